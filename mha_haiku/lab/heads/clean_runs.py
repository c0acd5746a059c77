"""A run of a model, and what edits of its heads or streams do to the metric.

B batch, T positions, P attention parts, H heads of a part, V value size per head, L
layers, X runs. Gates and results are `[P, H]`, as wide as the widest part; where there
is no head results are NaN.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models, sites
from mha_haiku.lab.heads import edits, model_runs
from mha_haiku.lab.heads.ablation_values import AblationValue
from mha_haiku.training import tasks

Array = jax.Array

# How many positions, over all examples and patterns of gates, run at once. On the CPU
# more of them overflow the caches and take 1.5 times as long.
_POSITIONS_AT_ONCE = {"cpu": 2**10}
_POSITIONS_ON_ACCELERATORS = 2**16

AT = ("*/heads", "layer_*/stream")  # what a clean run looks at


class Clean(NamedTuple):
    """A run without edits, with which the edited runs are compared."""

    example: tasks.Example
    run: Callable[[edits.Edits], Array]  # from edits to the metric `[B]`
    before: Array  # the metric without edits
    # The outputs `[B, T, H, V]` of P parts, by site; see `model_runs.by_example`.
    heads: dict[str, Array]
    values: Sequence[Array | None]  # what ablated heads pass on, see `edits.gated`
    streams: dict[str, Array]  # inputs of the layers; {}: they are not one stack
    alternate: bool  # whether each part comes right after the input of its layer
    is_scanned: bool  # whether the model scans its layers

    @classmethod
    def of(
        cls,
        model: models.Model,
        params: Any,
        example: tasks.Example,
        metric: model_runs.Metric,
        ablation_value: AblationValue,
        seen: tuple[Any, dict[str, Array]] | None = None,
    ) -> "Clean":
        """Runs the model once, unless `seen` is what a look at `AT` gives."""
        output, seen_sites = seen or model_runs.look(
            model, params, example, AT, strict=False
        )
        streams = {name: x for name, x in seen_sites.items() if name.endswith("stream")}
        heads = {name: x for name, x in seen_sites.items() if name not in streams}
        if not heads:
            raise ValueError(
                "the model has no heads: no attention was found in it; mh.sites lists "
                "what there is."
            )
        count = len(example.inputs)
        heads = {name: model_runs.by_example(x, count) for name, x in heads.items()}
        are_streams = [name in streams for name in seen_sites]
        alternate = are_streams == [True, False] * len(streams)
        if len({re.sub(r"\d+", "", name) for name in streams}) > 1:
            streams = {}

        def run(edits: edits.Edits) -> Array:
            edited = model_runs.run_edited(model, params, example, edits)
            return metric(edited.logits, example)

        before = metric(output.logits, example)
        values = ablation_value([*heads.values()])
        is_scanned = model_runs.is_scanned(model, params)
        return cls(example, run, before, heads, values, streams, alternate, is_scanned)

    @property
    def exists(self) -> np.ndarray:
        """`[P, H]` booleans: where there is a head."""
        return model_runs.exists([x.shape[-2] for x in self.heads.values()])

    def gated(self, gates: Array) -> Array:
        """Computes the metric with heads gated by `[P, H]` or `[B, P, H]`.

        Raises:
          ValueError: If gates are of other parts, or of fewer heads.
        """
        parts, widest = self.exists.shape
        if gates.shape[-2] != parts or gates.shape[-1] < widest:
            raise ValueError(
                f"gates must be of {parts} attention parts of up to {widest} heads, "
                f"[..., {parts}, {widest}], got shape {gates.shape}."
            )

        def change(heads: Array, part: int | Array, value: Array | None) -> Array:
            return edits.gated(heads, gates[..., part, : heads.shape[-2]], value)

        return self.run(self._edits(change))

    def _edits(self, change: Callable[[Array, Any, Any], Array]) -> edits.Edits:
        """Makes the edit of all heads by their outputs, part and ablation value."""

        def of_site(heads: Array, pair: tuple[int | Array, Array | None]) -> Array:
            ours = model_runs.by_example(heads, len(self.before))
            return change(ours, *pair).reshape(heads.shape)

        return edits.on_parts(self.heads, [*enumerate(self.values)], of_site)

    def slopes(self, gate: Array | float) -> Array:
        """Computes slopes `[B, P, H]` of the metric where all gates are `gate`."""
        gates = jnp.full((len(self.before), *self.exists.shape), gate, jnp.float32)
        slopes = jax.grad(lambda gates: self.gated(gates).sum())(gates)
        return jnp.where(self.exists[None], slopes, jnp.nan)

    def ablated(self, *, per_position: bool = False) -> Array:
        """Measures the change of the metric when one head is ablated, `[B, P, H]`.

        With `per_position`, at each position alone: `[B, P, H, T]`.
        """
        lengths = [x.shape[-3] if per_position else 1 for x in self.heads.values()]
        exists = self.exists[..., None] & model_runs.exists(lengths)[:, None]
        places = np.argwhere(exists)  # part, head and position
        rows = [places[places[:, 0] == part, 1:] for part in range(len(lengths))]

        def ablation(at_part: int | Array, head: Array, position: Array) -> edits.Edits:
            def change(heads: Array, part: int | Array, value: Array | None) -> Array:
                is_part = part == at_part
                if is_part is False:  # as is known of layers that are not scanned
                    return heads
                *_, length, count, _ = heads.shape
                is_it = is_part & (jnp.arange(count) == head)
                at = jnp.arange(length) == position if per_position else np.ones(length)
                gates = 1 - at[:, None] * is_it[None]
                gates = jnp.broadcast_to(gates, heads.shape[:-1])
                return edits.gated(heads, gates, value)

            return self._edits(change)

        def of_layer(
            layer: int | Array, rows_and_stream: tuple[Array | np.ndarray, Array]
        ) -> Array:
            rows, stream = rows_and_stream
            begun = self.from_layer(layer, stream)
            run = lambda row: self.run(begun | ablation(layer, *row))  # noqa: E731
            return over(run, rows, self.example)

        # To compile the layers above each of many takes longer than to run them all.
        is_deep = len(rows) > 2 * model_runs.FEW_LAYERS and not self.is_scanned
        if self.streams and self.alternate and not is_deep:
            layers = [*zip(rows, self.streams.values(), strict=True)]
            after = self.each_layer(of_layer, layers)
        else:
            run = lambda place: self.run(ablation(*place))  # noqa: E731
            after = over(run, places, self.example)
        changes = jnp.full((len(self.before), *exists.shape), jnp.nan)
        changes = changes.at[:, *places.T].set((after - self.before[None]).T)
        return changes if per_position else changes[..., 0]

    def from_layer(self, layer: int | Array, stream: Array) -> edits.Edits:
        """Makes the edits of a run that begins with the input stream of a layer."""
        return {tuple(self.streams): sites.Resume(layer, stream)}

    def each_layer(self, function: Callable, layers: Sequence[Any]) -> Array:
        """Concatenates the results of `function(index, layer)`, `[X, B]`."""
        if not self.is_scanned:
            return jnp.concatenate([function(*each) for each in enumerate(layers)])
        # One layer is compiled, and which one runs first is an array.
        layers = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        indices = jnp.arange(len(self.streams))
        results = jax.lax.map(lambda each: function(*each), (indices, layers))
        return results.reshape(-1, results.shape[-1])


def over(function: Callable, rows: Any, example: tasks.Example) -> Any:
    """Maps a function over rows `[X, ...]`, as many at once as is fastest."""
    inputs = example.inputs, example.decoder_inputs
    length = max(x.shape[1] for x in inputs if x is not None)
    positions = example.inputs.shape[0] * length
    most = _POSITIONS_AT_ONCE.get(jax.default_backend(), _POSITIONS_ON_ACCELERATORS)
    count = len(jax.tree.leaves(rows)[0])
    at_once = max(1, min(count, most // positions))
    batch_size = at_once if at_once > 1 else None
    return jax.lax.map(function, rows, batch_size=batch_size)

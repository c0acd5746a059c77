"""The compiled programs of the measures of importance: looks and edits of a model.

B batch, T positions, P attention parts, H heads of a part, V value size per head, L
layers, F hidden units of a layer, X patterns of gates. Gates and results are `[P, H]`
with P as wide as its widest part; where there is no head results are NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models, sites
from mha_haiku.lab.heads import edits, running
from mha_haiku.training import tasks

Array = jax.Array

# How many positions, over all examples and patterns of gates, run at once. On the CPU
# more of them overflow the caches and take 1.5 times as long.
_POSITIONS_AT_ONCE = {"cpu": 2**10}
_POSITIONS_ON_ACCELERATORS = 2**16

AT = ("*/heads", "layer_*/stream")  # what a clean run looks at


class Clean(NamedTuple):
    """A run without edits, and what edits of its heads do to the metric.

    Attributes:
      example: The batch.
      run: From edits to the metric `[B]`.
      before: The metric without any.
      heads: What the heads of P parts pass on, `[B, T, H, V]` by the name of the site.
      values: What ablated heads pass on, see `edits.gated`.
      streams: What enters each layer, by the name of the site; {} where the model is
        not one stack of layers.
      is_scanned: Whether the model scans its layers.
    """

    example: tasks.Example
    run: Callable[[edits.Edits], Array]
    before: Array
    heads: dict[str, Array]
    values: list[Array | None]
    streams: dict[str, Array]
    is_scanned: bool

    @classmethod
    def of(cls, model, params, example, metric, ablation_value, seen=None) -> "Clean":
        """Runs the model once, unless `seen` is what a look at `AT` gives."""
        output, found = seen or running.look(model, params, example, AT, strict=False)
        streams = {name: x for name, x in found.items() if name.endswith("stream")}
        heads = {name: x for name, x in found.items() if name not in streams}
        if not heads:
            raise ValueError(
                "the model has no heads: no attention was found in it; mh.sites lists "
                "what there is."
            )
        if len({sites.numbered_by_layer(name)[0] for name in streams}) > 1:
            streams = {}

        def run(edits):
            edited = running.run_edited(model, params, example, edits)
            return metric(edited.logits, example)

        before, values = (
            metric(output.logits, example),
            ablation_value([*heads.values()]),
        )
        is_scanned = running.is_scanned(model, params)
        return cls(example, run, before, heads, values, streams, is_scanned)

    @property
    def exists(self) -> np.ndarray:
        """`[P, H]` booleans: where there is a head."""
        return running.exists([x.shape[-2] for x in self.heads.values()])

    def gated(self, gates: Array) -> Array:
        """Returns the metric with heads gated by `[P, H]` or `[B, P, H]`."""

        def change(heads, given):
            part, value = given
            return edits.gated(heads, gates[..., part, : heads.shape[-2]], value)

        return self.run(edits.on_parts(self.heads, [*enumerate(self.values)], change))

    def slopes(self, gate: Array) -> Array:
        """Returns the slopes of the metric by gates, where all are the same.

        They are `[B, P, H]`, NaN where there is no head.
        """
        gates = jnp.full((len(self.before), *self.exists.shape), gate, jnp.float32)
        found = jax.grad(lambda gates: self.gated(gates).sum())(gates)
        return jnp.where(self.exists[None], found, jnp.nan)

    def ablated(self, *, per_position: bool = False) -> Array:
        """Returns the change of the metric when one head is ablated.

        Args:
          per_position: Whether it is ablated at each position alone; else at all.

        Returns:
          `[B, P, H, T or 1]`, NaN where there is no such head or position.
        """
        lengths = [x.shape[-3] if per_position else 1 for x in self.heads.values()]
        exists = self.exists[..., None] & running.exists(lengths)[:, None]
        places = np.argwhere(exists)  # part, head and position
        rows = [places[places[:, 0] == part, 1:] for part in range(len(lengths))]

        def ablation(at_part, head, position):
            def change(heads, given):
                part, value = given
                is_part = part == at_part
                if is_part is False:  # as is known of layers that are not scanned
                    return heads
                *_, length, count, _ = heads.shape
                is_it = is_part & (jnp.arange(count) == head)
                at = jnp.arange(length) == position if per_position else np.ones(length)
                gates = jnp.broadcast_to(
                    1 - at[:, None] * is_it[None], heads.shape[:-1]
                )
                return edits.gated(heads, gates, value)

            return edits.on_parts(self.heads, [*enumerate(self.values)], change)

        def of_layer(layer, given):
            rows, stream = given
            begun = self.from_layer(layer, stream)
            run = lambda row: self.run(begun | ablation(layer, *row))  # noqa: E731
            return over(run, rows, self.example)

        # To compile the layers above each of many takes longer than to run them all.
        is_deep = len(rows) > 2 * running.FEW_LAYERS and not self.is_scanned
        if len(self.streams) == len(rows) and not is_deep:
            layers = [*zip(rows, self.streams.values(), strict=True)]
            after = self.each_layer(of_layer, layers)
        else:
            run = lambda place: self.run(ablation(*place))  # noqa: E731
            after = over(run, places, self.example)
        changes = jnp.full((len(self.before), *exists.shape), jnp.nan)
        return changes.at[:, *places.T].set((after - self.before[None]).T)

    def from_layer(self, layer: int | Array, stream: Array) -> edits.Edits:
        """Returns the edits of a run that begins with what enters a layer."""
        pattern, _ = sites.numbered_by_layer(next(iter(self.streams)))
        return {pattern: sites.Resume(layer, stream)}

    def each_layer(self, function: Callable, layers: Sequence[Any]) -> Array:
        """Returns `[X, B]`, the concatenated results of a function of each layer.

        Args:
          function: Of a layer's index and what is given for it.
          layers: What is given for each of the L layers.
        """
        if not self.is_scanned:
            return jnp.concatenate([function(*each) for each in enumerate(layers)])
        # One layer is compiled, and which one runs first is an array.
        layers = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        indices = jnp.arange(len(self.streams))
        found = jax.lax.map(lambda each: function(*each), (indices, layers))
        return found.reshape(-1, found.shape[-1])


@running.compiled
def changes(model, params, example, *, metric, ablation_value) -> Array:
    """Returns the change of the metric when one head is ablated, `[B, P, H]`."""
    return Clean.of(model, params, example, metric, ablation_value).ablated()[..., 0]


@running.compiled
def slopes(model, params, example, *, metric, ablation_value) -> Array:
    """Returns the absolute slopes of the metric by gates, `[B, P, H]`."""
    return jnp.abs(Clean.of(model, params, example, metric, ablation_value).slopes(1.0))


@running.compiled
def shares(model, params, example, *, metric, ablation_value, points) -> Array:
    """Returns integrated gradients of the gates, `[B, P, H]`."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = jnp.float32((nodes + 1) / 2), jnp.float32(weights / 2)
    clean = Clean.of(model, params, example, metric, ablation_value)

    def add(total, point):
        node, weight = point
        return total - weight * clean.slopes(node), None

    init = jnp.zeros((len(clean.before), *clean.exists.shape))
    return jax.lax.scan(add, init, (nodes, weights))[0]


@running.compiled
def metrics(model, params, example, gates, *, metric, ablation_value) -> Array:
    """Returns the metric under patterns of gates `[X, P, H]`, `[B, X]`."""
    clean = Clean.of(model, params, example, metric, ablation_value)
    return over(clean.gated, gates, example).T


@running.compiled
def unit_slopes(model, params, example, *, metric) -> Array:
    """Returns the absolute slopes of the metric by gates of units, `[B, L, F]`."""
    _, hidden = running.look(model, params, example, ["*/hidden"])
    sizes = [x.shape[-1] for x in hidden.values()]
    if model.config is not None:  # which knows of layers without any, too
        sizes = models.hidden_sizes(model.config)
    layers, exists = np.flatnonzero(sizes).tolist(), running.exists(sizes)

    def total(gates):
        def change(units, layer):
            return units * gates[:, layer, None, : units.shape[-1]]

        gated = edits.on_parts(hidden, layers, change)
        output = running.run_edited(model, params, example, gated)
        return metric(output.logits, example).sum()

    found = jax.grad(total)(jnp.ones((len(example.inputs), *exists.shape)))
    return jnp.where(exists[None], jnp.abs(found), jnp.nan)


@running.compiled
def numbers(model, params, example, *, name) -> Array:
    """Returns a statistic of the maps, `[B, P, H]`."""

    def number(attention_map, kind):
        tokens = running.tokens(example, kind)
        values = getattr(attention_map.statistics(tokens=tokens), name)
        if values is None and kind == "cross":  # two texts have no equal tokens
            return jnp.full(attention_map.shape[:-2], jnp.nan)
        if values is None or values.shape != attention_map.shape[:-2]:
            raise ValueError(f"{name!r} is not one number per head.")
        return values

    _, found = running.look(model, params, example, running.by_kind(number, model))
    exists = running.exists([x.shape[-1] for x in found.values()])
    result = jnp.full((len(example.inputs), *exists.shape), jnp.nan)
    return result.at[:, exists].set(jnp.concatenate([*found.values()], axis=-1))


def over(function: Callable, rows: Any, example: tasks.Example) -> Any:
    """Returns the function of each row; runs as many at once as is fastest.

    Memory is that of those at once.

    Args:
      function: Of a row, to a tree of arrays.
      rows: `[X, ...]`, or a tree of such.
      example: A batch of the size that each row runs.
    """
    inputs = example.inputs, example.decoder_inputs
    length = max(x.shape[1] for x in inputs if x is not None)
    positions = example.inputs.shape[0] * length
    most = _POSITIONS_AT_ONCE.get(jax.default_backend(), _POSITIONS_ON_ACCELERATORS)
    count = len(jax.tree.leaves(rows)[0])
    at_once = max(1, min(count, most // positions))
    batch_size = at_once if at_once > 1 else None
    return jax.lax.map(function, rows, batch_size=batch_size)

"""Patching: the effect of putting a part of one run into another.

The two runs read a clean and a corrupted example, which differ in what determines the
answer. Activation patching puts one activation into the other run; path patching, in
`head_circuits`, changes only what one head reads from another. The batches of the
subject are the clean examples, whose targets the metric uses in all runs; `corrupted`
has the same number of batches, with the same shapes and lengths, and the examples with
index i are pair i.

B batch, T positions, P attention parts, H heads of a part, L layers, N pairs of
examples, E edges.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mha_haiku.core import checks, display, models
from mha_haiku.lab.heads import ablation_values, clean_runs, model_runs
from mha_haiku.lab.heads.graph import LOGITS as LOGITS
from mha_haiku.lab.heads.model_runs import Batches, Measured
from mha_haiku.records import Result, means
from mha_haiku.training import tasks

Array = jax.Array
Example = tasks.Example


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Changes(Result):
    """The changes of the metric by patching."""

    per_example: np.ndarray  # `[N, ...]` float64; NaN where there is no number
    base: np.ndarray  # `[N]`, the metric of the run that is patched
    other: np.ndarray  # `[N]`, the metric of the run that patches come from
    unit: str = dataclasses.field(default="change of the metric", kw_only=True)

    def __repr__(self) -> str:
        return display.record(self)

    @property
    def mean(self) -> np.ndarray:
        """`[...]`, the mean over the examples."""
        return means.mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """`[...]`, of the mean, from the spread of examples; NaN for one example."""
        return means.standard_error(self.per_example)

    @property
    def share(self) -> np.ndarray:
        """`[...]`, the mean as a share of the change by patching everything."""
        return self.mean / (self.other - self.base).mean()

    def _numbers(self, place: tuple[int, ...]) -> dict[str, float]:
        names = ("mean", "standard_error", "share")
        return {name: float(getattr(self, name)[place]) for name in names}


def _pairs(changes: Changes) -> str:
    count = len(changes.base)
    return display.count(count, "pair")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patched(Changes):
    """The changes of the metric by patching one place at a time.

    Example:
      >>> patched = mh.heads.activation_patching(measured, corrupted)
      >>> patched.axes
      ('layer', 'head')
      >>> abs(patched.share.round(2))
      array([[0.78, 0.  ],
             [1.  , 0.  ]])
    """

    # The axes of `per_example` after N, among "layer" (the attention part, for heads),
    # "head" and "position".
    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()  # of the parts; () if there is one kind
    tokens: tuple[str, ...] = ()  # at the positions, for one pair of texts
    # Numbers of layers in the model; () if all have attention, and are counted.
    numbers: tuple[int, ...] = ()
    file_name = "patching"

    @property
    def title(self) -> str:
        """The title, with the number of pairs."""
        return f"Activation patching, {_pairs(self)}: {self.unit}"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each patched place, with its `axes` and its numbers."""
        rows: list[dict[str, Any]] = [
            dict(zip(self.axes, place, strict=True)) | self._numbers(tuple(place))
            for place in np.argwhere(~np.isnan(self.mean)).tolist()
        ]
        numbers = self.numbers or range(len(self.mean))
        return [row | {"layer": numbers[row["layer"]]} for row in rows]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Edges(Changes):
    """Edges with numbers: the change of the clean run's metric by patching an edge.

    Example:
      >>> edges = mh.heads.path_patching(measured, corrupted, senders=[(0, 0)])
      >>> strongest = edges.strength.argmax()
      >>> edges.receivers[strongest].tolist(), str(edges.kinds[strongest])
      ([1, 0], 'k')
    """

    senders: np.ndarray  # `[E, 2]`, part and head that write; see also `heads.graph`
    receivers: np.ndarray  # `[E, 2]`, part and head that read; `LOGITS` for the logits
    kinds: np.ndarray  # `[E]`: "q", "k", "v", "feed_forward" or "logits"
    file_name = "paths"

    @property
    def title(self) -> str:
        """The title, with the number of pairs."""
        return f"{display.count(len(self.kinds), 'edge')}, {_pairs(self)}: {self.unit}"

    @property
    def strength(self) -> np.ndarray:
        """`[E]`: the magnitude of the mean."""
        return np.abs(self.mean)

    def rows(self) -> list[dict[str, int | float | str]]:
        """Lists a row for each edge: its ends, its kind and its numbers."""
        names = ("sender_layer", "sender_head", "receiver_layer", "receiver_head")
        ends = np.concatenate([self.senders, self.receivers], axis=1).T.tolist()
        rows = zip(*ends, self.kinds.tolist(), strict=True)
        return [
            dict(zip((*names, "kind"), row, strict=True)) | self._numbers((i,))
            for i, row in enumerate(rows)
        ]


def activation_patching(
    subject: Measured,
    corrupted: Batches,
    *,
    what: str = "heads",
    per_position: bool = False,
    into: str = "clean",
) -> Patched:
    """Computes the change of the metric when one activation is from the other run.

    Everything after the patched activation is recomputed.

    Args:
      what: "heads" to patch a head's output, or "layers" to patch the input of a layer.
      per_position: Patch one position at a time instead of all at once.
      into: The run that is patched: "clean" shows what breaks the answer, "corrupted"
        what restores it.

    Raises:
      TypeError: If batches can be iterated over only once.
      ValueError: If batches do not pair, a choice is unknown, or `what` is "layers" and
        the model is not a single stack of layers.

    Source: Meng et al. 2022, section 2.1, https://arxiv.org/abs/2202.05262; Vig et al.
    2020, https://arxiv.org/abs/2004.12265, for heads.

    Example:
      >>> patched = mh.heads.activation_patching(measured, corrupted)
      >>> abs(patched.mean.round(1))  # nats, [L, H]
      array([[4.4, 0. ],
             [5.6, 0. ]])
    """
    checks.choice("what", what, ("heads", "layers"))
    checks.choice("into", into, ("clean", "corrupted"))
    options = {"what": what, "per_position": per_position, "into": into}
    program = _activations(subject.model, metric=subject.metric, **options)
    changes, base, other = over_pairs(subject, corrupted, program)
    axes = ("layer", "head") if what == "heads" else ("layer",)
    axes = (*axes, "position") if per_position else axes
    kinds = model_runs.kinds_measured(subject) if what == "heads" else ()
    return Patched(changes, base, other, axes, tuple(kinds))


@model_runs.compiled
def _activations(
    model: models.Model,
    params: Any,
    clean: Example,
    corrupted: Example,
    *,
    metric: model_runs.Metric,
    what: str,
    per_position: bool,
    into: str,
) -> tuple[Array, Array, Array]:
    """Computes changes `[B, P, H]` or `[B, L]` (and T), and both metrics."""
    examples = (clean, corrupted) if into == "clean" else (corrupted, clean)
    pair = both(model, params, *examples, clean_runs.AT)
    of_clean = lambda logits, _: metric(logits, clean)  # noqa: E731
    zero = ablation_values.zero
    ours, theirs = (
        clean_runs.Clean.of(model, params, example, of_clean, zero, seen)
        for example, seen in zip(examples, pair, strict=True)
    )
    if what == "heads":
        ours = ours._replace(values=[*theirs.heads.values()])
        changes = ours.ablated(per_position=per_position)
    else:
        changes = _of_layers(ours, theirs, per_position)
    return changes, ours.before, theirs.before


def _of_layers(
    ours: clean_runs.Clean, theirs: clean_runs.Clean, per_position: bool
) -> Array:
    """Computes changes by the streams of another run, `[B, L]` or `[B, L, T]`."""
    if not ours.streams:
        raise ValueError(
            "what must be 'heads' for a model without the streams of a single stack "
            "of layers, got 'layers'."
        )
    layers = [*zip(theirs.streams.values(), ours.streams.values(), strict=True)]
    places = np.arange(layers[0][0].shape[1])
    positions = places if per_position else np.array([-1])  # -1 for all

    def of_layer(layer: int | Array, streams: tuple[Array, Array]) -> Array:
        def patched(position: Array) -> Array:
            at = (position < 0) | (places == position)
            stream = jnp.where(at[None, :, None], *streams)
            return ours.run(ours.from_layer(layer, stream))

        return clean_runs.over(patched, positions, ours.example)

    after = ours.each_layer(of_layer, layers) - ours.before[None]
    changes = after.T.reshape(-1, len(layers), len(positions))
    return changes if per_position else changes[..., 0]


def over_pairs(
    subject: Measured, corrupted: Batches, program: Callable, *arrays: ArrayLike
) -> tuple[np.ndarray, ...]:
    """Runs a program on all pairs of batches; results are float64 `[N, ...]`."""
    for batches in (subject.batches, corrupted):
        model_runs.check_batches(batches)
    cleans, others = list(subject.batches), list(corrupted)
    if len(cleans) != len(others):
        raise ValueError(
            "corrupted must have the number of batches of the clean examples, "
            f"{len(cleans)}, got {len(others)}."
        )
    pairs = []
    for clean, other in zip(cleans, others, strict=True):
        shape, got = (jax.tree.map(np.shape, x.model_inputs()) for x in (clean, other))
        if shape != got:
            raise ValueError(
                "corrupted must have inputs with the shapes of the clean examples, "
                f"{shape}, got {got}."
            )
        for name in ("lengths", "decoder_lengths"):
            length, got = (model_runs.fetched(getattr(x, name)) for x in (clean, other))
            if length is not None and (at := np.flatnonzero(length != got)).size:
                raise ValueError(
                    f"corrupted must have the {name} of the clean examples, "
                    f"{length[at[0]]} for example {at[0]}, got {got[at[0]]}."
                )
        # A metric reads only the clean targets, which may be vectors, not tokens.
        other = other._replace(targets=clean.targets, weights=clean.weights)
        pairs.append((clean, other))
    results = model_runs.over(
        pairs, lambda pair: program(subject.params, *pair, *arrays)
    )
    return jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64), *results)


def both(
    model: models.Model, params: Any, one: Example, other: Example, at: Sequence[str]
) -> list[tuple[Any, dict[str, Array]]]:
    """Applies `model_runs.look` to two batches; the model is compiled once."""
    look = lambda x: model_runs.look(model, params, x, at, strict=False)  # noqa: E731
    results = jax.lax.map(look, jax.tree.map(lambda *x: jnp.stack(x), one, other))
    return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(2)]

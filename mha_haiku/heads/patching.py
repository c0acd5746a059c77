"""Activation patching: what one activation of another run changes in the answer.

B batch, T positions, P attention parts, H heads of a part, L layers, N examples.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import checks, tasks
from mha_haiku.core import sites
from mha_haiku.heads import edits, paired_runs, programs, subject

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patched(paired_runs.Changes):
    """What it changes to patch each place.

    Attributes:
      axes: Those of `per_example` behind N: of "layer" (which part, for heads), "head"
        and "position".
      kinds: The kind of each part; () where there is one kind.
    """

    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, int | float]]:
        """Returns a row for each patched place, by `axes` and its numbers."""
        return [
            dict(zip(self.axes, place, strict=True)) | self.numbers(tuple(place))
            for place in np.argwhere(~np.isnan(self.mean)).tolist()
        ]


def activation_patching(
    of: subject.Subject,
    corrupted: Iterable[tasks.Example],
    *,
    what: str = "heads",
    per_position: bool = False,
    into: str = "clean",
) -> Patched:
    """Returns what changes when one activation is that of the other run.

    Everything behind the patched activation is computed anew.

    Args:
      of: What is measured; its batches are the clean examples. The metric takes the
        clean example in all runs, so its targets are what is asked for.
      corrupted: As many batches of the same shapes: example i is the other one of a
        pair.
      what: "heads": what a head passes on; "layers": the residual stream in front of a
        layer, of a model with one stack of layers.
      per_position: Whether each position is patched alone; else all at once.
      into: Which run is patched, "clean" or "corrupted", with activations of the other:
        what breaks the answer, or what mends it.

    Raises:
      TypeError: If batches can be gone through only once.
      ValueError: If batches do not pair, or the model has no such streams.

    Source: Meng et al. 2022, section 2.1, https://arxiv.org/abs/2202.05262; Vig et al.
    2020, https://arxiv.org/abs/2004.12265, for heads.
    """
    checks.choice("what", what, ("heads", "layers"))
    checks.choice("into", into, ("clean", "corrupted"))
    make = _heads if what == "heads" else _layers
    program = make(of.model, of.metric, per_position, into == "clean")
    changes, base, other = paired_runs.over_pairs(of, corrupted, program)
    axes, kinds = ("layer", "position"), ()
    if what == "heads":
        axes = ("layer", "head", "position")
        kinds = tuple(subject.kinds_of(of.model))
    if not per_position:
        axes, changes = axes[:-1], changes[..., 0]
    return Patched(changes, base, other, axes, kinds)


@functools.lru_cache(maxsize=8)
def _heads(model, metric, per_position, into_clean) -> Callable:
    """Returns a program of a pair of batches to changes `[B, P, H, T or 1]`."""

    @jax.jit
    def program(params, clean, corrupted):
        own, params = subject.compact(model, params)
        patched, giving = (clean, corrupted) if into_clean else (corrupted, clean)
        (base, heads), (other, theirs) = paired_runs.both(
            own, params, patched, giving, ["*/heads"]
        )
        before, after = (metric(x.logits, clean) for x in (base, other))
        counts = [each.shape[-2] for each in heads.values()]
        lengths = [each.shape[-3] for each in heads.values()]
        positions = max(lengths) if per_position else 1

        def change(row):
            head, position = row
            chosen = paired_runs.single(head, counts)
            given = [
                (
                    1 - _chosen(position, length, per_position)[:, None] * here[None],
                    values,
                )
                for here, length, values in zip(
                    chosen, lengths, theirs.values(), strict=True
                )
            ]
            patch = edits.on_parts(list(heads), given, _patched)
            output = subject.run_edited(own, params, patched, patch)
            return metric(output.logits, clean) - before

        rows = jnp.repeat(jnp.arange(sum(counts)), positions)
        rows = rows, jnp.tile(jnp.arange(positions), sum(counts))
        changes = programs.over(change, rows, clean).T
        changes = changes.reshape(len(before), sum(counts), positions)
        return _by_part(changes, counts, lengths), before, after

    return program


@functools.lru_cache(maxsize=8)
def _layers(model, metric, per_position, into_clean) -> Callable:
    """Returns a program of a pair of batches to changes `[B, L, T or 1]`."""

    @jax.jit
    def program(params, clean, corrupted):
        own, params = subject.compact(model, params)
        patched, giving = (clean, corrupted) if into_clean else (corrupted, clean)
        (base, ours), (other, theirs) = paired_runs.both(
            own, params, patched, giving, ["layer_*/stream"]
        )
        if not ours or subject.kinds_of(model):
            raise ValueError(
                "what must be 'heads' for a model that has no streams of one stack of "
                "layers, got 'layers'."
            )
        before, after = (metric(x.logits, clean) for x in (base, other))
        streams = [*zip(theirs.values(), ours.values(), strict=True)]
        length = streams[0][0].shape[1]
        pattern, _ = sites.numbered_by_layer(next(iter(ours)))

        def at_layer(layer):
            i, (theirs, ours) = layer

            def change(position):
                at = _chosen(position, length, per_position)
                stream = jnp.where(at[None, :, None] > 0, theirs, ours)
                resumed = {pattern: sites.Resume(i, stream)}
                output = subject.run_edited(own, params, patched, resumed)
                return metric(output.logits, clean) - before

            positions = jnp.arange(length if per_position else 1)
            return programs.over(change, positions, clean).T

        if subject.is_scanned(own, model):
            # One layer is compiled, and which one runs first is an array.
            layers = jax.tree.map(lambda *x: jnp.stack(x), *streams)
            changes = jax.lax.map(at_layer, (jnp.arange(len(streams)), layers))
        else:
            changes = jnp.stack([at_layer(each) for each in enumerate(streams)])
        return changes.swapaxes(0, 1), before, after

    return program


def _patched(values, given) -> Array:
    """Returns heads' outputs with others where gates `[T, H]` are closed."""
    gates, others = given
    gates = jnp.broadcast_to(gates, values.shape[:-1])
    return edits.gated(values, gates, others)


def _chosen(position, length, per_position) -> Array:
    """Returns `[T]`, 1 at the position and 0 elsewhere, or 1 everywhere."""
    return (jnp.arange(length) == position) * 1.0 if per_position else jnp.ones(length)


def _by_part(changes, counts, lengths) -> Array:
    """Returns `[B, P, H, T or 1]`, NaN where there is no such place.

    Args:
      changes: `[B, X, T or 1]` of the X heads of all parts.
      counts: H of each part.
      lengths: T of each part.
    """
    size, _, positions = changes.shape
    result = jnp.full((size, len(counts), max(counts), positions), jnp.nan)
    first = 0
    for part, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        length = min(length, positions)
        own = changes[:, first : first + count, :length]
        result = result.at[:, part, :count, :length].set(own)
        first += count
    return result

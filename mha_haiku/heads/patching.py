"""Activation patching: what one activation of another run changes in the answer.

B batch, T positions, P attention parts, H heads of a part, L layers, N examples.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import checks, modules, tasks
from mha_haiku.heads import paired_runs, programs, subject

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
        layer, of a model that can `start` from there.
      per_position: Whether each position is patched alone; else all at once.
      into: Which run is patched, "clean" or "corrupted", with activations of the other:
        what breaks the answer, or what mends it.

    Raises:
      TypeError: If batches can be gone through only once.
      ValueError: If batches do not pair, or the model has no layers to start from.

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
        example = next(iter(of.batches))
        kinds = tuple(subject.kinds_of(of.model, of.params, example))
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
        base, other = paired_runs.both(own, params, patched, giving)
        before, after = (metric(x.logits, clean) for x in (base, other))
        replacement = [subject.head_outputs(each) for each in other.maps]
        counts = [each.shape[-3] for each in base.maps]
        lengths = [each.shape[-2] for each in base.maps]
        positions = max(lengths) if per_position else 1

        def change(row):
            head, position = row
            gates = []
            for here, length in zip(
                paired_runs.single(head, counts), lengths, strict=True
            ):
                at = _chosen(position, length, per_position)
                gate = 1 - at[:, None] * here[None]
                gates.append(jnp.broadcast_to(gate, (len(before), *gate.shape)))
            given = modules.Interventions(gates, replacement)
            output = subject.run(own, params, patched, interventions=given)
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
        base, other = paired_runs.both(own, params, patched, giving)
        if not base.hidden:
            raise ValueError(
                "what must be 'heads' for a model that cannot start from the input of "
                "a layer, got 'layers'."
            )
        before, after = (metric(x.logits, clean) for x in (base, other))
        length = base.hidden[0].shape[1]

        def at_layer(layer):
            i, theirs, ours = layer

            def change(position):
                at = _chosen(position, length, per_position)
                hidden = jnp.where(at[None, :, None] > 0, theirs, ours)
                output = subject.run(own, params, patched, start=(i, hidden))
                return metric(output.logits, clean) - before

            positions = jnp.arange(length if per_position else 1)
            return programs.over(change, positions, clean).T

        layers = range(len(base.hidden)), other.hidden, base.hidden
        if own is model and not (model.config and model.config.scan_layers):
            changes = jnp.stack([at_layer(x) for x in zip(*layers, strict=True)])
        else:  # one layer is compiled, and which one runs first is an array
            changes = jax.lax.map(at_layer, tuple(jnp.stack([*x]) for x in layers))
        return changes.swapaxes(0, 1), before, after

    return program


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

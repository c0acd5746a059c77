"""Activation patching: what one activation of another run changes in the answer.

B batch, T positions, P attention parts, H heads of a part, L layers, N examples.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab.heads import ablation_values, paired_runs, programs, running
from mha_haiku.training import tasks

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patched(paired_runs.Changes):
    """What it changes to patch each place.

    Attributes:
      axes: Those of `per_example` behind N: of "layer" (which part, for heads), "head"
        and "position".
      kinds: The kind of each part; () where there is one kind.
      tokens: The text at each position, where one pair of texts was patched.
      unit: The unit of the changes.
    """

    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    unit: str = "change of the metric"

    def rows(self) -> list[dict[str, int | float]]:
        """Returns a row for each patched place, by `axes` and its numbers."""
        return [
            dict(zip(self.axes, place, strict=True)) | self.numbers(tuple(place))
            for place in np.argwhere(~np.isnan(self.mean)).tolist()
        ]


def activation_patching(
    of: running.Measured,
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
    program = _changes(
        of.model, metric=of.metric, what=what, per_position=per_position, into=into
    )
    changes, base, other = paired_runs.over_pairs(of, corrupted, program)
    axes, kinds = ("layer", "position"), ()
    if what == "heads":
        axes = ("layer", "head", "position")
        kinds = tuple(running.kinds_of(of.model))
    if not per_position:
        axes, changes = axes[:-1], changes[..., 0]
    return Patched(changes, base, other, axes, kinds)


@running.compiled
def _changes(model, params, clean, corrupted, *, metric, what, per_position, into):
    """Returns changes `[B, P, H, T or 1]` or `[B, L, T or 1]`, and both metrics."""
    examples = (clean, corrupted) if into == "clean" else (corrupted, clean)
    pair = paired_runs.both(model, params, *examples, programs.AT)
    ours, theirs = (
        programs.Clean.of(
            model,
            params,
            example,
            lambda x, _: metric(x, clean),
            ablation_values.zero,
            seen,
        )
        for example, seen in zip(examples, pair, strict=True)
    )
    if what == "heads":
        ours = ours._replace(values=[*theirs.heads.values()])
        changes = ours.ablated(per_position=per_position)
    else:
        changes = _of_layers(ours, theirs, per_position)
    return changes, ours.before, theirs.before


def _of_layers(ours, theirs, per_position) -> Array:
    """Returns what changes by the streams of another run, `[B, L, T or 1]`."""
    if not ours.streams:
        raise ValueError(
            "what must be 'heads' for a model that has no streams of one stack of "
            "layers, got 'layers'."
        )
    layers = [*zip(theirs.streams.values(), ours.streams.values(), strict=True)]
    places = np.arange(layers[0][0].shape[1])
    positions = places if per_position else np.array([-1])  # -1 for all

    def of_layer(layer, streams):
        def patched(position):
            at = (position < 0) | (places == position)
            stream = jnp.where(at[None, :, None], *streams)
            return ours.run(ours.from_layer(layer, stream))

        return programs.over(patched, positions, ours.example)

    after = ours.each_layer(of_layer, layers) - ours.before[None]
    return after.T.reshape(-1, len(layers), len(positions))

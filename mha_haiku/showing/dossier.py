"""What one page shows: sets of maps, which belong together."""

from typing import NamedTuple

import numpy as np

from mha_haiku.showing import map_set
from mha_haiku.showing.map_set import MapSet


class Dossier(NamedTuple):
    """All that one page shows.

    Attributes:
      title: What it is about.
      sets: One map set or more. Sets with a step are shown one after the other, others
        side by side.
      matches: `[L, H, 2]` integers: for each head of the first set (layer, head) of the
        one of the second set that attends most alike, -1 where there is none; or None.
      notes: What has to be said of all of it.
      rounding: Weights may be rounded to multiples of this, to need less room.
    """

    title: str
    sets: tuple[MapSet, ...]
    matches: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    rounding: float = 0.0


def check(dossier: Dossier) -> Dossier:
    """Checks that all sizes of the dossier fit together.

    Raises:
      ValueError: If a number of positions, heads, layers, bins or pictures differs from
        another, or a value is none that can be shown. The message names both.
    """
    if not dossier.sets:
        raise ValueError("sets must not be empty.")
    for each in dossier.sets:
        each.check()
        if not each.examples:
            raise ValueError(f"examples of {each.name!r} must not be empty.")
    if dossier.matches is not None:
        if len(dossier.sets) < 2:
            raise ValueError("matches must be None where there is one set of maps.")
        shape = *dossier.sets[0].shape, 2
        map_set.has_shape("matches", dossier.matches, shape, kinds="iu")
    return dossier

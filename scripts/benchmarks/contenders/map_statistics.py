"""Attention, and the statistics of its map."""

from collections.abc import Mapping
from typing import Any

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(use: str, size: int, core: Mapping[str, Any]) -> worker.Program:
    """Returns calls of causal attention, forward.

    Args:
      use: "forward" for only the values; "statistics" for the map's statistics and 32 x
        32 of its cells, too.
    """
    shape = sizes.CoreSize(**core).shape

    def attend(query, key, value):
        values, attention_map = mh.attend(query, key, value, mask=mh.masks.causal())
        if use == "forward":
            return values
        return values, attention_map.statistics(pooled=(32, 32))

    arrays = tuple(jax_programs.normal(seed, shape) for seed in (2, 3, 4))
    return jax_programs.calls_of(attend, arrays, case="forward", calls=size)

"""mha_haiku's attention without projections."""

from collections.abc import Mapping
from typing import Any

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(case: str, size: int, core: Mapping[str, Any]) -> worker.Program:
    """Prepares calls of attention."""
    core = sizes.CoreSize(**core)
    mask = mh.masks.causal() if core.is_causal else None

    def values(query, key, value):
        return mh.attend(query, key, value, mask=mask)[0]

    arrays = tuple(jax_programs.normal(seed, core.shape) for seed in (2, 3, 4))
    return jax_programs.calls_of(values, arrays, case=case, calls=size)

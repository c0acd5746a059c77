"""mha_haiku's attention without projections: called, or compiled again and again."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str, size: int, core: Mapping[str, Any], implementation: str = "auto"
) -> worker.Program:
    """Prepares calls or compilations of attention.

    Args:
      case: "forward", "forward_and_backward", or "compile" for compiling the latter.
      size: Calls or compilations in a run.
      core: Fields of `sizes.CoreSize`.
      implementation: The implementation of `mha_haiku.attend`.
    """
    core = sizes.CoreSize(**core)
    mask = mh.masks.causal() if core.is_causal else None
    if core.window is not None:
        mask = mh.masks.window(core.window, 0)

    def values(query, key, value):
        return mh.attend(query, key, value, mask=mask, implementation=implementation)[0]

    if case == "compile":
        return _compilations(values, core.shape, size)
    arrays = tuple(jax_programs.normal(seed, core.shape) for seed in (2, 3, 4))
    return jax_programs.calls_of(values, arrays, case=case, calls=size)


def _compilations(function, shape, count) -> worker.Program:
    """Returns compilations from nothing, with tracing; no array is made."""
    jax.config.update("jax_enable_compilation_cache", False)
    array = jax.ShapeDtypeStruct(shape, jnp.float32)

    def run():
        for _ in range(count):
            jax.clear_caches()
            both = jax_programs.forward_and_backward(function)
            jax.jit(both).lower(array, array, array, array).compile()

    return worker.Program(run, units=count)

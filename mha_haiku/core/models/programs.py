"""Functions that are traced once for each kind of arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from mha_haiku.core.attention import implementations
from mha_haiku.core.sites import jaxprs, traces

_MOST = 32  # kinds of arguments, such as lengths, whose programs a function keeps


def kept(function: Callable) -> Callable:
    """Returns the same function, which keeps its programs.

    Arguments are of one kind if their arrays have the same shapes and dtypes, and
    others are equal. What the function does besides its result is not repeated.
    """
    programs: dict[Any, tuple] = {}

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if traces.is_array(x)]
        kinds = ((x.shape, x.dtype) if traces.is_array(x) else x for x in leaves)
        options = ("jax_enable_x64", "jax_default_matmul_precision")
        key = structure, *(getattr(jax.config, name) for name in options), *kinds
        key = *key, implementations.apart.value
        try:
            program = programs.get(key)
        except TypeError:  # an argument cannot be hashed
            return function(*args, **kwargs)
        if program is None:
            program = traces.trace(function, args, kwargs)
            # Values of an enclosing trace are gone when that ends.
            if not any(isinstance(x, jax.core.Tracer) for x in program[0].consts):
                for oldest in [*programs][: 1 - _MOST]:
                    del programs[oldest]
                programs[key] = program
        closed, _, _, results = program
        return results(jaxprs.bound(closed, arrays))

    return run

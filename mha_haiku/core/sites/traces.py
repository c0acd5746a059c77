"""Traces functions whose arguments need not all be arrays, also inside Haiku."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haiku._src import base as haiku_base
from haiku._src import stateful
from jax.extend import core


def transformed(function: Callable, walk: Callable[..., tuple[Any, Any]]) -> Callable:
    """Returns a function that runs `walk(function, args, kwargs)` in its place.

    The walk traces the function, and returns what that returns and a second result. In
    a function transformed by Haiku, parameters and keys become arguments and results of
    the traced function.
    """

    @functools.wraps(function)
    def run(*args, **kwargs):
        if not haiku_base.inside_transform():
            return walk(function, args, kwargs)

        def threaded(inner: Callable):
            def run(*args, **kwargs):
                (output, state), second = walk(inner, args, kwargs)
                return (output, second), state

            return run

        wrapped = stateful.thread_hk_state_in_kwargs(threaded)
        return wrapped(function)(*args, **kwargs)

    return run


def trace(
    function: Callable, args: tuple, kwargs: dict[str, Any]
) -> tuple[core.ClosedJaxpr, list, list, Callable[[Iterable], Any]]:
    """Traces a function; returns its program, its arrays, and how to make its output.

    Before the last come the leaves of the output that are no arrays.
    """
    # Other leaves, such as a flag or the activation of an Equinox module, are static.
    arrays, _, arguments_of = _parted((args, kwargs))
    outputs: list[tuple[list, Callable]] = []

    def flat(*arrays):
        args, kwargs = arguments_of(arrays)
        results, rest, whole = _parted(function(*args, **kwargs))
        outputs.append((rest, whole))
        return results

    return jax.make_jaxpr(flat)(*arrays), arrays, *outputs[-1]


def _parted(tree: Any) -> tuple[list, list, Callable]:
    """Splits a tree into its arrays, its other leaves, and a function that joins both.

    The other leaves have None in the places of arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}
    rest = [None if i in arrays else x for i, x in enumerate(leaves)]
    places = list(arrays)

    def whole(new: Iterable) -> Any:
        at = dict(zip(places, new, strict=True))
        return jax.tree.unflatten(structure, [at.get(i, x) for i, x in enumerate(rest)])

    return [*arrays.values()], rest, whole


def is_array(x: Any) -> bool:
    """Tells whether an argument of a function is traced; others are static."""
    # A NumPy scalar is treated like a Python number, on which a program may branch.
    if isinstance(x, np.generic) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    is_numpy = isinstance(x, np.ndarray)
    kinds = np.number, np.bool_
    return not is_numpy or any(jnp.issubdtype(x.dtype, kind) for kind in kinds)

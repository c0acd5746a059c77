"""Inputs that a PyTorch module reads while it is traced: constants of its program."""

import os
import traceback
from typing import Any

import jax
import jax.core
import numpy as np

_MOST = 2**31  # smaller integers fit the 32 bits that JAX uses by default
# Their frames say nothing about the module.
_LIBRARIES = "torch", "torchax", "jax", "mha_haiku"


class ReadsInputsError(ValueError):
    """Raised where a module reads what is not there while it is traced."""


class HostValues(np.ndarray):
    """Integers or booleans that a program has as constants: one program for each.

    Through `jax.jit` they go as a part of the arguments' structure, so that another
    array compiles another program.
    """


def _flatten(x: HostValues) -> tuple[tuple, tuple]:
    return (np.asarray(x),), (x.shape, x.dtype.str, x.tobytes())


def _unflatten(key: tuple, children: tuple) -> HostValues:
    shape, kind, data = key
    if isinstance(children[0], np.ndarray):
        return children[0].view(HostValues)
    if getattr(children[0], "shape", shape) != shape:
        raise ValueError(
            "inputs must be whole batches of a module that reads their values, got "
            f"{children[0].shape} of {shape}."
        )
    return np.frombuffer(data, kind).reshape(shape).view(HostValues)


jax.tree_util.register_pytree_node(HostValues, _flatten, _unflatten)


def is_host(x: Any) -> bool:
    """Checks for host values."""
    return isinstance(x, HostValues)


def bound(tree: Any, *, every: bool) -> Any:
    """Makes integers and booleans host values; by default those beyond 32 bits."""

    def bind(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer) or np.asarray(x).dtype.kind not in "bui":
            return x
        x = np.asarray(x)
        is_wide = x.dtype.itemsize == 8 and x.size and (abs(x) >= _MOST).any()
        return x.view(HostValues) if every or is_wide else x

    return jax.tree.map(bind, tree)


def error(module: Any, cause: Exception, inputs: Any) -> ValueError:
    """Makes the error of a module whose trace ended; it names the line of its file."""
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if os.path.join("nn", "modules") in os.path.dirname(frame.filename)
        and not frame.filename.endswith("module.py")
        or not any(f"{os.sep}{x}{os.sep}" in frame.filename for x in _LIBRARIES)
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its code"
    name = f"function must be a module that can be traced: {type(module).__name__}"
    if type(cause).__name__ in ("OperatorNotFound", "NotImplementedError"):
        sentence = str(cause).partition(". ")[0].removesuffix(".")
        return ValueError(f"{name}, at {place}: {sentence}.")
    arrays = (x for x in jax.tree.leaves(inputs, is_leaf=is_host) if not is_host(x))
    is_unread = any(x.dtype.kind in "bui" for x in arrays if hasattr(x, "dtype"))
    kind = ReadsInputsError if is_unread else ValueError
    return kind(
        f"{name} reads values at {place} that depend on features or parameters; only "
        "integers and booleans among its inputs can be read while it is traced."
    )

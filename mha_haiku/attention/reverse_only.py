"""Refuses forward mode in plain words, where a function has a gradient of its own.

JAX cannot push tangents through a `custom_vjp`, and says so by a `TypeError` without a
way out, under jit as late as lowering. Here inputs are passed on by an identity whose
tangent goes through a primitive that can be transposed, but neither run nor compiled.
Reverse mode transposes it, to nothing; whatever is left of it is forward mode.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def reverse_only(tree: Any, message: str) -> Any:
    """Returns a pytree that can be differentiated in reverse mode alone.

    It costs nothing in compiled programs.

    Args:
      tree: The pytree; floats in it are guarded one by one, so that those that nothing
        differentiates stay so.
      message: What the `ValueError` says under `jax.jvp` and the like.
    """

    def guarded(x):
        can_be_differentiated = isinstance(x, jax.core.Tracer) and jnp.issubdtype(
            x.dtype, jnp.floating
        )
        return _guarded(message, x) if can_be_differentiated else x

    return jax.tree.map(guarded, tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(message: str, x: Array) -> Array:
    del message
    return x


@_guarded.defjvp
def _guarded_jvp(message, primals, tangents):
    return primals[0], _tangent.bind(tangents[0], message=message)


def _refuse(*_, message):
    raise ValueError(message)


_tangent = Primitive("reverse_only")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse  # as in vmap of jvp, which is jacfwd
ad.deflinear2(_tangent, lambda cotangent, x, *, message: [cotangent])

"""Refuses forward mode in plain words, where a function has a gradient of its own.

JAX cannot push tangents through a `custom_vjp`. It raises a `TypeError` that names no
alternative, under jit as late as lowering. Here inputs pass through an identity whose
tangent passes through a primitive that can be transposed, but not run, batched or
compiled. Reverse mode transposes it, to nothing; forward mode meets it, and is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def reverse_only(tree: Any, message: str) -> Any:
    """Marks a pytree as differentiable in reverse mode only.

    It costs nothing in compiled programs. Floats are guarded one by one, so that those
    that nothing differentiates stay so; `message` is what the `ValueError` of forward
    mode says.
    """

    def guarded(x):
        can_be_differentiated = isinstance(x, jax.core.Tracer) and jnp.issubdtype(
            x.dtype, jnp.floating
        )
        return _guarded.bind(x, message=message) if can_be_differentiated else x

    return jax.tree.map(guarded, tree)


def _refuse(*_, message):
    raise ValueError(message)


# The identity is a primitive and no `jax.custom_jvp`, whose rule would be batched as a
# whole: then the gradient of a vmap could not be told from `jax.jacfwd`, a vmap of jvp.
_guarded = Primitive("reverse_only")
_guarded.def_impl(lambda x, *, message: x)
_guarded.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_guarded, lambda _, x, *, message: [x])
batching.defvectorized(_guarded)
ad.primitive_jvps[_guarded] = lambda primals, tangents, *, message: (
    primals[0],
    _tangent.bind(tangents[0], message=message),
)

_tangent = Primitive("reverse_only_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
ad.deflinear2(_tangent, lambda cotangent, x, *, message: [cotangent])

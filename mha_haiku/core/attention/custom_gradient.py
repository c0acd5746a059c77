"""Functions with a custom gradient, which reject forward mode with a clear message.

JAX cannot push tangents through a `custom_vjp`. It raises a `TypeError` that names no
alternative, and under jit only when lowering. Here inputs pass through an identity
whose tangent passes through a primitive that can be transposed, but not run, batched or
compiled. Reverse mode transposes the primitive away; forward mode runs into it and gets
the error.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# In the pytree of a gradient, in the place of what is not differentiated.
NO_GRADIENT: Any = None


def differentiable(run: Callable, pull_back: Callable, refusal: str) -> Callable:
    """Gives a function the gradient `pull_back`, in reverse mode only.

    `run(*arguments)` returns the outputs and the residuals that the gradient needs.
    `pull_back(arguments, saved, is_wanted, cotangents)` returns the gradients of the
    arguments. `is_wanted` has the structure of the arguments, with None for each array
    that is not differentiated; a cotangent of zeros is None. Forward mode raises a
    ValueError with the message `refusal`.
    """

    # With symbolic zeros JAX says which inputs are differentiated (`perturbed`) and
    # which cotangents are zero (`SymbolicZero`), so that neither costs anything.
    # Residuals are a pytree, in which a bool would be traced. None is structure, so it
    # can say "no" at trace time.
    def forward_rule(*primals):
        is_wanted = jax.tree.map(lambda x: x.perturbed or None, primals)
        arguments = jax.tree.map(lambda x: x.value, primals)
        outputs, saved = run(*arguments)
        return outputs, (arguments, saved, is_wanted)

    def backward_rule(residuals, cotangents):
        cotangents = jax.tree.map(
            lambda x: None if isinstance(x, SymbolicZero) else x, cotangents
        )
        return pull_back(*residuals, cotangents)

    function = jax.custom_vjp(lambda *arguments: run(*arguments)[0])
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return lambda *arguments: function(*_reverse_only(arguments, refusal))


def _reverse_only(tree: Any, message: str) -> Any:
    """Marks a pytree as differentiable in reverse mode only."""

    # It costs nothing in compiled programs. Floats are guarded one by one, so that
    # arrays that are not differentiated remain so.
    def guarded(x):
        can_be_differentiated = isinstance(x, core.Tracer) and jnp.issubdtype(
            x.dtype, jnp.floating
        )
        return _guarded.bind(x, message=message) if can_be_differentiated else x

    return jax.tree.map(guarded, tree)


def _refuse(*_, message):
    raise ValueError(message)


# The identity is a primitive, not a `jax.custom_jvp`, whose rule would be batched as a
# whole: then the gradient of a vmap would look the same as `jax.jacfwd`, a vmap of jvp.
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

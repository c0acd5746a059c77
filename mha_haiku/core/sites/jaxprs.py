"""What is inside of an equation, and the path of modules in which it is."""

import functools
import re

from jax.extend import core

CALLS = ("jit", "pjit", "closed_call", "core_call")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
REMAT = ("checkpoint", "remat", "remat2")

_HELD = (core.ClosedJaxpr, core.Jaxpr)


def inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the jaxprs inside of an equation, in the order of its parameters."""
    if eqn.primitive.name == "while":
        return [eqn.params[key].jaxpr for key in ("cond_jaxpr", "body_jaxpr")]
    if eqn.primitive.name in CUSTOM:
        call = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
        return [getattr(call, "jaxpr", call)]
    return [getattr(each, "jaxpr", each) for each in _held(eqn)]


def consts(eqn: core.JaxprEqn) -> list:
    """Returns the constants of a call."""
    (call,) = (each for each in _held(eqn) if isinstance(each, core.ClosedJaxpr))
    return call.consts


def _held(eqn) -> list[core.ClosedJaxpr | core.Jaxpr]:
    held = []
    for value in eqn.params.values():
        if isinstance(value, _HELD):
            held.append(value)
        elif isinstance(value, tuple | list):
            held += [x for x in value if isinstance(x, _HELD)]
    return held


def path(eqn: core.JaxprEqn) -> str:
    """Returns the path of an equation within its level, from the stack of names.

    `transpose(jvp(encoder))/layer_0` is `encoder/layer_0`.
    """
    return _path(str(eqn.source_info.name_stack))


@functools.lru_cache(2**14)
def _path(stack: str) -> str:
    before = None
    while stack != before:
        stack, before = re.sub(r"\w+\(([^()]*)\)", r"\1", stack), stack
    return "/".join(filter(None, stack.split("/")))

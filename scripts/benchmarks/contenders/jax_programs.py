"""Shared by contenders on JAX: calls of an attention module or of any function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def attention(
    params: Any,
    apply: Callable[[Any, Array], Array],
    size: sizes.AttentionSize,
    *,
    case: str,
    calls: int,
) -> worker.Program:
    """Returns calls of self-attention.

    Args:
      params: Parameters of the module.
      apply: A function of the parameters and `x` `[B, T, D]` that returns `[B, T, D]`.
      size: B, T and D.
      case: "forward", or "forward_and_backward" with the gradient with respect to both.
      calls: Calls in a run.
    """
    shape = (size.batch, size.length, size.width)
    program = calls_of(apply, (params, normal(0, shape)), case=case, calls=calls)
    return program._replace(facts={"parameters": count(params), **program.facts})


def calls_of(
    function: Callable[..., Array], arguments: tuple[Any, ...], *, case: str, calls: int
) -> worker.Program:
    """Returns calls of a compiled function, and the compiler's estimate of its cost.

    Args:
      function: It returns one array, or anything if it is only run forward.
      arguments: Arguments of the function.
      case: "forward", or "forward_and_backward" with the gradient with respect to all
        arguments.
      calls: Calls in a run.
    """
    called = function
    if case == "forward_and_backward":
        called = forward_and_backward(function)
        arguments = (normal(1, jax.eval_shape(function, *arguments).shape), *arguments)
    compiled = jax.jit(called).lower(*arguments).compile()

    def run():
        for _ in range(calls):
            jax.block_until_ready(compiled(*arguments))

    facts = {
        "flops": int(compiled.cost_analysis()["flops"]),
        "temporary bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    return worker.Program(run, units=calls, facts=facts)


def forward_and_backward(function: Callable[..., Array]) -> Callable:
    """Returns a function of a cotangent and the arguments: the output and gradients."""

    def both(cotangent, *arguments):
        output, pull = jax.vjp(function, *arguments)
        return output, pull(cotangent)

    return both


def causal(length: int) -> Array:
    """Returns booleans `[T, T]` for libraries that need them; free under jit."""
    return jnp.tril(jnp.ones((length, length), bool))


def normal(seed: int, shape: tuple[int, ...]) -> Array:
    """Returns standard normal float32 numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def count(params: Any) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))

"""Shared by contenders on JAX: programs of a training step and an attention module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mha_haiku import runs
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def optimizer(config: runs.RunConfig) -> optax.GradientTransformation:
    """Returns the optimizer of a config, written with optax in the usual way."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.optimizer.learning_rate,
        config.optimizer.warmup_steps,
        config.training.steps,
        config.optimizer.learning_rate * config.optimizer.final_learning_rate_fraction,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.adamw(
            schedule,
            b1=config.optimizer.b1,
            b2=config.optimizer.b2,
            weight_decay=config.optimizer.weight_decay,
        ),
    )


def training(
    config: runs.RunConfig,
    params: Any,
    logits: Callable[[Any, Array], Array],
    *,
    steps: int,
) -> worker.Program:
    """Returns training to reverse tokens, sampled anew in each step.

    Every run starts at the first step: a fully trained model computes with numbers so
    small that some processors are slower.

    Args:
      config: Config of the run.
      params: Initial parameters.
      logits: A function of the parameters and tokens `[B, T]` that returns `[B, T, C]`.
      steps: Training steps in a run.
    """
    transformation = optimizer(config)
    shape = (config.training.batch_size, config.task.sequence_length)

    def mean_loss(params, tokens):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, tokens), tokens[:, ::-1]
        )
        return losses.mean()

    def step(state):
        params, optimizer_state, key = state
        key, sample_key = jax.random.split(key)
        tokens = jax.random.randint(sample_key, shape, 0, config.task.num_tokens)
        loss, gradient = jax.value_and_grad(mean_loss)(params, tokens)
        updates, optimizer_state = transformation.update(
            gradient, optimizer_state, params
        )
        params = optax.apply_updates(params, updates)
        return (params, optimizer_state, key), loss

    take = jax.jit(step, donate_argnums=0)
    optimizer_state = jax.jit(transformation.init)(params)
    first_state = (params, optimizer_state, jax.random.key(config.seed))
    state = loss = None

    def reset():
        nonlocal state
        state = jax.tree.map(jnp.copy, first_state)  # as it will be donated
        jax.block_until_ready(state)

    def run():
        nonlocal state, loss
        for _ in range(steps):
            state, loss = take(state)
        jax.block_until_ready((state, loss))

    return worker.Program(
        run,
        reset,
        units=steps,
        facts={"parameters": count(params)},
        finish=lambda: {"last loss": float(loss)},
    )


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

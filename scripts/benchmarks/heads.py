"""Measures studies of heads: sweeps of ablations, gradients, and pruned models.

Run: python scripts/benchmarks/heads.py

Compared programs run alternately in one process. It prints medians of the ratios with
their quartiles, and the limits that the project promises.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import commands, heads, models, modules, tasks
from mha_haiku.core import checks, sites

B, T, D, H, L, F, C = 16, 64, 256, 8, 6, 1024, 64


def main(*, rounds: int = 7) -> int:
    """Measures, and prints the table.

    Args:
      rounds: Number of alternating runs.
    """
    with checks.user_mistakes():
        checks.positive_integer("--rounds", rounds)
    example = _example()
    config = _config()
    model, params = _model(config, example)
    print(f"{L} layers of {H} heads, width {D}, {B} x {T} tokens; {rounds} rounds")
    of = heads.Measured(model, heads.metrics.loss, params, [example])
    lines = [
        _sweep(of, example, rounds),
        _gradient(of, example, rounds),
        *_pruned(model, params, config, example, rounds),
    ]
    print(f"\n{'':58}{'median':>8}  {'quartiles':>14}   promised")
    is_kept = True
    for name, ratios, promise, holds in lines:
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        spread = f"[{low:.2f}, {high:.2f}]"
        print(f"{name:58}{middle:8.2f}  {spread:>14}   {promise}")
        is_kept &= holds(middle)
    return 0 if is_kept else 1


def _sweep(of, example, rounds):
    whole = jax.jit(
        lambda params, gates: of.metric(
            sites.edit(of.model.apply, heads.edits.gate(gates))(
                params, None, example.inputs, is_training=False
            ).logits,
            example,
        )
    )
    patterns = 1 - jnp.eye(L * H).reshape(L * H, L, H)

    def loop():
        for gates in patterns:
            jax.block_until_ready(whole(of.params, gates))

    ratios = _ratios(lambda: heads.ablation(of), loop, rounds)
    name = "time of all single ablations / of a loop over one program"
    return name, ratios, "at most 0.6", lambda x: x <= 0.6


def _gradient(of, example, rounds):
    step = jax.jit(
        jax.grad(
            lambda params: of.metric(
                of.model.apply(params, None, example.inputs, is_training=False).logits,
                example,
            ).mean()
        )
    )
    ratios = _ratios(
        lambda: heads.gradient(of),
        lambda: jax.block_until_ready(step(of.params)),
        rounds,
    )
    name = "time of gradient importance / of a training gradient"
    return name, ratios, "at most 1.3", lambda x: x <= 1.3


def _pruned(model, params, config, example, rounds):
    keep = [list(range(0, H, 2))] * L
    small, small_config = heads.prune(params, config, keep)
    small_model = _build(small_config)
    gates = jnp.stack(heads.open_gates(config, keep))
    gated = model._replace(apply=sites.edit(model.apply, heads.edits.gate(gates)))
    whole, pruned, masked = (
        _forward(one, example) for one in (model, small_model, gated)
    )
    operations = [
        each.lower(p).compile().cost_analysis()["flops"]
        for each, p in ((whole, params), (pruned, small))
    ]
    ideal = operations[0] / operations[1]
    faster = _ratios(lambda: whole(params), lambda: pruned(small), rounds * 5)
    gained = _ratios(lambda: whole(params), lambda: masked(params), rounds * 5)
    layer = _attention_alone(params, config)
    small_layer = _attention_alone(small, small_config)
    of_layer = _ratios(layer, small_layer, rounds * 5)
    return [
        (
            "speed-up of an attention sub-layer, half of its heads",
            of_layer,
            "at least 1.7 (ideal 2)",
            lambda x: x >= 1.7,
        ),
        (
            f"speed-up of the encoder (by operations {ideal:.2f})",
            faster,
            f"{0.85 * ideal:.2f} to {1.15 * ideal:.2f}",
            lambda x: abs(x / ideal - 1) <= 0.15,
        ),
        ("speed-up of masking the same heads", gained, "none", lambda x: True),
    ]


def _attention_alone(params, config) -> Callable:
    """Compiles the forward pass of layer 0's attention."""
    import haiku as hk

    count = models.heads_of_layers(config)[0]

    def forward(x):
        attention = modules.MultiHeadAttention(
            len(count.names),
            models.key_size(config),
            model_size=config.model_size,
            name="attention",
        )
        return attention(x, x, x)[0]

    apply = hk.without_apply_rng(hk.transform(forward)).apply
    scope = "encoder/layer_0/"
    own = {
        name.removeprefix(scope): leaves
        for name, leaves in params.items()
        if name.startswith(f"{scope}attention")
    }
    x = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
    compiled = jax.jit(apply).lower(own, x).compile()
    arguments = jax.device_put((own, x))
    return lambda: jax.block_until_ready(compiled(*arguments))


def _forward(model, example):
    run = functools.partial(model.apply, is_training=False)
    return jax.jit(lambda params: run(params, None, example.inputs).logits)


def _ratios(first: Callable, second: Callable, rounds: int) -> list[float]:
    """Returns the ratios of the seconds of two calls, which take turns."""
    first(), second()
    ratios = []
    for _ in range(rounds):
        seconds = []
        for call in (first, second):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return ratios


def _example() -> tasks.Example:
    tokens = np.random.default_rng(0).integers(0, C, (B, T)).astype(np.int32)
    return tasks.Example(tokens, tokens, np.ones((B, T), np.float32))


def _config() -> models.ModelConfig:
    from configs import sort

    return sort.get_config().model.replace(
        num_layers=L,
        model_size=D,
        attention=dict(num_heads=H),
        feed_forward=dict(hidden_size=F),
        embedding=dict(max_length=T),
    )


def _build(config):
    return models.build(config, num_tokens=C, feature_size=None, num_classes=C)


def _model(config, example):
    model = _build(config)
    params = jax.jit(model.init)(jax.random.key(0), example.inputs)
    return model, jax.device_get(params)


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))

"""mha_haiku's laboratory on a model of GPT-2's size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mha_haiku as mh
from mha_haiku.lab.heads import model_runs
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models


def prepare(
    use: str, model: str, batch: int, length: int, calls: int = 1
) -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "forward" (with the loss), "ablation" or "resampling" (of each head),
        "patching" (of each head, between two sets of texts), or "statistics" (of all
        maps).
      calls: Forward passes in a run.
    """
    of = measured(model, batch, length)
    (example,) = of.batches
    num_heads = causal_models.SIZES[model].num_heads
    if use == "forward":
        return _forward(of, example, calls)
    if use == "ablation":
        return _asked(lambda: mh.heads.ablation(of), num_heads)
    if use == "resampling":
        value = {"ablation_value": mh.heads.ablation_values.resample}
        return _asked(lambda: mh.heads.ablation(of, **value), num_heads)
    if use == "patching":
        return _patching(of, example, _example(model, batch, length, seed=1), num_heads)
    return _statistics(of, example)


def measured(model: str, batch: int, length: int) -> mh.heads.Measured:
    """Returns a model with random weights, its loss, and a batch."""
    network, params = causal_models.ours(model)
    example = _example(model, batch, length, seed=0)
    return mh.heads.Measured(network, mh.heads.metrics.loss, params, [example])


def _asked(question: Callable[[], Any], units: int) -> worker.Program:
    """Makes a program that drops the answer."""

    def run():
        question()

    return worker.Program(run, units=units)


def _example(model, batch, length, seed) -> mh.tasks.Example:
    tokens = causal_models.tokens(model, batch, length, seed)
    return mh.tasks.Example(tokens, np.roll(tokens, -1, 1), np.ones(tokens.shape, "f4"))


def _forward(of, example, calls):
    def metric(params, example):
        return of.metric(model_runs.run(of.model, params, example).logits, example)

    call = jax.jit(metric).lower(of.params, example).compile()

    def run():
        for _ in range(calls):
            jax.block_until_ready(call(of.params, example))

    return worker.Program(run, units=calls)


def _patching(of, example, other, num_heads):
    # The answer of the last position, as TransformerLens's patching is used.
    answers = np.stack([example.inputs[:, 0], other.inputs[:, 0]], 1)
    ones = np.ones(answers.shape, np.float32)
    clean = example._replace(targets=answers, weights=ones)
    of = of._replace(metric=mh.heads.metrics.logit_difference, batches=[clean])
    return _asked(lambda: mh.heads.activation_patching(of, [other]), num_heads)


def _statistics(of, example):
    def forward(params, example):
        output = model_runs.run(of.model, params, example)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *output.maps)
        statistics = jax.lax.map(lambda each: each.statistics(pooled=(32, 32)), stacked)
        return output.logits[:, -1], statistics

    call = jax.jit(forward).lower(of.params, example).compile()
    return _asked(lambda: jax.block_until_ready(call(of.params, example)), 1)

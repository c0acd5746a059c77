"""Greedy decoding by `models.decoding`, or reading the parameters once."""

import jax
import numpy as np

from mha_haiku.core.models import decoding
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models


def prepare(
    model: str, batch: int, steps: int, use: str = "early", length: int | None = None
) -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "early" or "late": the first or the last tokens of texts of `length`;
        "reading": the sum of all parameters, instead of a step.
      length: Room of the cache in tokens. Defaults to the model's positions.
    """
    length = length or causal_models.SIZES[model].length
    built, params = causal_models.ours(model)
    if use == "reading":
        total = jax.jit(lambda params: sum(x.sum() for x in jax.tree.leaves(params)))
        megabytes = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
        return worker.Program(
            lambda: jax.block_until_ready(total(params)) and None,
            facts={"parameters MB": round(megabytes, 1)},
        )
    columns = 1 if use == "early" else length - steps - 1
    prompts, strategy = np.ones((batch, columns), int), decoding.Sampled(0)
    writer, start, ends = decoding._checked(
        built, (prompts, None, None, None), strategy, length, (), None
    )
    params, key, state = writer.decoding.prepare(params), jax.random.key(0), []

    def reset():
        begun = decoding._begun(writer, params, start, ends, key)
        state[:] = jax.block_until_ready(begun)

    def run():
        texts, cache, keys = state
        jax.block_until_ready(
            decoding._advanced(writer, params, texts, cache, keys, ends, steps)
        )

    return worker.Program(run, reset, units=steps)

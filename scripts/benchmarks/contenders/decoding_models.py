"""Greedy decoding: by `models.decoding` and by `generate` of transformers."""

import os

import jax
import numpy as np

from mha_haiku.core.models import decoding
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models


def prepare(model: str, batch: int, steps: int, use: str = "early") -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "early" or "late": the first or the last tokens of texts; "reading": the sum
        of all parameters, instead of a step; "dynamic" or "static": transformers, with
        this cache.
    """
    if use in ("dynamic", "static"):
        return _of_torch(model, batch, steps, use)
    built, params = causal_models.ours(model)
    if use == "reading":
        total = jax.jit(lambda params: sum(x.sum() for x in jax.tree.leaves(params)))
        megabytes = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
        return worker.Program(
            lambda: jax.block_until_ready(total(params)) and None,
            facts={"parameters MB": round(megabytes, 1)},
        )
    length = causal_models.SIZES[model].length
    columns = 1 if use == "early" else length - steps - 1
    prompts, strategy = np.ones((batch, columns), int), decoding.Sampled(0)
    writer, start = decoding._checked(
        built, (prompts, None, None, None), strategy, length, (), None
    )
    params, key, state = writer.decoding.prepare(params), jax.random.key(0), []

    def reset():
        begun = decoding._begun(writer, params, start, key)
        state[:] = [jax.block_until_ready(begun)]

    def run():
        jax.block_until_ready(decoding._advanced(writer, params, *state, steps))

    return worker.Program(run, reset, units=steps)


def _of_torch(model, batch, steps, cache) -> worker.Program:
    import torch

    torch.set_num_threads(os.cpu_count())  # as many as the others use
    network = causal_models.of_transformers(model)
    prompts = torch.ones(batch, 1, dtype=torch.long)
    options = {"cache_implementation": "static"} if cache == "static" else {}

    def run():
        with torch.inference_mode():
            network.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=steps,
                max_new_tokens=steps,
                do_sample=False,
                **options,
            )

    return worker.Program(run, units=steps)

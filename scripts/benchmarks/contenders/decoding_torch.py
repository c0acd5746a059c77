"""Greedy decoding by `generate` of transformers, of a GPT-2 with random weights."""

import os

import torch

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models


def prepare(
    model: str, batch: int, steps: int, cache: str = "dynamic"
) -> worker.Program:
    """Prepares what is measured.

    Args:
      cache: "dynamic" or "static", with room for all positions.
    """
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    network = causal_models.of_transformers(model)
    prompts = torch.ones(batch, 1, dtype=torch.long)
    own_cache = {"cache_implementation": "static"} if cache == "static" else {}

    def run():
        with torch.inference_mode():
            tokens = network.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=steps,
                max_new_tokens=steps,
                do_sample=False,
                **own_cache,
            )
        assert tokens.shape == (batch, 1 + steps)

    return worker.Program(run, units=steps)

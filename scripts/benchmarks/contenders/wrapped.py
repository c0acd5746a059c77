"""Steps of a Llama of PyTorch: by `train` of the wrapped module, and by torch."""

import json
import os
import tempfile

import numpy as np
import torch
import transformers

import mha_haiku as mh
from scripts.benchmarks import worker


def prepare(use: str, size: int) -> worker.Program:
    """Prepares `size` steps by "train" or "torch"; compilation is not measured."""
    sizes = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024}
    config = transformers.LlamaConfig(
        num_hidden_layers=8, num_attention_heads=6, **sizes
    )
    module = transformers.LlamaForCausalLM(config)
    torch.set_num_threads(os.cpu_count())  # as many as JAX uses
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)
    rows = np.random.default_rng(0).integers(0, 8192, (64, 128))

    def train():
        subject = mh.wrap(module, check=False)
        run = subject.train(tempfile.mkdtemp(), steps=size, examples=rows).folder
        return size / json.loads(run.summary.read_text())["steps_per_second"]

    def by_torch():
        for i in range(size):
            batch = torch.from_numpy(np.roll(rows, 8 * i, 0)[:8])
            optimizer.zero_grad()
            module(batch, labels=batch).loss.backward()
            optimizer.step()

    return worker.Program(train if use == "train" else by_torch, units=size)

"""PyTorch without compilation: its attention, or nn.Transformer with fused AdamW."""

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def prepare(
    case: str,
    size: int,
    attention: Mapping[str, Any] | None = None,
    core: Mapping[str, Any] | None = None,
) -> worker.Program:
    """Prepares what is measured in a case."""
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    torch.manual_seed(0)
    if case == "training":
        return _training(sizes.training_config(), size)
    if case in ("llama", "train"):
        return _llama(size, by_torch=case == "llama")
    if core is not None:
        return _core(sizes.CoreSize(**core), case, size)
    return _module(sizes.AttentionSize(**attention or {}), case, size)


class _EncoderDecoder(nn.Module):
    """Reads a source `[B, S]` and the target's tokens before each `[B, T]`."""

    def __init__(self, config):
        super().__init__()
        model, num_tokens = config.model, config.task.num_tokens
        size, count = model.model_size, num_tokens + 2  # with start and end tokens
        self.sources = nn.Embedding(num_tokens, size)
        self.targets = nn.Embedding(count, size)
        self.positions = nn.ParameterList(
            0.02 * torch.randn(model.embedding.max_length, size) for _ in range(2)
        )
        self.transformer = nn.Transformer(
            size,
            model.attention.num_heads,
            model.num_layers,
            model.num_layers,
            model.feed_forward.hidden_size,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=model.norm.epsilon,
            batch_first=True,
            norm_first=True,
        )
        self.logits = nn.Linear(size, count)

    def forward(self, source, read):
        x, y = (
            table(tokens) + positions[: tokens.shape[1]]
            for table, tokens, positions in zip(
                (self.sources, self.targets),
                (source, read),
                self.positions,
                strict=True,
            )
        )
        mask = nn.Transformer.generate_square_subsequent_mask(read.shape[1])
        return self.logits(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))


def _start(config):
    """Returns a new model and its optimizer; a schedule would take no time."""
    torch.manual_seed(config.seed)
    model = _EncoderDecoder(config)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.b1, config.optimizer.b2),
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    return model, optimizer


def _training(config, steps) -> worker.Program:
    model, optimizer = _start(config)
    loss = None

    def reset():
        nonlocal model, optimizer
        model, optimizer = _start(config)

    def run():
        nonlocal loss
        for _ in range(steps):
            inputs, targets = _draw(config)
            logits = model(*inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()

    return worker.Program(
        run,
        reset,
        units=steps,
        facts={"parameters": _count(model)},
        finish=lambda: {"last loss": loss.item()},
    )


def _llama(steps, *, by_torch) -> worker.Program:
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
    )
    module = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)
    rows = np.random.default_rng(0).integers(0, 8192, (64, 128))

    def train():
        subject = mh.wrap(module, check=False)
        run = subject.train(tempfile.mkdtemp(), steps=steps, examples=rows).folder
        return steps / json.loads(run.summary.read_text())["steps_per_second"]

    def run():
        for i in range(steps):
            batch = torch.from_numpy(np.roll(rows, 8 * i, 0)[:8])
            optimizer.zero_grad()
            module(batch, labels=batch).loss.backward()
            optimizer.step()

    return worker.Program(run if by_torch else train, units=steps)


def _draw(config):
    """Returns what the model reads, source and target, and the targets."""
    count, size = config.task.num_tokens, config.training.batch_size
    source = torch.randint(count, (size, config.task.max_length))
    start, end = (torch.full((size, 1), count + i) for i in (0, 1))
    target = torch.cat([start, source.flip(1), end], 1)
    return (source, target[:, :-1]), target[:, 1:]


def _module(size, case, calls) -> worker.Program:
    module = nn.MultiheadAttention(size.width, size.heads, batch_first=True)
    x = torch.randn(size.batch, size.length, size.width)
    options = {"need_weights": False}
    if size.is_causal:
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        options |= {"attn_mask": mask, "is_causal": True}
    module.train(case != "forward")

    def values(x):
        module.zero_grad()
        return module(x, x, x, **options)[0]

    return _calls(values, [x], case, calls, {"parameters": _count(module)})


def _core(core, case, calls) -> worker.Program:
    def values(*arrays):
        query, key, value = (array.transpose(1, 2) for array in arrays)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=core.is_causal
        )
        return attended.transpose(1, 2)

    return _calls(values, [torch.randn(core.shape) for _ in range(3)], case, calls, {})


def _calls(function, arrays, case, calls, facts) -> worker.Program:
    cotangent = torch.randn(arrays[0].shape)

    def run():
        for _ in range(calls):
            if case == "forward":
                with torch.inference_mode():
                    function(*arrays)
            else:
                inputs = [array.detach().requires_grad_() for array in arrays]
                function(*inputs).backward(cotangent)

    return worker.Program(run, units=calls, facts=facts)


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

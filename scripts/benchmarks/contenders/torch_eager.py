"""PyTorch without compilation: its attention or Transformer, and its fused AdamW."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def prepare(
    case: str, size: int, attention: Mapping[str, Any] | None = None
) -> worker.Program:
    """Prepares what is measured in a case.

    Args:
      case: A name of `sizes.TRAINING_CASES`, "forward" or "forward_and_backward".
      size: Steps or calls in a run.
      attention: Fields of `sizes.AttentionSize`, of the attention module.
    """
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    torch.manual_seed(0)
    if case in sizes.TRAINING_CASES:
        return _training(sizes.training_config(case), size)
    return _calls(sizes.attention_size(attention), case, size)


class _Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        model = config.model
        size = model.model_size
        self.embedding = nn.Embedding(config.task.num_tokens, size)
        self.positions = nn.Parameter(
            0.02 * torch.randn(model.embedding.max_length, size)
        )
        self.layers = nn.Sequential(*(_Layer(model) for _ in range(model.num_layers)))
        self.norm = nn.LayerNorm(size, model.norm.epsilon)
        self.logits = nn.Linear(size, config.task.num_tokens)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        return self.logits(self.norm(self.layers(x)))


class _Layer(nn.Module):
    def __init__(self, model):
        super().__init__()
        size = model.model_size
        self.norm_1 = nn.LayerNorm(size, model.norm.epsilon)
        self.attention = _attention(size, model.attention.num_heads)
        self.norm_2 = nn.LayerNorm(size, model.norm.epsilon)
        self.hidden = nn.Linear(size, model.feed_forward.hidden_size)
        self.output = nn.Linear(model.feed_forward.hidden_size, size)

    def forward(self, x):
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.output(nn.functional.gelu(self.hidden(self.norm_2(x))))


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


def _attention(size, num_heads):
    return nn.MultiheadAttention(size, num_heads, batch_first=True)


def _start(config):
    """Returns a new model, its optimizer and its schedule."""
    torch.manual_seed(config.seed)
    has_decoder = config.model.family == "encoder_decoder"
    model = _EncoderDecoder(config) if has_decoder else _Model(config)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.b1, config.optimizer.b2),
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(config, step)
    )
    return model, optimizer, schedule


def _training(config, steps) -> worker.Program:
    model, optimizer, schedule = _start(config)
    draw = _draw_pair if config.model.family == "encoder_decoder" else _draw
    loss = None

    def reset():
        nonlocal model, optimizer, schedule
        model, optimizer, schedule = _start(config)

    def run():
        nonlocal loss
        for _ in range(steps):
            inputs, targets = draw(config)
            logits = model(*inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            schedule.step()

    return worker.Program(
        run,
        reset,
        units=steps,
        facts={"parameters": _count(model)},
        finish=lambda: {"last loss": loss.item()},
    )


def _draw(config):
    """Returns what the model reads, and the targets."""
    shape = (config.training.batch_size, config.task.sequence_length)
    tokens = torch.randint(config.task.num_tokens, shape)
    return (tokens,), tokens.flip(1)


def _draw_pair(config):
    """Returns the same of a source and a target with start and end tokens."""
    count, size = config.task.num_tokens, config.training.batch_size
    source = torch.randint(count, (size, config.task.max_length))
    start, end = (torch.full((size, 1), count + i) for i in (0, 1))
    target = torch.cat([start, source.flip(1), end], 1)
    return (source, target[:, :-1]), target[:, 1:]


def _learning_rate_factor(config, step) -> float:
    """Returns the share of the highest learning rate: warm-up, then half a cosine."""
    warmup, end = config.optimizer.warmup_steps, config.training.steps
    if step < warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / (end - warmup))
    last = config.optimizer.final_learning_rate_fraction
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


def _calls(size, case, calls) -> worker.Program:
    module = _attention(size.width, size.heads)
    x = torch.randn(size.batch, size.length, size.width)
    cotangent = torch.randn(x.shape)
    options = {"need_weights": False}
    if size.is_causal:
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        options |= {"attn_mask": mask, "is_causal": True}

    def forward():
        with torch.inference_mode():
            module(x, x, x, **options)

    def forward_and_backward():
        module.zero_grad()
        inputs = x.detach().requires_grad_()
        module(inputs, inputs, inputs, **options)[0].backward(cotangent)

    if case == "forward":
        module.eval()
        call = forward
    else:
        call = forward_and_backward

    def run():
        for _ in range(calls):
            call()

    return worker.Program(run, units=calls, facts={"parameters": _count(module)})


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

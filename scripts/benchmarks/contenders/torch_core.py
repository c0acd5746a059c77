"""PyTorch's scaled_dot_product_attention of [B, T, H, K] arrays."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def prepare(case: str, size: int, core: Mapping[str, Any]) -> worker.Program:
    """Prepares calls of attention.

    Args:
      case: "forward" or "forward_and_backward".
      size: Calls in a run.
      core: Fields of `sizes.CoreSize`, without a window.
    """
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    torch.manual_seed(0)
    core = sizes.CoreSize(**core)
    shape = core.shape
    arrays = [torch.randn(shape) for _ in range(3)]
    cotangent = torch.randn(shape)

    def values(arrays):
        query, key, value = (array.transpose(1, 2) for array in arrays)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=core.is_causal
        )
        return attended.transpose(1, 2)

    def forward():
        with torch.inference_mode():
            values(arrays)

    def forward_and_backward():
        inputs = [array.detach().requires_grad_() for array in arrays]
        torch.autograd.grad(values(inputs), inputs, cotangent)

    call = forward if case == "forward" else forward_and_backward

    def run():
        for _ in range(size):
            call()

    return worker.Program(run, units=size)

"""Attention by accelerator kernels, which `attend` calls "fused"."""

from mha_haiku.core.attention.fused.kernel_attention import attend, suits

__all__ = ["attend", "suits"]

"""Attention by the kernels of accelerators, which `attend` knows as "fused"."""

from mha_haiku.core.attention.fused.kernel_attention import attend, suits

__all__ = ["attend", "suits"]

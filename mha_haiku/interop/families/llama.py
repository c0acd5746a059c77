"""Llama and similar models: causal, rotary positions, gated feed-forward parts.

Llama (with SmolLM2), Mistral, Qwen2, Qwen3, OLMo 2, Gemma, Gemma 2 and Gemma 3 differ
in a few fields; they share one table of names.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_haiku.core import checks
from mha_haiku.interop.families import name_tables, rules

_FIELDS = {
    "family": "causal",
    "embedding.positions": "rotary",
    "norm.kind": "rms_norm",
    "norm.position": "pre",
    "attention.with_bias": False,
    "attention.output_bias": False,
    "feed_forward.with_bias": False,
}


def _family(
    name: str,
    title: str,
    *settings: name_tables.Setting | name_tables.Rule,
    fields: Mapping[str, Any] | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    scale: name_tables.Change = name_tables.as_it_is,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_settings: tuple = (),
) -> name_tables.Family:
    """Makes a family; numbers and `tied` are defaults of `transformers`."""
    fields = {**_FIELDS, **(fields or {})}
    # A norm after attention has the name that others give to the one before the
    # feed-forward part.
    norms = name_tables.norm("norm_2", "post_attention_layernorm", scale)
    if fields["norm.position"] != "pre":
        norms = (
            *name_tables.norm("norm_1_after", "post_attention_layernorm", scale),
            *name_tables.norm("norm_2", "pre_feedforward_layernorm", scale),
            *name_tables.norm("norm_2_after", "post_feedforward_layernorm", scale),
        )
    return name_tables.Family(
        name=name,
        prefix="model.",
        layer="layers.{}.",
        fields=fields,
        settings=(
            name_tables.Setting("num_tokens", "vocab_size"),
            *rules.sizes(),
            name_tables.Setting(
                "attention.num_key_value_heads", "num_key_value_heads", kv_heads
            ),
            name_tables.Setting("attention.key_size", "head_dim", head_size),
            name_tables.Setting("norm.epsilon", "rms_norm_eps", epsilon),
            name_tables.Setting("embedding.max_length", "max_position_embeddings"),
            *settings,
        ),
        rows=(
            name_tables.row("embedding/embeddings", "embed_tokens.weight"),
            *name_tables.norm("encoder/norm", "norm", scale),
        ),
        layer_rows=(
            *name_tables.norm("norm_1", "input_layernorm", scale),
            *name_tables.linear("attention/query", "self_attn.q_proj"),
            *name_tables.linear("attention/key", "self_attn.k_proj"),
            *name_tables.linear("attention/value", "self_attn.v_proj"),
            *name_tables.linear("attention/linear", "self_attn.o_proj"),
            *name_tables.norm("attention/query_norm", "self_attn.q_norm", scale),
            *name_tables.norm("attention/key_norm", "self_attn.k_norm", scale),
            *name_tables.linear("feed_forward/gate", "mlp.gate_proj"),
            *name_tables.linear("feed_forward/hidden", "mlp.up_proj"),
            *name_tables.linear("feed_forward/output", "mlp.down_proj"),
            *norms,
        ),
        heads=(
            rules.next_token(
                f"{title}ForCausalLM",
                "lm_head.weight",
                "model.embed_tokens.weight",
                *head_settings,
                tied=tied,
            ),
            name_tables.OutputHead(f"{title}Model", rules.NO_LOGITS),
        ),
        supported=rules.SUPPORTED_CAUSAL,
        buffers=("rotary_emb.inv_freq",),
    )


# Norms of Gemma store their scale minus 1, whose small numbers 1 + x rounds away.
_SCALE_LESS_ONE = name_tables.each(
    lambda x: x.astype(np.float32) + np.float32(1),
    lambda x: x.astype(np.float32) - np.float32(1),
    is_wide=True,
)
_EMBEDDING_SCALE = name_tables.Rule(
    lambda theirs: {"embedding.scale": math.sqrt(theirs["hidden_size"])},
)
_QUERY_SCALE = name_tables.Rule(
    lambda theirs: {"attention.scale": theirs["query_pre_attn_scalar"] ** -0.5},
    {"query_pre_attn_scalar": name_tables.key(256, checks.positive_number)},
)
_GATE = rules.activation("hidden_act", "silu", rules.GATED_ACTIVATIONS)
_QWEN_WINDOWS = rules.windows(
    lambda theirs, i: i >= theirs["max_window_layers"],
    optional=True,
    max_window_layers=name_tables.key(28, checks.non_negative_integer),
)
_GEMMA_2_WINDOWS = rules.windows(lambda theirs, i: i % 2 == 0)


def _is_local_in_gemma_3(theirs: rules.Theirs, i: int) -> bool:
    return (i + 1) % theirs["sliding_window_pattern"] != 0


# Files of Gemma 1 say "gelu", and mean the other one.
_GEMMA_1_ACTIVATIONS = {
    "gelu_pytorch_tanh": "geglu_tanh",
    **rules.GATED_ACTIVATIONS,
    "gelu": "geglu_tanh",
}

LLAMA = _family(
    "llama",
    "Llama",
    rules.rotary(),
    rules.biases(False),
    name_tables.Setting("feed_forward.with_bias", "mlp_bias", False),
    _GATE,
)
MISTRAL = _family(
    "mistral", "Mistral", rules.rotary(), rules.one_window(), _GATE, kv_heads=8
)
QWEN2 = _family(
    "qwen2",
    "Qwen2",
    rules.rotary(),
    _QWEN_WINDOWS,
    _GATE,
    fields={"attention.with_bias": True},
    kv_heads=32,
)
QWEN3 = _family(
    "qwen3",
    "Qwen3",
    rules.rotary(),
    _QWEN_WINDOWS,
    rules.biases(False),
    _GATE,
    fields={"attention.qk_norm": True},
    kv_heads=32,
    head_size=128,
)
OLMO2 = _family(
    "olmo2",
    "Olmo2",
    rules.rotary(),
    rules.biases(False),
    _GATE,
    fields={
        "norm.position": "reordered",
        "attention.qk_norm": True,
        "attention.qk_norm_over": "layer",
    },
    epsilon=1e-5,
)
GEMMA = _family(
    "gemma",
    "Gemma",
    rules.rotary(),
    rules.biases(False),
    rules.activation("hidden_act", "gelu_pytorch_tanh", _GEMMA_1_ACTIVATIONS),
    _EMBEDDING_SCALE,
    kv_heads=16,
    head_size=256,
    scale=_SCALE_LESS_ONE,
    tied=True,
)


def _later_gemma(
    name: str,
    title: str,
    *settings: name_tables.Setting | name_tables.Rule,
    **options: Any,
) -> name_tables.Family:
    return _family(
        name,
        title,
        *settings,
        rules.biases(False),
        rules.activation(
            "hidden_activation", "gelu_pytorch_tanh", rules.GATED_ACTIVATIONS
        ),
        _EMBEDDING_SCALE,
        _QUERY_SCALE,
        kv_heads=4,
        head_size=256,
        scale=_SCALE_LESS_ONE,
        tied=True,
        **options,
    )


GEMMA2 = _later_gemma(
    "gemma2",
    "Gemma2",
    rules.rotary(),
    _GEMMA_2_WINDOWS,
    name_tables.Setting("attention.soft_cap", "attn_logit_softcapping", 50.0),
    fields={"norm.position": "both"},
    head_settings=(
        name_tables.Setting("output.soft_cap", "final_logit_softcapping", 30.0),
    ),
)
GEMMA3 = _later_gemma(
    "gemma3_text",
    "Gemma3",
    rules.rotary_by_layer(_is_local_in_gemma_3),
    rules.windows(
        _is_local_in_gemma_3,
        sliding_window_pattern=name_tables.key(6, checks.positive_integer),
    ),
    fields={"norm.position": "both", "attention.qk_norm": True},
    head_settings=(
        name_tables.Setting("output.soft_cap", "final_logit_softcapping", None),
    ),
)
# transformers has the field and does not apply it.
_NO_CAP = {"attn_logit_softcapping": (None,)}
GEMMA3 = GEMMA3._replace(supported={**GEMMA3.supported, **_NO_CAP})
ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, GEMMA3)

"""Llama and similar models: causal, rotary positions, gated feed-forward parts.

Llama (with SmolLM2), Mistral, Qwen2, Qwen3 and Gemma differ in a few fields; they share
one table of names.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    *own_rules: name_tables.Rule,
    fields: Mapping[str, Any] = _FIELDS,
    kv_heads: int | None = None,
    head_size: int | None = None,
    scale: name_tables.Change = name_tables.as_it_is,
    tied: bool = False,
    supported: Mapping[str, tuple] = rules.SUPPORTED_CAUSAL,
) -> name_tables.Family:
    """Makes a family; numbers and `tied` are defaults of `transformers`."""
    return name_tables.Family(
        name=name,
        prefix="model.",
        layer="layers.{}.",
        fields=fields,
        rules=(
            rules.ROTARY,  # before the size of a head, whose default counts
            *rules.SIZES,
            name_tables.setting(
                "attention.num_key_value_heads", "num_key_value_heads", kv_heads
            ),
            name_tables.setting("attention.key_size", "head_dim", head_size),
            name_tables.setting("norm.epsilon", "rms_norm_eps", 1e-6),
            name_tables.setting("embedding.max_length", "max_position_embeddings"),
            *own_rules,
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
            *name_tables.norm("norm_2", "post_attention_layernorm", scale),
            *name_tables.linear("feed_forward/gate", "mlp.gate_proj"),
            *name_tables.linear("feed_forward/hidden", "mlp.up_proj"),
            *name_tables.linear("feed_forward/output", "mlp.down_proj"),
        ),
        heads=(
            rules.next_token(
                f"{title}ForCausalLM",
                "lm_head.weight",
                "model.embed_tokens.weight",
                tied=tied,
            ),
            name_tables.OutputHead(f"{title}Model", rules.NO_LOGITS),
        ),
        supported=supported,
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
_GATE = rules.activation("hidden_act", "silu", rules.GATED_ACTIVATIONS)
# Files of Gemma say "gelu", and mean the other one.
_GEMMA_GATE = rules.activation(
    "hidden_act",
    "gelu_pytorch_tanh",
    {**rules.GATED_ACTIVATIONS, "gelu": "geglu_tanh"},
)
# Theirs counts the query itself, ours the positions before it. All layers have it,
# whatever `layer_types` says.
_WINDOW = name_tables.Rule(
    lambda theirs: {
        "attention.window": theirs["sliding_window"] and theirs["sliding_window"] - 1
    },
    {"sliding_window": name_tables.key(4096, rules.LENGTH, int | None)},
)
# Configs of Qwen have a window that most models do not use.
_WITHOUT_WINDOW = {**rules.SUPPORTED_CAUSAL, "use_sliding_window": (False,)}

ALL = (
    _family(
        "llama",
        "Llama",
        rules.biases(False),
        name_tables.setting("feed_forward.with_bias", "mlp_bias", False),
        _GATE,
    ),
    _family("mistral", "Mistral", _WINDOW, _GATE, kv_heads=8),
    _family(
        "qwen2",
        "Qwen2",
        _GATE,
        fields={**_FIELDS, "attention.with_bias": True},
        kv_heads=32,
        supported=_WITHOUT_WINDOW,
    ),
    _family(
        "qwen3",
        "Qwen3",
        rules.biases(False),
        _GATE,
        fields={**_FIELDS, "attention.qk_norm": True},
        kv_heads=32,
        head_size=128,
        supported=_WITHOUT_WINDOW,
    ),
    _family(
        "gemma",
        "Gemma",
        rules.biases(False),
        _GEMMA_GATE,
        _EMBEDDING_SCALE,
        kv_heads=16,
        head_size=256,
        scale=_SCALE_LESS_ONE,
        tied=True,
    ),
)

"""GPT-2: a causal model with learned positions and norms before each part."""

import numpy as np

from mha_haiku.core import fields
from mha_haiku.interop.families import name_tables, rules

# Queries, keys and values are side by side, along the last axis.
_THIRDS = name_tables.Change(
    lambda arrays: np.split(arrays[0], 3, -1),
    lambda arrays: [np.concatenate(arrays, -1)],
)

GPT2 = name_tables.Family(
    name="gpt2",
    prefix="transformer.",
    layer="h.{}.",
    fields={
        "family": "causal",
        "embedding.positions": "learned",
        "norm.kind": "layer_norm",
        "norm.position": "pre",
    },
    rules=(
        *rules.sizes("vocab_size", "n_layer", "n_embd", "n_head"),
        name_tables.setting("embedding.max_length", "n_positions", 1024),
        name_tables.Rule(
            lambda theirs: {
                "feed_forward.hidden_size": theirs["n_inner"] or 4 * theirs["n_embd"]
            },
            {"n_inner": name_tables.key(None, fields.integer(1, 2**22), int | None)},
        ),
        rules.activation("activation_function", "gelu_new"),
        name_tables.setting("norm.epsilon", "layer_norm_epsilon", 1e-5),
    ),
    rows=(
        name_tables.row("embedding/embeddings", "wte.weight"),
        name_tables.row("positions/positions", "wpe.weight"),
        *name_tables.norm("encoder/norm", "ln_f"),
    ),
    layer_rows=(  # linear maps are stored `[in, out]`, as ours are
        *name_tables.norm("norm_1", "ln_1"),
        *(
            name_tables.Row(
                tuple(f"attention/{part}/{ours}" for part in ("query", "key", "value")),
                (f"attn.c_attn.{theirs}",),
                _THIRDS,
            )
            for ours, theirs in (("w", "weight"), ("b", "bias"))
        ),
        *name_tables.linear("attention/linear", "attn.c_proj", name_tables.as_it_is),
        *name_tables.norm("norm_2", "ln_2"),
        *name_tables.linear("feed_forward/hidden", "mlp.c_fc", name_tables.as_it_is),
        *name_tables.linear("feed_forward/output", "mlp.c_proj", name_tables.as_it_is),
    ),
    heads=(
        rules.next_token(
            "GPT2LMHeadModel", "lm_head.weight", "transformer.wte.weight", tied=True
        ),
        name_tables.OutputHead("GPT2Model", rules.NO_LOGITS),
    ),
    supported={
        **rules.SUPPORTED_CAUSAL,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    buffers=(".attn.bias", ".attn.masked_bias"),
)

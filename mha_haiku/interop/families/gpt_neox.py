"""GPT-NeoX (Pythia): attention and feed-forward in parallel, some features turn."""

import numpy as np

from mha_haiku.core import models
from mha_haiku.interop.families import name_tables, rules


def _order(config: models.ModelConfig) -> np.ndarray:
    """Orders the features `[K]` so that pairs are K/2 apart, as in our models.

    The first `turning` features of a head rotate, in pairs `turning / 2` apart. The
    halves of the others are appended to the halves of these, and have frequency 0.
    """
    size = models.key_size(config)
    frequencies = config.embedding.frequencies
    turning = size if frequencies is None else 2 * np.count_nonzero(frequencies)
    features = np.arange(size)
    first, second = features[:turning].reshape(2, -1)
    third, fourth = features[turning:].reshape(2, -1)
    return np.concatenate([first, third, second, fourth])


# A head's query, key and value are one after the other: `[H 3 K, ...]`. Thirds of the
# whole, as in GPT-2, would give wrong numbers and no error.
def _to_ours(arrays: name_tables.Arrays, config: models.ModelConfig):
    (x,) = arrays
    features = _order(config)
    parts = x.reshape(config.attention.num_heads, 3, -1, *x.shape[1:])
    query, key, value = np.moveaxis(parts, 1, 0)
    parts = query[:, features], key[:, features], value
    return [part.reshape(-1, *x.shape[1:]).T for part in parts]


def _to_theirs(arrays: name_tables.Arrays, config: models.ModelConfig):
    features = np.argsort(_order(config))
    num_heads, rest = config.attention.num_heads, arrays[0].T.shape[1:]
    query, key, value = (x.T.reshape(num_heads, -1, *rest) for x in arrays)
    parts = np.stack([query[:, features], key[:, features], value], axis=1)
    return [parts.reshape(-1, *rest)]


GPT_NEOX = name_tables.Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    layer="layers.{}.",
    fields={
        "family": "causal",
        "embedding.positions": "rotary",
        "norm.kind": "layer_norm",
        "norm.position": "pre",
    },
    rules=(
        *rules.SIZES,
        rules.activation("hidden_act", "gelu"),
        name_tables.setting("feed_forward.parallel", "use_parallel_residual", True),
        name_tables.setting("norm.epsilon", "layer_norm_eps", 1e-5),
        name_tables.setting("embedding.max_length", "max_position_embeddings", 2048),
        rules.biases(True),
        rules.rotary("rotary_emb_base", "rotary_pct", 0.25),
    ),
    rows=(
        name_tables.row("embedding/embeddings", "embed_in.weight"),
        *name_tables.norm("encoder/norm", "final_layer_norm"),
    ),
    layer_rows=(
        *name_tables.norm("norm_1", "input_layernorm"),
        *name_tables.norm("norm_2", "post_attention_layernorm"),
        *name_tables.query_key_value(
            "attention.query_key_value", name_tables.Change(_to_ours, _to_theirs)
        ),
        *name_tables.linear("attention/linear", "attention.dense"),
        *name_tables.linear("feed_forward/hidden", "mlp.dense_h_to_4h"),
        *name_tables.linear("feed_forward/output", "mlp.dense_4h_to_h"),
    ),
    heads=(
        rules.next_token(
            "GPTNeoXForCausalLM",
            "embed_out.weight",
            "gpt_neox.embed_in.weight",
            tied=False,
        ),
        name_tables.OutputHead("GPTNeoXModel", rules.NO_LOGITS),
    ),
    supported=rules.SUPPORTED_CAUSAL,
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    renamed={"lm_head.weight": "embed_out.weight"},
)

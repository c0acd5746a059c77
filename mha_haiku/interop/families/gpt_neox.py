"""GPT-NeoX (Pythia): attention and feed-forward in parallel, some features turn."""

import numpy as np

from mha_haiku.interop.families import changes, rules
from mha_haiku.interop.families.tables import (
    Family,
    Head,
    Row,
    Setting,
    linear,
    norm,
    row,
)

_SHARE = 0.25  # of a head's features that turn, where config.json does not say it


def _order(place: changes.Place) -> np.ndarray:
    """Returns the features `[K]` in the order in which ours K/2 apart are pairs.

    The first `turning` features of a head turn, in pairs half of them apart. The halves
    of the others are appended to the halves of these, and have frequency 0.
    """
    turning = rules.turning(place.theirs, _SHARE)
    features = np.arange(rules.head_size(place.theirs))
    first, second = features[:turning].reshape(2, -1)
    third, fourth = features[turning:].reshape(2, -1)
    return np.concatenate([first, third, second, fourth])


_OURS = ("attention/query", "attention/key", "attention/value")

GPT_NEOX = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    layer="layers.{}.",
    fields={
        "family": "causal",
        "embedding.positions": "rotary",
        "norm.kind": "layer_norm",
        "norm.position": "pre",
    },
    settings=(
        Setting("num_tokens", "vocab_size", 50432),
        Setting("num_layers", "num_hidden_layers", 44),
        Setting("model_size", "hidden_size", 6144),
        Setting("attention.num_heads", "num_attention_heads", 64),
        Setting("feed_forward.hidden_size", "intermediate_size", 24576),
        Setting("feed_forward.activation", "hidden_act", "gelu", rules.ACTIVATIONS),
        Setting("feed_forward.parallel", "use_parallel_residual", True),
        Setting("norm.epsilon", "layer_norm_eps", 1e-5),
        Setting("embedding.max_length", "max_position_embeddings", 2048),
        rules.biases(True),
        rules.rotary(share=_SHARE),
    ),
    rows=(
        row("embedding/embeddings", "embed_in.weight"),
        *norm("encoder/norm", "final_layer_norm"),
    ),
    layer_rows=(
        *norm("norm_1", "input_layernorm"),
        *norm("norm_2", "post_attention_layernorm"),
        Row(
            tuple(f"{name}/w" for name in _OURS),
            ("attention.query_key_value.weight",),
            changes.chain(changes.by_heads(_order), changes.transposed),
        ),
        Row(
            tuple(f"{name}/b" for name in _OURS),
            ("attention.query_key_value.bias",),
            changes.by_heads(_order),
        ),
        *linear("attention/linear", "attention.dense"),
        *linear("feed_forward/hidden", "mlp.dense_h_to_4h"),
        *linear("feed_forward/output", "mlp.dense_4h_to_h"),
    ),
    heads=(
        Head(
            "GPTNeoXForCausalLM",
            {"output.with_bias": False},
            (row("logits/w", "embed_out.weight", changes.transposed),),
            copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
            settings=(Setting("output.tied", "tie_word_embeddings", False),),
        ),
        Head("GPTNeoXModel", rules.NO_LOGITS),
    ),
    supported=rules.SUPPORTED,
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    renamed={"lm_head.weight": "embed_out.weight"},
)

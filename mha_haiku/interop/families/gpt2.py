"""GPT-2: a causal model with learned positions and norms before each part."""

from mha_haiku.interop.families import changes, rules
from mha_haiku.interop.families.tables import (
    Family,
    Head,
    Row,
    Rule,
    Setting,
    linear,
    norm,
    row,
)


def _scale(theirs):
    return {} if theirs.get("scale_attn_weights", True) else {"attention.scale": 1.0}


def _inverse_layer(place: changes.Place) -> float:
    """Returns the factor of queries where scores are divided by the layer's number."""
    is_divided = place.theirs.get("scale_attn_by_inverse_layer_idx", False)
    return 1 / (place.layer + 1) if is_divided else 1


_QUERY_KEY_VALUE = changes.chain(changes.thirds, changes.first_by(_inverse_layer))
_OURS = ("attention/query", "attention/key", "attention/value")


def _convolution(ours: str, theirs: str) -> tuple[Row, ...]:
    """Returns the rows of a linear map that is stored `[in, out]`, as ours are."""
    return linear(ours, theirs, changes.as_it_is)


GPT2 = Family(
    name="gpt2",
    prefix="transformer.",
    layer="h.{}.",
    fields={
        "family": "causal",
        "embedding.positions": "learned",
        "norm.kind": "layer_norm",
        "norm.position": "pre",
    },
    settings=(
        Setting("num_tokens", "vocab_size", 50257),
        Setting("num_layers", "n_layer", 12),
        Setting("model_size", "n_embd", 768),
        Setting("attention.num_heads", "n_head", 12),
        Setting("embedding.max_length", "n_positions", 1024),
        Rule(
            lambda theirs: {
                "feed_forward.hidden_size": theirs.get("n_inner")
                or 4 * theirs.get("n_embd", 768)
            },
            lambda ours: {"n_inner": ours["feed_forward.hidden_size"]},
        ),
        Setting(
            "feed_forward.activation",
            "activation_function",
            "gelu_new",
            rules.ACTIVATIONS,
        ),
        Setting("norm.epsilon", "layer_norm_epsilon", 1e-5),
        Rule(
            _scale, lambda ours: {"scale_attn_weights": ours["attention.scale"] != 1.0}
        ),
    ),
    rows=(
        row("embedding/embeddings", "wte.weight"),
        row("positions/positions", "wpe.weight"),
        *norm("encoder/norm", "ln_f"),
    ),
    layer_rows=(
        *norm("norm_1", "ln_1"),
        Row(
            tuple(f"{name}/w" for name in _OURS),
            ("attn.c_attn.weight",),
            _QUERY_KEY_VALUE,
        ),
        Row(
            tuple(f"{name}/b" for name in _OURS),
            ("attn.c_attn.bias",),
            _QUERY_KEY_VALUE,
        ),
        *_convolution("attention/linear", "attn.c_proj"),
        *norm("norm_2", "ln_2"),
        *_convolution("feed_forward/hidden", "mlp.c_fc"),
        *_convolution("feed_forward/output", "mlp.c_proj"),
    ),
    heads=(
        Head(
            "GPT2LMHeadModel",
            {"output.with_bias": False},
            (row("logits/w", "lm_head.weight", changes.transposed),),
            copies={"lm_head.weight": "transformer.wte.weight"},
            settings=(Setting("output.tied", "tie_word_embeddings", True),),
        ),
        Head("GPT2Model", rules.NO_LOGITS),
    ),
    supported={
        key: values for key, values in rules.SUPPORTED.items() if key != "is_decoder"
    },
    buffers=(".attn.bias", ".attn.masked_bias"),
)

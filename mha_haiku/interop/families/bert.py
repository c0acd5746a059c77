"""BERT, RoBERTa and DistilBERT: encoders with norms after each part.

MiniLM and many other sentence encoders are BERT models.
"""

import numpy as np

from mha_haiku.interop.families import name_tables, rules

_FIELDS = {
    "family": "encoder",
    "embedding.positions": "learned",
    "embedding.norm": True,
    "norm.kind": "layer_norm",
    "norm.position": "post",
}
_SIZES = (
    *rules.sizes(12, 768, 12, 3072),
    rules.activation("hidden_act", "gelu"),
    name_tables.Setting("norm.epsilon", "layer_norm_eps", 1e-12),
    name_tables.Setting("embedding.segments", "type_vocab_size", 2),
)
_MAX_LENGTH = name_tables.Setting(
    "embedding.max_length", "max_position_embeddings", 512
)
_EMBEDDINGS = (
    name_tables.row("embedding/embeddings", "embeddings.word_embeddings.weight"),
    name_tables.row("segments/embeddings", "embeddings.token_type_embeddings.weight"),
    *name_tables.norm("embedding_norm", "embeddings.LayerNorm"),
)
_POSITIONS = name_tables.row(
    "positions/positions", "embeddings.position_embeddings.weight"
)


def _heads(
    name: str,
    *,
    activation: str | None = None,
    hidden: str,
    norm: str,
    decoder: str,
    bias: str,
    pooled: str,
    pooled_activation: str = "tanh",
    classifier: str = "classifier",
    unused: tuple[str, ...] = (),
) -> tuple[name_tables.OutputHead, ...]:
    # For masked words, with arrays `hidden`, `norm`, `decoder`, `bias` and the field of
    # `config.json` for the `activation` in between (None for gelu); for texts, with
    # arrays `pooled` and `classifier`; for positions; and without logits.
    table = f"{name.lower()}.embeddings.word_embeddings.weight"
    settings = (name_tables.Setting("output.tied", "tie_word_embeddings", True),)
    if activation is not None:
        hidden_by = "output.hidden", activation, "gelu", rules.HIDDEN
        settings = (*settings, name_tables.Setting(*hidden_by))
    return (
        name_tables.OutputHead(
            f"{name}ForMaskedLM",
            {"output.hidden": "gelu", "output.norm": True, "output.with_bias": True},
            (
                *name_tables.linear("output_hidden", hidden),
                *name_tables.norm("output_norm", norm),
                name_tables.row(
                    "logits/w", f"{decoder}.weight", name_tables.transposed
                ),
                name_tables.row("logits/b", bias),
            ),
            has=bias,
            unused=unused,
            copies={f"{decoder}.weight": table, f"{decoder}.bias": bias},
            settings=settings,
        ),
        name_tables.OutputHead(
            f"{name}ForSequenceClassification",
            {
                "output.pool": "first",
                "output.hidden": pooled_activation,
                "output.with_bias": True,
            },
            (
                *name_tables.linear("output_hidden", pooled),
                *name_tables.linear("logits", classifier),
            ),
            has=f"{pooled}.weight",
            unused=unused,
            settings=(rules.LABELS,),
        ),
        name_tables.OutputHead(
            f"{name}ForTokenClassification",
            {"output.with_bias": True},
            name_tables.linear("logits", "classifier"),
            has="classifier.weight",
            unused=unused,
            settings=(rules.LABELS,),
        ),
        name_tables.OutputHead(f"{name}Model", rules.NO_LOGITS, unused=unused),
    )


_BERT_HEADS = _heads(
    "Bert",
    activation="hidden_act",
    hidden="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    pooled="bert.pooler.dense",
    unused=("bert.pooler.", "cls.seq_relationship."),
)
BERT = name_tables.Family(
    name="bert",
    prefix="bert.",
    layer="encoder.layer.{}.",
    fields=_FIELDS,
    settings=(
        name_tables.Setting("num_tokens", "vocab_size", 30522),
        *_SIZES,
        _MAX_LENGTH,
    ),
    rows=(*_EMBEDDINGS, _POSITIONS),
    layer_rows=(
        *name_tables.linear("attention/query", "attention.self.query"),
        *name_tables.linear("attention/key", "attention.self.key"),
        *name_tables.linear("attention/value", "attention.self.value"),
        *name_tables.linear("attention/linear", "attention.output.dense"),
        *name_tables.norm("norm_1", "attention.output.LayerNorm"),
        *name_tables.linear("feed_forward/hidden", "intermediate.dense"),
        *name_tables.linear("feed_forward/output", "output.dense"),
        *name_tables.norm("norm_2", "output.LayerNorm"),
    ),
    heads=(*_BERT_HEADS, _BERT_HEADS[0]._replace(architecture="BertForPreTraining")),
    supported={**rules.SUPPORTED, "position_embedding_type": ("absolute",)},
    buffers=("embeddings.position_ids",),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


# Positions of RoBERTa count from pad_token_id + 1; those before are unused.
def _num_unused(place: name_tables.Place) -> int:
    return place.theirs["pad_token_id"] + 1


_AFTER_PADDING = name_tables.Change(
    lambda arrays, place: [x[_num_unused(place) :] for x in arrays],
    lambda arrays, place: [
        np.pad(x, [(_num_unused(place), 0), (0, 0)]) for x in arrays
    ],
)
ROBERTA = BERT._replace(
    name="roberta",
    prefix="roberta.",
    settings=(
        name_tables.Setting("num_tokens", "vocab_size", 50265),
        *_SIZES,
        rules.POSITIONS_AFTER_PADDING,
    ),
    rows=(*_EMBEDDINGS, _POSITIONS._replace(change=_AFTER_PADDING)),
    heads=_heads(
        "Roberta",
        hidden="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder",
        bias="lm_head.bias",
        pooled="classifier.dense",
        classifier="classifier.out_proj",
        unused=("roberta.pooler.",),
    ),
)

DISTILBERT = BERT._replace(
    name="distilbert",
    prefix="distilbert.",
    layer="transformer.layer.{}.",
    # No config.json has its epsilon.
    fields={**_FIELDS, "norm.epsilon": 1e-12, "embedding.segments": 0},
    settings=(
        name_tables.Setting("num_tokens", "vocab_size", 30522),
        *rules.sizes(
            6, 768, 12, 3072, names=("n_layers", "dim", "n_heads", "hidden_dim")
        ),
        rules.activation("activation", "gelu"),
        _MAX_LENGTH,
    ),
    rows=(
        name_tables.row("embedding/embeddings", "embeddings.word_embeddings.weight"),
        _POSITIONS,
        *name_tables.norm("embedding_norm", "embeddings.LayerNorm"),
    ),
    layer_rows=(
        *name_tables.linear("attention/query", "attention.q_lin"),
        *name_tables.linear("attention/key", "attention.k_lin"),
        *name_tables.linear("attention/value", "attention.v_lin"),
        *name_tables.linear("attention/linear", "attention.out_lin"),
        *name_tables.norm("norm_1", "sa_layer_norm"),
        *name_tables.linear("feed_forward/hidden", "ffn.lin1"),
        *name_tables.linear("feed_forward/output", "ffn.lin2"),
        *name_tables.norm("norm_2", "output_layer_norm"),
    ),
    heads=_heads(
        "DistilBert",
        activation="activation",
        hidden="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
        pooled="pre_classifier",
        pooled_activation="relu",
    ),
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
)

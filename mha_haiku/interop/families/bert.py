"""BERT, RoBERTa and DistilBERT: encoders with norms after each part.

The MiniLM and many other sentence encoders are BERT.
"""

from mha_haiku.interop.families import changes, rules, tables

_FIELDS = {
    "family": "encoder",
    "embedding.positions": "learned",
    "embedding.norm": True,
    "norm.kind": "layer_norm",
    "norm.position": "post",
}
_SIZES = (
    tables.Setting("num_tokens", "vocab_size", 30522),
    *rules.sizes(12, 768, 12, 3072),
    rules.activation("hidden_act", "gelu"),
    tables.Setting("norm.epsilon", "layer_norm_eps", 1e-12),
    tables.Setting("embedding.segments", "type_vocab_size", 2),
)
_EMBEDDINGS = (
    tables.row("embedding/embeddings", "embeddings.word_embeddings.weight"),
    tables.row("segments/embeddings", "embeddings.token_type_embeddings.weight"),
    *tables.norm("embedding_norm", "embeddings.LayerNorm"),
)
_POSITIONS = "embeddings.position_embeddings.weight"
_LAYER = (
    *tables.linear("attention/query", "attention.self.query"),
    *tables.linear("attention/key", "attention.self.key"),
    *tables.linear("attention/value", "attention.self.value"),
    *tables.linear("attention/linear", "attention.output.dense"),
    *tables.norm("norm_1", "attention.output.LayerNorm"),
    *tables.linear("feed_forward/hidden", "intermediate.dense"),
    *tables.linear("feed_forward/output", "output.dense"),
    *tables.norm("norm_2", "output.LayerNorm"),
)
_OF_ALL = {
    "supported": {**rules.SUPPORTED, "position_embedding_type": ("absolute",)},
    "buffers": ("embeddings.position_ids",),
    "renamed": {
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
    },
}


def _heads(
    name: str,
    words: tuple[str, str, str, str, str],
    texts: tuple[str, str, str],
    *,
    activation: str | None,
    unused: tuple[str, ...] = (),
) -> tuple[tables.Head, ...]:
    """Returns the heads for masked words, texts and positions, and one without logits.

    `activation` is the field of `config.json` with the activation of the hidden layer
    for masked words; None: it is gelu.
    """
    table, hidden, normed, decoder, bias = words
    pooled, pooled_activation, logits = texts
    settings = [tables.Setting("output.tied", "tie_word_embeddings", True)]
    if activation is not None:
        settings.append(
            tables.Setting("output.hidden", activation, "gelu", rules.HIDDEN)
        )
    return (
        tables.Head(
            f"{name}ForMaskedLM",
            {"output.hidden": "gelu", "output.norm": True, "output.with_bias": True},
            (
                *tables.linear("output_hidden", hidden),
                *tables.norm("output_norm", normed),
                tables.row("logits/w", f"{decoder}.weight", changes.transposed),
                tables.row("logits/b", bias),
            ),
            has=bias,
            unused=unused,
            copies={f"{decoder}.weight": table, f"{decoder}.bias": bias},
            settings=tuple(settings),
        ),
        tables.Head(
            f"{name}ForSequenceClassification",
            {
                "output.pool": "first",
                "output.hidden": pooled_activation,
                "output.with_bias": True,
            },
            (*tables.linear("output_hidden", pooled), *tables.linear("logits", logits)),
            has=f"{pooled}.weight",
            unused=unused,
            settings=(rules.LABELS,),
        ),
        tables.Head(
            f"{name}ForTokenClassification",
            {"output.with_bias": True},
            tables.linear("logits", "classifier"),
            has="classifier.weight",
            unused=unused,
            settings=(rules.LABELS,),
        ),
        tables.Head(f"{name}Model", rules.NO_LOGITS, unused=unused),
    )


_BERT_HEADS = _heads(
    "Bert",
    (
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    ("bert.pooler.dense", "tanh", "classifier"),
    activation="hidden_act",
    unused=("bert.pooler.", "cls.seq_relationship."),
)

BERT = tables.Family(
    name="bert",
    prefix="bert.",
    layer="encoder.layer.{}.",
    fields=_FIELDS,
    settings=(
        *_SIZES,
        tables.Setting("embedding.max_length", "max_position_embeddings", 512),
    ),
    rows=(*_EMBEDDINGS, tables.row("positions/positions", _POSITIONS)),
    layer_rows=_LAYER,
    heads=(*_BERT_HEADS, _BERT_HEADS[0]._replace(architecture="BertForPreTraining")),
    **_OF_ALL,
)

ROBERTA = tables.Family(
    name="roberta",
    prefix="roberta.",
    layer="encoder.layer.{}.",
    fields=_FIELDS,
    settings=(*_SIZES, rules.positions_after_padding(512)),
    rows=(
        *_EMBEDDINGS,
        # Positions of RoBERTa count from pad_token_id + 1; those before are unused.
        tables.row(
            "positions/positions",
            _POSITIONS,
            changes.rows_from(lambda place: place.theirs.get("pad_token_id", 1) + 1),
        ),
    ),
    layer_rows=_LAYER,
    heads=_heads(
        "Roberta",
        (
            "roberta.embeddings.word_embeddings.weight",
            "lm_head.dense",
            "lm_head.layer_norm",
            "lm_head.decoder",
            "lm_head.bias",
        ),
        ("classifier.dense", "tanh", "classifier.out_proj"),
        activation=None,
        unused=("roberta.pooler.",),
    ),
    **_OF_ALL,
)

DISTILBERT = tables.Family(
    name="distilbert",
    prefix="distilbert.",
    layer="transformer.layer.{}.",
    # Its epsilon stands in no config.json.
    fields={**_FIELDS, "norm.epsilon": 1e-12, "embedding.segments": 0},
    settings=(
        tables.Setting("num_tokens", "vocab_size", 30522),
        *rules.sizes(
            6, 768, 12, 3072, names=("n_layers", "dim", "n_heads", "hidden_dim")
        ),
        rules.activation("activation", "gelu"),
        tables.Setting("embedding.max_length", "max_position_embeddings", 512),
    ),
    rows=(
        tables.row("embedding/embeddings", "embeddings.word_embeddings.weight"),
        tables.row("positions/positions", _POSITIONS),
        *tables.norm("embedding_norm", "embeddings.LayerNorm"),
    ),
    layer_rows=(
        *tables.linear("attention/query", "attention.q_lin"),
        *tables.linear("attention/key", "attention.k_lin"),
        *tables.linear("attention/value", "attention.v_lin"),
        *tables.linear("attention/linear", "attention.out_lin"),
        *tables.norm("norm_1", "sa_layer_norm"),
        *tables.linear("feed_forward/hidden", "ffn.lin1"),
        *tables.linear("feed_forward/output", "ffn.lin2"),
        *tables.norm("norm_2", "output_layer_norm"),
    ),
    heads=_heads(
        "DistilBert",
        (
            "distilbert.embeddings.word_embeddings.weight",
            "vocab_transform",
            "vocab_layer_norm",
            "vocab_projector",
            "vocab_projector.bias",
        ),
        ("pre_classifier", "relu", "classifier"),
        activation="activation",
    ),
    **_OF_ALL,
)

"""BERT: an encoder with norms after each part.

MiniLM and many other sentence encoders are BERT models.
"""

from mha_haiku.interop.families import name_tables, rules

_UNREAD = ("bert.pooler.", "cls.seq_relationship.")
_WORDS = name_tables.OutputHead(
    "BertForMaskedLM",
    {"output.norm": True, "output.with_bias": True},
    (
        *name_tables.linear("output_hidden", "cls.predictions.transform.dense"),
        *name_tables.norm("output_norm", "cls.predictions.transform.LayerNorm"),
        name_tables.row(
            "logits/w", "cls.predictions.decoder.weight", name_tables.transposed
        ),
        name_tables.row("logits/b", "cls.predictions.bias"),
    ),
    unused=_UNREAD,
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    rules=(
        name_tables.setting("output.tied", "tie_word_embeddings", True),
        name_tables.setting("output.hidden", "hidden_act", "gelu", rules.HIDDEN),
    ),
)
_TEXTS = name_tables.OutputHead(
    "BertForSequenceClassification",
    {"output.pool": "first", "output.hidden": "tanh", "output.with_bias": True},
    (
        *name_tables.linear("output_hidden", "bert.pooler.dense"),
        *name_tables.linear("logits", "classifier"),
    ),
    unused=_UNREAD,
    rules=(rules.LABELS,),
)
_POSITIONS = name_tables.OutputHead(
    "BertForTokenClassification",
    {"output.with_bias": True},
    name_tables.linear("logits", "classifier"),
    unused=_UNREAD,
    rules=(rules.LABELS,),
)

BERT = name_tables.Family(
    name="bert",
    prefix="bert.",
    layer="encoder.layer.{}.",
    fields={
        "family": "encoder",
        "embedding.positions": "learned",
        "embedding.norm": True,
        "norm.kind": "layer_norm",
        "norm.position": "post",
    },
    rules=(
        *rules.SIZES,
        rules.activation("hidden_act", "gelu"),
        name_tables.setting("norm.epsilon", "layer_norm_eps", 1e-12),
        name_tables.setting("embedding.segments", "type_vocab_size", 2),
        name_tables.setting("embedding.max_length", "max_position_embeddings", 512),
    ),
    rows=(
        name_tables.row("embedding/embeddings", "embeddings.word_embeddings.weight"),
        name_tables.row(
            "segments/embeddings", "embeddings.token_type_embeddings.weight"
        ),
        name_tables.row("positions/positions", "embeddings.position_embeddings.weight"),
        *name_tables.norm("embedding_norm", "embeddings.LayerNorm"),
    ),
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
    heads=(
        _WORDS,
        _WORDS._replace(architecture="BertForPreTraining"),
        _TEXTS,
        _POSITIONS,
        name_tables.OutputHead("BertModel", rules.NO_LOGITS, unused=_UNREAD),
    ),
    supported={**rules.SUPPORTED, "position_embedding_type": ("absolute",)},
    buffers=("embeddings.position_ids",),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)

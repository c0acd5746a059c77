"""BERT, RoBERTa and DistilBERT: encoders with norms after each part.

The MiniLM and many other sentence encoders are BERT.
"""

from mha_haiku.interop.families import changes, rules
from mha_haiku.interop.families.tables import (
    Family,
    Head,
    Setting,
    linear,
    norm,
    row,
)

_FIELDS = {
    "family": "encoder",
    "embedding.positions": "learned",
    "embedding.norm": True,
    "norm.kind": "layer_norm",
    "norm.position": "post",
}
_SIZES = (
    Setting("num_tokens", "vocab_size", 30522),
    Setting("num_layers", "num_hidden_layers", 12),
    Setting("model_size", "hidden_size", 768),
    Setting("attention.num_heads", "num_attention_heads", 12),
    Setting("feed_forward.hidden_size", "intermediate_size", 3072),
    Setting("feed_forward.activation", "hidden_act", "gelu", rules.ACTIVATIONS),
    Setting("norm.epsilon", "layer_norm_eps", 1e-12),
    Setting("embedding.segments", "type_vocab_size", 2),
)
_SUPPORTED = {
    **rules.SUPPORTED,
    "position_embedding_type": ("absolute",),
}
_EMBEDDINGS = (
    row("embedding/embeddings", "embeddings.word_embeddings.weight"),
    row("segments/embeddings", "embeddings.token_type_embeddings.weight"),
    *norm("embedding_norm", "embeddings.LayerNorm"),
)
_LAYER = (
    *linear("attention/query", "attention.self.query"),
    *linear("attention/key", "attention.self.key"),
    *linear("attention/value", "attention.self.value"),
    *linear("attention/linear", "attention.output.dense"),
    *norm("norm_1", "attention.output.LayerNorm"),
    *linear("feed_forward/hidden", "intermediate.dense"),
    *linear("feed_forward/output", "output.dense"),
    *norm("norm_2", "output.LayerNorm"),
)
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _words(table: str, hidden: str, normed: str, decoder: str, bias: str) -> dict:
    """Returns fields and rows of a head that tells the masked words."""
    return {
        "fields": {"output.norm": True, "output.with_bias": True},
        "rows": (
            *linear("output_hidden", hidden),
            *norm("output_norm", normed),
            row("logits/w", f"{decoder}.weight", changes.transposed),
            row("logits/b", bias),
        ),
        "copies": {
            f"{decoder}.weight": table,
            **({f"{decoder}.bias": bias} if bias != f"{decoder}.bias" else {}),
        },
        "has": bias,
    }


def _classes(hidden: str, activation: str, logits: str) -> dict:
    """Returns fields and rows of a head that classifies the whole text."""
    return {
        "fields": {
            "output.pool": "first",
            "output.hidden": activation,
            "output.with_bias": True,
        },
        "rows": (*linear("output_hidden", hidden), *linear("logits", logits)),
        "has": f"{hidden}.weight",
        "settings": (rules.LABELS,),
    }


def _classes_of_positions() -> dict:
    """Returns fields and rows of a head that classifies each position."""
    return {
        "fields": {"output.with_bias": True},
        "rows": linear("logits", "classifier"),
        "has": "classifier.weight",
        "settings": (rules.LABELS,),
    }


_TIED = Setting("output.tied", "tie_word_embeddings", True)
_HIDDEN = Setting("output.hidden", "hidden_act", "gelu", rules.HIDDEN)

_BERT_WORDS = _words(
    "bert.embeddings.word_embeddings.weight",
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
) | {
    "settings": (_TIED, _HIDDEN),
    "unused": ("bert.pooler.", "cls.seq_relationship."),
}

BERT = Family(
    name="bert",
    prefix="bert.",
    layer="encoder.layer.{}.",
    fields=_FIELDS,
    settings=(
        *_SIZES,
        Setting("embedding.max_length", "max_position_embeddings", 512),
    ),
    rows=(
        *_EMBEDDINGS,
        row("positions/positions", "embeddings.position_embeddings.weight"),
    ),
    layer_rows=_LAYER,
    heads=(
        Head("BertForMaskedLM", **_BERT_WORDS),
        Head("BertForPreTraining", **_BERT_WORDS),
        Head(
            "BertForSequenceClassification",
            **_classes("bert.pooler.dense", "tanh", "classifier"),
        ),
        Head(
            "BertForTokenClassification",
            **_classes_of_positions(),
            unused=("bert.pooler.",),
        ),
        Head("BertModel", rules.NO_LOGITS, unused=("bert.pooler.",)),
    ),
    supported=_SUPPORTED,
    buffers=("embeddings.position_ids",),
    renamed=_OLD_NAMES,
)

ROBERTA = Family(
    name="roberta",
    prefix="roberta.",
    layer="encoder.layer.{}.",
    fields=_FIELDS,
    settings=(*_SIZES, rules.positions_after_padding(512)),
    rows=(
        *_EMBEDDINGS,
        # Positions of RoBERTa count from pad_token_id + 1; those before are unused.
        row(
            "positions/positions",
            "embeddings.position_embeddings.weight",
            changes.rows_from(lambda place: place.theirs.get("pad_token_id", 1) + 1),
        ),
    ),
    layer_rows=_LAYER,
    heads=(
        Head(
            "RobertaForMaskedLM",
            **_words(
                "roberta.embeddings.word_embeddings.weight",
                "lm_head.dense",
                "lm_head.layer_norm",
                "lm_head.decoder",
                "lm_head.bias",
            )
            | {"fields": {"output.hidden": "gelu", "output.norm": True}},
            settings=(_TIED,),
            unused=("roberta.pooler.",),
        ),
        Head(
            "RobertaForSequenceClassification",
            **_classes("classifier.dense", "tanh", "classifier.out_proj"),
            unused=("roberta.pooler.",),
        ),
        Head(
            "RobertaForTokenClassification",
            **_classes_of_positions(),
            unused=("roberta.pooler.",),
        ),
        Head("RobertaModel", rules.NO_LOGITS, unused=("roberta.pooler.",)),
    ),
    supported=_SUPPORTED,
    buffers=("embeddings.position_ids",),
    renamed=_OLD_NAMES,
)

DISTILBERT = Family(
    name="distilbert",
    prefix="distilbert.",
    layer="transformer.layer.{}.",
    # Its epsilon stands in no config.json.
    fields={**_FIELDS, "norm.epsilon": 1e-12, "embedding.segments": 0},
    settings=(
        Setting("num_tokens", "vocab_size", 30522),
        Setting("num_layers", "n_layers", 6),
        Setting("model_size", "dim", 768),
        Setting("attention.num_heads", "n_heads", 12),
        Setting("feed_forward.hidden_size", "hidden_dim", 3072),
        Setting("feed_forward.activation", "activation", "gelu", rules.ACTIVATIONS),
        Setting("embedding.max_length", "max_position_embeddings", 512),
    ),
    rows=(
        row("embedding/embeddings", "embeddings.word_embeddings.weight"),
        row("positions/positions", "embeddings.position_embeddings.weight"),
        *norm("embedding_norm", "embeddings.LayerNorm"),
    ),
    layer_rows=(
        *linear("attention/query", "attention.q_lin"),
        *linear("attention/key", "attention.k_lin"),
        *linear("attention/value", "attention.v_lin"),
        *linear("attention/linear", "attention.out_lin"),
        *norm("norm_1", "sa_layer_norm"),
        *linear("feed_forward/hidden", "ffn.lin1"),
        *linear("feed_forward/output", "ffn.lin2"),
        *norm("norm_2", "output_layer_norm"),
    ),
    heads=(
        Head(
            "DistilBertForMaskedLM",
            **_words(
                "distilbert.embeddings.word_embeddings.weight",
                "vocab_transform",
                "vocab_layer_norm",
                "vocab_projector",
                "vocab_projector.bias",
            ),
            settings=(
                _TIED,
                Setting("output.hidden", "activation", "gelu", rules.HIDDEN),
            ),
        ),
        Head(
            "DistilBertForSequenceClassification",
            **_classes("pre_classifier", "relu", "classifier"),
        ),
        Head("DistilBertForTokenClassification", **_classes_of_positions()),
        Head("DistilBertModel", rules.NO_LOGITS),
    ),
    supported=_SUPPORTED,
    buffers=("embeddings.position_ids",),
    renamed=_OLD_NAMES,
)

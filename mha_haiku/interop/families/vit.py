"""ViT: an encoder of patches of an image, classified by its first position."""

import math

import numpy as np

from mha_haiku.core import checks
from mha_haiku.interop.families import changes, rules, tables


def patches(images: np.ndarray, size: int) -> np.ndarray:
    """Returns the inputs of a ViT, `[B, 1 + N, channels * size * size]`.

    They are a row of zeros, for the class, and the patches, row by row, of images `[B,
    channels, height, width]`, normalised as the model wants it. `size` is a patch's
    height and width.

    Raises:
      ValueError: If `size` does not divide the image's height and width.
    """
    batch, channels, height, width = images.shape
    if height % size or width % size:
        raise ValueError(
            f"size must divide height and width, {height} and {width}, got {size}."
        )
    cut = images.reshape(batch, channels, height // size, size, width // size, size)
    rows = cut.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)
    return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)


def _image(theirs):
    size, patch = theirs.get("image_size", 224), theirs.get("patch_size", 16)
    for name, value in (("image_size", size), ("patch_size", patch)):
        if not isinstance(value, int):
            raise checks.ConfigError(
                f"config.json's {name} must be an integer, got {value!r}: other than "
                "square images are not supported."
            )
    return {
        "num_tokens": None,
        "feature_size": theirs.get("num_channels", 3) * patch**2,
        "embedding.max_length": (size // patch) ** 2 + 1,
    }


def _write_image(ours):
    if ours["feature_size"] is None:
        raise tables.CannotSayError("inputs that are tokens")
    patch = math.isqrt(ours["feature_size"] // 3)
    side = math.isqrt(ours["embedding.max_length"] - 1)
    return {"image_size": side * patch, "patch_size": patch, "num_channels": 3}


VIT = tables.Family(
    name="vit",
    prefix="vit.",
    layer="encoder.layer.{}.",
    fields={
        "family": "encoder",
        "embedding.positions": "learned",
        "norm.kind": "layer_norm",
        "norm.position": "pre",
    },
    settings=(
        tables.Rule(_image, _write_image),
        *rules.sizes(12, 768, 12, 3072),
        tables.Setting("attention.with_bias", "qkv_bias", True),
        rules.activation("hidden_act", "gelu"),
        tables.Setting("norm.epsilon", "layer_norm_eps", 1e-12),
    ),
    rows=(
        tables.Row(
            ("positions/positions", "embedding/b"),
            (
                "embeddings.position_embeddings",
                "embeddings.cls_token",
                "embeddings.patch_embeddings.projection.bias",
            ),
            changes.class_token,
        ),
        tables.row(
            "embedding/w",
            "embeddings.patch_embeddings.projection.weight",
            changes.convolution,
        ),
        *tables.norm("encoder/norm", "layernorm"),
    ),
    layer_rows=(
        *tables.norm("norm_1", "layernorm_before"),
        *tables.linear("attention/query", "attention.attention.query"),
        *tables.linear("attention/key", "attention.attention.key"),
        *tables.linear("attention/value", "attention.attention.value"),
        *tables.linear("attention/linear", "attention.output.dense"),
        *tables.norm("norm_2", "layernorm_after"),
        *tables.linear("feed_forward/hidden", "intermediate.dense"),
        *tables.linear("feed_forward/output", "output.dense"),
    ),
    heads=(
        tables.Head(
            "ViTForImageClassification",
            {"output.pool": "first", "output.with_bias": True},
            tables.linear("logits", "classifier"),
            has="classifier.weight",
            settings=(rules.LABELS,),
            unused=("vit.pooler.",),
        ),
        tables.Head("ViTModel", rules.NO_LOGITS, unused=("vit.pooler.",)),
    ),
    supported=rules.SUPPORTED,
)

"""ViT: an encoder of patches of an image, classified by its first position."""

from typing import Any

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.interop.families import name_tables, rules


def patches(images: np.ndarray, size: int) -> np.ndarray:
    """Returns the inputs of a ViT, `[B, 1 + N, channels * size * size]`.

    They are a row of zeros, for the class, and the patches, row by row, of images `[B,
    channels, height, width]`, normalized as the model expects. `size` is the height and
    width of a patch.

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


def _sides(name: str, value: Any) -> list[int]:
    """Checks an integer, or two, and returns height and width."""
    sides = value if isinstance(value, list) else [value] * 2
    if len(sides) != 2:
        raise ValueError(
            f"{name} must be an integer or two, got {checks.shown(value)}."
        )
    for side in sides:
        checks.integer_in(name, side, 1, 2**20)
    return sides


def _image(theirs: rules.Theirs) -> dict[str, Any]:
    height, width = theirs["image_size"]
    patch, other = theirs["patch_size"]
    if patch != other or patch > min(height, width):
        raise checks.ConfigError(
            "config.json's patch_size must be the side of squares that fit into images "
            f"of {height} x {width}, got {patch} x {other}."
        )
    channels = theirs["num_channels"]
    return {
        "num_tokens": None,
        "feature_size": channels * patch**2,
        "embedding.max_length": (height // patch) * (width // patch) + 1,
        "embedding.image": (channels, height, width, patch),
    }


def _write_image(ours: rules.Theirs) -> dict[str, Any]:
    if ours["feature_size"] is None:
        raise name_tables.CannotSayError("inputs that are tokens")
    if ours["embedding.image"] is None:
        raise name_tables.CannotSayError(
            "embedding.image = None, of inputs no patches", 1
        )
    channels, height, width, patch = ours["embedding.image"]
    return {
        "image_size": height if height == width else [height, width],
        "patch_size": patch,
        "num_channels": channels,
    }


# A convolution whose stride is its size is a linear map of patches; theirs is
# [D, channels, P, P].
_CONVOLUTION = name_tables.Change(
    lambda arrays, place: [x.reshape(len(x), -1).T for x in arrays],
    lambda arrays, place: [
        x.T.reshape(x.shape[1], -1, *place.config.embedding.image[-1:] * 2)
        for x in arrays
    ],
)


def _class_token_to_ours(arrays: name_tables.Arrays, place: name_tables.Place):
    positions, token, bias = arrays
    ours = positions[0].astype(np.float32)
    ours[0] += token[0, 0].astype(np.float32) - bias.astype(np.float32)
    return [ours, bias]


# A class token before the patches is a patch of zeros, which the embedding turns into
# its bias: the rest of the token goes into the first position.
_CLASS_TOKEN = name_tables.Change(
    _class_token_to_ours,
    lambda arrays, place: [arrays[0][None], arrays[1].reshape(1, 1, -1), arrays[1]],
)

VIT = name_tables.Family(
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
        name_tables.Rule(
            _image,
            _write_image,
            {
                "image_size": name_tables.key(224, _sides),
                "patch_size": name_tables.key(16, _sides),
                "num_channels": name_tables.key(3, fields.integer(1, 2**20)),
            },
        ),
        *rules.sizes(12, 768, 12, 3072),
        name_tables.Setting("attention.with_bias", "qkv_bias", True),
        rules.activation("hidden_act", "gelu"),
        name_tables.Setting("norm.epsilon", "layer_norm_eps", 1e-12),
    ),
    rows=(
        name_tables.Row(
            ("positions/positions", "embedding/b"),
            (
                "embeddings.position_embeddings",
                "embeddings.cls_token",
                "embeddings.patch_embeddings.projection.bias",
            ),
            _CLASS_TOKEN,
        ),
        name_tables.row(
            "embedding/w",
            "embeddings.patch_embeddings.projection.weight",
            _CONVOLUTION,
        ),
        *name_tables.norm("encoder/norm", "layernorm"),
    ),
    layer_rows=(
        *name_tables.norm("norm_1", "layernorm_before"),
        *name_tables.linear("attention/query", "attention.attention.query"),
        *name_tables.linear("attention/key", "attention.attention.key"),
        *name_tables.linear("attention/value", "attention.attention.value"),
        *name_tables.linear("attention/linear", "attention.output.dense"),
        *name_tables.norm("norm_2", "layernorm_after"),
        *name_tables.linear("feed_forward/hidden", "intermediate.dense"),
        *name_tables.linear("feed_forward/output", "output.dense"),
    ),
    heads=(
        name_tables.OutputHead(
            "ViTForImageClassification",
            {"output.pool": "first", "output.with_bias": True},
            name_tables.linear("logits", "classifier"),
            has="classifier.weight",
            settings=(rules.LABELS,),
            unused=("vit.pooler.",),
        ),
        name_tables.OutputHead("ViTModel", rules.NO_LOGITS, unused=("vit.pooler.",)),
    ),
    supported=rules.SUPPORTED,
)

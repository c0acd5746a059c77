"""The two causal models whose decoding is measured, in our terms and GPT-2's."""

from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku import models


class Size(NamedTuple):
    """A causal transformer."""

    layers: int
    width: int
    heads: int
    tokens: int  # of the vocabulary
    is_tied: bool  # whether logits are products with the embeddings, as in GPT-2
    positions: str


LENGTH = 512
SIZES = {
    "small": Size(3, 128, 4, 103, False, "rotary"),  # configs/text_lm.py
    "large": Size(12, 768, 12, 50_257, True, "learned"),  # GPT-2
}


def ours(size: str) -> tuple[models.Model, Any]:
    """Returns our model of one of `SIZES`, and random parameters."""
    sizes = SIZES[size]
    config = models.ModelConfig().replace(
        family="causal",
        num_layers=sizes.layers,
        model_size=sizes.width,
        embedding=dict(positions=sizes.positions, max_length=LENGTH),
        attention=dict(num_heads=sizes.heads),
        feed_forward=dict(hidden_size=4 * sizes.width, activation="gelu_tanh"),
        output=dict(tied=sizes.is_tied, with_bias=not sizes.is_tied),
    )
    model = models.build(
        config, num_tokens=sizes.tokens, feature_size=None, num_classes=sizes.tokens
    )
    generator = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), int))
    return model, jax.tree.map(
        lambda leaf: jax.device_put(
            0.02 * generator.standard_normal(leaf.shape, np.float32)
        ),
        shapes,
    )

"""Causal models with random weights, in our terms and in GPT-2's."""

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
    length: int = 512  # positions

    @property
    def num_heads(self) -> int:
        """The number of heads of all layers."""
        return self.layers * self.heads


SIZES = {
    "tiny": Size(2, 24, 3, 53, True, "learned", length=64),  # for quick runs
    "small": Size(3, 128, 4, 103, False, "rotary"),  # configs/text_lm.py
    "large": Size(12, 768, 12, 50_257, True, "learned"),  # GPT-2
    "whole": Size(12, 768, 12, 50_257, True, "learned", length=1024),
}


def tokens(size: str, batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Draws token ids `[B, T]`, int32."""
    drawn = np.random.default_rng(seed).integers(0, SIZES[size].tokens, (batch, length))
    return drawn.astype(np.int32)


def ours(size: str) -> tuple[models.Model, Any]:
    """Returns our model of one of `SIZES`, and random parameters."""
    own = SIZES[size]
    config = models.ModelConfig().replace(
        family="causal",
        num_layers=own.layers,
        model_size=own.width,
        embedding=dict(positions=own.positions, max_length=own.length),
        attention=dict(num_heads=own.heads),
        feed_forward=dict(hidden_size=4 * own.width, activation="gelu_tanh"),
        output=dict(tied=own.is_tied, with_bias=not own.is_tied),
    )
    model = models.build(
        config, num_tokens=own.tokens, feature_size=None, num_classes=own.tokens
    )
    generator = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), int))
    return model, jax.tree.map(
        lambda leaf: jax.device_put(
            0.02 * generator.standard_normal(leaf.shape, np.float32)
        ),
        shapes,
    )


def of_transformers(size: str) -> Any:
    """Returns transformers' model of one of `SIZES`, as a GPT-2."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    own = SIZES[size]
    config = transformers.GPT2Config(
        vocab_size=own.tokens,
        n_positions=own.length,
        n_embd=own.width,
        n_layer=own.layers,
        n_head=own.heads,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        architectures=["GPT2LMHeadModel"],
    )
    return transformers.GPT2LMHeadModel(config).eval()

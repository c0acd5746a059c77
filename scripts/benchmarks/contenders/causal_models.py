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
    sizes = SIZES[size]
    config = models.ModelConfig().replace(
        family="causal",
        num_layers=sizes.layers,
        model_size=sizes.width,
        embedding=dict(positions=sizes.positions, max_length=sizes.length),
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


def of_transformers(size: str, length: int = 0, attention: str = "sdpa") -> Any:
    """Returns transformers' model of one of `SIZES`, as a GPT-2.

    Args:
      length: The number of positions. Defaults to the size of the config.
      attention: "eager" or "sdpa".
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = SIZES[size]
    config = transformers.GPT2Config(
        vocab_size=sizes.tokens,
        n_positions=length or sizes.length,
        attn_implementation=attention,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        architectures=["GPT2LMHeadModel"],
    )
    return transformers.GPT2LMHeadModel(config).eval()

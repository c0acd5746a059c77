"""PyTorch modules at 2,048 tokens need no memory for scores of all queries and keys."""

import dataclasses

import jax
import numpy as np
import pytest

import mha_haiku as mh
from tests.interop.torch_packages import WARNINGS, torch, transformers

pytestmark = [pytest.mark.slow, *WARNINGS]
T, D, H, L, VOCABULARY = 2048, 48, 6, 2, 31
SCORES = 4 * H * T * T  # bytes of the scores of a layer

_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=D,
    intermediate_size=2 * D,
    num_hidden_layers=L,
    num_attention_heads=H,
    max_position_embeddings=T,
)
_LLAMA = dict(_SIZES, head_dim=8, num_key_value_heads=2, pad_token_id=0)
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=D, n_layer=L, n_head=H, n_positions=T)
_T5 = dict(d_model=D, d_kv=8, num_layers=L, num_heads=H, d_ff=2 * D)
_VIT = dict(_SIZES, image_size=184, patch_size=4)  # 46 x 46 patches
# Family: a class of transformers, the fields of its config, and the most bytes that a
# compiled forward pass may take, as a share of the scores of a layer.
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", _GPT2, 0.35),
    "gemma2": ("Gemma2ForCausalLM", dict(_LLAMA, sliding_window=64), 0.35),
    "t5": ("T5EncoderModel", dict(_T5, vocab_size=VOCABULARY), 0.35),
    "vit": ("ViTModel", _VIT, 0.42),
}


def wrapped(family):
    """Returns a tiny model, an input of 2,048 tokens, and the wrapped model."""
    name, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes, attn_implementation="eager")).eval()
    rng = np.random.default_rng(0)
    if family == "vit":
        pixels = rng.normal(size=(1, 3, 184, 184)).astype(np.float32)
        given = {"pixel_values": pixels}
    else:
        given = {"input_ids": rng.integers(3, VOCABULARY, (1, T))}
    return model, given, mh.wrap(model, examples=[given], metric=lambda x, _: x.mean())


def temporary_bytes(function, params):
    return (
        jax.jit(function).lower(params).compile().memory_analysis().temp_size_in_bytes
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_scores_of_all_queries_and_keys_are_in_memory(family):
    _, given, subject = wrapped(family)

    def logits(params):
        return dataclasses.replace(subject, params=params).logits(given)

    share = temporary_bytes(logits, subject.params) / SCORES
    assert share < FAMILIES[family][-1]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "t5"])
def test_logits_and_gradients_of_long_texts_are_those_of_torch(family):
    model, given, subject = wrapped(family)
    tensors = {name: torch.as_tensor(x) for name, x in given.items()}
    expected = model(**tensors)[0]
    found = np.asarray(subject.logits(given))
    size = expected.abs().max().item()
    np.testing.assert_allclose(found, expected.detach(), rtol=0, atol=1e-4 * size)
    (expected**2).mean().backward()

    def loss(params):
        found = dataclasses.replace(subject, params=params).logits(given)
        return (found**2).mean()

    slopes = jax.jit(jax.grad(loss))(subject.params)
    for name, parameter in model.named_parameters():
        if name in slopes and parameter.grad is not None:
            size = parameter.grad.abs().max().item()
            np.testing.assert_allclose(
                slopes[name], parameter.grad, rtol=0, atol=1e-3 * size + 1e-7
            )
    assert temporary_bytes(jax.grad(loss), subject.params) < 1.5 * SCORES

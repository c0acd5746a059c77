"""Tiny random models of transformers, most of families that have no table here.

Sizes are small, and differ where a family lets them: B, T, S, D, H, L are 2, 5, 7, 24,
4, 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

B, T, S, D, H, L = 2, 5, 7, 24, 4, 2
VOCABULARY = 31


def _tokens(count=S, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, (B, count))


def _text():
    return {"input_ids": _tokens()}


def _pair():
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens(T, 1)}


def _pixels():
    pixels = np.random.default_rng(0).normal(size=(B, 3, 8, 8))
    return {"pixel_values": pixels.astype(np.float32)}


def _audio():
    features = np.random.default_rng(0).normal(size=(B, 6, 2 * S))
    return {
        "input_features": features.astype(np.float32),
        "decoder_input_ids": _tokens(T, 1),
    }


def _both():
    return _text() | _pixels()


class Case(NamedTuple):
    """A model, and where a head of it can be zeroed in torch."""

    model: str  # a class of transformers
    sizes: dict[str, Any]  # and other fields of its config
    projection: str  # the module that reads the heads of the first attention
    inputs: Callable[[], dict[str, np.ndarray]] = _text


_WORDS = dict(vocab_size=VOCABULARY)
_HEADS = dict(hidden_size=D, num_hidden_layers=L, num_attention_heads=H)
_SIZES = dict(_WORDS, **_HEADS, max_position_embeddings=16)
_BERT = dict(_SIZES, intermediate_size=20)
_GPT2 = dict(_WORDS, n_embd=D, n_layer=L, n_head=H, n_positions=16)
_MULTI = dict(_BERT, head_dim=8, pad_token_id=0)
_LLAMA = dict(_MULTI, num_key_value_heads=2)
_BART = dict(
    _WORDS,
    d_model=D,
    encoder_layers=L,
    decoder_layers=L,
    encoder_attention_heads=H,
    decoder_attention_heads=H,
    encoder_ffn_dim=20,
    decoder_ffn_dim=20,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
_WHISPER = dict(num_mel_bins=6, max_source_positions=S, max_target_positions=16)
# Scores of T5 are not scaled: of random weights they are large, and lose digits.
_T5 = dict(
    d_model=D, d_kv=8, num_layers=L, num_heads=H, d_ff=20, initializer_factor=0.5
)
_VIT = dict(_HEADS, intermediate_size=20, image_size=8, patch_size=4)
_EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2)
_CLIP = dict(
    text_config=dict(_BERT, projection_dim=10, eos_token_id=2),
    vision_config=dict(_VIT, projection_dim=10),
    projection_dim=10,
)

_IN_BERT = "encoder.layer.0.attention.output.dense"
_IN_GPT2 = "transformer.h.0.attn.c_proj"
_IN_LLAMA = "model.layers.0.self_attn.o_proj"
_IN_BART = "model.encoder.layers.0.self_attn.out_proj"
_IN_CLIP = "vision_model.encoder.layers.0.self_attn.out_proj"
CASES = {
    "bert": Case("BertForMaskedLM", _BERT, f"bert.{_IN_BERT}"),
    "roberta": Case(
        "RobertaForMaskedLM", dict(_BERT, pad_token_id=1), f"roberta.{_IN_BERT}"
    ),
    "gpt2": Case("GPT2LMHeadModel", _GPT2, _IN_GPT2),
    "gptj": Case(
        "GPTJForCausalLM", dict(_GPT2, rotary_dim=4), "transformer.h.0.attn.out_proj"
    ),
    "mpt": Case(
        "MptForCausalLM",
        dict(_WORDS, d_model=D, n_layers=L, n_heads=H),
        "transformer.blocks.0.attn.out_proj",
    ),
    "llama": Case("LlamaForCausalLM", _LLAMA, _IN_LLAMA),
    "gemma2": Case("Gemma2ForCausalLM", dict(_LLAMA, sliding_window=4), _IN_LLAMA),
    "mixtral": Case("MixtralForCausalLM", dict(_LLAMA, **_EXPERTS), _IN_LLAMA),
    "gpt_oss": Case(
        "GptOssForCausalLM", dict(_LLAMA, **_EXPERTS, sliding_window=4), _IN_LLAMA
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        dict(_WORDS, **_T5, decoder_start_token_id=0),
        "encoder.block.0.layer.0.SelfAttention.o",
        _pair,
    ),
    "bart": Case("BartForConditionalGeneration", _BART, _IN_BART, _pair),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        dict(_BART, **_WHISPER) | dict(max_position_embeddings=None),
        _IN_BART,
        _audio,
    ),
    "vit": Case(
        "ViTForImageClassification", _VIT, "vit.layers.0.attention.o_proj", _pixels
    ),
    "clip": Case("CLIPModel", _CLIP, _IN_CLIP, _both),
}


def make(case: Case) -> torch.nn.Module:
    """Makes the model of a case, with numbers that no layer hides."""
    kind = getattr(transformers, case.model)
    return at_random(kind, kind.config_class(**case.sizes))


def at_random(kind: Any, config: Any, scale: float = 0.3) -> torch.nn.Module:
    """Makes a model, with the same noise on its parameters in each run."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model

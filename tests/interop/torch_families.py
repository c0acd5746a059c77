"""Tiny random models of transformers, of families that have no table here and others.

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


class Case(NamedTuple):
    """A model, and where a head of it can be zeroed in torch."""

    model: str  # a class of transformers
    config: Callable[[], Any]
    projection: str  # the module that reads the heads of the first attention
    inputs: Callable[[], dict[str, np.ndarray]]


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


_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=D,
    num_hidden_layers=L,
    num_attention_heads=H,
    intermediate_size=20,
    max_position_embeddings=16,
)
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=D, n_layer=L, n_head=H, n_positions=16)
_LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=D,
    num_hidden_layers=L,
    num_attention_heads=H,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=20,
    max_position_embeddings=16,
    pad_token_id=0,
)
_MULTI = dict(_LLAMA, num_key_value_heads=H)
_BART = dict(
    vocab_size=VOCABULARY,
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
_VIT = dict(
    hidden_size=D,
    num_hidden_layers=L,
    num_attention_heads=H,
    intermediate_size=20,
    image_size=8,
    patch_size=4,
)
_EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2)
_DEEPSEEK = dict(
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=5,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    first_k_dense_replace=1,
)


def _of(name, **options):
    def make():
        return getattr(transformers, f"{name}Config")(**options)

    return make


def _clip():
    text = dict(_BERT, projection_dim=10, eos_token_id=2)
    vision = dict(_VIT, projection_dim=10)
    return transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=10
    )


_BERT_HEADS = "encoder.layer.0.attention.output.dense"
_LLAMA_HEADS = "model.layers.0.self_attn.o_proj"
CASES = {
    "bert": Case("BertForMaskedLM", _of("Bert", **_BERT), f"bert.{_BERT_HEADS}", _text),
    "roberta": Case(
        "RobertaForMaskedLM",
        _of("Roberta", **_BERT, pad_token_id=1),
        f"roberta.{_BERT_HEADS}",
        _text,
    ),
    "distilbert": Case(
        "DistilBertForMaskedLM",
        _of("DistilBert", vocab_size=VOCABULARY, dim=D, n_layers=L, n_heads=H),
        "distilbert.transformer.layer.0.attention.out_lin",
        _text,
    ),
    "albert": Case(
        "AlbertForMaskedLM",
        _of("Albert", **_BERT, embedding_size=10),
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
        _text,
    ),
    "deberta": Case(
        "DebertaV2ForMaskedLM",
        _of(
            "DebertaV2",
            **_BERT,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=4,
        ),
        f"deberta.{_BERT_HEADS}",
        _text,
    ),
    "modernbert": Case(
        "ModernBertForMaskedLM",
        _of("ModernBert", **_BERT, local_attention=4, pad_token_id=0),
        "model.layers.0.attn.Wo",
        _text,
    ),
    "gpt2": Case(
        "GPT2LMHeadModel", _of("GPT2", **_GPT2), "transformer.h.0.attn.c_proj", _text
    ),
    "gptj": Case(
        "GPTJForCausalLM",
        _of("GPTJ", **_GPT2, rotary_dim=4),
        "transformer.h.0.attn.out_proj",
        _text,
    ),
    "gpt_neox": Case(
        "GPTNeoXForCausalLM",
        _of("GPTNeoX", **_BERT | dict(hidden_size=32)),
        "gpt_neox.layers.0.attention.dense",
        _text,
    ),
    "opt": Case(
        "OPTForCausalLM",
        _of(
            "OPT",
            vocab_size=VOCABULARY,
            hidden_size=D,
            num_hidden_layers=L,
            num_attention_heads=H,
            ffn_dim=20,
            max_position_embeddings=16,
            word_embed_proj_dim=D,
        ),
        "model.decoder.layers.0.self_attn.out_proj",
        _text,
    ),
    "bloom": Case(
        "BloomForCausalLM",
        _of("Bloom", vocab_size=VOCABULARY, hidden_size=D, n_layer=L, n_head=H),
        "transformer.h.0.self_attention.dense",
        _text,
    ),
    "falcon": Case(
        "FalconForCausalLM",
        _of(
            "Falcon",
            vocab_size=VOCABULARY,
            hidden_size=D,
            num_hidden_layers=L,
            num_attention_heads=H,
        ),
        "transformer.h.0.self_attention.dense",
        _text,
    ),
    "mpt": Case(
        "MptForCausalLM",
        _of("Mpt", vocab_size=VOCABULARY, d_model=D, n_layers=L, n_heads=H),
        "transformer.blocks.0.attn.out_proj",
        _text,
    ),
    "phi": Case(
        "PhiForCausalLM",
        _of("Phi", **dict(_MULTI, hidden_size=32)),
        "model.layers.0.self_attn.dense",
        _text,
    ),
    "llama": Case("LlamaForCausalLM", _of("Llama", **_LLAMA), _LLAMA_HEADS, _text),
    "mistral": Case(
        "MistralForCausalLM",
        _of("Mistral", **_LLAMA, sliding_window=4),
        _LLAMA_HEADS,
        _text,
    ),
    "qwen3": Case("Qwen3ForCausalLM", _of("Qwen3", **_LLAMA), _LLAMA_HEADS, _text),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        _of("Gemma3Text", **_LLAMA, sliding_window=4),
        _LLAMA_HEADS,
        _text,
    ),
    "mixtral": Case(
        "MixtralForCausalLM", _of("Mixtral", **_LLAMA, **_EXPERTS), _LLAMA_HEADS, _text
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        _of("Qwen3Moe", **_LLAMA, **_EXPERTS, moe_intermediate_size=12),
        _LLAMA_HEADS,
        _text,
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM",
        _of("GptOss", **_LLAMA, **_EXPERTS, sliding_window=4),
        _LLAMA_HEADS,
        _text,
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        _of("DeepseekV3", **dict(_MULTI, head_dim=4), **_DEEPSEEK),
        _LLAMA_HEADS,
        _text,
    ),
    "olmo2": Case("Olmo2ForCausalLM", _of("Olmo2", **_LLAMA), _LLAMA_HEADS, _text),
    "t5": Case(
        "T5ForConditionalGeneration",
        _of(
            "T5",
            vocab_size=VOCABULARY,
            d_model=D,
            d_kv=8,
            num_layers=L,
            num_heads=H,
            d_ff=20,
            decoder_start_token_id=0,
        ),
        "encoder.block.0.layer.0.SelfAttention.o",
        _pair,
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        _of("Bart", **_BART),
        "model.encoder.layers.0.self_attn.out_proj",
        _pair,
    ),
    "marian": Case(
        "MarianMTModel",
        _of("Marian", **_BART),
        "model.encoder.layers.0.self_attn.out_proj",
        _pair,
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        _of(
            "Whisper",
            **dict(_BART, max_position_embeddings=None),
            num_mel_bins=6,
            max_source_positions=S,
            max_target_positions=16,
        ),
        "model.encoder.layers.0.self_attn.out_proj",
        _audio,
    ),
    "vit": Case(
        "ViTForImageClassification",
        _of("ViT", **_VIT),
        "vit.layers.0.attention.o_proj",
        _pixels,
    ),
    "dinov2": Case(
        "Dinov2Model",
        _of("Dinov2", **_VIT),
        "encoder.layer.0.attention.o_proj",
        _pixels,
    ),
    "clip": Case(
        "CLIPModel", _clip, "vision_model.encoder.layers.0.self_attn.out_proj", _both
    ),
    "swin": Case(
        "SwinForImageClassification",
        _of(
            "Swin",
            image_size=8,
            patch_size=1,
            embed_dim=12,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        "swin.encoder.layers.0.blocks.0.attention.o_proj",
        _pixels,
    ),
}


def make(case: Case) -> torch.nn.Module:
    """Makes the model of a case, with numbers that no layer hides."""
    torch.manual_seed(0)
    config = case.config()
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model

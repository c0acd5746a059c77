"""Tiny pretrained models as others store them: config.json, arrays, tokenizer.json."""

import json
import pathlib

import numpy as np
import safetensors.numpy

L, H, G, K, D, F, T = 2, 4, 2, 6, 24, 20, 40
WORDS = "the a cat dog sat ran on under mat log and then again today while"


def bert(folder: pathlib.Path, *, architecture: str = "BertModel") -> pathlib.Path:
    """Writes an encoder: `BertModel` for sentences, `BertForMaskedLM`, or another."""
    tokenizer = words()
    size = tokenizer.get_vocab_size() + 2  # rows that the tokenizer knows nothing of
    shapes = {
        "embeddings.word_embeddings.weight": (size, D),
        "embeddings.position_embeddings.weight": (T, D),
        "embeddings.token_type_embeddings.weight": (2, D),
        **_layer_norm("embeddings.LayerNorm"),
    }
    for i in range(L):
        layer = f"encoder.layer.{i}."
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{layer}attention.self.{name}", D, D)
        shapes |= _linear(f"{layer}attention.output.dense", D, D)
        shapes |= _layer_norm(f"{layer}attention.output.LayerNorm")
        shapes |= _linear(f"{layer}intermediate.dense", D, F)
        shapes |= _linear(f"{layer}output.dense", F, D)
        shapes |= _layer_norm(f"{layer}output.LayerNorm")
    if architecture == "BertForMaskedLM":
        head = "cls.predictions."
        shapes = {f"bert.{name}": shape for name, shape in shapes.items()}
        shapes |= _linear(f"{head}transform.dense", D, D)
        shapes |= _layer_norm(f"{head}transform.LayerNorm")
        shapes[f"{head}bias"] = (size,)
    config = {
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": size,
        "hidden_size": D,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "intermediate_size": F,
        "max_position_embeddings": T,
    }
    return _write(folder, config, shapes, tokenizer)


def llama(folder: pathlib.Path, *, text: str) -> pathlib.Path:
    """Writes a causal model whose byte pairs come from a text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    size = tokenizer.get_vocab_size() + 3
    shapes = {"model.embed_tokens.weight": (size, D), "model.norm.weight": (D,)}
    for i in range(L):
        layer = f"model.layers.{i}."
        sizes = {"q": (D, H * K), "k": (D, G * K), "v": (D, G * K), "o": (H * K, D)}
        for name, (inputs, outputs) in sizes.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (outputs, inputs)
        for name, (inputs, outputs) in {
            "gate": (D, F),
            "up": (D, F),
            "down": (F, D),
        }.items():
            shapes[f"{layer}mlp.{name}_proj.weight"] = (outputs, inputs)
        shapes[f"{layer}input_layernorm.weight"] = (D,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (D,)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size,
        "hidden_size": D,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": K,
        "intermediate_size": F,
        "max_position_embeddings": T,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    return _write(folder, config, shapes, tokenizer)


def words():
    """Returns a tokenizer of `WORDS`, with special tokens around a text."""
    import tokenizers

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), "."]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(ids, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(vocabulary[:5])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def text(count: int = 400) -> str:
    """Returns sentences over `WORDS`, the same each time."""
    generator = np.random.default_rng(5)
    words = WORDS.split()
    rows = [generator.choice(words, generator.integers(4, 9)) for _ in range(count)]
    return " ".join(" ".join(row).capitalize() + "." for row in rows)


def _linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _layer_norm(name):
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def _write(folder, config, shapes, tokenizer) -> pathlib.Path:
    generator = np.random.default_rng(7)
    arrays = {}
    for name, shape in shapes.items():
        # Norms near the identity, heads far from uniform.
        is_scale = len(shape) == 1 and name.endswith("weight")
        spread = 0.1 if len(shape) == 1 else 0.4
        values = is_scale + spread * generator.standard_normal(shape)
        arrays[name] = values.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

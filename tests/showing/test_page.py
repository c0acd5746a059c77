import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from mha_haiku.records import map_set
from mha_haiku.showing import page
from tests.showing.saved_maps import make_maps_of_kinds


class _Outline(html.parser.HTMLParser):
    """Collects a page's tags, and the text inside its `script` and `style` elements."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.inside, self._open = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        self._open = tag

    def handle_data(self, data):
        if self._open in ("script", "style") and data.strip():
            self.inside.append((self._open, data))

    def handle_endtag(self, tag):
        self._open = None


def _codes(contents, packed, shape):
    dtype = {1: "u1", 2: "<u2"}[contents["bytes_per_cell"]]
    return np.frombuffer(_unpacked(packed), dtype).reshape(shape)


def _unpacked(packed):
    return zlib.decompress(base64.b64decode(packed))


def _decode(contents, example, layer, *, maps=0):
    """Returns the maps of a layer, and which cells are masked, as the page reads it."""
    one = contents["sets"][maps]["examples"][example]
    sides = [
        len(axis["tokens"] if axis["edges"] is None else axis["edges"][1:])
        for axis in (one["queries"], one["keys"] or one["queries"])
    ]
    packed, largest = (one["layers"][layer][name] for name in ("codes", "largest"))
    codes = _codes(contents, packed, (len(largest), *sides))
    return _weights(contents, codes, np.array(largest)[:, None, None])


def _weights(contents, codes, largest):
    levels = contents["levels"]
    weights = largest * (codes / levels) ** 2
    weights = np.where(codes == levels + 1, np.nan, weights)
    return np.where(codes == levels + 2, 0, weights), codes == levels + 2


def _contents(saved):
    return page.contents(_dossier(saved))


def _dossier(saved):
    return map_set.Dossier(saved.name, (saved,))


@pytest.mark.parametrize("fine_cells", [2**18, 0])
def test_weights_decode_to_within_the_stated_precision(load, monkeypatch, fine_cells):
    monkeypatch.setattr(page, "_MOST_FINE_CELLS", fine_cells)
    saved = load()
    contents = _contents(saved)
    assert contents["bytes_per_cell"] == (2 if fine_cells else 1)
    assert contents["precision"] <= 0.004
    assert saved.examples[2].is_mean
    for n, example in enumerate(saved.examples):
        for layer, weights in enumerate(example.weights):
            shown, _ = _decode(contents, n, layer)
            assert abs(shown - weights).max() <= contents["precision"]


@pytest.mark.parametrize("fine_cells", [2**18, 0])
def test_masked_cells_and_nan_have_codes_of_their_own(
    whole, monkeypatch, rng, fine_cells
):
    monkeypatch.setattr(page, "_MOST_FINE_CELLS", fine_cells)
    example = whole.sets[0].examples[0]
    for layer, weights in enumerate(example.weights):
        weights[:] = np.where(rng.random(weights.shape) < 0.3, np.nan, weights)
        weights[:, example.masked_cells(layer)] = 0
    contents = page.contents(whole)
    for layer, weights in enumerate(example.weights):
        decoded, masked = _decode(contents, 0, layer)
        np.testing.assert_allclose(decoded, weights, atol=contents["precision"])
        assert (masked == example.masked_cells(layer)).all()
        assert masked.any() and not masked.all()


def test_a_weight_under_a_wrong_mask_is_shown():
    weights = np.array([[[0.0, 0.25], [np.nan, 0.0]]])
    packed = page.encode(weights, np.ones((2, 2), bool), levels=253)
    assert list(_unpacked(packed["codes"])) == [255, 253, 255, 255]
    assert packed["largest"] == [0.25]


def test_signed_weights_decode_to_their_sign():
    weights = np.array([[[-1.0, 0.25], [0.0, -0.04]], [[0.5, 0.0], [0.0, 0.0]]])
    packed = page.encode(weights, levels=253, signed=True)
    codes = np.frombuffer(_unpacked(packed["codes"]), np.uint8).reshape(weights.shape)
    roots = codes / 126 - 1
    decoded = np.sign(roots) * roots**2 * np.array([1.0, 0.5])[:, None, None]
    np.testing.assert_allclose(decoded, weights, atol=2 / 253)
    assert packed["largest"] == [1, 0.5]


def test_rounded_weights_are_within_the_stated_precision_and_shorter(load):
    shown = _dossier(load(heads=(3,), length=60))
    rough = page.contents(shown._replace(rounding=0.02))
    assert rough["precision"] == pytest.approx(0.02)
    weights = shown.sets[0].examples[1].weights[0].astype(np.float64)
    decoded, _ = _decode(rough, 1, 0)
    assert 0.005 < abs(decoded - weights).max() <= rough["precision"]
    # What is small in a map stays to be seen.
    faint = page.encode(np.array([[[0.01, 0.005]]]), levels=253, rounding=0.5)
    assert list(_unpacked(faint["codes"])) == [253, round(253 * 0.5**0.5)]
    fine = page.contents(shown)
    sizes = [len(page.to_json(each)) for each in (rough, fine)]
    assert sizes[0] < 0.3 * sizes[1]


def test_pooled_cells_carry_their_positions_and_their_text(load):
    contents = _contents(load(length=10, bins=4, lengths=[10, 7]))
    first, second, mean = contents["sets"][0]["examples"]
    assert first["queries"] == {
        "tokens": [f"t{i}" for i in range(10)],
        "edges": [0, 3, 6, 9, 10],
    }
    assert second["queries"]["edges"] == [0, 3, 6, 7]
    assert first["keys"] is None  # the same
    assert mean["queries"]["tokens"] == [""] * 10


def test_tokens_of_a_long_input_are_packed(load, monkeypatch):
    plain = _contents(load())["sets"][0]["examples"][0]["queries"]["tokens"]
    monkeypatch.setattr(page, "_MOST_PLAIN_TOKENS", 4)
    packed = _contents(load())["sets"][0]["examples"][0]["queries"]["tokens"]
    assert json.loads(_unpacked(packed)) == plain == [f"t{i}" for i in range(5)]


def test_right_answers_are_counted_where_there_is_a_target(load):
    predictions = [["a", "b", "c", "", "e"]] * 2
    targets = [["a", "x", "", "", "e"]] * 2
    saved = load(predictions=predictions, targets=targets)
    answers = _contents(saved)["sets"][0]["examples"][0]["answers"]
    assert (answers["right"], answers["counted"], answers["total"]) == (2, 3, 4)
    assert answers["shown"][1] == [1, "t1", [["b", None]], "x"]


def test_one_answer_for_the_whole_input_has_no_position(load):
    column = [["3"], ["4"]]
    contents = _contents(load(predictions=column, targets=column))
    answers = contents["sets"][0]["examples"][1]["answers"]
    assert answers["whole"]
    assert answers["shown"] == [[None, "", [["4", None]], "4"]]


def test_the_page_has_everything_of_a_dossier(whole):
    contents = page.contents(whole)
    assert json.loads(page.to_json(contents)) == contents
    maps, other = contents["sets"]
    given = whole.sets[0]
    assert [layer["heads"] for layer in maps["layers"]] == [["0", "3"], ["1"]]

    (number,) = maps["numbers"]
    mean = given.columns["ablation"].mean
    first, (second, none) = number["values"]
    assert first == [pytest.approx(x) for x in mean[0]]
    assert (second, none) == (mean[1, 0], None)
    assert number["errors"][1] == [0.25, None]
    assert number["ranks"] == [[[1, 2], [1, 3]], [[None, None]] * 2]
    assert maps["roles"] == [[{"name": "induction", "score": 0.75}, None], [None] * 2]

    example, given = maps["examples"][0], given.examples[0]
    assert example["keys"]["tokens"] == list("uvwxy")
    assert example["answers"]["shown"][1] == [2, "c", [["p", 0.625], ["q", None]], "r"]
    images = example["images"]
    assert (images["count"], images["height"], images["width"]) == (5, 2, 3)
    pixels = np.frombuffer(_unpacked(images["codes"]), "u1").reshape(5, 2, 3)
    assert (pixels == given.images).all()


def test_nan_weights_are_said(whole):
    assert page.contents(whole)["notes"] == ["a note"]
    whole.sets[0].examples[0].weights[0][1, 2, 0] = np.nan
    assert page.contents(whole)["notes"][1] == (
        "One map of one with weights that are NaN, first: held-out example 3, "
        "layer 0, head 3."
    )


def test_hostile_text_adds_no_element_to_the_page(load, hostile):
    calm = _Outline(page.render(_dossier(load())))
    attacked = _Outline(page.render(_dossier(hostile)))
    assert attacked.tags == calm.tags
    assert attacked.tags.count("script") == 2
    assert not any(name.startswith("on") for name, _ in attacked.attributes)


def test_the_page_asks_for_nothing_and_lets_only_its_own_script_run(load):
    text = page.render(_dossier(load()))
    outline = _Outline(text)
    names = {name for name, _ in outline.attributes}
    assert names.isdisjoint({"src", "href", "srcset", "action"})
    assert not {"link", "img", "iframe", "base"} & set(outline.tags)
    assert not re.search(r"https?:|\bimport\b|innerHTML|fetch\(|@import|url\(", text)
    policy = next(v for _, v in outline.attributes if v and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for (tag, source), directive in zip(
        [outline.inside[0], outline.inside[2]], ("style", "script"), strict=True
    ):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert tag == directive
        assert f"{directive}-src 'sha256-{digest}'" in policy


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_well_formed(load, tmp_path):
    (_, (_, _), (_, script)) = _Outline(page.render(_dossier(load()))).inside
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_a_kind_of_layers_brings_its_axes_and_its_alignment(load):
    maps = load(make_maps_of_kinds())
    shown = page.contents(map_set.Dossier("", (maps,)))
    (one,) = shown["sets"]
    assert [layer["kind"] for layer in one["layers"]] == ["encoder", "decoder", "cross"]
    example = one["examples"][0]
    assert example["queries"]["label"] == "token read" and example["keys"] is None
    assert "answers" not in example["kinds"]["cross"]
    assert example["kinds"]["encoder"]["answers"] is None
    assert example["kinds"]["cross"]["alignment"] == [[0, 4], [1, 3], [2, 0], [2, 1]]
    assert example["kinds"]["cross"]["queries"]["notes"][1] == "reads “a”"
    (note,) = (x for x in shown["notes"] if "predicts the next token" in x)
    assert note.endswith("in cross maps by the one that it should predict.")
    # Where rows of cross maps are the tokens read, as of a wrapped model.
    examples = []
    for each in maps.examples:
        cross = each.kinds["cross"]
        cross = cross._replace(queries=cross.queries._replace(label="", notes=()))
        examples.append(each._replace(kinds=each.kinds | {"cross": cross}))
    maps = dataclasses.replace(maps, examples=tuple(examples))
    shown = page.contents(map_set.Dossier("", (maps,)))
    (note,) = (x for x in shown["notes"] if "predicts the next token" in x)
    assert note.endswith("It is named by the token that it reads.")

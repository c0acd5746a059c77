import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from mha_haiku.report import labels, page


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


def _data(text):
    return json.loads(_Outline(text).inside[1][1])


def _decode(contents, example, layer):
    """Returns the maps of a layer as the page's script reads them."""
    found = contents["examples"][example]
    one = found["layers"][layer]
    codes = np.frombuffer(
        zlib.decompress(base64.b64decode(one["codes"])),
        {1: "u1", 2: "<u2"}[contents["bytes_per_cell"]],
    ).reshape(len(one["largest"]), len(found["queries"]), len(found["keys"]))
    largest = np.array(one["largest"])[:, None, None]
    return largest * (codes / contents["levels"]) ** 2


@pytest.mark.parametrize("fine_cells", [2**18, 0])
def test_weights_decode_to_within_the_stated_precision(load, monkeypatch, fine_cells):
    monkeypatch.setattr(page, "_MOST_FINE_CELLS", fine_cells)
    saved = load()
    contents = page.contents(saved)
    assert contents["bytes_per_cell"] == (2 if fine_cells else 1)
    assert contents["precision"] <= 0.004
    for layer, weights in enumerate(saved.weights):
        shown = [_decode(contents, example, layer) for example in range(2)]
        assert abs(np.stack(shown) - weights).max() <= contents["precision"]
        mean = _decode(contents, 2, layer)
        assert abs(mean - saved.means[layer]).max() <= contents["precision"]


def test_the_square_root_keeps_small_weights_exacter():
    weights = np.array([[[1.0, 1e-3]]])
    codes, (largest,) = page.encode(weights, 255)
    code = zlib.decompress(base64.b64decode(codes))[1]
    assert largest == 1
    assert abs((code / 255) ** 2 - 1e-3) < 2e-4


def test_maps_without_weight_decode_to_zero():
    codes, largest = page.encode(np.zeros((2, 3, 4), "f2"), 255)
    assert zlib.decompress(base64.b64decode(codes)) == bytes(24)
    assert largest == [0, 0]


def test_padding_is_left_out(load):
    saved = load(lengths=np.array([3, 5]))
    first, second, _ = page.contents(saved)["examples"]
    assert [len(first["queries"]), len(second["queries"])] == [3, 5]
    assert first["note"] == "its last 2 positions are padding"
    np.testing.assert_allclose(
        _decode(page.contents(saved), 0, 1), saved.weights[1][0, :, :3, :3], atol=1e-4
    )


def test_pooled_cells_carry_their_positions_and_their_text(load):
    contents = page.contents(load(length=10, bins=4))
    assert contents["pooled"]
    assert contents["examples"][0]["keys"][1] == ("3–5", "t3t4t5")
    assert contents["examples"][2]["keys"][3] == ("9", "")


def test_examples_over_the_limit_are_left_out(load, monkeypatch):
    monkeypatch.setattr(page, "_MOST_CELLS", 5 * 25)
    names = [example["name"] for example in page.contents(load())["examples"]]
    assert names == ["example 1", "mean of 7 examples"]


def test_right_answers_are_counted_where_there_is_a_target(load):
    predictions = np.array([["a", "b", "c", "", "e"]] * 2)
    targets = np.array([["a", "x", "", "", "e"]] * 2)
    saved = load(predictions=predictions, targets=targets)
    answers = page.contents(saved)["examples"][0]["answers"]
    assert (answers["right"], answers["counted"], answers["total"]) == (2, 3, 4)
    assert answers["shown"][1] == (1, "t1", "b", "x")


def test_one_answer_for_the_whole_input_has_no_position(load):
    column = np.array([["3"], ["4"]])
    contents = page.contents(load(predictions=column, targets=column))
    assert contents["examples"][1]["answers"]["shown"] == [(None, "", "4", "4")]


def test_hostile_text_adds_no_element_to_the_page(load, hostile):
    calm = _Outline(page.render(load()))
    attacked = _Outline(page.render(hostile))
    assert attacked.tags == calm.tags
    assert attacked.tags.count("script") == 2
    assert not any(name.startswith("on") for name, _ in attacked.attributes)


def test_hostile_text_comes_back_from_the_page_unchanged(hostile):
    contents = _data(page.render(hostile))
    shown = [text for _, text in contents["examples"][0]["keys"]]
    tokens = [labels.visible(text) for text in hostile.tokens[0].tolist()]
    assert shown == tokens
    assert contents["title"] == labels.one_line(hostile.title)


def test_json_is_inert_and_faithful(hostile):
    value = {"texts": hostile.tokens[0].tolist()}
    text = page.to_json(value)
    assert text.isascii()
    assert not re.search("[<>&]", text)
    assert json.loads(text) == value


def test_the_page_can_be_stored(hostile):
    assert page.render(hostile).encode("utf-8")


def test_the_page_asks_for_nothing_and_lets_only_its_own_script_run(load):
    text = page.render(load())
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


def test_the_page_states_its_precision_and_where_the_numbers_are(load):
    text = page.render(load())
    assert "maps.npz" in text
    assert _data(text)["precision"] == pytest.approx(2e-5)


def test_a_large_page_stays_small(load):
    heads = (8,) * 3
    saved = load(heads=heads, length=128, num_examples=2)
    weights = sum(w.size for w in saved.weights) + sum(m.size for m in saved.means)
    assert len(page.render(saved)) < 1.4 * weights + 100_000


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_well_formed(load, tmp_path):
    (_, (_, _), (_, script)) = _Outline(page.render(load())).inside
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)

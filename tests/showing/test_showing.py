"""`show`: maps as a page that fits, and the refusals of what does not fit together."""

import base64
import html.parser
import json
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.lab import maps, text_maps

from .small_maps import B, H, S, T, make_empty, make_map


def page_of(view):
    """Returns what a view's page has as its data."""
    text = re.search(
        r'<script[^>]*id="data"[^>]*>(.*?)</script>', view.html, re.DOTALL
    )[1]
    return json.loads(text)


def weights_of(page, layer=0, example=0, of=0):
    """Returns the weights in a page, `[H, P, Q]`, NaN where masked."""
    shown = page["sets"][of]["examples"][example]
    codes = shown["layers"][layer]["codes"]
    dtype = "u1" if page["bytes_per_cell"] == 1 else "<u2"
    codes = np.frombuffer(zlib.decompress(base64.b64decode(codes)), dtype)
    largest = np.array(shown["layers"][layer]["largest"])[:, None]
    codes = codes.reshape(len(largest), -1).astype(float)
    weights = largest * (codes / page["levels"]) ** 2
    return np.where(codes > page["levels"], np.nan, weights)


class Frames(html.parser.HTMLParser):
    """Collects the frames, scripts and pictures of what a notebook shows."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def view(attention_map):
    return mh.show(attention_map)


@pytest.mark.slow
def test_a_page_has_the_weights_of_the_map(attention_map, view):
    page = page_of(view)
    for example in range(B):
        weights = np.asarray(attention_map.weights())[example].reshape(H, -1)
        shown = weights_of(page, example=example)
        np.testing.assert_allclose(np.nan_to_num(shown), weights, atol=1e-4)
        masked = np.zeros((T, S), bool)
        masked[:, [6, 3][example] :] = True
        np.testing.assert_array_equal(
            np.isnan(shown), np.broadcast_to(masked.ravel(), shown.shape)
        )


@pytest.mark.slow
def test_a_page_has_the_statistics_of_the_heads():
    attention_map = make_map(1, mask=mh.masks.causal(), first_query=1)
    statistics = attention_map.statistics()
    *numbers, offset = page_of(mh.show(attention_map))["sets"][0]["numbers"]
    assert (offset["name"], offset["unit"]) == ("offset", "positions")
    largest = np.asarray(attention_map.weights()).argmax(-1)  # [B, H, T]
    apart = np.arange(1, 1 + largest.shape[-1]) - largest  # the first query is 1
    for head, found in enumerate(offset["values"][0]):
        values, counts = np.unique(apart[:, head], return_counts=True)
        assert counts[values == found] == counts.max()
    for number in numbers:
        wanted = np.mean(getattr(statistics, number["name"]), 0)
        # A page has six digits, which scores above 10 use up before the fifth place.
        atol = 1e-4 if number["name"] == "max_score" else 1e-5
        np.testing.assert_allclose(number["values"], [wanted], atol=atol)
        assert number["label"] == mh.attention.STATISTICS[number["name"]].label


@pytest.mark.slow
def test_a_notebook_gets_one_closed_frame_above_a_picture(view):
    frames = Frames(view._repr_html_())
    (frame,) = frames.of("iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == view.html
    (picture,) = frames.of("img")
    assert picture["src"].startswith("data:image/png;base64,")
    assert not frames.of("script")  # all of them are inside of the frame
    assert "src=" not in re.sub(r"srcdoc='[^']*'|src=\"data:", "", view.inline)


def test_a_map_shows_itself_as_its_view(attention_map, view):
    assert attention_map._repr_html_() == view.inline
    assert repr(view).startswith("View('Attention, 5 x 4 x 6, mask padding([6, 3])',")


def test_a_view_is_saved_whole(view, tmp_path):
    path = view.save(tmp_path / "new" / "map.html")
    assert path.read_text(encoding="utf-8") == view.html
    with pytest.raises(mh.runs.files.ConfigError, match="cannot be written"):
        view.save(path / "below_a_file.html")
    folder = f"{tmp_path}/v0.1/"
    assert view.save(folder) == view.save(folder[:-1]) == Path(folder, "index.html")
    assert view.save(tmp_path / "MAP.HTML").name == "MAP.HTML"


@pytest.mark.parametrize("name", ["map.png", "map.PDF", "map.csv", "map.npz", "map.1"])
def test_a_page_is_not_saved_under_the_name_of_another_kind_of_file(
    view, tmp_path, name
):
    with pytest.raises(ValueError, match=rf"ends with \.html, got .*{name}.*mh\.plot"):
        view.save(tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tokens",
    ["wxyz", ("w", "x", "y", "z"), [["w", "x", "y", "z"], list("WXYZ")]],
)
def test_tokens_are_for_all_examples_or_for_each(attention_map, tokens):
    page = page_of(mh.show(attention_map, tokens=tokens))
    rows = [
        "".join(example["queries"]["tokens"]) for example in page["sets"][0]["examples"]
    ]
    assert rows == ["wxyz", "WXYZ" if isinstance(tokens[0], list) else "wxyz"]


@pytest.mark.parametrize("make", [jnp.array, np.array])
@pytest.mark.parametrize("kind", ["row", "rows", "items", "list of rows"])
def test_numbers_as_tokens_are_their_digits(attention_map, make, kind):
    ids = make([10, 11, 12, 13] if kind in ("row", "items") else [[10, 11, 12, 13]] * B)
    shown = ids if kind in ("row", "rows") else list(ids)
    found = maps.map_set(text_maps.TextMaps(attention_map, shown), has_numbers=False)
    for example in found.examples:
        assert example.queries.tokens == ("10", "11", "12", "13")


@pytest.mark.slow
def test_layers_are_a_list_or_named_by_a_dict(attention_map):
    named = {"a/b": attention_map, "c": make_map(2)}
    for value, names in (
        (list(named.values()), ["layer 0", "layer 1"]),
        (named, list(named)),
    ):
        page = page_of(mh.show(value))
        assert [layer["name"] for layer in page["sets"][0]["layers"]] == names
    output = mh.models.Output(None, tuple(named.values()))
    assert (
        page_of(mh.show(output))["sets"]
        == page_of(mh.show(list(named.values())))["sets"]
    )


@pytest.mark.slow
def test_two_maps_are_compared(attention_map):
    page = page_of(mh.show(attention_map, compare={"after": make_map(3)}))
    assert [each["name"] for each in page["sets"]] == ["first", "after"]
    after = np.asarray(make_map(3).weights())[1].reshape(H, -1)
    np.testing.assert_allclose(weights_of(page, example=1, of=1), after, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [230_000, 260_000])
def test_a_view_keeps_to_its_budget_and_says_what_it_leaves_out(budget):
    attention_map = make_map(batch=(3,), queries=90, keys=110, heads=12)
    view = mh.show(attention_map, budget=budget)
    assert len(view._repr_html_().encode()) <= budget
    page = page_of(view)
    assert any("examples the first" in note for note in page["notes"])
    kept = page["sets"][0]["examples"]
    assert len(kept) < 3


@pytest.mark.slow
def test_long_maps_are_pooled_in_their_pass():
    size = maps.WHOLE + 10
    attention_map = make_map(
        batch=(), queries=size, keys=size, heads=2, mask=mh.masks.causal()
    )
    page = page_of(mh.show(attention_map))
    pooled = np.asarray(attention_map.pooled(128, 128)).reshape(2, -1)
    shown = weights_of(page)
    np.testing.assert_allclose(np.nan_to_num(shown), pooled, atol=1e-4)
    edges = page["sets"][0]["examples"][0]["queries"]["edges"]
    beyond = np.array(edges[:-1])[None, :] >= np.array(edges[1:])[:, None]
    np.testing.assert_array_equal(np.isnan(shown[0]), beyond.ravel())
    assert any("Pooled" in note for note in page["notes"])


@pytest.mark.slow
def test_a_map_without_batch_axes_and_one_with_two():
    assert len(page_of(mh.show(make_map(batch=())))["sets"][0]["examples"]) == 1
    page = page_of(mh.show(make_map(batch=(2, 3))))
    names = [example["name"] for example in page["sets"][0]["examples"]]
    assert names[3] == "example 1, 0"
    assert len(names) == 6


def test_what_is_traced_shows_its_short_repr_and_no_page(attention_map):
    shown = []
    jax.jit(lambda maps: shown.append(maps._repr_html_()) or maps.logsumexp)(
        attention_map
    )
    assert shown[0].startswith("<pre") and "float32[2,5,4,6]" in shown[0]
    with pytest.raises(ValueError, match="got one that is traced: AttentionMap"):
        jax.jit(lambda maps: mh.show(maps))(attention_map)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "abc"}, "tokens must be 4, one for each position .* got 3"),
        ({"key_tokens": "abc"}, "key_tokens must be 6, .* got 3"),
        ({"tokens": [list("abcd")]}, "tokens must be of 2 examples, .* got 1"),
        ({"tokens": [list("abcd"), list("abc")]}, "got 3 for example 1"),
        (
            {"compare": make_map(keys=5)},
            "same batch axes, T and S, .* for 'compare'",
        ),
        ({"budget": 100}, "budget must be at least [0-9,]+ bytes here, got 100"),
        ({"budget": 0}, "budget must be an integer of at least 1"),
    ],
)
def test_what_does_not_fit_the_map_is_refused(attention_map, options, message):
    with pytest.raises(ValueError, match=message):
        mh.show(attention_map, **options)


def test_maps_that_cannot_be_in_one_view_are_refused(attention_map):
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 6\) for 'layer 0' and .*4, 5\)"):
        mh.show([attention_map, make_map(keys=5)])
    with pytest.raises(ValueError, match="maps must have heads, got none"):
        mh.show(make_empty())
    with pytest.raises(ValueError, match="must have examples, queries and keys"):
        mh.show(make_map(queries=0))
    with pytest.raises(TypeError, match="got int for 'layer 1'"):
        mh.show([attention_map, 3])
    with pytest.raises(TypeError, match="what is shown must be attention maps"):
        mh.show(3.5)
    assert "Not shown" in make_map(queries=0)._repr_html_()


def test_a_layer_without_heads_is_beside_others(attention_map):
    page = page_of(mh.show([attention_map, make_empty()]))
    assert [len(layer["heads"]) for layer in page["sets"][0]["layers"]] == [5, 0]


@pytest.mark.slow
def test_inputs_are_named_by_the_beginnings_of_their_texts():
    attention_map = make_map(batch=(2,), queries=12, keys=12)
    words = ["[CLS]", *(f" word{i}" for i in range(10)), "[SEP]"]
    second = ["[CLS]", " The", " end", ".", "[SEP]", *["[PAD]"] * 7]
    page = page_of(mh.show(attention_map, tokens=[words, second]))
    assert [each["name"] for each in page["sets"][0]["examples"]] == [
        "example 0: word0 word1 word2 word3 word4 word5 …",
        "example 1: The end.",
    ]


@pytest.mark.slow
def test_a_title_is_the_model_and_its_text():
    attention_map = make_map(batch=(1,), queries=5, keys=5)
    tokens = ["[CLS]", " the", " cat", "s", "[SEP]"]
    found = text_maps.TextMaps([attention_map], (tokens,), name="owner/small-model")
    assert mh.show(found).title == "small-model: the cats"
    assert mh.show(attention_map, tokens=tokens).title == "the cats"
    long = [f" word{i}" for i in range(5)] * 9
    attention_map = make_map(batch=(3,), queries=45, keys=45)
    title = mh.show(attention_map, tokens=long).title
    assert title.startswith("word0 word1") and title.endswith(" … (and 2 more)")

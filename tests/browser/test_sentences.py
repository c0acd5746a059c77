"""The sentences that open a page: what heads do, and which to look at first."""

import dataclasses

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.records import map_set
from mha_haiku.showing import page
from tests.showing.conftest import load, rng, whole  # noqa: F401
from tests.showing.saved_maps import make_maps_of_kinds

pytestmark = pytest.mark.slow


@pytest.fixture
def short_texts_count(monkeypatch):
    monkeypatch.setattr(page, "_FEWEST_QUERIES", 1)


@pytest.fixture
def said(drawn):
    """A function from a set to the text of its page, and the heads that it names."""

    def said(maps):
        opened = drawn(map_set.Dossier("", (maps,)))
        links = opened.locator("#said .head-link").all_inner_texts()
        return opened.locator("#said").text_content(), links

    return said


def _with_roles(maps, names, scores, **columns):
    role = records.Column(scores, "score", "what", names=np.array(names, object))
    return dataclasses.replace(maps, columns={"role": role, **columns})


def test_no_role_is_told_of_a_short_text(said, whole, load, monkeypatch):  # noqa: F811
    text, _ = said(dataclasses.replace(whole.sets[0]))
    assert text.startswith("The text is too short to tell roles: 3 queries. ")
    monkeypatch.setattr(page, "_FEWEST_QUERIES", 18)
    maps = load(make_maps_of_kinds())
    names = [["induction"] * 2 + [""], ["uniform"] * 3, ["broad"] * 2 + [""]]
    maps = _with_roles(maps, names, np.full((3, 3), 0.9))
    # 20 queries of the encoder, 16 of the decoder.
    text, _ = said(dataclasses.replace(maps, examples=maps.examples[:1] * 4))
    words = "attend to what followed the same token before"
    assert text.startswith(f"Of 2 heads 2 {words}. ")


@pytest.mark.usefixtures("short_texts_count")
def test_a_page_says_what_heads_do_and_which_matter(said, whole):  # noqa: F811
    text, heads = said(whole.sets[0])
    assert text == (
        "The one head attends to what followed the same token before. The clearest: "
        "layer 0, head 0 to what followed the same token before (0.75). Most important "
        "(rise of the loss): layer 2, head 1 2 nats; layer 0, head 0 0.5 nats; layer "
        "0, head 3 −0.125 nats."
    )
    assert heads[1:] == ["layer 2, head 1", "layer 0, head 0", "layer 0, head 3"]
    assert said(whole.sets[1]) == ("", [])


@pytest.mark.usefixtures("short_texts_count")
@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (2, "to the position 2 before each token"),
        (-1, "to the position 1 after each token"),
        (0, "from each token to itself"),
        (None, "to a fixed distance"),
    ],
)
def test_a_positional_head_is_said_with_its_distance(said, whole, offset, words):  # noqa: F811
    columns = {}
    if offset is not None:
        offsets = np.full((2, 2), float(offset))
        columns["offset"] = records.Column(offsets, "positions", "t - s")
    scores = np.array([[0.95, np.nan], [np.nan, np.nan]])
    names = [["positional", ""], ["", ""]]
    text, _ = said(_with_roles(whole.sets[0], names, scores, **columns))
    assert text.endswith(f"head 0 {words} (0.95). ")


@pytest.mark.usefixtures("short_texts_count")
@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0, "to the same position of the other text"),
        (1, "to the position 1 before the same one of the other text"),
    ],
)
def test_offsets_of_cross_heads_are_between_two_texts(said, load, offset, words):  # noqa: F811
    names = np.full((3, 3), "", object)
    names[2, 0] = "positional"
    offsets = records.Column(np.full((3, 3), float(offset)), "positions", "t - s")
    scores = np.where(names == "", np.nan, 0.95)
    maps = _with_roles(load(make_maps_of_kinds()), names, scores, offset=offsets)
    assert said(maps)[0].endswith(f" {words} (0.95). ")


@pytest.mark.usefixtures("short_texts_count")
def test_the_clearest_heads_are_those_with_most_attention_on_what_their_role_is(
    said,
    whole,  # noqa: F811
):
    # Three of four heads: the scores of the others are no shares of attention.
    names = [["positional", "previous_token"], ["first_token", ""]]
    scores = np.array([[1.0, 0.6], [0.7, np.nan]])
    _, heads = said(_with_roles(whole.sets[0], names, scores))
    assert heads == ["layer 2, head 1", "layer 0, head 3", "layer 0, head 0"]

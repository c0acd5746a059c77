"""The panel that says why a head looks there: it opens, and leads to other heads."""

import re

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.records import map_set


def shown():
    """Two layers of two heads; head (1, 1) looks from 3 to 1 because of (0, 1)."""
    axis = map_set.Axis.whole("abcd")
    weights = np.tril(np.ones((2, 4, 4))) / np.arange(1, 5)[:, None]
    why = map_set.Why(
        ("token", "position", "layer 0, head 0", "layer 0, head 1", "biases"),
        np.array([[1, 1, 3, 1], [1, 0, 3, 1]]),
        np.array([2.5, -1.0]),
        np.array([[[0, 3], [4, 1]], [[0, 0], [1, 1]]]),
        np.array([[2.25, 0.25], [-0.75, -0.25]]),
    )
    layers = tuple(records.Layer(f"layer {i}", ("0", "1")) for i in range(2))
    example = map_set.Example("example 0", axis, axis, (weights, weights), why=why)
    return map_set.Dossier("Why", (map_set.MapSet("", layers, (example,)),))


@pytest.mark.slow
def test_a_cell_opens_its_pairs_and_a_pair_goes_to_its_head(open_page):
    page = open_page(shown(), address="#layer=1&head=1&query=3&key=1")
    panel = page.locator(".panel.why")
    assert "score 2.5" in panel.locator("p").first.inner_text()
    rows = panel.locator("tr").all_inner_texts()
    assert [row.split() for row in rows[1:]] == [
        ["2.25", "token", "layer", "0,", "head", "1"],
        ["0.25", "biases", "position"],
    ]
    panel.get_by_role("button", name="layer 0, head 1").click()
    assert "layer 0, head 1" in page.locator("#detail-title").inner_text()
    # At the position that the earlier head wrote at, which was the key.
    page.wait_for_url(re.compile("query=1"))
    assert "no terms are kept" in panel.locator("p").first.inner_text()


def test_pages_without_terms_have_no_such_panel(open_page):
    whole = shown()
    (maps,) = whole.sets
    example = maps.examples[0]._replace(why=None)
    page = open_page(
        whole._replace(sets=(map_set.MapSet("", maps.layers, (example,)),))
    )
    assert page.locator(".panel.why").is_hidden()

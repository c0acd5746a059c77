"""The overview of heads: full roles, meanings of numbers, orders."""

import dataclasses

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.showing import page
from tests.browser import samples
from tests.browser.samples import H, L


def _maps(name: str = "", *, shape=(L, H), **more):
    mean = np.arange(shape[0] * shape[1], dtype=float).reshape(shape)
    return dataclasses.replace(
        samples.maps(name=name),
        columns={
            "squared_weights": records.Column(mean, "weight²", "sum of squares"),
            "entropy": records.Column(mean, "nats", "entropy"),
            **samples.role(np.full(shape, "previous_token"), np.full(shape, 0.75)),
        },
        **more,
    )


@pytest.mark.slow
def test_roles_stand_in_full_and_numbers_are_named(drawn):
    opened = drawn(samples.show(_maps()))
    role = opened.locator(".head .role").first
    assert role.text_content() == "previous token"
    assert role.evaluate("x => x.scrollWidth <= x.clientWidth")
    opened.select_option("#beside", "entropy")
    assert opened.inner_text("#legend") == "Below a head: entropy in nats."
    opened.set_viewport_size({"width": 400, "height": 800})
    wide = opened.evaluate("document.documentElement.scrollWidth")
    assert wide <= 400


@pytest.mark.slow
def test_a_click_on_a_role_shows_its_heads_and_on_a_name_that_head(drawn, monkeypatch):
    monkeypatch.setattr(page, "_FEWEST_QUERIES", 1)
    names = np.full((L, H), "first_token", object)
    names[1, 2], names[0, 1] = "induction", "no_clear_role"
    scores = np.where(names == "induction", 0.9, 0.6)
    scores[names == "no_clear_role"] = np.nan
    own = dataclasses.replace(_maps(), columns=samples.role(names, scores))
    opened = drawn(samples.show(own))
    assert opened.inner_text("#said") == (
        "Of 6 heads 4 attend to the first token, 1 attends to what followed the same "
        "token before and 1 has no clear role. The clearest: layer 1, head 2 to what "
        "followed the same token before (0.90); layer 0, head 0 to the first token "
        "(0.60)."
    )
    assert opened.inner_text("#detail-title").startswith("layer 1, head 2")
    roles = opened.locator("#roles button")
    assert roles.all_inner_texts() == [
        "first token 4",
        "induction 1",
        "no clear role 1",
    ]
    roles.nth(1).click()
    assert opened.locator(".head:not(.dimmed)").count() == 1
    roles.nth(1).click()
    assert opened.locator(".head:not(.dimmed)").count() == L * H
    opened.get_by_role("button", name="layer 0, head 0", exact=True).first.click()
    assert opened.inner_text("#detail-title").startswith("layer 0, head 0")


@pytest.mark.slow
def test_a_page_of_two_runs_opens_with_their_comparison(drawn):
    opened = drawn(samples.show(_maps("one run"), _maps("another")))
    opened.locator("svg.map").nth(1).wait_for()
    assert opened.locator("#compare").input_value() == "set:1"
    text = opened.inner_text("#detail")
    assert "one run" in text
    assert "another" in text

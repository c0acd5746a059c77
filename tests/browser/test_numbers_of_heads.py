"""The overview of heads: full roles, meanings of numbers, orders, steps."""

import dataclasses

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import records
from mha_haiku.lab import maps
from mha_haiku.subjects import pictures
from tests.browser import samples
from tests.browser.samples import H, L


def _maps(name: str = "", *, shape=(L, H), step: int | None = None, **more):
    mean = np.arange(shape[0] * shape[1], dtype=float).reshape(shape)
    return dataclasses.replace(
        samples.maps(name=name, step=step),
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
def test_many_layers_stand_in_columns(drawn):
    """Thirty layers of nine heads: in one column they would be 12 pixels wide."""
    layers, heads = 30, 9
    query, key = jax.random.normal(jax.random.key(0), (2, layers, 1, 6, heads, 4))
    of_layers = [mh.attend(q, k, k)[1] for q, k in zip(query, key, strict=True)]
    found = maps.map_set(maps.TextMaps(of_layers))
    opened = drawn(pictures.dossier_of(found))
    lines = opened.locator("#overview .layer")
    first, second, below = (lines.nth(i).bounding_box() for i in (0, 15, 16))
    assert second["x"] > first["x"] + first["width"]
    assert second["y"] == pytest.approx(first["y"], abs=1) and below["y"] > second["y"]
    assert opened.locator("#overview .head").first.bounding_box()["width"] > 20
    box = opened.locator("#overview")
    assert box.evaluate("(x) => x.scrollWidth - x.clientWidth") == 0
    opened.set_viewport_size({"width": 400, "height": 700})  # now it scrolls down
    opened.wait_for_timeout(500)
    assert box.evaluate("(x) => x.scrollWidth - x.clientWidth") == 0
    assert lines.nth(29).bounding_box()["y"] > lines.nth(28).bounding_box()["y"]


@pytest.mark.slow
def test_a_click_on_a_role_shows_its_heads_and_on_a_name_that_head(drawn):
    names = np.full((L, H), "first_token", object)
    names[1, 2], names[0, 1] = "induction", "mixed"
    scores = np.where(names == "induction", 0.9, 0.6)
    scores[names == "mixed"] = np.nan
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
def test_numbers_in_which_a_head_is_like_others_are_folded_away(drawn):
    values = np.zeros((L, H))
    names = [f"number_{i}" for i in range(5)]
    numbers = {x: records.Column(values.copy(), "nats", x) for x in names}
    for i in (1, 4):
        numbers[names[i]].mean[0, 0] = 1.0
    own = dataclasses.replace(_maps(), columns=numbers)
    opened = drawn(samples.show(own))
    first = opened.locator(".standing-panel > table th").all_inner_texts()
    assert first == ["number 1", "number 4", "number 0"]
    others = opened.locator(".standing-panel details")
    assert others.get_attribute("open") is None
    assert others.locator("th").count() == 2


@pytest.mark.slow
def test_bars_of_small_heads_have_a_legend(drawn):
    shown = samples.of_size(12, 30, 8)
    (maps,) = shown.sets
    numbers = np.random.default_rng(0).random((12, 30))
    numbers = {"entropy": records.Column(numbers, "nats", "entropy")}
    maps = dataclasses.replace(maps, columns=numbers)
    opened = drawn(samples.show(maps), viewport={"width": 900, "height": 800})
    assert opened.locator("#overview.small").count() == 1
    said = "The bar below a head: its entropy in nats, as a share of the largest."
    assert opened.inner_text("#legend") == said


@pytest.mark.slow
def test_orders_are_grouped_and_spelled_as_in_the_table(drawn):
    opened = drawn(samples.show(_maps()))
    groups = opened.locator("#order optgroup")
    labels = [x.get_attribute("label") for x in groups.all()]
    assert labels == ["largest first", "smallest first"]
    names = ["role", "squared weights", "entropy"]
    assert groups.first.locator("option").all_text_contents() == names
    opened.select_option("#order", "-squared_weights")
    assert opened.locator("#overview.ranked .head").count() == L * H
    first = opened.locator("#overview .head").first
    assert "squared weights 0" in first.text_content()


@pytest.mark.slow
def test_an_order_shows_its_first_heads_and_not_the_last_chosen_one(drawn):
    maps = samples.of_size(20, 9, 6).sets[0]
    number = records.Column(np.arange(180.0).reshape(20, 9), "nats", "count")
    maps = dataclasses.replace(maps, columns={"count": number})
    opened = drawn(samples.show(maps), viewport={"width": 900, "height": 600})
    opened.select_option("#order", "count")  # layer 0, head 0 is the last
    assert opened.locator("#overview").evaluate("x => x.scrollTop") == 0


@pytest.mark.slow
def test_one_head_has_no_order(drawn):
    maps = _maps()
    opened = drawn(samples.show(maps))
    assert opened.locator("#rank").is_visible()
    one = samples.of_size(1, 1, 6).sets[0]
    mean = np.ones((1, 1))
    one = dataclasses.replace(one, columns={"x": records.Column(mean, "nats", "x")})
    opened = drawn(samples.show(one))
    assert not opened.locator("#rank").is_visible()


@pytest.mark.slow
def test_earlier_steps_say_where_the_numbers_are(drawn):
    first = samples.maps(name="step 1", step=1)
    opened = drawn(samples.show(first, _maps("step 2", step=2)), address="#set=0")
    said = (
        "Of earlier steps maps and roles alone are saved; the numbers of step 2 are "
        "shown there."
    )
    assert said in opened.inner_text("#panels .standing")
    opened.locator("#step").fill("1")
    opened.locator("#step-now", has_text="step 2").wait_for()
    assert said not in opened.inner_text("#panels .standing")


@pytest.mark.slow
def test_a_page_of_two_runs_opens_with_their_comparison(drawn):
    opened = drawn(samples.show(_maps("one run"), _maps("another")))
    opened.locator("svg.map").nth(1).wait_for()
    assert opened.locator("#compare").input_value() == "set:1"
    text = opened.inner_text("#detail")
    assert "one run" in text
    assert "another" in text


@pytest.mark.slow
def test_each_number_says_what_it_means(drawn):
    values = np.random.default_rng(0).random((L, H))
    numbers = {x: records.Column(values, "nats", f"what {x} means") for x in "abcde"}
    opened = drawn(samples.show(dataclasses.replace(_maps(), columns=numbers)))
    opened.locator("summary", has_text="how to read them").click()
    told = opened.locator(".standing .meaning").all_inner_texts()
    assert sorted(told) == [f"what {x} means" for x in "abcde"]


@pytest.mark.slow
def test_bars_without_words_have_a_legend(drawn):
    shown = samples.show(_maps())
    legend = "The bar below a head has the color of its role."
    # Thumbnails have words here.
    opened = drawn(shown)
    assert opened.locator(".head .role").first.inner_text() == "previous token"
    assert opened.locator("#legend").is_hidden()
    # And none if they are smaller, whether they are small or tiny.
    for width in (265, 215):
        opened = drawn(shown, viewport={"width": width, "height": 800})
        assert opened.locator("#legend").inner_text() == legend

"""What the overview says of heads: roles in full, what a number is, orders, steps."""

import dataclasses

import numpy as np

from mha_haiku.showing import map_set
from tests.browser import samples
from tests.browser.samples import H, L


def _maps(name: str = "", *, shape=(L, H), step: int | None = None, **more):
    mean = np.arange(shape[0] * shape[1], dtype=float).reshape(shape)
    return dataclasses.replace(
        samples.maps(name=name, step=step),
        numbers={
            "squared_weights": map_set.PerHead(mean, "weight²", "sum of squares"),
            "entropy": map_set.PerHead(mean, "nats", "entropy"),
        },
        roles=map_set.Roles(np.full(shape, "previous_token"), np.full(shape, 0.75)),
        **more,
    )


def test_roles_stand_in_full_and_numbers_are_named(drawn):
    opened = drawn(samples.show(_maps()))
    role = opened.locator(".head .role").first
    assert role.text_content() == "previous token"
    assert role.evaluate("x => x.scrollWidth <= x.clientWidth")
    assert opened.inner_text("#legend") == "Below a head: role; entropy in nats."
    opened.set_viewport_size({"width": 400, "height": 800})
    wide = opened.evaluate("document.documentElement.scrollWidth")
    assert wide <= 400


def test_bars_of_small_heads_have_a_legend(drawn):
    shown = samples.of_size(12, 30, 8)
    (maps,) = shown.sets
    numbers = np.random.default_rng(0).random((12, 30))
    numbers = {"entropy": map_set.PerHead(numbers, "nats", "entropy")}
    maps = dataclasses.replace(maps, numbers=numbers)
    opened = drawn(samples.show(maps), viewport={"width": 900, "height": 800})
    assert opened.locator("#overview.small").count() == 1
    said = "The bar below a head: its entropy in nats, as a share of the largest."
    assert opened.inner_text("#legend") == said


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


def test_one_head_has_no_order(drawn):
    maps = _maps()
    opened = drawn(samples.show(maps))
    assert opened.locator("#rank").is_visible()
    one = samples.of_size(1, 1, 6).sets[0]
    mean = np.ones((1, 1))
    one = dataclasses.replace(one, numbers={"x": map_set.PerHead(mean, "nats", "x")})
    opened = drawn(samples.show(one))
    assert not opened.locator("#rank").is_visible()


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


def test_a_page_of_two_runs_opens_with_their_comparison(drawn):
    opened = drawn(samples.show(_maps("one run"), _maps("another")))
    opened.locator("svg.map").nth(1).wait_for()
    assert opened.locator("#compare").input_value() == "set:1"
    text = opened.inner_text("#detail")
    assert "one run" in text
    assert "another" in text

"""The page as a browser shows it: colors, keys, the mouse, texts that want to run."""

import re

import numpy as np
import pytest

from tests.browser import samples

T, S = samples.T, samples.S
# Ten stops of the page's color map against matplotlib's 256.
CLOSE = 0.08


def _readout(opened) -> str:
    return opened.locator("#readout").inner_text()


def _title(opened) -> str:
    return opened.locator("#detail-title").inner_text()


@pytest.mark.slow
def test_cells_have_the_colors_of_their_weights(drawn, cells, viridis):
    shown = samples.show()
    opened = drawn(shown, address="#layer=1&head=2&range=own")
    weights = shown.sets[0].examples[0].weights[1][2]
    expected = viridis(weights / weights.max())
    assert np.abs(cells(opened, (T, S)) - expected).max() < CLOSE
    opened.select_option("#scale", "root")
    expected = viridis(np.sqrt(weights / weights.max()))
    assert np.abs(cells(opened, (T, S)) - expected).max() < CLOSE


@pytest.mark.slow
def test_masked_cells_look_unlike_small_weights(drawn, cells, viridis):
    masked = np.triu(np.ones((T, S), bool), 3)
    opened = drawn(samples.show(samples.maps(samples.example(masked=masked))))
    picture = cells(opened, (T, S))
    spread = picture.max(-1) - picture.min(-1)
    assert (spread[masked] < 0.02).all()  # gray
    assert (spread[~masked] > 0.1).all()
    opened.locator("svg.map").focus()
    opened.keyboard.press("Home")
    for _ in range(T):
        opened.keyboard.press("ArrowUp")
    assert "masked" not in _readout(opened)
    opened.keyboard.press("End")
    assert "masked" in _readout(opened)


@pytest.mark.slow
def test_hostile_texts_are_shown_and_run_nothing(drawn):
    opened = drawn(samples.hostile())
    own = opened.title()
    elements = "script, img, b, iframe, object, link"
    before = opened.locator(elements).count()
    tabs = opened.locator("#views button:visible")
    for i in range(tabs.count()):
        tabs.nth(i).click()
        opened.locator("#stage[aria-busy=false]").wait_for()
    opened.click("#view-map")
    opened.select_option("#compare", "set:1")
    opened.locator("#table-box summary").click()
    opened.locator("svg.map").first.focus()
    shown = ""
    opened.keyboard.press("Home")
    for _ in samples.HOSTILE:
        shown += _readout(opened)
        opened.keyboard.press("ArrowRight")
    assert "</script>" in shown and "<img" in shown
    assert "\u202e" not in shown and "U+202E" in shown
    assert "U+D800" in shown or "d800" in shown.lower()
    assert opened.title() == own
    assert opened.locator(elements).count() == before
    assert opened.locator("[onerror], [onmouseover]").count() == 0
    width = opened.evaluate("document.documentElement.scrollWidth")
    assert width <= 1400


@pytest.mark.slow
def test_page_can_be_walked_by_keys_alone(drawn):
    opened = drawn(samples.show(), address="#query=4&key=0")
    reached = []

    def tab_to(selector):
        for _ in range(60):
            opened.keyboard.press("Tab")
            reached.append(opened.evaluate("document.activeElement.id"))
            if opened.evaluate(f"document.activeElement.matches('{selector}')"):
                return
        raise AssertionError(f"{selector} is not reached by Tab: {reached}")

    tab_to(".head")
    assert "range" in reached and "scale" in reached
    assert _title(opened).startswith("layer 0, head 0")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowDown")
    assert _title(opened).startswith("layer 1, head 1")
    assert opened.evaluate("document.activeElement.ariaPressed") == "true"
    tab_to("#views button")
    tab_to("svg.map")
    opened.keyboard.press("Home")
    assert re.search(r"q4.*k0", _readout(opened))
    opened.keyboard.press("ArrowUp")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowRight")
    assert re.search(r"q3.*k2", _readout(opened))
    opened.wait_for_url(re.compile("head=1.*query=3.*key=2"))
    opened.reload()
    opened.locator("svg.map").wait_for()
    assert _title(opened).startswith("layer 1, head 1")
    assert re.search(r"q3.*k2", _readout(opened))


@pytest.mark.slow
def test_pointing_reads_a_cell_and_marks_both_tokens(drawn):
    shown = samples.show()
    opened = drawn(shown)
    query, key = 2, 5
    opened.evaluate("location.hash = '#layer=0&head=1&query=2&key=5'")
    opened.locator(".head[aria-pressed=true][aria-label^='layer 0, head 1']").wait_for()
    box = opened.locator("svg.map .chosen-cell").first.bounding_box()
    opened.evaluate("location.hash = '#layer=0&head=1&query=0&key=0'")
    opened.locator("#readout", has_text="q0").wait_for()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.locator("svg.map .tag").first.wait_for()
    assert opened.locator("svg.map .tag + text").all_text_contents() == ["q2", "k5"]
    weight = shown.sets[0].examples[0].weights[0][1, query, key]
    number = float(re.search(r": ([\d.e-]+)", _readout(opened))[1])
    assert abs(number - weight) < 1e-3


@pytest.mark.slow
def test_two_maps_are_compared_side_by_side_and_as_difference(drawn, cells, viridis):
    first, second = samples.example("first"), samples.example("second", seed=50)
    opened = drawn(samples.show(samples.maps(first, second)), address="#range=own")
    opened.select_option("#compare", "example:1")
    opened.locator("svg.map").nth(1).wait_for()
    for i, example in enumerate((first, second)):
        weights = example.weights[0][0]
        expected = viridis(weights / weights.max())
        assert np.abs(cells(opened, (T, S), i) - expected).max() < CLOSE
    opened.select_option("#pair", "difference")
    opened.locator("svg.map").nth(1).wait_for(state="detached")
    picture = cells(opened, (T, S))
    difference = first.weights[0][0] - second.weights[0][0]
    far = np.abs(difference) > 0.3 * np.abs(difference).max()
    redder = picture[..., 0] > picture[..., 2]
    assert far.sum() > 4
    assert (redder == (difference > 0))[far].all()


def _luminance(color: str) -> float:
    """The relative luminance of `rgb(...)` by the Web's contrast rules."""
    parts = np.array(re.findall(r"[\d.]+", color)[:3], float) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"]
)
def test_text_is_legible_in_light_and_dark(drawn, cells, viridis, scheme):
    shown = samples.show()
    opened = drawn(shown, color_scheme=scheme, address="#range=own")
    style = "(x => [x.backgroundColor, x.color])(getComputedStyle(document.body))"
    back, fore = map(_luminance, opened.evaluate(style))
    assert (back < fore) == (scheme == "dark")
    contrast = (max(back, fore) + 0.05) / (min(back, fore) + 0.05)
    assert contrast > 7
    weights = shown.sets[0].examples[0].weights[0][0]
    assert (
        np.abs(cells(opened, (T, S)) - viridis(weights / weights.max())).max() < CLOSE
    )


@pytest.mark.parametrize("width", [400, pytest.param(1600, marks=pytest.mark.slow)])
def test_page_does_not_scroll_sideways(drawn, width):
    opened = drawn(samples.show(), viewport={"width": width, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.select_option("#compare", "head:0.0")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_screen_readers_get_the_weights_as_a_table(drawn):
    shown = samples.show()
    opened = drawn(shown, address="#layer=1&head=1")
    opened.locator("#table-box summary").click()
    texts = opened.locator("#table tr").all_inner_texts()
    rows = [
        re.findall(r"(?<![\w.])\d*\.\d+(?:e-?\d+)?|(?<!\w)[01]\b", x) for x in texts
    ]
    numbers = [[float(x) for x in row[-S:]] for row in rows if len(row) >= S]
    weights = shown.sets[0].examples[0].weights[1][1]
    assert np.shape(numbers) == (T, S)
    np.testing.assert_allclose(numbers, weights, atol=2e-3)


@pytest.mark.slow
def test_keys_go_to_a_head_and_to_inputs_and_a_map_is_saved(drawn):
    opened = drawn(samples.show(samples.maps(samples.example(), samples.example("2"))))
    opened.keyboard.type("1.2")
    opened.keyboard.press("Enter")
    assert _title(opened) == "layer 1, head 2 · first"
    opened.keyboard.press("n")
    opened.locator("#detail-title", has_text="layer 1, head 2 · 2").wait_for()
    opened.fill("#jump", "7.0")
    opened.keyboard.press("Enter")
    assert _title(opened) == "layer 1, head 2 · 2"
    with opened.expect_download() as download:
        opened.click("#save")
    assert download.value.suggested_filename == "layer_1_head_2_2.svg"

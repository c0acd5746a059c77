"""The text and drawings of a head's views, against the page's arrays."""

import dataclasses
import re

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.records import map_set
from tests.browser import samples

L, H, T, S = samples.L, samples.H, samples.T, samples.S
K = 4
MASKED = np.triu(np.ones((T, S), bool), 4)


def _example(**more) -> map_set.Example:
    return samples.example(masked=MASKED)._replace(**more)


def _open(drawn, view: str, *examples, **more):
    """Returns a page at a view of layer 1, head 2, query 3 and key 5."""
    own = samples.maps(*examples or (_example(),))
    own = dataclasses.replace(own, **more)
    opened = drawn(samples.show(own), address="#layer=1&head=2&query=3&key=5")
    opened.click(f"#view-{view}")
    return opened


def _said(opened, selector: str = ".view-readout") -> str:
    return opened.locator(selector).first.inner_text().replace("−", "-")


@pytest.mark.slow
def test_text_lists_the_largest_weights_from_and_to(drawn):
    opened = _open(drawn, "text")
    weights = samples.example(masked=MASKED).weights[1][2]
    items = opened.locator(".largest-weights li")
    keys = np.argsort(-weights[3])[:5]
    expected = [f"key {k} “k{k}”: {weights[3, k]:.4f}"[:-1] for k in keys]
    assert all(map(str.startswith, items.all_inner_texts(), expected))
    # Of two texts, a click on the shaded one turns the view round.
    opened.locator(".tokens").nth(1).get_by_text("k0", exact=True).click()
    queries = np.argsort(-weights[:, 0])[:5]
    expected = [f"query {q} “q{q}”: {weights[q, 0]:.4f}"[:-1] for q in queries]
    assert all(map(str.startswith, items.all_inner_texts(), expected))
    strength = (
        opened.locator(".tokens")
        .nth(1)
        .locator(".token")
        .evaluate_all(
            "all => all.map(x => Number(/[\\d.]+\\)$/.exec(getComputedStyle(x)"
            ".backgroundColor)[0].slice(0, -1)))"
        )
    )
    column = weights[:, 0] / weights[:, 0].max()
    np.testing.assert_allclose(strength, 0.9 * column, atol=5e-3)


@pytest.mark.slow
def test_lines_go_to_the_keys_of_the_token_that_is_pointed_at(drawn):
    opened = _open(drawn, "lines")
    weights = samples.example(masked=MASKED).weights[1]
    assert opened.locator(".lines-query text").all_text_contents() == [
        f"q{i}" for i in range(T)
    ]
    number = opened.locator(".lines-back path").evaluate_all(
        "all => all.flatMap(x => x.getAttribute('d').match(/M/g)).length"
    )
    assert number == (weights[2] >= 0.005 * weights[2].max()).sum()
    opened.locator(".lines-scroller").focus()
    opened.keyboard.press("ArrowUp")
    best = weights[2, 2].argmax()
    number = f"{weights[2, 2, best]:.4f}"[:-1]  # the last digit is rounded twice
    assert f"query 2 “q2” attends to {best} “k{best}” {number}" in _said(opened)
    ends = opened.locator(".lines-alone path").evaluate_all(
        "all => all.flatMap(x => x.getAttribute('d').match(/L[^M]*/g)).length"
    )
    assert ends == (weights[2, 2] > 0).sum()
    # All heads of the layer: the largest weight of any is said, with its head.
    opened.get_by_role("button", name="all", exact=True).click()
    head, best = divmod(int(weights[:, 2].argmax()), S)
    assert f"attends to {best} “k{best}” {weights[head, 2, best]:.4f}"[:-1] in _said(
        opened
    )
    assert f"(head {head})" in _said(opened)
    opened.wait_for_url(re.compile("heads=0.1.2"))


@pytest.mark.slow
def test_head_has_its_numbers_with_errors_ranks_and_what_is_missing(drawn):
    mean = np.arange(L * H, dtype=np.float64).reshape(L, H) / 8
    ranks = np.stack([np.full((L, H), 2.0), np.full((L, H), 4.0)], -1)
    opened = _open(
        drawn,
        "map",
        columns={
            "ablation": records.Column(mean, "nats", "a label", mean / 10, ranks),
            **samples.role(np.full((L, H), "induction"), np.full((L, H), 0.75)),
        },
        missing=(("entropy", "python -m experiments.head_statistics"),),
    )
    said = _said(opened, "#panels .standing")
    for words in ("induction, score 0.75", "0.625 ± 0.0625", "rank 2-4 of 6", "nats"):
        assert words in said.replace("–", "-")
    assert "entropy: not computed. python -m experiments.head_statistics" in said


@pytest.mark.slow
def test_kinds_of_layers_have_their_own_axes_and_the_best_aligned_head_is_first(drawn):
    opened = drawn(samples.kinds())
    titles = opened.locator("#overview .kind").all_inner_texts()
    assert titles == [
        "encoder rows: source token, columns: source token",
        "decoder rows: token read, columns: token read",
        "cross rows: token predicted, columns: source token",
    ]
    heights = [each.bounding_box()["height"] for each in opened.locator(".kind").all()]
    assert max(heights) < 30  # one line each
    assert opened.locator("#detail-title").inner_text() == "cross 1, head 2"
    map_box = "#stage svg.map"
    labels = opened.locator(f"{map_box} text").all_text_contents()
    assert "← query: token predicted" in labels and "key: source token →" in labels
    # From the last aligned row to its largest weight, which is not aligned.
    readout = opened.locator("#readout")
    assert readout.inner_text().startswith("query 4 “und” (reads “i”) → key 8 “n”")
    assert "aligned" not in readout.inner_text()
    opened.locator(map_box).focus()
    opened.keyboard.press("ArrowUp")
    opened.keyboard.press("ArrowUp")
    for _ in range(7):
        opened.keyboard.press("ArrowLeft")
    assert readout.inner_text().startswith("query 2 “e” (reads “r”) → key 1 “4”")
    assert readout.inner_text().endswith(", aligned")
    opened.get_by_role("button", name="encoder 0, head 1").click()
    assert opened.locator(f"{map_box} path.aligned").count() == 0
    assert not opened.locator("#answer").is_visible()
    assert (
        "key: source token →" in opened.locator(f"{map_box} text").all_text_contents()
    )
    opened.get_by_role("button", name="decoder 1, head 0").click()
    assert "predicts" in readout.inner_text()
    assert opened.locator("#answer").is_visible()


def _of_words(**more):
    tokens = ("[CLS]", " the", " cat", "ness", "[SEP]")
    axis = map_set.Axis.whole(tokens)
    return samples.example(queries=axis, keys=axis)._replace(**more)


def _shares(opened):
    """How strongly the words of the text are shaded."""
    return opened.locator(".tokens .token").evaluate_all(
        "all => all.map(x => Number(/[\\d.]+\\)$/.exec("
        "getComputedStyle(x).backgroundColor)[0].slice(0, -1)))"
    )


@pytest.mark.slow
def test_a_page_of_words_opens_with_where_they_look_in_all_heads(drawn):
    example = _of_words()
    opened = drawn(samples.show(samples.maps(example)))
    tokens = opened.locator(".tokens .token")
    assert tokens.all_inner_texts() == ["[CLS]", "the", "cat", "##ness", "[SEP]"]
    assert opened.inner_text("#detail-title") == "Mean of all heads"
    mean = np.concatenate(example.weights).mean(0)
    for query in (1, 2):
        tokens.nth(query).hover()
        shares = 0.9 * mean[query] / mean[query].max()
        np.testing.assert_allclose(_shares(opened), shares, atol=5e-3)
    best = opened.locator(".largest-weights li").first.inner_text()
    assert f"key {mean[2].argmax()} " in best and f"{mean[2].max():.4f}"[:-1] in best
    # A click on a thumbnail chooses that head; the menu chooses a layer or all heads.
    opened.locator(".head").nth(4).click()
    assert opened.inner_text("#detail-title") == "layer 1, head 1"
    tokens.nth(2).hover()
    row = example.weights[1][1][2]
    np.testing.assert_allclose(_shares(opened), 0.9 * row / row.max(), atol=5e-3)
    opened.select_option(".text-view select", "layer")
    tokens.nth(1).hover()
    row = example.weights[1].mean(0)[1]
    np.testing.assert_allclose(_shares(opened), 0.9 * row / row.max(), atol=5e-3)


@pytest.mark.slow
def test_without_special_tokens_the_colors_follow_what_is_left(drawn, cells, viridis):
    maps = [x.copy() for x in _of_words().weights]
    for each in maps:
        each[:, :, 0] += 5
        each /= each.sum(-1, keepdims=True)
    shown = samples.show(samples.maps(_of_words(weights=tuple(maps))))
    opened = drawn(shown, address="#layer=1&head=2&query=4")
    assert opened.locator("svg.map text.special").count() == 4
    before = cells(opened, (5, 5))
    np.testing.assert_allclose(before, viridis(maps[1][2] / maps[1][2].max()), atol=0.1)
    opened.check("#special")
    opened.wait_for_url(re.compile("query=3"))  # the nearest that is left
    left = [x[:, 1:4, 1:4] for x in maps]
    expected = viridis(left[1][2] / np.max(left))
    assert np.abs(cells(opened, (3, 3)) - expected).max() < 0.08
    # Weights are as before, and positions keep their numbers.
    opened.locator("svg.map").focus()
    opened.keyboard.press("Home")
    said = opened.inner_text("#readout")
    assert said.startswith("query 3 “##ness” → key 1 “the”: ")
    assert abs(float(said.split(": ")[1]) - maps[1][2, 3, 1]) < 1e-3


@pytest.mark.slow
def test_a_head_lists_where_it_attends_most_and_a_click_goes_there(drawn):
    examples = [samples.example(str(seed), seed=10 * seed) for seed in range(3)]
    opened = drawn(samples.show(samples.maps(*examples)), address="#layer=1&head=2")
    weights = np.array([example.weights[1][2] for example in examples])
    order = np.argsort(-weights.max((1, 2)))
    buttons = opened.locator(".panel.examples button")
    opened.locator(".panel.examples tr").nth(3).wait_for()
    places = [np.unravel_index(x.argmax(), x.shape) for x in weights[order]]
    assert buttons.all_inner_texts() == [f"q{query} → k{key}" for query, key in places]
    buttons.nth(1).click()
    query, key = places[1]
    opened.wait_for_url(re.compile(f"example={order[1]}.*query={query}&key={key}"))
    assert opened.input_value("#example") == str(order[1])


@pytest.mark.slow
def test_a_word_lights_up_the_picture_and_its_share_is_said(drawn):
    axis = map_set.Axis.whole(["<s>", "0,0", "0,1", "1,0", "1,1", "cat", "[image 9]"])
    example = samples.example(queries=axis, keys=axis)
    example = example._replace(images=np.zeros((7, 2, 2, 3), np.uint8))
    shown = samples.show(samples.maps(example))
    opened = drawn(shown, address="#layer=1&head=2&query=5&view=text")
    row = example.weights[1][2][5]
    share = row[[1, 2, 3, 4, 6]].sum() / row.sum()
    said = opened.locator(".picture-share").inner_text()
    assert abs(float(said.partition("%")[0]) - 100 * share) < 1
    assert opened.locator(".patches .token").count() == 4
    assert opened.locator(".token img").count() == 4  # and none of words

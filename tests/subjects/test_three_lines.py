"""A researcher's tasks, in at most three lines after the imports.

What each verb does for each kind of model is in test_verb_table.py.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh

WORDS = "the quick brown foxes jumped over 13 lazy dogs and slept in hay .".split()


def tried(code, **given):
    """Runs at most three lines, and returns their variables."""
    lines = [line for line in code.strip().splitlines() if line.strip()]
    assert len(lines) <= 3
    names = {"mh": mh, "jnp": jnp, "np": np, **given}
    for line in lines:
        exec(line.strip(), names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_arrays_of_weights_are_a_page(kind):
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5)).astype("f4")
    arrays = (jnp.asarray(weights),) * 2
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = (torch.from_numpy(weights),) * 2
    found = tried(
        "page = mh.show(attentions, tokens=words).html",
        attentions=arrays,
        words="a cat sat on mats".split(),
    )
    assert '"cat"' in found["page"] and "layer 1" in found["page"]


def _boxes(figure, labels):
    figure.draw_without_rendering()
    return [x.get_window_extent() for x in labels if x.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 48])
def test_a_figure_for_a_column_has_labels_that_do_not_overlap(count):
    pytest.importorskip("matplotlib")
    weights = np.random.default_rng(0).dirichlet(np.ones(count), (1, 4, count))
    tokens = [f" {x}" for x in itertools.islice(itertools.cycle(WORDS), count)]
    found = tried(
        "figure = mh.plot(weights, tokens=tokens, heads=1, size=(3.25, 2.6))",
        weights=weights,
        tokens=tokens,
    )
    figure = found["figure"]
    axes = figure.axes[0]
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = _boxes(figure, labels)
        assert len(boxes) >= 5
        for one, other in itertools.pairwise(boxes):
            assert not one.overlaps(other)
        assert not any("␣" in x.get_text() for x in labels)
        assert min(x.get_fontsize() for x in labels) >= 6

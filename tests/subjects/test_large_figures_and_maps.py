"""A figure of a column's width, several devices, and a map of 32,768 tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import runs
from tests.subjects import test_three_lines

TOKENS = "the quick brown foxes jumped over 13 lazy dogs and slept in hay .".split()


def _boxes(figure, labels):
    figure.draw_without_rendering()
    return [x.get_window_extent() for x in labels if x.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 48])
def test_15_a_figure_for_a_column_has_labels_that_do_not_overlap(count):
    pytest.importorskip("matplotlib")
    weights = np.random.default_rng(0).dirichlet(np.ones(count), (1, 4, count))
    tokens = [f" {x}" for x in itertools.islice(itertools.cycle(TOKENS), count)]
    found = test_three_lines.tried(
        "figure = mh.plot(weights, tokens=tokens, head=1, size=(3.25, 2.6))",
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


@pytest.mark.slow
def test_16_two_devices_bfloat16_and_dropout(tmp_path):
    config = runs.default_config("reverse").replace(
        training=dict(steps=2, batch_size=8, evaluation_examples=8),
        model=dict(dropout_rate=0.1, precision="bfloat16"),
    )
    found = test_three_lines.tried(
        """
        runs.train(config, folder, devices=jax.devices()[:2])
        weights = mh.load(folder).maps("3 1 4 1")[0].weights()
        """,
        runs=runs,
        jax=jax,
        config=config,
        folder=tmp_path / "run",
    )
    np.testing.assert_allclose(found["weights"].sum(-1), 1, atol=1e-2)


@pytest.mark.slow
def test_17_a_map_of_32768_tokens_is_a_page(tmp_path):
    query = jax.random.normal(jax.random.key(0), (1, 32_768, 1, 8), jnp.float32)
    test_three_lines.tried(
        """
        values, map = mh.attend(query, query, query, mask=mh.masks.causal())
        mh.show(map).save(path)
        """,
        query=query,
        path=tmp_path / "map.html",
    )
    assert 10_000 < (tmp_path / "map.html").stat().st_size < 1_000_000

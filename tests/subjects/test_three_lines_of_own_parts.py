"""Own data, an own score and an own mask, in at most three lines after the imports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.subjects import test_three_lines

TOKENS = np.random.default_rng(0).integers(0, 7, (60, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", [TOKENS[:, ::-1], (TOKENS[:, 0] > 3).astype(int)], ids=["each", "whole"]
)
def test_11_a_model_is_trained_on_arrays(tmp_path, targets):
    found = test_three_lines.tried(
        """
        m = mh.train(mh.tasks.from_arrays(x, y), folder, steps=2)
        maps = m.maps("1 2 3")
        """,
        x=TOKENS,
        y=targets,
        folder=tmp_path / "run",
    )
    assert found["maps"][0].weights().shape[-2:] == (3, 3)
    assert (tmp_path / "run" / "attention").is_dir()


@pytest.mark.slow
def test_12_a_model_is_trained_on_a_text_and_continues_a_prompt(tmp_path):
    (tmp_path / "mine.txt").write_text("the cat sat on the mat. " * 60)
    found = test_three_lines.tried(
        """
        m = mh.train(mh.tasks.from_text(path), folder, steps=2)
        text = m.generate("the cat", tokens=5)
        """,
        path=tmp_path / "mine.txt",
        folder=tmp_path / "run",
    )
    assert "causal" in repr(found["m"])
    assert isinstance(found["text"], str)
    assert found["text"]


@pytest.mark.slow
def test_12_a_model_is_trained_on_pairs_and_answers(tmp_path):
    found = test_three_lines.tried(
        """
        pairs = [(f"{a} plus {b}", str(a + b)) for a in range(12) for b in range(12)]
        m = mh.train(mh.tasks.from_examples(pairs, labels=False), folder, steps=2)
        text = m.generate("3 plus 4")
        """,
        folder=tmp_path / "run",
    )
    assert isinstance(found["text"], str)


def test_13_a_score_and_a_mask_of_my_own_are_functions():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
    found = test_three_lines.tried(
        """
        score = lambda q, k: -((q[:, None] - k[None]) ** 2).sum(-1)
        mask = lambda t, s: (s <= t) & (s % 2 == 0)
        values, maps = mh.attend(query, key, value, score=score, mask=mask)
        """,
        query=query,
        key=key,
        value=value,
    )
    apart = query[:, :, None] - key[:, None]
    scores = -jnp.moveaxis((apart**2).sum(-1), -1, 1)
    position = np.arange(5)
    allowed = (position <= position[:, None]) & (position % 2 == 0)
    expected = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
    # A weight is the exponential of its score, whose rounding it has.
    atol = np.finfo(np.float32).eps * np.abs(scores).max()
    np.testing.assert_allclose(found["maps"].weights(), expected, atol=atol)

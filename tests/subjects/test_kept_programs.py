"""What a subject traces and compiles once, for all later questions."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

import mha_haiku as mh
from mha_haiku.lab.heads import model_runs

TOKENS = np.array([[1, 2, 3, 4]])


def num_programs() -> int:
    gc.collect()
    return len(backend.get_backend().live_executables())


class Counted:
    """A causal function of two layers that counts how often it is traced."""

    traces = 0

    def __call__(self, params, tokens):
        self.traces += 1
        x = params["embedding"][tokens]
        for _ in range(2):
            heads = (x @ params["projection"]).reshape(*x.shape[:2], 2, 4)
            scores = jnp.einsum("bthk,bshk->bhts", heads, heads)
            scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
            weights = jax.nn.softmax(scores)
            x += jnp.einsum("bhts,bshk->bthk", weights, heads).reshape(x.shape)
        return x @ params["embedding"].T


@pytest.fixture
def counted():
    keys = jax.random.split(jax.random.key(0), 2)
    embedding, projection = map(jax.random.normal, keys, ((11, 8), (8, 8)))
    function = Counted()
    subject = mh.wrap(function, {"embedding": embedding, "projection": projection})
    return function, subject


def test_one_text_is_traced_once_for_all_verbs(counted):
    function, subject = counted
    subject.logits(TOKENS)
    for verb in ("maps", "statistics", "roles", "lens"):
        getattr(subject, verb)(TOKENS)
    subject.importance(examples=TOKENS)
    subject.ablated(0, 1).statistics(TOKENS)
    # And eight tokens, to count the heads, as no batch is known.
    assert function.traces == 2


def test_other_heads_take_the_program_of_the_first(counted):
    _, subject = counted
    plain, answers = subject.logits(TOKENS), {}
    for verb in ("logits", "maps", "statistics"):
        getattr(subject.ablated(0, 0), verb)(TOKENS)
    before = num_programs()
    for head in ((0, 1), (1, 0), (1, 1)):
        ablated = subject.ablated(head)
        answers[head] = ablated.logits(TOKENS)
        ablated.maps(TOKENS)
        ablated.statistics(TOKENS)
    assert num_programs() == before
    for head, answer in answers.items():
        edit = mh.heads.edits.ablate(f"attention_{head[0]}", head[1])
        wanted = subject.edited(edit).logits(TOKENS)
        np.testing.assert_allclose(answer, wanted, atol=1e-6)
        assert abs(answer - plain).max() > 0.01


def test_the_importance_of_all_heads_is_three_programs(counted):
    _, subject = counted
    subject.importance("ablation", TOKENS)  # and small programs around it
    before = num_programs()
    subject.importance("ablation", np.tile(TOKENS, 2))
    assert num_programs() - before <= 3


@pytest.mark.parametrize(
    ("most", "lengths", "bound"),
    [
        pytest.param(4, 24, 8, marks=pytest.mark.slow),
        pytest.param(model_runs._MOST_SHAPES, 200, 50, marks=pytest.mark.weekly),
    ],
)
def test_many_lengths_do_not_fill_the_memory(
    counted, monkeypatch, most, lengths, bound
):
    monkeypatch.setattr(model_runs, "_MOST_SHAPES", most)
    _, subject = counted
    counts = []
    for length in range(2, 2 + lengths):
        subject.logits(np.ones((1, length), int))
        counts.append(num_programs())
    assert max(counts) - counts[0] < bound

"""The guide's table of other libraries' calls and ours: each of ours answers."""

import pathlib
import re

import numpy as np
import pytest

import mha_haiku as mh
from tests import tiny_runs

_PAGE = (
    pathlib.Path(__file__).parents[2] / "experiments/guide/7_from_other_libraries.md"
)
_CALLS = [
    re.fullmatch(r"`(.+)`", row.strip("| ").rpartition(" | ")[2])[1]
    for row in _PAGE.read_text("utf-8").splitlines()
    if row.startswith("| ") and "here |" not in row
]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    config = mh.runs.default_config("induction").replace(
        model=dict(
            num_layers=2,
            model_size=16,
            embedding=dict(max_length=32),
            attention=dict(num_heads=2),
            feed_forward=dict(hidden_size=16),
            output=dict(with_bias=False),
        )
    )
    tiny_runs.write_untrained(folder / "run", config)
    tokens, other = np.random.default_rng(0).integers(0, 16, (2, 9)).tolist()
    return {
        "mh": mh,
        "subject": mh.load(folder / "run"),
        "tokens": tokens,
        "other": other,
        "f": lambda weights: 0.5 * weights,
        "folder": folder / "saved",
    }


@pytest.mark.slow
@pytest.mark.parametrize("call", _CALLS)
def test_a_call_in_place_of_another_librarys_gives_an_answer(names, call):
    assert eval(call, names) is not None


@pytest.mark.slow
def test_what_stands_in_one_row_is_the_same(names):
    """`maps` and `look` agree, and so do an ablated and a pruned head."""
    subject, tokens = names["subject"], names["tokens"]
    _, seen = subject.look(tokens, ["layer_1/attention/weights"])
    (weights,) = seen.values()
    np.testing.assert_allclose(
        weights, subject.maps(tokens)[1].weights(), rtol=1e-5, atol=1e-6
    )
    ablated = subject.ablated((1, 0)).logits(tokens)
    pruned = subject.prune([[0, 1], [1]]).logits(tokens)
    np.testing.assert_allclose(ablated, pruned, rtol=1e-4, atol=1e-5)

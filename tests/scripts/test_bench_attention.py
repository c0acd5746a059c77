"""The cases of attention: their promises, what they compute, and tiny runs of them."""

import jax
import numpy as np
import pytest

import mha_haiku as mh
from scripts import bench_attention_cases
from scripts.contenders import jax_programs, map_statistics, sizes

_PEAK = "peak MiB"


def _promises(case):
    duels = bench_attention_cases.CASES[case](case, False)
    return [promise for each in duels for promise in each.promises]


def test_the_module_is_held_to_the_fastest_library_on_jax():
    (promise,) = _promises("module_128")
    assert promise.base == ("haiku", "flax", "equinox", "jax_nn")
    assert (promise.contender, promise.limit, promise.aim) == ("ours", 1.0, 0.7)


@pytest.mark.parametrize(
    "case, time, memory",
    [
        ("module_2048_causal", 0.5, 1 / 10),
        ("module_8192_causal", 0.25, 1 / 50),
        ("statistics_8192", 1 / 5, 1 / 50),
    ],
)
def test_long_sequences_promise_time_and_memory(case, time, memory):
    duels = bench_attention_cases.CASES[case](case, False)
    assert all(each.with_memory for each in duels)
    *_, of_time, of_memory = _promises(case)
    assert (of_time.quantity, of_time.limit) == ("seconds", time)
    assert (of_memory.quantity, of_memory.limit) == (_PEAK, memory)
    assert of_time.base == of_memory.base


def test_growth_is_promised_of_causal_attention_and_of_a_window():
    lengths = [2048, 4096, 8192, 16384, 32768, 65536]
    causal, window = _promises("scaling")
    assert (causal.limit, window.limit) == (2.1, 1.2)
    assert [*causal.sizes.values()] == [*window.sizes.values()] == lengths
    duels = bench_attention_cases.CASES["scaling"]("scaling", False)
    windows = [
        {contender.options["core"]["window"] for contender in each.contenders}
        for each in duels
    ]
    assert windows == [{None}, {512}]


def test_materialised_statistics_are_those_of_the_map():
    core = sizes.CoreSize(length=64, heads=3, head_width=5)
    arrays = [jax_programs.normal(seed, core.shape) for seed in (2, 3, 4)]
    with jax.numpy_rank_promotion("allow"):  # as outside of tests
        values, found = jax.jit(map_statistics.materialised)(*arrays)
    expected, attention_map = mh.attend(*arrays, mask=mh.masks.causal())
    statistics = attention_map.statistics(pooled=(32, 32))
    np.testing.assert_allclose(values, expected, 1e-5, 1e-6)
    for name, numbers in found.items():
        wanted = getattr(statistics, name)
        np.testing.assert_allclose(numbers, wanted, 1e-5, 1e-6, err_msg=name)


def test_quick_run_of_attention_alone(quick_run):
    told, (record,) = quick_run(
        "bench_attention.py", "--case=core_8192", "--contenders=ours"
    )
    (result,) = record["results"]
    assert (result["name"], len(result["samples"])) == ("ours", 2)
    assert "core_8192: attention alone" in told and "ms/call" in told
    assert "promised" not in told


@pytest.mark.slow
@pytest.mark.parametrize("case", ["module_128", "module_2048_causal"])
def test_the_libraries_have_modules_of_one_size(quick_run, case):
    pytest.importorskip("equinox")
    pytest.importorskip("flax")
    names = "ours,haiku,flax,equinox,jax_nn"
    _, (record,) = quick_run(
        "bench_attention.py", f"--case={case}", f"--contenders={names}"
    )
    width = 256 if case == "module_128" else 512
    assert [result["name"] for result in record["results"]] == names.split(",")
    for result in record["results"]:
        assert result["facts"]["parameters"] == 4 * (width**2 + width)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["statistics_2048", "statistics_32768", "scaling", "compile"]
)
def test_quick_run_of_what_is_only_compared_with_itself(quick_run, case):
    _, records = quick_run("bench_attention.py", f"--case={case}")
    for record in records:
        for result in record["results"]:
            assert len(result["samples"]) == 2
            assert all(sample["seconds"] > 0 for sample in result["samples"])

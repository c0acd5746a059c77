"""Several processes train one run; slow, as each starts an interpreter and compiles."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mha_haiku.commands import config_files
from mha_haiku.training.runs import loop

pytestmark = pytest.mark.slow
_REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
# Enough for several reports, and little to compile.
_SHORT = {
    "reverse": {
        "training.steps": 40,
        "training.report_every": 10,
        "training.evaluate_every": 40,
        "training.checkpoint_every": 20,
        "optimizer.warmup_steps": 10,
    },
    "text_lm": {
        "training.steps": 6,
        "training.report_every": 2,
        "training.evaluate_every": 6,
        "training.checkpoint_every": 6,
        "training.evaluation_examples": 8,
        "training.batch_size": 8,
        "optimizer.warmup_steps": 2,
        "model.num_layers": 1,
        "model.dropout_rate": 0.0,
    },
}


def _free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def _start(script, *flags, count=2, each=()):
    """Starts the processes of a script, each with two devices."""
    at = f"--coordinator=localhost:{_free_port()}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    environment.pop("JAX_NUMPY_RANK_PROMOTION", None)  # jax's own gathering promotes
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", f"experiments.{script}", *flags),
                *(at, f"--num_processes={count}", f"--process_id={i}"),
                *(each[i] if each else ()),
            ],
            cwd=_REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def _ended(processes, seconds=240):
    """Returns exit status and stderr of each."""
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, error)
        for process, error in zip(processes, errors, strict=True)
    ]


def _assert_done(processes):
    for status, error in _ended(processes):
        assert not status, error


def _train(name, folder, *flags, **options):
    fields = [f"--config.{path}={value}" for path, value in _SHORT[name].items()]
    cache = jax.config.jax_compilation_cache_dir
    return _start(
        "train",
        f"--config=configs/{name}.py",
        f"--workdir={folder}",
        f"--compilation_cache={cache}",
        *fields,
        *flags,
        **options,
    )


def _losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [x["loss"] for x in found] + [found[-1]["held_out_loss"]]


def _train_alone(name, folder, **changed):
    """Trains on one device; returns the config."""
    config = config_files.load(f"configs/{name}.py")
    fields = (_SHORT[name] | changed).items()
    config = config_files.override(
        config, ((f"config.{path}", str(x)) for path, x in fields)
    )
    loop.train(config, folder, devices=jax.devices()[:1])
    return config


def test_two_processes_find_the_losses_of_one(tmp_path):
    _assert_done(_train("text_lm", tmp_path / "two"))
    two = _losses(tmp_path / "two")
    assert two[0] > two[-1]
    _train_alone("text_lm", tmp_path / "one")
    np.testing.assert_allclose(two, _losses(tmp_path / "one"), atol=1e-5, rtol=0)
    assert (tmp_path / "two" / "attention" / "index.html").exists()


def test_a_mesh_over_two_processes_finds_them_too(tmp_path):
    """Also where a head's parameters are on another host, and in the analysis."""
    mesh = ("--config.devices.heads=2", "--config.devices.sequence=2")
    mesh += ("--config.model.attention.num_heads=2",)
    _assert_done(_train("reverse", tmp_path / "two", *mesh))
    _train_alone("reverse", tmp_path / "one", **{"model.attention.num_heads": 2})
    np.testing.assert_allclose(
        _losses(tmp_path / "two"), _losses(tmp_path / "one"), atol=1e-5, rtol=0
    )
    for script, wanted in (
        ("head_statistics", "attention/head_statistics.csv"),
        ("head_importance", "heads/head_importance.csv"),
    ):
        (tmp_path / "two" / wanted).unlink(missing_ok=True)
        flags = f"--workdir={tmp_path / 'two'}", "--examples=4"
        _assert_done(_start(script, *flags))
        assert (tmp_path / "two" / wanted).exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_one_is_killed_the_other_ends_and_both_resume(killed, tmp_path):
    long = ("--config.training.steps=100000", "--override_config")
    processes = _train("reverse", tmp_path, *long)
    until = time.monotonic() + 120
    while not (tmp_path / "checkpoints" / "20").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    processes[killed].send_signal(signal.SIGKILL)
    before = time.monotonic()
    status, error = _ended([processes[1 - killed]], 60)[0]
    assert time.monotonic() - before < 60
    assert status in (1, -signal.SIGABRT)  # whether a collective or JAX noticed it
    assert "another task died" in error or "fault: JaxRuntimeError: " in error
    processes[killed].communicate()
    if killed:  # whoever it was
        return

    processes = _train("reverse", tmp_path, *long)
    resumed_from = 0
    while not resumed_from:  # the first report after the start
        assert time.monotonic() < until + 120
        time.sleep(0.1)
        steps = [int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")]
        resumed_from = max(steps) if max(steps) > 40 else 0
    processes[1].send_signal(signal.SIGTERM)  # which stops both
    ended = _ended(processes)
    assert [x[0] for x in ended] == [130, 130]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] and summary["resumed_from"] >= 20
    assert (tmp_path / "checkpoints" / str(summary["steps"])).exists()


def test_processes_of_other_configs_are_refused(tmp_path):
    own = [(), ("--config.optimizer.b1=0.8",)]
    ended = _ended(_train("reverse", tmp_path / "run", each=own))
    for i, (status, error) in enumerate(ended):
        assert status == 2
        details = "config.optimizer.b1: 0.9 -> 0.8" if i else "another has a different"
        assert f"All processes must have the same config: {details}" in error
        assert len(error.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


_TALK = """
import json, sys
import numpy as np
from mha_haiku.training.devices import cluster

at, own = sys.argv[1], int(sys.argv[2])
cluster.join(at, 2, own)
tree = {"a": np.float32([[-0.0, 1e-42], [np.inf, 3]]), "b": np.int32(7)}
tree["c"] = np.array([True, False, True])
tree["d"] = np.arange(6).reshape(2, 3).astype("bfloat16")


def read():
    assert not own
    return {"arrays": tree, "text": "ä", "none": None}


found = cluster.first_does(read)
arrays = found.pop("arrays")
told = {
    "same": all(
        (arrays[name].dtype, arrays[name].shape, arrays[name].tobytes())
        == (x.dtype, x.shape, x.tobytes())
        for name, x in tree.items()
    ),
    "agreed": cluster.agree(own == 1, 5 + own),
    "first": found,
}
print(json.dumps(told), flush=True)
cluster.leave()
"""


def test_processes_tell_each_other_the_same_bits():
    at = f"localhost:{_free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _TALK, at, str(i)],
            cwd=_REPOSITORY,
            env=os.environ | {"JAX_NUMPY_RANK_PROMOTION": "allow"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        told = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
        assert told == {
            "same": True,
            "agreed": [True, 5],
            "first": {"text": "ä", "none": None},
        }

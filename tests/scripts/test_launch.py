"""The launchers, with stand-ins for what a cluster has."""

import json
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A function that puts a command of a cluster on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name, text):
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.mark.slow
def test_slurm_tells_the_processes_of_each_other(stand_in, tmp_path):
    stand_in(
        "srun",
        "shift\n"
        "export SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0\n"
        'SLURM_PROCID=1 "$@" &\n'
        'SLURM_PROCID=0 "$@"\n'
        "wait $!\n",
    )
    with socket.create_server(("localhost", 0)) as server:  # jax takes it of the job
        job = server.getsockname()[1]
    environment = tmp_path / "environment" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    done = subprocess.run(
        [
            _REPOSITORY / "scripts" / "launch_slurm.sh",
            "--config=configs/reverse.py",
            "--config.training.steps=4",
            "--config.optimizer.warmup_steps=1",
            f"--workdir={tmp_path / 'run'}",
            "--compilation_cache=",
        ],
        env=os.environ
        | {
            "SLURM_JOB_ID": str(job),
            "SLURM_SUBMIT_DIR": str(_REPOSITORY),
            "MHA_HAIKU_ENVIRONMENT": str(environment.parent),
            "PYTHONPATH": os.pathsep.join(x for x in sys.path if x),
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_NUMPY_RANK_PROMOTION": "allow",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 cpu devices" in done.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(config["devices"]) == 4


@pytest.mark.parametrize(
    ("script", "before"),
    [("train", ["-m", "experiments.train"]), ("run", []), ("test", None)],
)
def test_scripts_run_in_their_environment_with_what_they_are_given(
    tmp_path, script, before
):
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf \'%s\\n\' "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    for extras in ("test", "data-plots"):  # there is nothing to install
        shutil.copy(_REPOSITORY / "setup.cfg", environment / f".installed-{extras}")
    given = ["python"] * (script == "run") + ["--text=a b", "-x"]
    done = subprocess.run(
        [_REPOSITORY / "scripts" / script, *given],
        cwd=tmp_path,
        env=os.environ | {"MHA_HAIKU_ENVIRONMENT": str(environment)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    path, *told = done.stdout.splitlines()
    if before is None:
        before = told[: told.index("worksteal") + 1]
        assert before[:2] == ["-m", "pytest"]
    else:
        assert path.split(":")[0] == str(_REPOSITORY)
    assert told == [*before, "--text=a b", "-x"]


def test_tpu_launcher_passes_flags_on(stand_in):
    stand_in("gcloud", 'printf "%s\\n" "$@"\n')
    launcher = _REPOSITORY / "scripts" / "launch_tpu.sh"
    flags = ["--config=configs/text_lm.py", "--workdir=a b"]
    done = subprocess.run(
        [launcher, "pod", "zone", *flags], capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert told[-1].endswith(
        "-m experiments.train --distributed --config=configs/text_lm.py --workdir=a\\ b"
    )
    assert "--zone=zone" in told and "pod" in told and "--worker=all" in told
    done = subprocess.run([launcher, "pod"], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2


_PIP = """#!/bin/sh
[ "$2" = pip ] || exit 0
echo "Collecting jax"
echo "  Downloading jax-0.10.whl (80 MB)"
[ ! -e failing ] || { echo "ERROR: none found" >&2; exit 1; }
"""


@pytest.mark.parametrize("fails", [False, True])
def test_first_start_shows_what_is_fetched_and_ends_where_that_fails(tmp_path, fails):
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PIP)
    python.chmod(0o755)
    if fails:
        (tmp_path / "failing").touch()
    done = subprocess.run(
        [_REPOSITORY / "scripts" / "train", "--help"],
        env=os.environ | {"MHA_HAIKU_ENVIRONMENT": str(python.parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Downloading jax-0.10.whl (80 MB)" in done.stderr and done.stdout == ""
    assert (done.returncode != 0) == fails == ("ERROR: none found" in done.stderr)
    stamps = list(python.parents[1].glob(".installed-*"))
    assert bool(stamps) == (not fails)

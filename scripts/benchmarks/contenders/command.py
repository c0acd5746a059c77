"""Commands as a user starts them, in separate processes."""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

from scripts.benchmarks import worker

_REPOSITORY = pathlib.Path(__file__).resolve().parents[3]

_IMPORT = """
import time, jax, haiku
before = time.perf_counter()
import mha_haiku
print(time.perf_counter() - before)
"""


def prepare(case: str, steps: int | None = None) -> worker.Program:
    """Prepares a command.

    Args:
      case: "train_cold" or "train_warm" (with an empty compilation cache or a full
        one), "help", or "import" of mha_haiku after jax and haiku.
      steps: Training steps; None for the config's.
    """
    if case == "help":
        return worker.Program(lambda: _timed("-m", "experiments.train", "--help"))
    if case == "import":
        return worker.Program(lambda: float(_output("-c", _IMPORT)))
    return _train(case, steps)


def _train(case, steps) -> worker.Program:
    shorter = []
    if steps is not None:
        names = "training.steps", "optimizer.warmup_steps"
        shorter = [f"--config.{name}={steps}" for name in names]
    cache = tempfile.TemporaryDirectory() if case == "train_warm" else None
    summary = {}

    def run():
        nonlocal summary
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "run", "summary.json")
            started = time.time()
            _output(
                "-m",
                "experiments.train",
                "--config=configs/reverse.py",
                f"--workdir={path.parent}",
                f"--compilation_cache={cache.name if cache else folder + '/cache'}",
                *shorter,
            )
            summary = json.loads(path.read_text())
            return path.stat().st_mtime - started

    # The first run with a cache fills it; without one there is nothing to prepare.
    return worker.Program(
        run,
        warm_up=int(cache is not None),
        finish=lambda: {
            "accuracy": summary["metrics"].get("held_out_accuracy"),
            "compile s": summary["compile_seconds"],
            "steps/s inside": summary["steps_per_second"],
        },
    )


def _timed(*arguments) -> float:
    before = time.perf_counter()
    _output(*arguments)
    return time.perf_counter() - before


def _output(*arguments) -> str:
    """Returns the output of a Python process; raises if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"status {done.returncode} of {arguments}: {last}")
    return done.stdout

"""Injects real faults into runs, and prints how many the runs survived.

Run: python scripts/check_reliability.py
     python scripts/check_reliability.py --quick --only=kills

Every run is a process that trains configs/reverse.py for 300 steps, with a checkpoint
every 20; it must end with the same bits as an undisturbed run. The exit status is 1 if
any fault was not survived.
"""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# The scripts use each other and experiments/, neither of which is installed.
_REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_REPOSITORY))

import mha_haiku as mh  # noqa: E402
from mha_haiku import commands  # noqa: E402
from mha_haiku.core import checks  # noqa: E402

STEPS, EVERY = 300, 20
_LAST = f"checkpoints/{STEPS}/arrays.safetensors"
# Small, and with a checkpoint under way most of the time.
_TRAIN = f"""
import sys
import mha_haiku as mh

config = mh.runs.default_config("reverse").replace(
    training=dict(
        steps={STEPS}, batch_size=32, steps_per_dispatch=10, report_every=10,
        evaluate_every=20, evaluation_examples=64, checkpoint_every={EVERY},
    )
)
summary = mh.runs.train(config, sys.argv[1])
sys.exit(130 if summary.interrupted else 0)
"""


class Subject:
    """Starts runs in a folder, and compares what they leave with an undisturbed one."""

    def __init__(self, folder: Path):
        self.folder, self._count = folder, 0
        # The first run fills the cache of compiled programs; the second is timed.
        status, error = self.run(reference := self.new_workdir())
        if status:
            raise RuntimeError(f"an undisturbed run ended with {status}: {error}")
        self.reference, start = reference, time.perf_counter()
        process = self.start(again := self.new_workdir())
        self.wait_for_step(again)
        self.start_seconds = time.perf_counter() - start
        process.communicate()
        self.train_seconds = time.perf_counter() - start - self.start_seconds
        if problem := self.difference(again):
            raise RuntimeError(f"two undisturbed runs differ: {problem}")

    def new_workdir(self) -> Path:
        """Returns a path in a separate folder."""
        self._count += 1
        return self.folder / f"{self._count:03d}" / "run"

    def start(self, workdir: Path):
        """Starts a run on the CPU."""
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(_REPOSITORY),
        }
        return subprocess.Popen(
            [sys.executable, "-c", _TRAIN, workdir],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workdir: Path) -> tuple[int, str]:
        """Runs to the end, and returns the status and stderr."""
        process = self.start(workdir)
        _, error = process.communicate(timeout=300)
        return process.returncode, error

    def wait_for_step(self, workdir: Path, step: int = 0) -> None:
        """Waits until a run has reported a step."""
        end = time.monotonic() + 120
        while time.monotonic() < end and max(self.losses(workdir), default=-1) < step:
            time.sleep(0.01)

    def losses(self, workdir: Path) -> dict[int, float]:
        """Returns the held-out losses that were reported, by step."""
        path = workdir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        reports = (json.loads(line) for line in lines if line.endswith("\n"))
        return {x["step"]: x["held_out_loss"] for x in reports if "held_out_loss" in x}

    def difference(self, workdir: Path) -> str | None:
        """Returns how a finished run differs from the undisturbed one."""
        if (workdir / _LAST).read_bytes() != (self.reference / _LAST).read_bytes():
            return "other bits than undisturbed"
        is_same = self.losses(workdir) == self.losses(self.reference)
        return None if is_same else "other held-out losses than undisturbed"

    def after_resuming(self, workdir: Path) -> str | None:
        """Runs to the end, and returns differences from the undisturbed run."""
        status, error = self.run(workdir)
        return f"status {status}: {error}" if status else self.difference(workdir)


Outcomes = Iterator[str | None]


def kills(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Kill -9 at a random moment; the run ends with the same bits."""
    done = 0
    while done < count:
        process = subject.start(workdir := subject.new_workdir())
        if chance.random() < 0.2:  # while it starts
            time.sleep(chance.uniform(0.2, 0.9) * subject.start_seconds)
        else:
            subject.wait_for_step(workdir)
            time.sleep(chance.uniform(0, 0.9) * subject.train_seconds)
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            done += 1
            yield subject.after_resuming(workdir)


def signals(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """SIGTERM or SIGINT: ends within 5 s, loses no step, resumes to the same bits."""
    done = 0
    while done < count:
        process = subject.start(workdir := subject.new_workdir())
        subject.wait_for_step(workdir)
        time.sleep(chance.uniform(0, 0.7) * subject.train_seconds)
        start = time.perf_counter()
        process.send_signal((signal.SIGTERM, signal.SIGINT)[done % 2])
        _, error = process.communicate()
        seconds = time.perf_counter() - start
        steps = json.loads((workdir / "summary.json").read_text())["steps"]
        if steps == STEPS:  # it was at its end already
            continue
        done += 1
        if process.returncode != 130 or seconds > 5:
            yield f"status {process.returncode} after {seconds:.1f} s: {error}"
        elif (saved := mh.runs.load(workdir).step) != steps:
            yield f"{steps - saved} steps lost"
        else:
            yield subject.after_resuming(workdir)


# Name: title, function, number of faults, and in a quick run.
_LINES: dict[str, tuple[str, Callable[..., Outcomes], int, int]] = {
    "kills": ("kill -9 at a random moment", kills, 50, 3),
    "signals": ("SIGTERM, SIGINT: under 5 s, no lost step", signals, 20, 2),
}


def main(*, quick: bool = False, only: str = "") -> int:
    """Measures, and prints the scorecard.

    Args:
      quick: Inject only a few faults of each kind, to test that it works.
      only: Names of lines, with commas between; all if left out.
    """
    names = only.split(",") if only else list(_LINES)
    with checks.user_mistakes():
        for name in names:
            checks.choice("--only", name, _LINES)
    # Deliberate damage needs no warning here.
    logging.getLogger("mha_haiku").setLevel(logging.ERROR)
    is_full = True
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder))
        for name in names:
            title, case, count, few = _LINES[name]
            count = few if quick else count
            failures = list(filter(None, case(subject, count, random.Random(name))))
            print(*(f"{name}: {x}" for x in failures), sep="\n", file=sys.stderr)
            good = count - len(failures)
            print(f"{title:41} {good:3} of {count}", flush=True)
            is_full &= good == count
    return 0 if is_full else 1


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

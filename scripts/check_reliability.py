"""Injects real faults into runs, and prints how many the runs survived.

Run: python scripts/check_reliability.py
     python scripts/check_reliability.py --quick --only=kills,full_disks

Every run is a process that trains configs/reverse.py for 300 steps, with a checkpoint
every 20; it must end with the same bits as an undisturbed run. The exit status is 1 if
any fault was not survived. Faults that this machine cannot produce are left out, with a
message.
"""

import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

# The scripts use each other and experiments/, neither of which is installed.
_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_REPOSITORY))

from mha_haiku import commands  # noqa: E402
from mha_haiku.core import checks  # noqa: E402

STEPS, EVERY = 300, 20
# Small, and with a checkpoint under way most of the time. An observer ends the run.
_TRAIN = f"""
import sys
import mha_haiku as mh

def look(step, params):
    if step == {3 * EVERY}:
        exec(sys.argv[2])

config = mh.runs.default_config("reverse").replace(
    training=dict(
        steps={STEPS}, batch_size=32, steps_per_dispatch=10, report_every=10,
        evaluate_every=20, evaluation_examples=64, checkpoint_every={EVERY},
    )
)
observer = mh.runs.Observer({EVERY}, look)
summary = mh.runs.train(config, sys.argv[1], observers=[observer])
sys.exit(130 if summary.interrupted else 0)
"""
# Runs a command on a disk of 4 MiB that is full from step 100 on, for a while or to the
# end, and once more with room; prints both statuses, stderr, and the resulting arrays.
_ON_FULL_DISK = """
import json, pathlib, subprocess, sys, time
disk, is_cleared, command = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
log, ballast = disk / "run" / "metrics.jsonl", disk / "ballast"
while process.poll() is None:
    if log.exists() and '"step": 100' in log.read_text():
        break
    time.sleep(0.01)
try:
    with ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
except OSError:
    if is_cleared == "True":
        ballast.unlink()
_, error = process.communicate()
ballast.unlink(missing_ok=True)
again = subprocess.run(command, stdout=subprocess.DEVNULL)
arrays = disk / "run" / "checkpoints" / "300" / "arrays.safetensors"
statuses = process.returncode, again.returncode
print(json.dumps([*statuses, error, arrays.read_bytes().hex()]))
"""


class UnavailableError(Exception):
    """This machine cannot produce a fault."""


class Subject:
    """Starts runs in a folder, and compares what they leave with an undisturbed one."""

    def __init__(self, folder: pathlib.Path):
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

    def new_workdir(self) -> pathlib.Path:
        """Returns a path in a separate folder."""
        self._count += 1
        return self.folder / f"{self._count:03d}" / "run"

    def command(self, workdir: pathlib.Path, ending: str = "") -> list[str]:
        """Returns the command of a run, which executes `ending` after three saves."""
        return [sys.executable, "-c", _TRAIN, str(workdir), ending]

    def environment(self, devices: int = 1) -> dict[str, str]:
        """Returns the environment of a run on CPU devices."""
        return os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(_REPOSITORY),
        }

    def start(
        self, workdir: pathlib.Path, ending: str = "", devices: int = 1
    ) -> subprocess.Popen:
        """Starts a run."""
        return subprocess.Popen(
            self.command(workdir, ending),
            env=self.environment(devices),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: Any, **options: Any) -> tuple[int, str]:
        """Runs to the end, and returns the status and stderr."""
        process = self.start(*args, **options)
        _, error = process.communicate(timeout=300)
        return process.returncode, error

    def wait_for_step(self, workdir: pathlib.Path, step: int = 0) -> None:
        """Waits until a run has reported a step."""
        end = time.monotonic() + 120
        while time.monotonic() < end and max(self.losses(workdir), default=-1) < step:
            time.sleep(0.01)

    def losses(self, workdir: pathlib.Path) -> dict[int, dict[str, float]]:
        """Returns losses by the steps of reports."""
        path = workdir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        reports = (json.loads(line) for line in lines if line.endswith("\n"))
        return {
            x["step"]: {k: v for k, v in x.items() if k in ("loss", "held_out_loss")}
            for x in reports
            if x["step"] % 10 == 0  # not those of an interruption
        }

    def arrays(self, workdir: pathlib.Path) -> bytes:
        """Returns the file of the last arrays."""
        path = workdir / "checkpoints" / str(STEPS) / "arrays.safetensors"
        return path.read_bytes()

    def latest(self, workdir: pathlib.Path) -> int:
        """Returns the newest good checkpoint's step."""
        import mha_haiku as mh

        return int(mh.runs.load(workdir).step)

    def difference(self, workdir: pathlib.Path) -> str | None:
        """Returns how a finished run differs from the undisturbed one."""
        if self.arrays(workdir) != self.arrays(self.reference):
            return "other bits than undisturbed"
        expected, losses = self.losses(self.reference), self.losses(workdir)
        # The report after an interruption is about fewer steps.
        held_out = [x.get("held_out_loss") for x in losses.values()]
        is_same = held_out == [x.get("held_out_loss") for x in expected.values()]
        return None if is_same else "other held-out losses than undisturbed"

    def after_resuming(self, workdir: pathlib.Path) -> str | None:
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
        elif (saved := subject.latest(workdir)) != steps:
            yield f"{steps - saved} steps lost"
        else:
            yield subject.after_resuming(workdir)


def corruptions(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A bit flipped, a file cut short, missing or added: the one before is taken."""
    for i in range(count):
        workdir = shutil.copytree(subject.reference, subject.new_workdir())
        folder = workdir / "checkpoints" / str(STEPS)
        kind = ("flip", "cut", "remove", "add")[i % 4]
        path = chance.choice(sorted(x for x in folder.rglob("*") if x.is_file()))
        if kind == "flip":  # the manifest may have no digest of itself
            path = folder / "arrays.safetensors"
        data = bytearray(path.read_bytes())
        if kind == "flip":
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(data[: chance.randrange(len(data))])
        elif kind == "remove":
            path.unlink()
        else:
            path.with_name(path.name + "x").write_bytes(data)
        step = subject.latest(workdir)
        shutil.rmtree(workdir)
        what = f"{kind} {path.relative_to(folder)}: step {step} taken"
        yield None if step == STEPS - EVERY else what


def full_disks(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A small disk fills, for a while or to the end; the run resumes to its bits."""
    del chance
    for i in range(count):
        (disk := subject.new_workdir()).mkdir(parents=True)
        # A mount in a separate namespace, invisible outside, ends with the process.
        isolated = ["unshare", "--map-root-user", "--mount", sys.executable, "-c"]
        command = subject.command(disk / "run")
        try:
            done = subprocess.run(
                [*isolated, _ON_FULL_DISK, disk, str(i % 2 == 0), *command],
                env=subject.environment(),
                capture_output=True,
                text=True,
            )
        except FileNotFoundError as error:
            raise UnavailableError(str(error)) from error
        if done.returncode:
            raise UnavailableError(f"no small disk: {done.stderr.strip()[-200:]}")
        status, resumed, error, arrays = json.loads(done.stdout)
        is_told = status == 0 or "No space left on device" in error
        is_same = bytes.fromhex(arrays) == subject.arrays(subject.reference)
        is_good = is_told and resumed == 0 and is_same
        yield None if is_good else f"status {status}, {resumed}: {error}"


def second_writers(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A second writer is refused; a kill of the first leaves the folder free."""
    del chance
    for _ in range(count):
        first = subject.start(workdir := subject.new_workdir())
        subject.wait_for_step(workdir)
        first.send_signal(signal.SIGSTOP)  # it holds the folder meanwhile
        status, error = subject.run(workdir)
        first.kill()
        first.communicate()
        if status == 0 or f"process {first.pid}" not in error:
            yield f"status {status}: {error}"
        else:
            yield subject.after_resuming(workdir)


def device_counts(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Resumes on another number of devices, with the same losses to 1e-5."""
    del chance
    expected = subject.losses(subject.reference)
    for i in range(count):
        before, after = ((1, 4), (4, 1))[i % 2]
        workdir = subject.new_workdir()
        subject.run(workdir, "sys.exit(3)", before)
        status, error = subject.run(workdir, devices=after)
        losses = subject.losses(workdir)
        if status or losses.keys() != expected.keys():
            yield f"{before} devices, then {after}: status {status}: {error}"
            continue
        difference = max(
            abs(losses[step][name] - value)
            for step, values in expected.items()
            for name, value in values.items()
        )
        yield None if difference <= 1e-5 else f"losses {difference:.1e} apart"


# Name: title, function, number of faults, and in a quick run.
_LINES: dict[str, tuple[str, Callable[..., Outcomes], int, int]] = {
    "kills": ("kill -9 at a random moment", kills, 50, 3),
    "signals": ("SIGTERM, SIGINT: under 5 s, no lost step", signals, 20, 2),
    "corruptions": ("bits flipped; files cut, missing, added", corruptions, 300, 8),
    "full_disks": ("full disk, then room again", full_disks, 4, 2),
    "second_writers": ("a second writer", second_writers, 2, 1),
    "device_counts": ("1 to 4 devices and back", device_counts, 2, 2),
}


def main(*, quick: bool = False, only: str = "", seed: int = 0) -> int:
    """Measures, and prints the scorecard.

    Args:
      quick: Inject only a few faults of each kind, to test that it works.
      only: Names of lines, with commas between; all if left out.
      seed: Seed of the random moments and places of faults.
    """
    names = only.split(",") if only else list(_LINES)
    with checks.user_mistakes():
        for name in names:
            checks.choice("--only", name, _LINES)
    # Deliberate damage needs no warning here.
    logging.getLogger("mha_haiku").setLevel(logging.ERROR)
    is_full = True
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(pathlib.Path(folder))
        for name in names:
            title, case, count, few = _LINES[name]
            count = few if quick else count
            good = 0
            try:
                for failure in case(subject, count, random.Random(f"{seed} {name}")):
                    good += failure is None
                    if failure is not None:
                        print(f"{name}: {failure}", file=sys.stderr)
            except UnavailableError as why:
                print(f"{title:41} left out: {why}", flush=True)
                continue
            print(f"{title:41} {good:3} of {count}", flush=True)
            is_full &= good == count
    return 0 if is_full else 1


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

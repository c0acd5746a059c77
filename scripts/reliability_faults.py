"""Faults of machines: kills, signals, damaged and full disks.

Each function yields, for each fault, what went wrong, or None if the run survived it.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from scripts.reliability_subject import EVERY, STEPS, Subject, UnavailableError

Outcomes = Iterator[str | None]


def kills(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Kill -9 at a random moment; the run ends with the same bits and reports."""
    done = 0
    while done < count:
        workdir = subject.new_workdir()
        process = subject.start(workdir)
        if chance.random() < 0.2:  # while it starts
            time.sleep(chance.uniform(0.2, 0.9) * subject.start_seconds)
        else:
            process.wait_for("starts")
            time.sleep(chance.uniform(0, 0.9) * subject.train_seconds)
        was_running = process.send(signal.SIGKILL)
        process.end()
        if was_running:
            done += 1
            yield subject.after_resuming(workdir)


def signals(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """SIGTERM or SIGINT: ends within 5 s, loses no step, resumes to the same bits."""
    done = 0
    while done < count:
        workdir = subject.new_workdir()
        process = subject.start(workdir)
        process.wait_for("starts")
        time.sleep(chance.uniform(0, 0.7) * subject.train_seconds)
        started = time.perf_counter()
        process.send((signal.SIGTERM, signal.SIGINT)[done % 2])
        end = process.end()
        seconds = time.perf_counter() - started
        saved = subject.latest(workdir) or 0
        if saved == STEPS:  # it was at its end already
            continue
        done += 1
        summary = json.loads((workdir / "summary.json").read_text())
        if end.status != 130:
            yield f"status {end.status}: {end.line}"
        elif seconds > 5:
            yield f"took {seconds:.1f} s"
        elif saved != summary["steps"]:
            yield f"{summary['steps'] - saved} steps lost"
        else:
            yield subject.after_resuming(workdir, is_report_split=True)


def exits(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Exit or exception right after a save, in a run or a script: it is committed."""
    del chance
    for i in range(count):
        workdir, ending = subject.new_workdir(), ("exit", "exception")[i % 2]
        if i % 4 < 2:
            subject.run(workdir, fault=json.dumps({ending: 3 * EVERY}))
            saved = int(subject.state(workdir).step)
            yield None if saved == 3 * EVERY else f"{ending}: step {saved} is the last"
            continue
        last = {"exit": "sys.exit(3)", "exception": "raise ValueError"}[ending]
        code = (
            "import sys, numpy; from mha_haiku.training.runs import checkpoints; "
            f"stored = checkpoints.Checkpoints({str(workdir / 'checkpoints')!r}); "
            f"stored.save(7, {{'w': numpy.ones(3)}}); {last}"
        )
        subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        yield None if subject.latest(workdir) == 7 else f"{ending}: not committed"


def corruptions(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A bit flipped, a file cut short, missing or added: the one before is taken."""
    newest, before = STEPS, STEPS - EVERY
    whole = subject.reference / "checkpoints"
    for i in range(count):
        workdir = subject.new_workdir()
        folder = shutil.copytree(whole, workdir / "checkpoints") / str(newest)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        kind = ("flip", "cut", "remove", "add")[i % 4]
        if kind == "flip":  # the manifest has no digest of itself
            files = [path for path in files if path.name != "manifest.json"]
        path = chance.choice(files)
        data = bytearray(path.read_bytes())
        if kind in ("flip", "cut") and not data:
            kind = "remove"
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
        latest = subject.latest(workdir)
        shutil.rmtree(workdir)
        what = f"{kind} {path.relative_to(folder)}"
        yield None if latest == before else f"{what}: step {latest} taken"


def full_disks(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A small disk fills and has room again; or stays full to the end of the run."""
    del count, chance
    out = subject.new_workdir()
    out.mkdir(parents=True)
    disk = subject.folder / "disk"
    disk.mkdir(exist_ok=True)
    workdir = disk / "run"
    commands = [
        subject.command(workdir, fault='{"fill": 100, "empty": 200}'),
        subject.command(workdir, fault='{"fill": 100}'),
        subject.command(workdir),
    ]
    # A mount in a separate namespace, invisible outside, which ends with the process.
    isolated = ["unshare", "--map-root-user", "--mount", sys.executable, "-m"]
    done = subprocess.run(
        [*isolated, "scripts.reliability_disk", disk, out, json.dumps(commands)],
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UnavailableError(
            f"no small disk can be mounted: {done.stderr.strip()[-200:]}"
        )
    through, full, after = json.loads(done.stdout)
    is_reported = (
        "No space left on device" in through["stderr"] and not through["status"]
    )
    yield None if is_reported else f"status {through['status']}: {through['stderr']}"
    is_same = subject.is_as_reference(out / "0")
    yield None if is_same else "other bits after the disk was full for a while"
    is_reported = full["status"] == 1 and "could not be written" in full["stderr"]
    yield None if is_reported else f"status {full['status']}: {full['stderr']}"
    kept = subject.latest(out / "1")
    # That of step 80 was perhaps still being written.
    yield None if kept in (60, 80) else f"step {kept} is the last good one"
    is_same = after["status"] == 0 and subject.is_as_reference(out / "2")
    yield None if is_same else f"status {after['status']}: {after['stderr']}"

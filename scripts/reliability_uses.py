"""Faults by users and numbers: a second writer, another config, NaN.

Each function yields, for each fault, what went wrong, or None if the run survived it.
"""

import json
import random
import shutil
import signal
import socket
from collections.abc import Iterator

import numpy as np

from scripts.reliability_subject import STEPS, Subject

Outcomes = Iterator[str | None]


def second_writers(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """A second writer is refused, by its owner; a kill leaves the folder free."""
    del count, chance
    workdir = subject.new_workdir()
    first = subject.start(workdir, fault='{"slow": 10}')
    first.wait_for("starts")
    second = subject.run(workdir)
    yield None if second.status == 2 else f"status {second.status}"
    owner = f"process {first.pid} on {socket.gethostname()}"
    yield None if owner in second.line else f"stderr {second.line!r}"
    first.send(signal.SIGKILL)
    first.end()
    yield None if (workdir / "lock.json").exists() else "the kill left no lock"
    yield subject.after_resuming(workdir)


def changed_configs(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Another config is refused by field; other arrays by the parameter's name."""
    del count, chance
    workdir = shutil.copytree(subject.reference, subject.new_workdir())

    def refused(*flags, expected):
        end = subject.run(workdir, *flags)
        is_good = end.status == 2 and all(part in end.line for part in expected)
        return None if is_good else f"status {end.status}: {end.line}"

    other, longer = "--config.optimizer.b1=0.5", f"--config.training.steps={STEPS + 20}"
    yield refused(other, expected=["config.optimizer.b1: 0.9 -> 0.5"])
    wider = ["--config.model.feed_forward.hidden_size=48", longer, "--override_config"]
    yield refused(*wider, expected=["has the shape", "feed_forward", "48"])
    fewer = ["--config.model.attention.with_bias=False", longer, "--override_config"]
    yield refused(*fewer, expected=["it also has", "['b']"])
    _save_as_double(subject, workdir)
    yield refused(
        longer, "--override_config", expected=["has the dtype float64", "embedding"]
    )
    workdir = shutil.copytree(subject.reference, subject.new_workdir())
    end = subject.run(workdir, other, longer, "--override_config")
    yield None if end.status == 0 else f"status {end.status}: {end.line}"


def device_counts(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Resumes on another number of devices, with the same losses to 1e-5."""
    del count, chance
    wanted = subject.losses(subject.reference)
    for devices in ((1, 4, 1), (4, 1, 4)):
        workdir = subject.new_workdir()
        for number, stop in zip(devices[:2], (100, 200), strict=True):
            fault = json.dumps({"signal": stop})
            subject.run(workdir, fault=fault, devices=number)
        end = subject.run(workdir, devices=devices[2])
        losses = subject.losses(workdir)
        if end.status or losses.keys() != wanted.keys():
            yield f"{devices}: status {end.status}: {end.line}"
            continue
        apart = max(
            np.abs(np.subtract(losses[step], wanted[step])).max() for step in wanted
        )
        yield None if apart <= 1e-5 else f"{devices}: losses {apart:.1e} apart"


def not_finite_steps(subject: Subject, count: int, chance: random.Random) -> Outcomes:
    """Ends or skips as the config says, applies none; spikes are logged."""
    del count, chance
    from mha_haiku.training.runs import metrics_log

    def events(workdir):
        return metrics_log.read_events(workdir / "metrics.jsonl")

    workdir, fault = subject.new_workdir(), json.dumps({"not_finite": [130]})
    end = subject.run(workdir, fault=fault)
    is_good = end.status == 1 and "not finite at step 130; " in end.line
    yield None if is_good and subject.latest(workdir) == 120 else end.line

    skip, workdir = "--config.training.non_finite=skip", subject.new_workdir()
    bad = [130, 131, 200]
    end = subject.run(workdir, skip, fault=json.dumps({"not_finite": bad}))
    logged = [event["step"] for event in events(workdir)]
    summary = json.loads((workdir / "summary.json").read_text())
    is_counted = end.status == 0 and logged == bad and summary["skipped_steps"] == 3
    yield None if is_counted and _is_finite(subject.state(workdir)) else end.line

    workdir, fault = subject.new_workdir(), {"not_finite": [130, 131, 132]}
    end = subject.run(
        workdir, skip, "--config.training.max_skips=2", fault=json.dumps(fault)
    )
    is_good = end.status == 1 and "not finite at step 132, as in all" in end.line
    yield None if is_good and subject.latest(workdir) == 120 else end.line

    workdir = subject.new_workdir()
    end = subject.run(workdir, fault=json.dumps({"spike": [290]}))
    recorded = [(event["event"], event["step"]) for event in events(workdir)]
    is_good = recorded == [("loss_spike", 290)] and "at step 290" in end.stderr
    yield None if is_good else f"logged {recorded}"


def _save_as_double(subject, workdir) -> None:
    """Saves the newest state of a run again, in float64."""
    import jax

    from mha_haiku.training.runs import checkpoints

    def double(leaf):
        return leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf

    state = jax.tree.map(double, subject.state(workdir))
    shutil.rmtree(workdir / "checkpoints")
    with checkpoints.Checkpoints(workdir / "checkpoints") as stored:
        stored.save(STEPS, state)


def _is_finite(state) -> bool:
    import jax

    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))

"""What a run promises: each property once. Faults of single files: test_checkpoints."""

import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from mha_haiku.commands import process
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files, folders, trainers
from tests.training.runs import faults


class Killed(BaseException):
    """Nothing of ours catches it, or writes after it."""


def _killed_at(monkeypatch, count):
    """Ends the process, as far as it can be seen, at one of its writes to a disk."""
    calls = itertools.count()

    def before(function):
        def call(*arguments, **options):
            if next(calls) >= count:
                raise Killed
            return function(*arguments, **options)

        return call

    for owner, name in (
        *((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir")),
        *((shutil, "rmtree"), (files.LineWriter, "append")),
        (trainers.Trainer, "take_steps"),
    ):
        monkeypatch.setattr(owner, name, before(getattr(owner, name)))
    return calls


@pytest.mark.slow
def test_killed_anywhere_a_run_resumes_bit_for_bit(
    make_config, whole, tmp_path, monkeypatch
):
    folder, state = whole
    summary = json.loads((folder / "summary.json").read_text())["metrics"]
    for count in itertools.count(0, 2):
        workdir = tmp_path / str(count)
        with monkeypatch.context() as patch:
            calls = _killed_at(patch, count)
            try:
                faults.train(make_config(), workdir)
            except Killed:
                pass
        ended = faults.train(make_config(), workdir)
        assert ended.steps == 30, count
        found = faults.state(workdir, make_config())
        jax.tree.map(np.testing.assert_array_equal, found, state)
        assert faults.reports(workdir) == faults.reports(folder)
        for name in summary.keys() - {"examples_per_second"}:
            assert ended.metrics[name] == summary[name], (count, name)
        if next(calls) <= count:  # it ended before it was killed
            break
    assert count > 40


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupted_run_resumes_bit_for_bit(
    whole, make_config, tmp_path, monkeypatch, signals
):
    # Step 14 is no step of any report: dispatches end at 4, 5, 9, 10, 14, 15, ...
    def interrupt(trainer):
        if trainer.step == 14:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        faults.act(patch, interrupt)
        if signals == 1:  # the first saves, the second ends at once
            assert faults.train(make_config(), tmp_path).interrupted
        else:
            with pytest.raises(KeyboardInterrupt):
                faults.train(make_config(), tmp_path)
    assert signal.getsignal(signal.SIGINT) == before
    summary = faults.train(make_config(), tmp_path)
    assert (summary.steps, summary.resumed_from) == (30, 14 if signals == 1 else 10)
    found = faults.state(tmp_path, make_config())
    jax.tree.map(np.testing.assert_array_equal, found, whole[1])
    for one, other in zip(
        faults.reports(tmp_path), faults.reports(whole[0]), strict=True
    ):
        # After step 14 the averages begin anew.
        assert one == other or one["step"] == other["step"] == 15


@pytest.mark.parametrize("name", ["arrays.safetensors", "manifest.json"])
def test_a_checkpoint_that_cannot_be_read_changes_nothing(
    make_config, copy, monkeypatch, name
):
    open_file = io.open

    def refuse(path, *arguments, **options):
        if os.fspath(path).endswith(f"30/{name}"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    before = {path: path.stat().st_ino for path in copy.rglob("*")}
    config = make_config(training__steps=40)
    with pytest.raises(ConfigError, match=f"30/{name} cannot be read: Permission"):
        faults.train(config, copy, override_config=True)
    assert {path: path.stat().st_ino for path in copy.rglob("*")} == before


def _hold(path, is_held, ends):
    with files.locked(path):
        is_held.set()
        ends.wait(60)


def test_the_second_of_two_processes_is_told(copy, make_config):
    context = multiprocessing.get_context("spawn")
    is_held, ends = context.Event(), context.Event()
    path = copy / "metrics.jsonl"
    holder = context.Process(target=_hold, args=(path, is_held, ends))
    holder.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(ConfigError, match="is in use: another process trains"):
            faults.train(make_config(), copy)
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        # The kernel has released it.
        assert faults.train(make_config(), copy).steps == 30
    finally:
        holder.kill()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with files.locked(tmp_path / "lock"):
        assert "cannot be locked (No locks available)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_a_full_disk_ends_with_status_1_and_loses_nothing(
    make_config, whole, tmp_path, monkeypatch, capsys, full
):
    class Disk:
        """A log on a disk that has room for a few lines and a half."""

        def __init__(self, file):
            self.file, self.room = file, 600
            self.name, self.fileno = file.name, file.fileno
            self.truncate = file.truncate

        def write(self, data):
            count = self.file.write(data[: self.room])
            self.room -= count
            return count

        def close(self):
            self.file.close()

    fsync = os.fsync

    def no_room(file):
        if (tmp_path / "checkpoints" / "20").exists():
            raise OSError(28, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        if full == "checkpoint":
            patch.setattr(os, "fsync", no_room)
        else:
            opened = files.LineWriter.__init__

            def open_there(self, *arguments, **options):
                opened(self, *arguments, **options)
                self._file = Disk(self._file)

            patch.setattr(files.LineWriter, "__init__", open_there)
        status = process.ended(lambda: faults.train(make_config(), tmp_path).steps)
    assert status == 1
    told = capsys.readouterr().err.removeprefix("reverse: compiling ...\n")
    assert "No space left on device" in told and len(told.splitlines()) == 1
    summary = faults.train(make_config(), tmp_path)
    assert summary.resumed_from == (20 if full == "checkpoint" else 10)
    found = faults.state(tmp_path, make_config())
    jax.tree.map(np.testing.assert_array_equal, found, whole[1])
    assert faults.reports(tmp_path) == faults.reports(whole[0])


@pytest.mark.parametrize(
    "name",
    [
        *("data.npz", "tokenizer.json", "metrics.jsonl", "model.safetensors"),
        *("attention/layer_00.png", "checkpoints/0/weights.npy", "a/b"),
    ],
)
def test_a_folder_with_files_of_others_is_refused_before_the_work(
    name, tmp_path, make_config, task, make_model, monkeypatch
):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("weeks")
    faults.open_only(monkeypatch)
    message = f"holds no run, but .*{name.partition('/')[0]}"
    with pytest.raises(ConfigError, match=message):
        faults.train(make_config(), tmp_path)
    params = make_model().init(jax.random.key(0), None)
    with pytest.raises(ConfigError, match=message):
        folders.write_run(tmp_path, make_config(), params, task)
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == [path]
    assert path.read_text() == "weeks"


@pytest.mark.slow
def test_dispatches_are_short_where_steps_are_long(make_config, tmp_path, monkeypatch):
    config = make_config(
        training__steps_per_dispatch=20, training__report_every=30
    ).replace(training=dict(evaluate_every=30, checkpoint_every=30))
    stops, seconds = [], [0.0, 0.5]  # sums of which are exact

    def clock():
        """Every look at the clock finds it 0.5 s later."""
        seconds[0] += seconds[1]
        return seconds[0]

    monkeypatch.setattr(trainers.time, "perf_counter", clock)
    faults.act(monkeypatch, lambda self: stops.append(self.step))
    faults.train(config, tmp_path / "a")
    # 0.5 s for the first step, so two next; then those took 0.5 s as well, and so on.
    assert stops == [1, 3, 7, 15, 30]
    first, stops[:], seconds[1] = faults.state(tmp_path / "a", config), [], 3.0
    faults.train(config, tmp_path / "b")
    assert stops == list(range(1, 31))
    # Nothing but the clock is in the results.
    again = faults.state(tmp_path / "b", config)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert faults.reports(tmp_path / "a") == faults.reports(tmp_path / "b")

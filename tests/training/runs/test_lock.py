"""One process trains in a folder; an abandoned lock is free."""

import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files

HOLDER = """
import pathlib, sys, time
from mha_haiku.training.runs import files
with files.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock.json")],
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_second_holder_is_refused_with_the_first_one_s_id_and_host(tmp_path, holder):
    message = f"in use: process {holder.pid} on {socket.gethostname()} trains in it"
    with pytest.raises(ConfigError, match=message) as refusal:
        with files.locked(tmp_path / "lock.json"):
            pass
    assert len(str(refusal.value).splitlines()) == 2
    owner = json.loads((tmp_path / "lock.json").read_text())
    assert owner == {"pid": holder.pid, "host": socket.gethostname()}


@pytest.mark.slow
def test_lock_of_a_killed_process_is_free(tmp_path, holder, caplog):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock.json").exists()
    with files.locked(tmp_path / "lock.json"):
        owner = json.loads((tmp_path / "lock.json").read_text())
        assert owner["pid"] == os.getpid()
    assert not (tmp_path / "lock.json").exists()
    assert not caplog.records


def test_lock_left_on_another_host_is_taken_over_with_a_warning(tmp_path, caplog):
    (tmp_path / "lock.json").write_text('{"pid": 12, "host": "elsewhere"}')
    with files.locked(tmp_path / "lock.json"):
        pass
    assert "process 12 on elsewhere" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 1}', "\0" * 99])
def test_contents_of_the_file_do_not_matter(tmp_path, text):
    (tmp_path / "lock.json").write_text(text)
    with files.locked(tmp_path / "lock.json"):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            with files.locked(tmp_path / "lock.json"):
                pass
    with files.locked(tmp_path / "lock.json"):
        pass


def test_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path, monkeypatch):
    """Who waits at the file that its owner is about to remove has to look again."""
    path, flock, calls = tmp_path / "lock.json", files.fcntl.flock, []

    def flock_late(descriptor, operation):
        if not calls:
            path.unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock_late)
    with files.locked(path):
        assert len(calls) == 2
        assert path.exists()


def test_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with files.locked(tmp_path / "lock.json"):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cannot be locked (Operation not supported)" in record.getMessage()


@pytest.mark.slow
def test_run_in_a_locked_folder_is_refused(tmp_path, holder, make_config):
    with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
        runs.train(make_config(), tmp_path)
    assert os.listdir(tmp_path) == ["lock.json"]

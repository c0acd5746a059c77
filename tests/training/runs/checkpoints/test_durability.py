"""After a fault the newest good checkpoint is restored, or none."""

import logging
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import checkpoints
from mha_haiku.training.runs.checkpoints import contents, store
from tests import everyday


@pytest.fixture
def folder(good_checkpoints, tmp_path):
    return shutil.copytree(good_checkpoints, tmp_path / "checkpoints")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _damage(folder, step):
    _flip(folder / str(step) / "arrays.safetensors")


def _warnings(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]


def test_damaged_step_is_told_once_and_the_one_before_is_taken(
    folder, make_tree, caplog
):
    _damage(folder, 2)
    with checkpoints.Checkpoints(folder, read_only=True) as stored:
        assert stored.steps() == [1, 2]
        for _ in range(2):
            assert stored.latest() == 1
            assert stored.restore(make_tree())["step"] == 1
        with pytest.raises(ConfigError, match=r"step 2 in .* is damaged: arrays\.s"):
            stored.restore(make_tree(), 2)
    (told,) = _warnings(caplog)
    assert "step 2" in told and "the newest good one is of step 1" in told
    assert sorted(os.listdir(folder)) == ["1", "2"]  # a reader changes nothing


def test_writer_sets_a_damaged_step_aside_and_saves_it_again(folder, make_tree, caplog):
    _damage(folder, 2)
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() == 1
        assert sorted(os.listdir(folder)) == ["1", "2.damaged"]
        stored.save(2, make_tree(5))
        assert stored.latest() == 2
        assert stored.restore(make_tree())["step"] == 5
    assert "it is kept as 2.damaged" in caplog.text
    caplog.clear()
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() == 2
    assert not _warnings(caplog)


def test_damaged_step_that_nobody_read_is_saved_again(folder, make_tree):
    _damage(folder, 2)
    with checkpoints.Checkpoints(folder) as stored:
        stored.save(2, make_tree(5))
        assert stored.restore(make_tree(), 2)["step"] == 5


def test_nothing_is_restored_where_nothing_is_good(folder, make_tree):
    _damage(folder, 1)
    (folder / "2" / "manifest.json").unlink()
    before = sorted(folder.rglob("*"))
    message = r"No checkpoint in .* is good: step 2: it has no manifest.*step 1: arrays"
    for read_only in (True, False):
        with checkpoints.Checkpoints(folder, read_only=read_only) as stored:
            for call in (stored.latest, lambda: stored.restore(make_tree())):  # noqa: B023
                with pytest.raises(ConfigError, match=message) as refusal:
                    call()
        assert len(str(refusal.value).splitlines()) == 2
        assert "Put back a copy" in str(refusal.value)
    assert sorted(folder.rglob("*")) == before


def test_what_a_kill_left_half_done_is_no_step(folder, make_tree):
    shutil.copytree(folder / "2", folder / ".partial-3")
    (folder / ".partial-3" / "manifest.json").unlink()
    os.rename(folder / "1", folder / ".removed-1")
    with checkpoints.Checkpoints(folder, read_only=True) as stored:
        assert stored.steps() == [2]
    assert len(os.listdir(folder)) == 3
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.steps() == [2]
        stored.save(3, make_tree(3))
    assert sorted(os.listdir(folder)) == ["2", "3"]


def test_link_in_place_of_a_step_is_warned_of(folder, make_tree, caplog):
    (folder / "3").symlink_to("3")  # to itself
    (folder / "4").symlink_to("2")
    (folder / "5").write_text("")
    with checkpoints.Checkpoints(folder, read_only=True) as stored:
        assert stored.latest() == 2
    three = ("it is a link", "it is a link", "it is not a folder")
    warnings = zip((3, 4, 5), _warnings(caplog)[::-1], three, strict=True)
    for step, warning, why in warnings:
        assert f"step {step} in" in warning and why in warning
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() == 2
        stored.save(4, make_tree(4))
        assert stored.restore(make_tree())["step"] == 4
    kept = ["2", "3.damaged", "4", "4.damaged", "5.damaged"]
    assert sorted(os.listdir(folder)) == kept


@pytest.mark.parametrize("name", ["01", "+1", "-1", "1.0", "٣", "1e3", " 4"])
def test_other_folders_are_no_steps(folder, name):
    shutil.copytree(folder / "2", folder / name)
    with checkpoints.Checkpoints(folder, read_only=True) as stored:
        assert stored.steps() == [1, 2]


def test_checkpoint_gets_its_name_when_it_is_whole(tmp_path, make_tree, monkeypatch):
    seen = {}

    def rename(old, new):
        before = pathlib.Path(old).name
        seen[pathlib.Path(new).name] = (before, sorted(os.listdir(old)))
        os.replace(old, new)

    monkeypatch.setattr(store.os, "rename", rename)
    with checkpoints.Checkpoints(tmp_path / "new") as stored:
        stored.save(3, make_tree())
        stored.close()
        assert seen["3"] == (".partial-3", ["arrays.safetensors", "manifest.json"])


def test_saving_does_not_wait_for_the_disk(tmp_path, make_tree, monkeypatch):
    write, may_write = contents.write_arrays, threading.Event()

    def slow(*args):
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(contents, "write_arrays", slow)
    with checkpoints.Checkpoints(tmp_path) as stored:
        stored.save(3, make_tree(3))
        assert not (tmp_path / "3").exists()
        may_write.set()
        assert stored.latest() == 3


def _full(monkeypatch, is_full):
    """Lets every write fail half done while `is_full` holds something."""
    write = contents.write_arrays

    def failing(folder, tree):
        if is_full:
            folder.mkdir()
            (folder / "half").write_text("")
            raise OSError(28, "No space left on device")
        write(folder, tree)

    monkeypatch.setattr(contents, "write_arrays", failing)


def test_save_that_fails_leaves_the_others_and_the_next_tries_again(
    folder, make_tree, monkeypatch, caplog
):
    is_full = [True]
    _full(monkeypatch, is_full)
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() == 2
        stored.save(3, make_tree(3))
        assert stored.latest() == 2
        (told,) = _warnings(caplog)
        assert "step 3 could not be written" in told
        assert "(No space left on device); the newest good one is of step 2" in told
        assert sorted(os.listdir(folder)) == ["1", "2"]
        is_full.clear()
        stored.save(4, make_tree(4))
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() == 4
        assert stored.restore(make_tree(), 2)["step"] == 2


def test_last_save_that_fails_is_an_error(folder, make_tree, monkeypatch):
    _full(monkeypatch, [True])
    with pytest.raises(checkpoints.SaveError, match="step 3 .*No space left"):
        with checkpoints.Checkpoints(folder) as stored:
            stored.save(3, make_tree(3))
    with pytest.raises(ZeroDivisionError):  # which matters more
        with checkpoints.Checkpoints(folder) as stored:
            stored.save(3, make_tree(3))
            raise ZeroDivisionError


def test_loss_that_is_not_finite_is_refused(tmp_path, make_tree):
    with checkpoints.Checkpoints(tmp_path / "new") as stored:
        with pytest.raises(ValueError, match="held_out_loss must be finite, got nan"):
            stored.save(1, make_tree(), held_out_loss=float("nan"))
    assert not (tmp_path / "new").exists()


ENDINGS = {
    "return": "",
    "exception": "raise RuntimeError('boom')",
    "with": "stored.__exit__(ValueError, ValueError(), None)",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", everyday.some(ENDINGS, 1))
def test_process_that_ends_after_a_save_has_it(tmp_path, make_tree, ending):
    code = f"""
        import sys
        import numpy as np
        from mha_haiku.training.runs import checkpoints

        stored = checkpoints.Checkpoints({str(tmp_path)!r})
        stored.save(5, {{"w": np.arange(3.0)}})
        {ENDINGS[ending]}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == {"exception": 1}.get(ending, 0), done.stderr
    with checkpoints.Checkpoints(tmp_path, read_only=True) as stored:
        assert stored.latest() == 5
        found = stored.restore({"w": np.zeros(3)})
    np.testing.assert_array_equal(found["w"], np.arange(3.0))

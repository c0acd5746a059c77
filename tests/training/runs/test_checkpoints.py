"""A checkpoint is whole, or not there."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training import train_step
from mha_haiku.training.runs import checkpoints
from mha_haiku.training.runs.files import SaveError

ARRAYS = "arrays.safetensors"


def _tree(step):
    numbers = np.random.default_rng(step)
    params = {
        "encoder/norm": {"scale": numbers.standard_normal(3).astype(np.float32)},
        "encoder/~/w": {"w": numbers.standard_normal((2, 3)).T.astype(jnp.bfloat16)},
        "others": {"i": np.uint32([7, 2**32 - 1]), "b": np.array([True, False])},
        "empty": {"x": np.zeros((0, 5), np.float64), "n": np.float32(np.nan)},
    }
    return train_step.Parameters(np.int32(step), params)


@pytest.fixture
def root(tmp_path):
    for step in (10, 20):
        checkpoints.save(tmp_path / "checkpoints", step, _tree(step))
    return tmp_path / "checkpoints"


def _restored(root, step=None):
    stored = checkpoints.read(root, step)
    return checkpoints.restored(stored.arrays(), _tree(0))


def _assert_same(found, tree):
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for x, y in zip(*map(jax.tree.leaves, (found, tree)), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def test_trees_come_back_with_their_bits(root):
    _assert_same(_restored(root), _tree(20))
    _assert_same(_restored(root, 10), _tree(10))
    stored = checkpoints.read(root)
    assert list(stored.arrays([".step"])) == [".step"]


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.5, 6: 1.25}
    for step, loss in losses.items():
        checkpoints.save(tmp_path, step, _tree(step), held_out_loss=loss)
    assert checkpoints.steps(tmp_path) == [2, 5, 6]


@pytest.mark.parametrize("name", [ARRAYS, "manifest.json"])
@pytest.mark.parametrize("harm", ["bit", "cut", "missing"])
def test_damage_is_told_and_the_step_before_is_used(root, caplog, name, harm):
    path = root / "20" / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if harm != "missing":
        content[len(content) // 2] ^= harm == "bit"
        path.write_bytes(content if harm == "bit" else content[:-9])
    _assert_same(_restored(root), _tree(10))
    assert "20 is damaged; the one before it is used" in caplog.text
    with pytest.raises(ConfigError, match="20 is damaged; there are: 10, 20"):
        checkpoints.read(root, 20)
    checkpoints.save(root, 20, _tree(20))
    _assert_same(_restored(root), _tree(20))
    for step in ("10", "20"):
        (root / step / ARRAYS).unlink()
    with pytest.raises(ConfigError, match="All checkpoints in .* are damaged"):
        checkpoints.newest(root)


def test_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        checkpoints.save(tmp_path, 1, _tree(1))
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "1").iterdir()]
    assert modes == [0o664, 0o664]


def test_a_full_disk_leaves_the_others(root, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", fail)
    with pytest.raises(SaveError, match=r"step 30 could not .*: No space left"):
        checkpoints.save(root, 30, _tree(30))
    assert sorted(os.listdir(root)) == ["10", "20"]
    _assert_same(_restored(root), _tree(20))


def test_what_a_kill_left_is_no_step(root):
    shutil.copytree(root / "20", root / ".30.partial")
    (root / "notes").write_text("")
    assert checkpoints.newest(root).step == 20
    checkpoints.save(root, 30, _tree(30))
    assert sorted(os.listdir(root)) == ["20", "30", "notes"]


def _other(**changes):
    params = _tree(0).params
    return _tree(0)._replace(params={**params, **changes})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (_other(new={"w": np.zeros(2)}), r"lacks .*'new'"),
        (_other(empty={"x": np.zeros((0, 5))}), r"has .*'n'"),
        (
            _other(empty={"x": np.zeros((0, 4)), "n": np.float32(0)}),
            r"has the shape \(0, 5\) at .*'x'.*has \(0, 4\)",
        ),
        (
            _other(empty={"x": np.zeros((0, 5), np.int8), "n": np.float32(0)}),
            "has the dtype float64 at .*has int8",
        ),
    ],
)
def test_arrays_of_another_model_are_refused_by_name(root, tree, message):
    stored = checkpoints.read(root)
    with pytest.raises(ConfigError, match=message):
        checkpoints.restored(stored.arrays(), tree)


def test_a_missing_step_names_those_there_are(root, tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint of step 15 .* are: 10, 20"):
        checkpoints.read(root, 15)
    with pytest.raises(ConfigError, match="There are no checkpoints in"):
        checkpoints.read(tmp_path / "none")
    assert checkpoints.newest(tmp_path / "none") is None

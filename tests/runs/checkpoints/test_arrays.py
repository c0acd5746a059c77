"""What orbax reads is what was written, and only where it was written."""

import json
import os
import shutil
import struct

import jax
import numpy as np
import pytest
import tensorstore

from mha_haiku.checks import ConfigError
from mha_haiku.runs.checkpoints import arrays


def test_names_in_a_tree_lead_nowhere(tmp_path):
    tree = {
        "../../out": np.full(3, 7.0),
        "/out": {"a/../../../b": np.arange(2)},
        "..": np.float32(4),
    }
    (tmp_path / "in").mkdir()
    arrays.write(tmp_path / "in" / "arrays", tree)
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == ["arrays"]
    found = arrays.read(tmp_path / "in" / "arrays", tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_half_precision_comes_back_with_its_bits(tmp_path):
    tree = {"w": np.asarray(jax.numpy.arange(5, dtype=jax.numpy.bfloat16))}
    arrays.write(tmp_path / "arrays", tree)
    found = arrays.read(tmp_path / "arrays", tree)["w"]
    assert found.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(found, tree["w"])


def test_nothing_that_could_be_unpickled_is_written(tmp_path, make_tree):
    arrays.write(tmp_path / "arrays", make_tree())
    files = [path for path in (tmp_path / "arrays").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert path.suffix not in (".pkl", ".pickle", ".npy", ".npz")
        assert not path.read_bytes().startswith(b"\x80")  # a pickle's first byte


def test_names_of_a_crafted_checkpoint_lead_nowhere(tmp_path):
    for name, value in (("mine", 1.0), ("theirs", 666.0)):
        arrays.write(tmp_path / name, {"w": np.full(3, value)})
    listed = tmp_path / "mine" / "_METADATA"
    contents = json.loads(listed.read_text())
    text = json.dumps(contents).replace('"w"', '"../theirs/w"')
    listed.write_text(text.replace("('w',)", "('../theirs/w',)"))
    assert listed.read_text() != json.dumps(contents)
    for tree in ({"w": np.zeros(3)}, {"../theirs/w": np.zeros(3)}):
        try:
            found = arrays.read(tmp_path / "mine", tree)
        except Exception:
            continue
        assert 666.0 not in jax.tree.leaves(found)[0]


def _crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_crafted_database_cannot_name_files_elsewhere(tmp_path):
    """Orbax keeps arrays in an OCDBT database, whose own list of files is binary."""
    outside = tmp_path / "out"
    outside.mkdir()
    spec = {
        "driver": "ocdbt",
        "base": f"file://{tmp_path}/base/",
        "config": {"compression": None},
    }
    tensorstore.KvStore.open(spec).result().write("w", b"here").result()
    (data,) = (tmp_path / "base" / "d").iterdir()
    listed = tmp_path / "base" / "manifest.ocdbt"
    body = listed.read_bytes()[:-4]
    name = f"d/{data.name}".encode()
    stray = b"../out/" + name[7:]  # as long as the name it takes the place of
    assert body.count(name) == 1
    os.rename(data, outside / stray[7:].decode())
    crafted = body.replace(name, stray)
    listed.write_bytes(crafted + struct.pack("<I", _crc32c(crafted)))
    with pytest.raises(ValueError, match="Invalid key: .*/base/../out/"):
        tensorstore.KvStore.open(spec).result().read("w").result()


def _described(**changes):
    return arrays.describe(
        {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3)} | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": np.zeros((2, 4), np.float32)}, r"shape \(2, 3\) at \['w'\].*\(2, 4\)"),
        ({"w": np.zeros((2, 3))}, r"dtype float32 at \['w'\].* has float64"),
        ({"w": np.zeros((2, 3), np.float16)}, r"dtype float32 at \['w'\].*float16"),
        ({"c": np.zeros(3)}, r"not hold the parameters[^\n]*\nit lacks \['c'\]\.$"),
    ],
)
def test_other_arrays_are_refused_by_name(changes, message):
    arrays.compare(_described(), _described(), "It")
    with pytest.raises(ConfigError, match=message) as refusal:
        arrays.compare(_described(), _described(**changes), "It")
    assert len(str(refusal.value).splitlines()) <= 2


def test_unknown_arrays_are_refused_by_name():
    more = {f"c{i}": np.zeros(3) for i in range(5)}
    message = r"it also has \['c0'\], \['c1'\], \['c2'\] and 2 more\.$"
    with pytest.raises(ConfigError, match=message):
        arrays.compare(_described(**more), _described(), "It")
    renamed = _described(d=np.zeros(3))
    del renamed["['b']"]
    with pytest.raises(ConfigError, match=r"it lacks \['d'\]; it also has \['b'\]"):
        arrays.compare(_described(), renamed, "It")


def test_full_disk_is_told_before_orbax_begins(tmp_path, make_tree, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=70_000)
    monkeypatch.setattr(arrays.shutil, "disk_usage", lambda _: usage)
    arrays.write(tmp_path / "small", make_tree())
    with pytest.raises(OSError, match="No space left on device"):
        arrays.write(tmp_path / "large", {"w": np.zeros(10_000)})
    assert os.listdir(tmp_path) == ["small"]

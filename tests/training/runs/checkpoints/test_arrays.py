"""Arrays are read as they were written, and only under their names."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs.checkpoints import contents


@pytest.mark.parametrize(
    "dtype",
    [
        *(bool, np.uint8, np.int32, np.uint32, np.int64),
        *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
    ],
)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 0)])
def test_every_dtype_comes_back_with_its_bits(tmp_path, dtype, shape):
    bits = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize))
    values = np.ascontiguousarray(bits.astype(np.uint8)).view(dtype).reshape(shape)
    contents.write_arrays(tmp_path / "file", {"w": values})
    after = contents.read_arrays(tmp_path / "file", {"w": values})["w"]
    assert (after.dtype, after.shape) == (values.dtype, values.shape)
    assert after.tobytes() == values.tobytes()


def test_layout_in_memory_does_not_count(tmp_path):
    values = np.arange(24.0).reshape(2, 3, 4)
    tree = {
        "transposed": values.T,
        "strided": values[:, ::2, 1:],
        "big_endian": values.astype(">f8"),
        "device": jnp.arange(3),
        "scalar": np.float32(3),
    }
    contents.write_arrays(tmp_path / "file", tree)
    abstract = jax.tree.map(lambda x: np.asarray(x), tree)
    abstract["big_endian"] = values
    after = contents.read_arrays(tmp_path / "file", abstract)
    jax.tree.map(np.testing.assert_array_equal, after, abstract)


def test_other_tools_read_the_file_by_our_names(tmp_path, make_tree):
    tree = make_tree()
    contents.write_arrays(tmp_path / "file", tree)
    loaded = safetensors.numpy.load_file(tmp_path / "file")
    assert set(loaded) == set(contents.describe(tree))
    np.testing.assert_array_equal(loaded["['params']['w']"], tree["params"]["w"])


def test_names_in_a_tree_lead_nowhere(tmp_path):
    tree = {
        "../../out": np.full(3, 7.0),
        "/out": {"a/../../../b": np.arange(2)},
        "..": np.float32(4),
        "a\0b\udcff": np.float32(5),
        "": np.float32(6),
    }
    contents.write_arrays(tmp_path / "file", tree)
    assert os.listdir(tmp_path) == ["file"]
    after = contents.read_arrays(tmp_path / "file", tree)
    jax.tree.map(np.testing.assert_array_equal, after, tree)


@jax.tree_util.register_pytree_with_keys_class
class _Odd:
    """A tree whose leaves have any names at all."""

    def __init__(self, *names):
        self.names = names

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key(name), np.zeros(3)) for name in self.names], self.names

    @classmethod
    def tree_unflatten(cls, names, leaves):
        return cls(*names)


def test_two_arrays_of_one_name_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="names of their own"):
        contents.write_arrays(tmp_path / "file", _Odd("same", "same"))
    assert not os.listdir(tmp_path)


def _crafted(path, pairs):
    """Writes a safetensors file whose header has these pairs of names and values."""
    header = ",".join(f"{json.dumps(name)}:{json.dumps(x)}" for name, x in pairs)
    header = f"{{{header}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


def test_crafted_files_are_refused(tmp_path):
    path, w = tmp_path / "file", {"dtype": "F64", "shape": [1]}
    # Of twins safetensors takes the last, and finds this file good.
    twins = [w | {"data_offsets": [0, 8]}, {**w, "shape": [2], "data_offsets": [0, 16]}]
    _crafted(path, [("['w']", twin) for twin in twins])
    with pytest.raises(ValueError, match="repeats names"):
        contents.read_arrays(path, {"w": np.zeros(2)})
    first, second = w | {"data_offsets": [0, 8]}, w | {"data_offsets": [8, 16]}
    abstract = {"w": np.zeros(1)}
    for pairs in (
        [("['w']", first), ("['w']", second)],
        [("['w']", first), ("['v']", second)],
        [("['v']", first)],
        [("['w']", first | {"dtype": "I64"}), ("__metadata__", {})],
        [("['w']", w | {"data_offsets": [0, 10**6]})],
        [("['w']", w | {"data_offsets": [-8, 0]})],
        [("['w']", 3)],
    ):
        _crafted(path, pairs)
        with pytest.raises((ValueError, safetensors.SafetensorError)):
            contents.read_arrays(path, abstract)
    for content in (b"", b"\xff" * 20, bytes(8), b"\2" + bytes(7) + b"[]"):
        path.write_bytes(content)
        with pytest.raises((ValueError, safetensors.SafetensorError)):
            contents.read_arrays(path, abstract)


def _described(**changes):
    return contents.describe(
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
    contents.compare(_described(), _described(), "It")
    with pytest.raises(ConfigError, match=message) as refusal:
        contents.compare(_described(), _described(**changes), "It")
    assert len(str(refusal.value).splitlines()) <= 2


def test_unknown_arrays_are_refused_by_name():
    more = {f"c{i}": np.zeros(3) for i in range(5)}
    message = r"it also has \['c0'\], \['c1'\], \['c2'\] and 2 more\.$"
    with pytest.raises(ConfigError, match=message):
        contents.compare(_described(**more), _described(), "It")
    renamed = _described(d=np.zeros(3))
    del renamed["['b']"]
    with pytest.raises(ConfigError, match=r"it lacks \['d'\]; it also has \['b'\]"):
        contents.compare(_described(), renamed, "It")


def test_full_disk_is_told_before_anything_is_written(tmp_path, make_tree, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=70_000)
    monkeypatch.setattr(contents.shutil, "disk_usage", lambda _: usage)
    contents.write_arrays(tmp_path / "small", make_tree())
    with pytest.raises(OSError, match="No space left on device"):
        contents.write_arrays(tmp_path / "large", {"w": np.zeros(10_000)})
    assert os.listdir(tmp_path) == ["small"]

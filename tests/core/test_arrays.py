"""Files of arrays say their sizes, which are checked before anything is unpacked."""

import io
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import arrays
from mha_haiku.core.checks import ConfigError

GIB = 2**30


def _npy(shape, content=b"", kind="<f4"):
    """Returns an array's file that says a shape, whatever it holds."""
    file = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)
    return file.getvalue() + content


def _headed(header):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def _archive(path, members, kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def _says(path, size):
    """Overwrites what the directory of an archive says of unpacked sizes."""
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 24 : at + 28] = struct.pack("<I", size)
    path.write_bytes(content)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_archive_come_back(save, tmp_path):
    made = {
        "a": np.arange(6, dtype="i2").reshape(2, 3),
        "b": np.array("text"),
        "none": np.zeros((0, 4)),
    }
    save(tmp_path / "x.npz", **made)
    for file in (tmp_path / "x.npz", io.BytesIO((tmp_path / "x.npz").read_bytes())):
        found = arrays.read_npz(file)
        assert set(found) == set(made)
        for name, array in made.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a": _npy((2**24,), bytes(2**26))}, "would be 67,108,992 when unpacked"),
        ({str(i): _npy((2**22,), bytes(2**24)) for i in range(4)}, "when unpacked"),
        ({"a": _npy((400 * GIB,))}, r"\(429496729600,\) in 0 bytes"),
        ({"a": _npy((2, 300 * GIB), bytes(64))}, "in 64 bytes"),
        ({"a": _npy((2**63, 2**63), bytes(64))}, "in 64 bytes"),
        ({"a": _npy((4,), bytes(8))}, "in 8 bytes"),
        ({"a": _npy((1,), bytes(8), "|O")}, "holds objects"),
        ({"a": _npy((10**18,), kind="|V0")}, r"\(1000000000000000000,\) in 0 bytes"),
        ({"a": _npy((0, 10**21))}, "too large"),
        ({"a": _headed(b"(" * 9000)}, "of plain arrays: ."),
        ({"a": _headed(b"-" * 9000 + b"1")}, "of plain arrays: ."),
        ({"a": b"no header"}, "magic string is not correct"),
        ({"a": b"\x93NUMPY\x09\x00"}, "version"),
    ],
)
def test_sizes_are_read_before_anything_is_unpacked(members, message, tmp_path):
    path = tmp_path / "x.npz"
    _archive(path, members)
    with pytest.raises(ConfigError, match=f"x.npz is not a readable .npz.*{message}"):
        arrays.read_npz(path)


def test_an_archive_that_lies_of_its_sizes_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    content = _npy((2**20,), bytes(2**22))
    _archive(path, {"a": content})
    _says(path, len(content) // 1000)
    with pytest.raises(ConfigError, match="not a readable"):
        arrays.read_npz(path)


def test_arrays_of_a_file_come_back_and_others_may_read_it(tmp_path):
    path = tmp_path / "x.safetensors"
    made = {
        "a": np.arange(6, dtype="f4").reshape(2, 3),
        "half": jnp.arange(4, dtype="bfloat16"),
        "none": np.zeros((0, 4)),
        "one": np.float32(3),
    }
    arrays.write_safetensors(path, made)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    found = arrays.read_safetensors(path)
    assert set(found) == set(made)
    for name, array in made.items():
        assert found[name].shape == array.shape
        assert found[name].read().dtype == array.dtype
        np.testing.assert_array_equal(found[name].read(), array)


def test_a_sparse_json_file_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="more than 268,435,456 bytes"):
        arrays.read_json(path)

"""Files of arrays: what they hold comes back, and other files are refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import arrays
from mha_haiku.core.checks import ConfigError


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_archive_come_back(save, tmp_path):
    made = {
        "a": np.arange(6, dtype="i2").reshape(2, 3),
        "b": np.array("text"),
        "none": np.zeros((0, 4)),
    }
    save(tmp_path / "x.npz", **made)
    found = arrays.read_npz(tmp_path / "x.npz")
    assert set(found) == set(made)
    for name, array in made.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_what_is_no_archive_of_plain_arrays_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    for write, message in (
        (lambda: path.write_bytes(b"no archive"), "pickled"),
        (lambda: np.savez(path, a=np.array([None], object)), "Object arrays cannot be"),
        (lambda: path.write_bytes(path.read_bytes()[:-9]), "not a zip file"),
    ):
        write()
        words = f"x.npz is not a readable .npz archive of plain arrays: .*{message}"
        with pytest.raises(ConfigError, match=words):
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

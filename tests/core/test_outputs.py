"""Folders of outputs, and the files of others in them."""

import pytest

from mha_haiku.core import outputs
from mha_haiku.core.checks import ConfigError


def test_a_new_an_empty_and_a_folder_of_ones_own_may_be_written(tmp_path):
    outputs.check("--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    outputs.check("--out", tmp_path)
    (tmp_path / ".git").mkdir()  # no command writes a hidden file
    outputs.check("--out", tmp_path)
    outputs.claim(tmp_path, ["a.csv", "a.png"])
    outputs.claim(tmp_path, ["b.csv"])
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).touch()
    outputs.check("--out", tmp_path)
    assert outputs.names(tmp_path) == {"a.csv", "a.png", "b.csv"}


@pytest.mark.parametrize("name", ["a.csv", "notes.txt", "layer_00.png", "folder"])
def test_a_folder_with_anything_else_may_not(name, tmp_path):
    outputs.claim(tmp_path, ["b.csv"])
    (tmp_path / name).mkdir() if name == "folder" else (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"--out .* must be .*, got one with '{name}"):
        outputs.check("--out", tmp_path)
    outputs.claim(tmp_path, [name])  # as the message says
    outputs.check("--out", tmp_path)

"""Whatever is done to a checkpoint's folder is found."""

import json
import os
import shutil

import hypothesis
import hypothesis.strategies as st
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs.checkpoints import contents


def _write(folder, step=7, **facts):
    folder.mkdir()
    (folder / "data").write_bytes(bytes(range(256)))
    (folder / "names").write_text("{}")
    (folder / "empty").write_bytes(b"")
    arrays = {"['w']": {"dtype": "float32", "shape": [2, 3]}}
    facts = {"held_out_loss": 0.5, "arrays": arrays} | facts
    contents.write(folder, step=step, **facts)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "7"
    _write(folder)
    return folder


def test_good_checkpoint_says_what_it_holds(folder):
    for read in (contents.read, contents.check):
        found = read(folder)
        assert (found.step, found.held_out_loss) == (7, 0.5)
        assert found.arrays == {"['w']": {"dtype": "float32", "shape": [2, 3]}}
        assert set(found.files) == {"data", "names", "empty"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest") / "7"
    _write(folder)
    return folder


@pytest.mark.slow
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=200)
def test_every_flipped_bit_of_a_file_is_found(whole, data):
    path = whole / data.draw(st.sampled_from(["data", "names"]))
    before = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    flipped = bytearray(before)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    try:
        with pytest.raises(contents.DamageError, match="not as it was"):
            contents.check(whole)
    finally:
        path.write_bytes(before)
    contents.check(whole)


@hypothesis.given(data=st.data())
def test_every_truncation_is_found(whole, data):
    names = ["data", "names", contents.NAME]
    path = whole / data.draw(st.sampled_from(names))
    before = path.read_bytes()
    path.write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
    try:
        with pytest.raises(contents.DamageError):
            contents.check(whole)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["data", "names", "empty"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(contents.DamageError, match=f"{name} is missing"):
        contents.check(folder)


def test_missing_manifest_is_damage(folder):
    (folder / contents.NAME).unlink()
    with pytest.raises(contents.DamageError, match=r"it has no manifest\.json"):
        contents.check(folder)


@pytest.mark.parametrize("name", ["more", "manifest.json2"])
def test_added_file_is_named(folder, name):
    (folder / name).write_bytes(b"")
    with pytest.raises(contents.DamageError, match=f"{name} was added"):
        contents.check(folder)


def test_link_in_place_of_a_file_or_folder_is_refused(folder, tmp_path):
    for name in ("empty", "data", contents.NAME):
        elsewhere = tmp_path / "elsewhere"
        os.rename(folder / name, elsewhere)
        (folder / name).symlink_to(elsewhere)
        with pytest.raises(contents.DamageError, match="is not a file|it has no"):
            contents.check(folder)
        (folder / name).unlink()
        os.rename(elsewhere, folder / name)
    contents.check(folder)
    os.rename(folder, tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(contents.DamageError, match="it is a link"):
        contents.check(folder)


def test_folder_in_a_checkpoint_is_damage(folder):
    (folder / "more").mkdir()
    with pytest.raises(contents.DamageError, match="more is not a file"):
        contents.check(folder)


def test_checkpoint_under_the_name_of_another_step_is_found(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "8")
    with pytest.raises(contents.DamageError, match="is of step 7"):
        contents.check(tmp_path / "8")


def _forge(folder, **changes):
    before = json.loads((folder / contents.NAME).read_text())
    (folder / contents.NAME).write_text(json.dumps(before | changes))


def test_names_that_lead_outside_are_refused(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"")
    digest = contents._digest(secret)
    outside = ("../secret", str(secret), "data/../../secret", "", "..")
    for name in (*outside, contents.NAME):
        _forge(folder, files={name: digest})
        with pytest.raises(contents.DamageError, match="is damaged"):
            contents.read(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1},
        {"held_out_loss": "small"},
        {"held_out_loss": [1]},
        {"files": ["empty"]},
        {"files": {"empty": 5}},
        {"files": {"empty": "short"}},
        {"arrays": {"w": 3}},
        {"arrays": {"w": {"dtype": "float32"}}},
        {"arrays": {"w": {"dtype": 3, "shape": []}}},
        {"arrays": {"w": {"dtype": "float32", "shape": 3}}},
        {"arrays": {"w": {"dtype": "float32", "shape": ["2"]}}},
        {"arrays": {"w": {"dtype": "float32", "shape": [-1]}}},
        {"arrays": []},
        {"held_out_loss": True},
        {"step": -7},
        {"step": True},
        {"step": [7]},
        {"step": "7"},
    ],
)
def test_forged_contents_are_damage_and_no_fault(folder, changes):
    _forge(folder, **changes)
    with pytest.raises(contents.DamageError):
        contents.check(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 10**5, b"\xff", b"null"])
def test_what_is_no_manifest_is_damage_and_no_fault(folder, text):
    (folder / contents.NAME).write_bytes(text)
    with pytest.raises(contents.DamageError, match="is damaged"):
        contents.check(folder)


def test_a_file_larger_than_memory_is_told_before_it_is_read(folder):
    with (folder / "data").open("r+b") as file:
        file.truncate(2**43)
    with pytest.raises(ConfigError, match="data has 8,796,093,022,208 bytes, and this"):
        contents.check(folder)

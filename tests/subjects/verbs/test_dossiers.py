"""The maps, statistics and importance in a run's folder, joined."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, records
from mha_haiku.lab import maps, text_maps
from mha_haiku.records import Layer, archive
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects import dossiers
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training.runs import folders

DEVICES = jax.local_devices()[:1]
N = 5


@pytest.fixture(scope="module")
def trained(trained):
    root = trained(model__family="causal", attention__examples=N)
    dumps.dump(Subject.of_folder(root), devices=DEVICES)
    return root


@pytest.mark.slow
def test_roles_of_whole_maps_are_those_of_the_model(trained):
    run = folders.load_run(trained)
    # Heads that attend sharply, and to different things.
    run = run._replace(params=jax.tree.map(lambda x: 4 * x, run.params))
    subject = Subject.of_run(run, trained.name, folders.Folder(trained))
    path = dumps.dump(subject, out=trained / "sharp", devices=DEVICES)
    maps = MapSet.load(path)
    found = maps.columns["role"]
    expected = heads.roles(run.model, run.params, [run.examples(N)])
    assert found.names.tolist() == expected["role"].names.tolist()
    for i, h in np.ndindex(2, 2):
        name = found.names[i, h]
        if name != heads.NO_CLEAR_ROLE:
            score = expected[heads.ROLES[name].score or name].mean[i, h]
            assert found.mean[i, h] == pytest.approx(score, abs=2e-3)


@pytest.mark.slow
def test_equal_texts_tell_induction_and_images_do_not():
    """Every query looks at the fourth key, which follows the same text."""
    query = np.ones((1, 8, 1, 4), np.float32)
    key = np.where(np.arange(8)[None, :, None, None] == 3, 20, 0) * query
    _, found = mh.attend(query, key, key)
    images = [np.zeros((8, 2, 2), np.uint8)]
    for options, expected in (({}, "induction"), ({"images": images}, "no_clear_role")):
        shown = maps.map_set(text_maps.TextMaps([found], "aaaaaaaa", **options))
        assert shown.columns["role"].names.tolist() == [[expected]]
    assert np.isnan(shown.columns["role"].mean).all()


@pytest.mark.slow
def test_heads_that_attend_to_special_tokens_after_the_first_have_a_role():
    """All queries look at the last key: [SEP], or a word."""
    query = np.ones((1, 5, 1, 4), np.float32)
    key = np.where(np.arange(5)[None, :, None, None] == 4, 20, 0) * query
    _, found = mh.attend(query, key, key)
    for last, expected in (("[SEP]", "separator"), ("down", "no_clear_role")):
        tokens = ["[CLS]", "the", "cat", "sat", last]
        columns = maps.map_set(text_maps.TextMaps([found], tokens)).columns
        assert columns["role"].names.tolist() == [[expected]]
        assert ("separator" in columns) == (expected == "separator")


@pytest.mark.slow
def test_numbers_are_those_that_were_computed(trained):
    shown = dossiers.of_folder(trained / "attention")
    (maps,) = shown.sets
    assert maps.missing[0][0] == "importance"
    assert f"--workdir={trained}" in maps.missing[0][1]
    saved = MapSet.load(trained / "attention" / "maps.npz").columns["entropy"]
    entropy = maps.columns["entropy"]
    np.testing.assert_array_equal(entropy.mean, saved.mean)
    np.testing.assert_array_equal(entropy.standard_error, saved.standard_error)
    assert (saved.standard_error > 0).all()
    alone = Subject.of_folder(trained).importance("ablation", 1).mean
    np.testing.assert_allclose(maps.columns["importance"].mean, alone, rtol=1e-3)

    numbers = {
        "ablation": records.Column(
            np.array([[1.0, 2], [3, 4]]),
            "nats",
            heads.MEASURES["ablation"].label.format(metric="loss"),
            np.eye(2),
        )
    }
    layers = tuple(records.Layer.of_model("", i, i, (0, 1)) for i in (0, 1))
    result = records.Heads("", layers, numbers, 30, file_name="head_importance")
    written = folders.Folder(trained).heads
    result.save(written)
    (maps,) = dossiers.of_folder(trained / "attention").sets
    assert maps.missing == ()
    np.testing.assert_array_equal(maps.columns["ablation"].mean, [[1, 2], [3, 4]])
    # Nor is a number that says that it is something else one of these measures.
    renamed = {"ablation": numbers["ablation"]._replace(label="/etc/passwd")}
    dataclasses.replace(result, columns=renamed).save(written)
    (maps,) = dossiers.of_folder(trained / "attention").sets
    assert "ablation" not in maps.columns and maps.missing
    # Of another step it says nothing of these maps.
    dataclasses.replace(result, step=20).save(written)
    (maps,) = dossiers.of_folder(trained / "attention").sets
    assert "ablation" not in maps.columns and maps.missing


@pytest.mark.slow
def test_files_of_earlier_versions_are_left_out(trained, monkeypatch, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    maps = MapSet.load(tmp_path / "attention" / "maps.npz")
    with monkeypatch.context() as earlier:
        earlier.setattr(archive, "FORMAT", 2)
        archive.save(tmp_path / "heads" / "head_importance.npz", maps.heads)
    (shown,) = dossiers.of_folder(tmp_path / "attention").sets
    assert shown.missing[0][0] == "importance"


def test_numbers_go_by_the_names_of_layers_and_heads():
    number = records.Column(
        np.array([[1.0, 2, 3], [4, 5, np.nan]]),
        "nats",
        "what",
        ranks=np.arange(12).reshape(2, 3, 2),
    )
    layers = Layer("", ("0", "2", "5"), index=1), Layer("", ("1", "4"), index=3)
    measured = MapSet("", layers, (), columns={"a": number})
    layers = Layer("", ("4",), index=3), Layer("", ("5", "1", "0"), index=1)
    found = measured.heads.at(layers)["a"]
    np.testing.assert_array_equal(found.mean, [[5, np.nan, np.nan], [3, np.nan, 1]])
    assert found.ranks[1, 0].tolist() == [4, 5]
    assert (found.unit, found.label, found.standard_error) == ("nats", "what", None)


def test_the_command_in_a_message_works_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "python -m mha_haiku dump_attention --workdir=runs/a"
    for folder in ("runs/a", tmp_path / "runs" / "a"):
        assert dossiers.command("dump_attention", folder) == command

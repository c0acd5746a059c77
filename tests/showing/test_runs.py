"""Runs show themselves: as a line, as a table, and their maps as a page."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import tasks
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training import train_step
from mha_haiku.training.runs import configuration, folders

from .test_showing import page_of, weights_of


@pytest.fixture(scope="module")
def folder(make_config, tmp_path_factory):
    """A run of two layers, of which the second lost its first head."""
    config = make_config(model__attention__kept_heads=[[0, 1], [1]])
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task)
    key = train_step.stream(0, "init")
    example = tasks.batch(task, key, (), jnp.arange(1))
    params = jax.tree.map(lambda x: 2 * x, jax.jit(model.init)(key, example.inputs))
    path = tmp_path_factory.mktemp("run") / "small"
    return folders.write_run(path, config, params, task)


@pytest.fixture(scope="module")
def run(folder):
    return mh.runs.load(folder)


@pytest.mark.slow
def test_a_run_says_task_step_model_and_size(run):
    count = sum(x.size for x in jax.tree.leaves(run.params))
    assert repr(run) == (
        "Run(reverse, step 0, Model(encoder: 2 layers of 2/1 heads, model size 8, "
        f"learned positions), {count:,} parameters)"
    )
    text = run._repr_html_()
    assert "0 of 30" in text and f"{count:,}" in text
    assert len(text) < 20_000 and "<script" not in text


@pytest.mark.slow
def test_a_run_is_shown_on_its_held_out_examples(run):
    page = page_of(mh.show(run))
    (maps,) = page["sets"]
    assert [layer["heads"] for layer in maps["layers"]] == [["0", "1"], ["1"]]
    count = run.config.attention.examples
    example = run.examples(count)
    assert len(maps["examples"]) == count
    weights = np.asarray(mh.Subject.of_run(run, "run").maps(example)[1].weights())[1]
    shown = weights_of(page, layer=1, example=1).reshape(weights.shape)
    np.testing.assert_allclose(np.nan_to_num(shown), weights, atol=1e-4)
    tokens = run.task.labels(jax.tree.map(lambda x: x[1], example))
    assert maps["examples"][1]["queries"]["tokens"] == tokens
    position, _, answers, target = maps["examples"][1]["answers"]["shown"][2]
    assert target == run.task.class_label(int(example.targets[1, position]))
    output = run.model.apply(run.params, None, example.inputs, is_training=False)
    shares = np.sort(jax.nn.softmax(output.logits[1, position]))[::-1]
    np.testing.assert_allclose([x for _, x in answers], shares[:3], atol=1e-5)


@pytest.mark.slow
def test_a_folder_shows_what_lies_in_it(folder, run):
    unsaved = page_of(mh.show(folder))
    assert unsaved["sets"] == page_of(mh.show(run))["sets"]
    dumps.dump(Subject.of_folder(folder))
    saved = page_of(mh.show(str(folder)))
    assert saved["title"] == Subject.of_folder(folder).title
    (maps,) = saved["sets"]
    assert maps["numbers"][0]["values"][1][0] is not None
    codes, wanted = weights_of(saved, layer=1), weights_of(unsaved, layer=1)
    np.testing.assert_allclose(codes, wanted, atol=2e-3)
    path = folder / "attention" / "maps.npz"
    maps = MapSet.load(path)
    (own,) = page_of(mh.show(maps))["sets"]
    (whole,) = page_of(mh.show(folder))["sets"]
    for name in ("layers", "examples", "numbers", "roles"):
        assert own[name] == whole[name]
    assert mh.plot(maps, layer=1, heads=1).axes[0].get_title() == "head 1"
    assert repr(maps).startswith("MapSet('small (reverse), step 0': 2 layers of")
    assert page_of(maps.show())["sets"] == page_of(mh.show(maps))["sets"]
    assert "<iframe" in maps._repr_html_()
    panels = mh.plot(path, layer=1).axes
    assert panels[0].get_title() == "head 1"
    drawn = panels[0].images[0].get_array().ravel()
    np.testing.assert_allclose(drawn, wanted[0], atol=2e-3)


@pytest.mark.slow
def test_saved_maps_of_two_folders_are_compared(folder, tmp_path, monkeypatch):
    dumps.dump(Subject.of_folder(folder))
    maps = MapSet.load(folder / "attention" / "maps.npz")
    second = shutil.copytree(folder, tmp_path / "second")
    monkeypatch.setattr(folders, "load_run", None)  # no model is run
    for compare, name in ((second, f"{maps.name} (2)"), ({"again": second}, "again")):
        view = mh.show(folder, compare=compare)
        first, other = page_of(view)["sets"]
        assert other["name"] == name and view.title == f"{maps.name} and {maps.name}"
        assert len(first["examples"]) == len(maps.examples)
        shown = weights_of(page_of(view), layer=1, of=1)
        saved = maps.examples[0].weights[1].reshape(shown.shape)
        np.testing.assert_allclose(np.nan_to_num(shown), saved, atol=1e-4)


@pytest.mark.slow
def test_two_runs_are_compared(run):
    page = page_of(mh.show(run, compare={"again": run}))
    assert [each["name"] for each in page["sets"]] == ["reverse, step 0", "again"]
    same = page_of(mh.show(run, compare=run))
    names = [each["name"] for each in same["sets"]]
    assert names == ["reverse, step 0 (1)", "reverse, step 0 (2)"]


@pytest.mark.slow
def test_what_runs_do_not_take_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="tokens must be None for a run"):
        mh.show(run, tokens="abc")
    with pytest.raises(TypeError, match="compare must be a run or its folder, got int"):
        mh.show(run, compare=3)
    with pytest.raises(ValueError, match="heads must be one of 0, 1; got '2'"):
        mh.plot(run, heads=2)
    with pytest.raises(ValueError, match="There is no run in"):
        mh.show(tmp_path)

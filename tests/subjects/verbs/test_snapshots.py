"""Maps at some steps of a training: which, of what, and after an interruption."""

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects import dossiers, observers
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training.runs import folders

DEVICES = jax.local_devices()[:1]


def test_steps_are_reports_spread_in_their_logarithm():
    assert observers.spread(400, 50, 5) == (50, 100, 150, 250, 400)
    assert observers.spread(1000, 1, 4) == (1, 10, 100, 1000)
    assert observers.spread(30, 7, 3) == (7, 14, 30)
    assert observers.spread(30, 10, 8) == (10, 20, 30)  # no more reports
    assert observers.spread(30, 10, 1) == (30,)
    assert observers.spread(30, 10, 0) == ()
    for count in range(1, 40):
        steps = observers.spread(1999, 50, count)
        assert len(steps) == count == len(set(steps))
        assert steps == tuple(sorted(steps)) and steps[-1] == 1999


@pytest.fixture(scope="module")
def watched(make_config, tmp_path_factory):
    config = make_config(attention__snapshots=3)
    whole = tmp_path_factory.mktemp("runs") / "whole"
    watching = [observers.Snapshots(config.training, config.attention.snapshots)]
    runs.train(config, whole, observers=watching, devices=DEVICES)
    return config, folders.Folder(whole)


def _saved(folder, step):
    return MapSet.load(folder.snapshots / str(step) / "maps.npz")


def _assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_snapshots_are_of_the_parameters_at_their_step(watched, tmp_path):
    config, folder = watched
    assert dossiers.steps_of(folder.snapshots) == [5, 10, 30]
    subject = Subject.of_folder(folder.root, 10)
    path = dumps.dump(subject, out=tmp_path, means=False, devices=DEVICES)
    snapshot, maps = _saved(folder, 10), MapSet.load(path)
    assert snapshot.step == maps.step == 10 and snapshot.mean is None
    _assert_same(snapshot.examples, maps.examples)


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_snapshots(watched, tmp_path):
    config, whole = watched

    def stop(step, params):
        if step == 25:
            raise RuntimeError("killed")

    # Two more than the checkpoint of step 20 knows of.
    config = config.replace(attention=dict(snapshots=6))
    folder = folders.Folder(tmp_path)
    watching = [
        observers.Snapshots(config.training, config.attention.snapshots),
        runs.Observer(5, stop),
    ]
    with pytest.raises(RuntimeError):
        runs.train(config, tmp_path, observers=watching, devices=DEVICES)
    assert dossiers.steps_of(folder.snapshots) == [5, 10, 15, 20, 25]
    before = (folder.snapshots / "20" / "maps.npz").stat().st_mtime_ns

    runs.train(
        config,
        tmp_path,
        observers=[observers.Snapshots(config.training, config.attention.snapshots)],
        devices=DEVICES,
    )
    assert dossiers.steps_of(folder.snapshots) == [5, 10, 15, 20, 25, 30]
    assert (folder.snapshots / "20" / "maps.npz").stat().st_mtime_ns == before
    for step in (10, 30):
        expected = vars(_saved(whole, step)) | {"name": None}
        _assert_same(vars(_saved(folder, step)) | {"name": None}, expected)


@pytest.mark.slow
def test_snapshots_are_the_steps_of_a_dossier(watched):
    _, folder = watched
    dumps.dump(Subject.of_folder(folder.root), devices=DEVICES)
    shown = dossiers.of_folder(folder.attention)
    assert [each.step for each in shown.sets] == [5, 10, 30]
    assert shown.sets[-1].columns and not shown.sets[0].heads.numbers

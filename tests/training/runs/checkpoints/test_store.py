"""Which checkpoints are kept, and that what comes back is what was saved."""

import jax
import numpy as np
import optax
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import checkpoints


def test_newest_two_and_best_are_kept(tmp_path, make_tree):
    losses = {1: 0.5, 2: 0.1, 3: 0.2, 4: None, 5: 0.3, 6: None}
    with checkpoints.Checkpoints(tmp_path) as stored:
        for step, loss in losses.items():
            stored.save(step, make_tree(step), held_out_loss=loss)
    with checkpoints.Checkpoints(tmp_path) as stored:
        assert stored.steps() == [2, 5, 6]
        assert stored.latest() == 6


def test_tree_comes_back_with_its_structure_and_bits(tmp_path, make_tree):
    with checkpoints.Checkpoints(tmp_path) as stored:
        for step in (4, 9):
            stored.save(step, make_tree(step))
    abstract = jax.eval_shape(lambda tree: tree, make_tree())
    with checkpoints.Checkpoints(tmp_path, read_only=True) as stored:
        for step, wanted in ((4, 4), (9, 9), (None, 9)):
            found = stored.restore(abstract, step)
            assert jax.tree.structure(found) == jax.tree.structure(make_tree())
            assert isinstance(found["state"][0], optax.ScaleByAdamState)
            jax.tree.map(np.testing.assert_array_equal, found, make_tree(wanted))


def test_window_comes_back_to_the_bit(tmp_path, make_tree):
    numbers = {"steps": 3, "loss": 0.1 + 0.2}
    with checkpoints.Checkpoints(tmp_path) as stored:
        assert stored.window() == {}
        stored.save(4, make_tree(4), window=numbers)
        assert stored.window() == numbers
        stored.save(9, make_tree(9))
        assert stored.window() == {}


def test_step_that_is_there_stays_as_it_is(tmp_path, make_tree):
    with checkpoints.Checkpoints(tmp_path) as stored:
        stored.save(1, make_tree(1))
        stored.save(1, make_tree(2))
        assert stored.restore(make_tree())["step"] == 1


def test_missing_step_names_those_there_are(tmp_path, make_tree):
    with checkpoints.Checkpoints(tmp_path) as stored:
        with pytest.raises(ConfigError, match="There are no checkpoints in"):
            stored.restore(make_tree())
        stored.save(10, make_tree())
        stored.save(20, make_tree())
        with pytest.raises(ConfigError, match="no checkpoint of step 15 .*: 10, 20"):
            stored.restore(make_tree(), 15)


def test_missing_folder_is_refused_for_reading_only(tmp_path):
    folder = tmp_path / "none"
    with pytest.raises(ConfigError, match="There are no checkpoints in .*none"):
        checkpoints.Checkpoints(folder, read_only=True)
    assert not folder.exists()
    with checkpoints.Checkpoints(folder) as stored:
        assert stored.latest() is None


def test_tree_of_another_model_is_refused(tmp_path, make_tree):
    wider, more = make_tree(), make_tree()
    wider["params"]["w"] = np.zeros((2, 4), np.float32)
    more["params"]["c"] = np.zeros(3, np.float32)
    with checkpoints.Checkpoints(tmp_path) as stored:
        stored.save(1, make_tree())
        with pytest.raises(ConfigError, match=r"\(2, 3\) at .*w.*\(2, 4\)"):
            stored.restore(wider)
        with pytest.raises(ConfigError, match="does not hold the parameters"):
            stored.restore(more)


def test_part_of_the_fields_is_read_alone(tmp_path, make_tree):
    tree = make_tree(3)
    with checkpoints.Checkpoints(tmp_path) as stored:
        stored.save(3, tree)
        assert stored.fields() == {"['step']", "['params']", "['state']"}
        part = {name: tree[name] for name in ("step", "params")}
        found = stored.restore(part, partly=True)
        jax.tree.map(np.testing.assert_array_equal, found, part)
        with pytest.raises(ConfigError, match="also has .*state"):
            stored.restore(part)
        del part["params"]["b"]  # a field is read as a whole
        with pytest.raises(ConfigError, match="also has .*params.*b"):
            stored.restore(part, partly=True)

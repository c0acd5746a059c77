import numpy as np

from mha_haiku.training.tasks import text_tasks
from tests.training.tasks import hamlet


def make(tmp_path):
    return hamlet.task_of(text_tasks.LanguageModel, tmp_path, 5)


def test_examples_are_all_windows_of_their_part_and_nothing_else(tmp_path, sampled):
    task = make(tmp_path)
    for data in (task.train_data, task.held_out_data):
        batch = sampled(task, data=data)
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        whole = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
        assert {tuple(window) for window in whole.tolist()} == hamlet.windows(data, 6)
        np.testing.assert_array_equal(batch.weights, np.ones((4096, 5)))


def test_worked_example_obeys_the_rule(tmp_path):
    task = make(tmp_path)
    rows = [row.split() for row in type(task).__doc__.splitlines()]
    (inputs,) = (row[1:] for row in rows if row[:1] == ["inputs"])
    (targets,) = (row[1:] for row in rows if row[:1] == ["targets"])
    assert inputs == [c.replace(" ", "␣") for c in hamlet.TEXT[:5]]
    assert targets == [c.replace(" ", "␣") for c in hamlet.TEXT[1:6]]
    assert task.encode(hamlet.TEXT[:5]).tolist() == task.train_data[:5].tolist()

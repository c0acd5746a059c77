"""Statistics of heads over held-out examples, against whole matrices in NumPy."""

import csv
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, records, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import statistics
from mha_haiku.records import Layer
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import per_head
from mha_haiku.training import evaluation
from mha_haiku.training.runs import folders
from tests import oracles
from tests.tiny_runs import write_untrained

N, T, L, H = 7, 6, 2, 2
NO_MEANS = ("received", "num_queries")


@dataclasses.dataclass(frozen=True)
class Padded(tasks.Task):
    """Examples of any length, nothing included."""

    name: ClassVar[str] = "padded"
    sequence_length: int = T
    num_tokens: int | None = 5
    num_classes: int = 5

    def example(self, key, data):
        words = jax.random.bits(key, (T + 1,))
        inputs = (words[1:] % 5).astype(jnp.int32)
        length = (words[0] % (T + 1)).astype(jnp.int32)
        return tasks.Example(inputs, inputs, jnp.ones(T), length)


@dataclasses.dataclass(frozen=True)
class Features(Padded):
    """The same with features in place of tokens."""

    name: ClassVar[str] = "features"
    num_tokens: None = None
    feature_size: int = 3

    def example(self, key, data):
        example = super().example(key, data)
        return example._replace(inputs=jax.random.normal(key, (T, 3)))


@pytest.fixture(scope="module")
def untrained(make_config, tmp_path_factory):
    """The folder of a run that has a checkpoint of step 0."""
    root = tmp_path_factory.mktemp("runs") / "run"
    return write_untrained(root, make_config(), step=0)


def _oracle(loaded, count):
    """Returns the statistics of the first examples, for each layer `[N, H]`."""

    @jax.jit
    def observe(params):
        example = evaluation.held_out_batch(
            loaded.task, loaded.config.seed, (), jnp.arange(count)
        )
        output = loaded.model.apply(
            params, None, example.inputs, lengths=example.lengths, is_training=False
        )
        return example, [(x.weights(), x.scores()) for x in output.maps]

    example, maps = observe(loaded.params)
    tokens = None if loaded.task.num_tokens is None else np.asarray(example.inputs)
    found = []
    for layer in maps:
        unseen = np.zeros((count, 1, T), bool)
        if example.lengths is not None:
            unseen |= np.arange(T) >= np.asarray(example.lengths)[:, None, None]
        weights, scores = (np.asarray(x, np.float64) for x in layer)
        given = {"tokens": tokens, "unseen": unseen, "scores": scores}
        found.append(oracles.map_statistics(weights, **given))
    return found, example


@pytest.mark.slow
def test_the_csv_holds_what_whole_matrices_say(untrained, tmp_path):
    table = per_head.statistics(Subject.of_folder(untrained), examples=N)
    path, picture, _ = table.save(tmp_path / "new" / "folder")
    assert picture.name == "head_statistics.png"
    assert path == tmp_path / "new" / "folder" / "head_statistics.csv"
    expected, _ = _oracle(folders.load_run(untrained), N)
    names = [name for name in expected[0] if name not in NO_MEANS]
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    columns = {f"{name}{end}" for name in names for end in ("", "_standard_error")}
    assert set(lines[0]) == {"layer", "head", "role"} | columns
    run = folders.load_run(untrained)
    roles = heads.roles(run.model, run.params, [run.examples(N)])
    assert [line["role"] for line in lines] == roles["role"].names.ravel().tolist()
    places = [(int(line["layer"]), int(line["head"])) for line in lines]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for line, (i, j) in zip(lines, places, strict=True):
        for name in names:
            values = expected[i][name][:, j]
            error = math.sqrt(((values - values.mean()) ** 2).sum() / (N - 1) / N)
            np.testing.assert_allclose(float(line[name]), values.mean(), 1e-4, 1e-5)
            found = float(line[f"{name}_standard_error"])
            np.testing.assert_allclose(found, error, 1e-3, 1e-5)
    title = "run (reverse), step 0: means over 7 held-out examples"
    numbers_of_layers = [layer.number for layer in table.layers]
    assert (table.title, numbers_of_layers) == (title, [0, 1])
    for name, each in table.numbers.items():
        assert each.unit and each.label, name


@pytest.mark.slow
def test_padding_and_empty_examples_do_not_count(of_task):
    loaded = of_task(Padded())
    table = per_head.statistics(Subject.of_folder("anywhere"), examples=40)
    expected, example = _oracle(loaded, 40)
    lengths = np.asarray(example.lengths)
    assert {0, T} <= set(lengths.tolist())
    for name, each in table.numbers.items():
        for i in range(L):
            values = expected[i][name][lengths > 0]
            error = values.std(0, ddof=1) / np.sqrt(len(values))
            np.testing.assert_allclose(each.mean[i], values.mean(0), 1e-4, 1e-5)
            found = each.standard_error[i]
            np.testing.assert_allclose(found, error, 1e-3, 1e-5, err_msg=name)


def test_layers_may_have_different_numbers_of_heads():
    of_layers = [
        {"entropy": np.array([[1.0, 2.0, 3.0], [3.0, 2.0, np.nan]])},
        {"entropy": np.array([[5.0], [6.0]])},
    ]
    numbers = statistics.summary(of_layers, [range(3), range(1)])
    mean, error, nothing = (
        numbers["entropy"].mean,
        numbers["entropy"].standard_error,
        np.nan,
    )
    np.testing.assert_array_equal(mean, [[2, 2, 3], [5.5, nothing, nothing]])
    np.testing.assert_allclose(error, [[1, 0, nothing], [0.5, nothing, nothing]])
    layers = tuple(Layer.of_model("", i, i, range(3)) for i in (0, 4))
    table = records.Heads("title", layers, numbers)
    lines = table.table().csv().splitlines()
    assert lines == [
        "layer,head,entropy,entropy_standard_error",
        "0,0,2,1",
        "0,1,2,0",
        "0,2,3,",
        "4,0,5.5,0.5",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples must be an integer from 1 to .*, got 0"),
        ({"examples": 2.5}, "examples must be an integer from 1 to .*, got 2.5"),
        ({"examples": 10**20}, "examples must be an integer from 1 to .*, got 1000"),
        ({"layers": [0, 2]}, "layers must be an integer from 0 to 1, got 2"),
        ({"layers": []}, "layers must not be empty"),
    ],
)
def test_what_is_not_there_is_refused(untrained, options, message):
    with pytest.raises(ConfigError, match=message):
        per_head.statistics(Subject.of_folder(untrained), **options)


@pytest.mark.slow
def test_a_model_that_attends_to_nothing_is_refused(of_task, monkeypatch):
    loaded = of_task(Features())
    params = jax.tree.map(lambda x: x * np.nan, loaded.params)
    loaded = loaded._replace(params=params)
    monkeypatch.setattr(folders, "load_run", lambda *_, **__: loaded)
    with pytest.raises(
        ConfigError, match="In 2 held-out examples every query is fully masked"
    ):
        per_head.statistics(Subject.of_folder("anywhere"), examples=2)

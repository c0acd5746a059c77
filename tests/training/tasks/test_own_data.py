"""Tasks of arrays, text files and pairs that are given in Python."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration, folders

TOKENS = np.random.default_rng(0).integers(0, 7, (200, 9))
FEATURES = np.random.default_rng(1).normal(size=(200, 9, 3))
SUMS = [(f"{a} plus {b}", str(a + b)) for a in range(12) for b in range(12)]
PARITY = [(source, int(total) % 2) for source, total in SUMS]


def _batch(task, data, count=16):
    return tasks.batch(task, jax.random.key(0), data, jnp.arange(count))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "targets", "name"),
    [
        (TOKENS, TOKENS[:, ::-1], "arrays"),
        (FEATURES, TOKENS, "arrays"),
        (TOKENS, TOKENS[:, 0], "labels"),
        (FEATURES, TOKENS[:, 0], "labels"),
        (TOKENS, None, "next_tokens"),
    ],
)
def test_examples_are_rows_of_the_arrays(inputs, targets, name):
    task = tasks.from_arrays(inputs, targets)
    tasks.check(name, task)
    assert task.name == name
    assert task.continues == (targets is None)
    if targets is None:
        inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    rows = {x.tobytes(): y for x, y in zip(inputs.astype("f4"), targets, strict=True)}
    for data in (task.train_data, task.held_out_data):
        batch = _batch(task, data)
        for x, y, weight in zip(*batch[:3], strict=True):
            found = rows[np.asarray(x, np.float32).tobytes()]
            np.testing.assert_array_equal(found, y)
            assert (np.asarray(weight) == 1).all()


def test_no_input_is_in_both_parts_and_more_data_moves_none():
    twice = np.concatenate([TOKENS, TOKENS])
    task = tasks.from_arrays(twice, twice, held_out_fraction=0.3)
    parts = [
        {row.tobytes() for row in part.inputs}
        for part in (task.train_data, task.held_out_data)
    ]
    assert not parts[0] & parts[1]
    assert 0.2 < len(parts[1]) / 200 < 0.4
    fewer = tasks.from_arrays(TOKENS[:100], TOKENS[:100], held_out_fraction=0.3)
    assert {row.tobytes() for row in fewer.held_out_data.inputs} <= parts[1]


def test_a_config_alone_cannot_give_data():
    task = tasks.from_arrays(TOKENS, TOKENS)
    config = runs.default_config(task)
    assert config.task.name == "arrays"
    assert config.data.sha256 == task.sha256
    assert "arrays" not in tasks.names()
    with pytest.raises(ConfigError, match="data that is given in Python"):
        runs.train(config, "no_folder")


@pytest.mark.slow
def test_a_run_keeps_the_data_and_notices_other_data(tmp_path):
    task = tasks.from_arrays(TOKENS, TOKENS)
    folder = tmp_path / "run"
    config = runs.default_config(task).replace(
        training=dict(steps=2, batch_size=8, evaluation_examples=8)
    )
    runs.train(config, folder, task=task)
    run = runs.load_run(folder)
    assert run.task == task
    np.testing.assert_array_equal(
        run.task.held_out_data.inputs, task.held_out_data.inputs
    )
    config = config.replace(training=dict(steps=4))
    other = tasks.from_arrays(TOKENS[::-1], TOKENS)
    with pytest.raises(ConfigError, match=re.escape("config.data.sha256")):
        runs.train(config, folder, task=other)
    runs.train(config, folder, task=other, override_config=True)
    assert runs.load_run(folder).task == other
    (folder / "data.npz").write_bytes((folder / "data.npz").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data.npz is not a readable .npz"):
        runs.load_run(folder)


@pytest.mark.parametrize(
    ("name", "head", "line"),
    [
        ("a.csv", "text,{}", '"{}",{}'),
        ("a.tsv", "text\t{}", "{}\t{}"),
        ("a.jsonl", "", '{{"text": "{}", "SECOND": "{}"}}'),
    ],
)
@pytest.mark.parametrize("second", ["label", "target"])
def test_a_table_makes_the_task_of_its_columns(tmp_path, name, head, line, second):
    lines = [line.format(*pair).replace("SECOND", second) for pair in SUMS]
    content = "\n".join([head.format(second)] * bool(head) + lines)
    (tmp_path / name).write_text(content)
    task = tasks.from_file(tmp_path / name, held_out_fraction=0.2)
    wanted = {"label": "labeled_texts", "target": "text_pairs"}
    assert task.name == wanted[second]
    labels = second == "label"
    other = tasks.from_examples(SUMS, labels=labels, held_out_fraction=0.2)
    mine, its = (jax.tree.leaves(x.held_out_data)[1:] for x in (task, other))
    assert len(mine[0]) == len(its[0]) > 10
    if not labels:
        jax.tree.map(np.testing.assert_array_equal, mine, its)


def test_any_other_file_is_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("text,label\na,b\n" * 40)
    task = tasks.from_file(tmp_path / "a.txt", sequence_length=5)
    assert task == tasks.from_text(tmp_path / "a.txt", sequence_length=5)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        tasks.from_file("nowhere.csv")


def test_what_is_behind_the_length_does_not_count():
    lengths = np.arange(200) % 9 + 1
    rows = tasks.from_arrays(TOKENS, TOKENS, lengths=lengths).train_data
    np.testing.assert_array_equal(
        rows.weights, np.arange(9) < np.asarray(rows.lengths)[:, None]
    )
    rows = tasks.from_arrays(TOKENS, lengths=lengths).train_data
    # A text of one token has nothing to predict.
    originals = {x.tobytes(): y for x, y in zip(TOKENS[:, :-1], lengths, strict=True)}
    expected = [originals[x.astype(TOKENS.dtype).tobytes()] - 1 for x in rows.inputs]
    np.testing.assert_array_equal(rows.weights.sum(-1), expected)
    assert (rows.lengths == np.maximum(expected, 1)).all()


@pytest.mark.parametrize("part", ["train_data", "held_out_data"])
def test_both_parts_have_targets_that_count(part):
    rows = getattr(tasks.from_arrays(TOKENS, TOKENS), part).inputs
    of_part = {row.tobytes() for row in rows}
    is_there = [row.tobytes() in of_part for row in TOKENS.astype("i4")]
    weights = np.where(is_there, 0.0, 1.0)[:, None] * np.ones(9)
    with pytest.raises(ValueError, match="weights .* must leave targets that count"):
        tasks.from_arrays(TOKENS, TOKENS, weights=weights)
    weights[is_there.index(True)] = 1
    tasks.from_arrays(TOKENS, TOKENS, weights=weights)


def test_the_baseline_is_that_of_the_frequencies():
    targets = (np.arange(200) % 4 == 0).astype(int)
    task = tasks.from_arrays(TOKENS, targets)
    held_out, train = task.held_out_data.targets, task.train_data.targets
    assert task.baseline["accuracy"] == pytest.approx(np.mean(held_out == 0))
    share = (np.bincount(train) + 1) / (len(train) + 2)
    expected = -np.log(share)[held_out].mean()
    assert task.baseline["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": TOKENS[0]}, r"inputs must be .*got int64 of shape \(9,\)"),
        ({"inputs": TOKENS * 1.5}, r"got float64 of shape \(200, 9\)"),
        ({"inputs": TOKENS - 1}, "inputs must be from 0 .* from -1 to 5"),
        ({"inputs": FEATURES}, "without targets inputs must be"),
        ({"inputs": FEATURES * np.inf, "targets": TOKENS}, "with 5,400 that are not"),
        ({"inputs": FEATURES * 1e60, "targets": TOKENS}, "inputs must be finite in"),
        ({"targets": TOKENS[:, :5]}, r"shape \(200, 9\), got int64 of shape \(200, 5"),
        ({"targets": TOKENS / 2}, "targets must be integers"),
        ({"targets": TOKENS, "weights": np.ones(9)}, r"\(200, 9\), got float64"),
        ({"targets": TOKENS, "weights": -1.0 * TOKENS}, "weights must be 0 or more"),
        ({"targets": TOKENS, "weights": TOKENS * 0}, "which leaves 0 to train on"),
        ({"targets": TOKENS, "lengths": np.zeros(200, int)}, "lengths .* from 1 to 9"),
        ({"targets": TOKENS, "num_tokens": 3}, "num_tokens must be .* at least 7"),
        ({"targets": TOKENS, "num_classes": 3}, "num_classes must be .* at least 7"),
        ({"targets": TOKENS, "held_out_fraction": 0.0}, "200 to train .* 0 held out"),
    ],
)
def test_what_does_not_fit_is_told_by_its_shape(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        tasks.from_arrays(**{"inputs": TOKENS} | changes)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ("text", {}, "must be pairs .* got 't' as number 0"),
        ([("a", 1), ("b",)], {}, r"got \('b',\) as number 1"),
        ([("a", 1), ("b", 2.5)], {}, r"got \('b', 2.5\) as number 1"),
        ([("a", 1), ("b", 1)], {}, r"at least 2 labels, got \['1'\]"),
        ([("a", 1), ("b", 2)], {"labels": False}, "labels must be True"),
        (SUMS, {"labels": False, "vocabulary_size": 2**15}, "must be .* to 16384"),
    ],
)
def test_what_is_no_pair_is_told_by_its_number(examples, options, message):
    with pytest.raises(ValueError, match=message):
        tasks.from_examples(examples, **options)


def test_a_label_is_told_from_a_text_to_write():
    assert tasks.from_examples(SUMS).name == "labeled_texts"  # 23 sums of 144 pairs
    task = tasks.from_examples(PARITY)
    tasks.check("labeled_texts", task)
    assert [task.class_label(c) for c in range(2)] == ["0", "1"]
    batch = _batch(task, task.train_data)
    for tokens, target, n in zip(
        batch.inputs, batch.targets, batch.lengths, strict=True
    ):
        text = "".join(task.token_label(int(x)) for x in tokens[1:n])
        assert (text, int(task.class_label(int(target)))) in PARITY
    task = tasks.from_examples(SUMS, labels=False)
    assert task.name == "text_pairs"
    tasks.check("text_pairs", task)
    batch = _batch(task, task.train_data)
    for i in range(16):
        example = jax.tree.map(lambda x, i=i: x[i], batch)
        assert (task.question(example), task.answer(example.targets)) in SUMS


def _pairs(labels, tokenizer):
    lone = "\ud800" * (tokenizer == "characters")  # no text of other tokenizers
    pairs = [(f"{text} 🙂\n{lone}", label) for text, label in SUMS]
    return lambda: tasks.from_examples(pairs, labels=labels, tokenizer=tokenizer)


def _floats(dtype):
    inputs, weights = jnp.asarray(FEATURES, dtype), jnp.ones(TOKENS.shape, dtype)
    return lambda: tasks.from_arrays(inputs, jnp.asarray(TOKENS), weights=weights)


@pytest.mark.parametrize(
    "made",
    [
        *(_pairs(x, y) for x in (True, False) for y in ("characters", "bpe")),
        *map(_floats, ("bfloat16", "float16", "float8_e4m3fn")),
    ],
)
def test_a_task_is_made_again_of_what_a_run_keeps(made, tmp_path):
    pytest.importorskip("tokenizers")
    task = made()
    config = runs.default_config(task)
    folder = folders.Folder(tmp_path)
    folders.write_config(folder, config, jax.local_devices()[:1], task)
    kept = tasks.Kept(**folders.read_kept(folder))
    again = configuration.make_task(config, kept)
    assert again == task and again.keep().tokenizer == task.keep().tokenizer
    for part in ("train_data", "held_out_data"):
        rows, others = (getattr(x, part) for x in (task, again))
        jax.tree.map(np.testing.assert_array_equal, rows, others)
        assert [x.dtype for x in jax.tree.leaves(rows)] == [
            x.dtype for x in jax.tree.leaves(others)
        ]
    classes = range(task.num_classes)
    assert [*map(again.class_label, classes)] == [*map(task.class_label, classes)]
    with pytest.raises(ConfigError, match="given in Python"):
        configuration.make_task(config)

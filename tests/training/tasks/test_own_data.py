"""Tasks of arrays, text files and pairs that are given in Python."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration, folders
from tests import docstring

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


@pytest.mark.parametrize("labels", [True, False])
def test_longer_texts_move_none_of_the_others(labels):
    def held_out(pairs):
        task = tasks.from_examples(pairs, labels=labels, held_out_fraction=0.3)
        data = task.held_out_data
        rows = data[0] if labels else data.sources
        lengths = data.lengths if labels else data.source_lengths
        return {
            "".join(task.token_label(int(x)) for x in row[:length])
            for row, length in zip(rows, lengths, strict=True)
        }

    longer = [("a text of other letters, and much longer", "0"), ("jump", "1")]
    before, after = held_out(SUMS), held_out(SUMS + longer)
    assert before == {x for x in after if "plus" in x}


@pytest.mark.slow
def test_what_is_behind_the_length_does_not_count():
    lengths = np.arange(200) % 9 + 1
    task = tasks.from_arrays(TOKENS, TOKENS, lengths=lengths)
    batch = _batch(task, task.train_data)
    expected = np.arange(9) < np.asarray(batch.lengths)[:, None]
    np.testing.assert_array_equal(batch.weights, expected)
    text = tasks.from_arrays(TOKENS, lengths=lengths)
    rows = text.train_data
    # A text of one token has nothing to predict.
    originals = {
        row.tobytes(): each
        for row, each in zip(TOKENS[:, :-1].astype("i4"), lengths, strict=True)
    }
    expected = [originals[row.tobytes()] - 1 for row in rows.inputs]
    np.testing.assert_array_equal(rows.weights.sum(-1), expected)
    assert (rows.lengths == np.maximum(expected, 1)).all()


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("without", ["train_data", "held_out_data"])
def test_both_parts_have_targets_that_count(labels, without):
    targets = TOKENS[:, 0] if labels else TOKENS
    part = getattr(tasks.from_arrays(TOKENS, targets), without)
    theirs = {row.tobytes() for row in part.inputs}
    is_there = np.array([row.tobytes() in theirs for row in TOKENS.astype("i4")])
    weights = np.where(is_there, 0.0, 1.0)
    weights = weights if labels else weights[:, None] * np.ones(9)
    counted = int(weights.sum())
    left = [0, counted] if without == "train_data" else [counted, 0]
    message = "which leaves {:,} to train on and {:,} held out".format(*left)
    with pytest.raises(ValueError, match=f"weights .* targets that count.*{message}"):
        tasks.from_arrays(TOKENS, targets, weights=weights)
    lengths = np.where(is_there, 1, 2)  # one next token, or none
    with pytest.raises(ValueError, match="lengths.* targets that count to both parts"):
        tasks.from_arrays(TOKENS, lengths=lengths)
    weights[np.flatnonzero(is_there)[0]] = 1
    tasks.from_arrays(TOKENS, targets, weights=weights)


def test_weights_that_float32_cannot_hold_are_refused():
    for weights in (np.full(TOKENS.shape, 1e-60), np.full(TOKENS.shape, 1e60)):
        with pytest.raises(ValueError, match="weights must be finite, 0 or more and"):
            tasks.from_arrays(TOKENS, TOKENS, weights=weights)
    with pytest.raises(ValueError, match="inputs must be finite"):
        tasks.from_arrays(FEATURES * 1e60, TOKENS)


def test_the_baseline_is_that_of_the_frequencies():
    targets = (np.arange(200) % 4 == 0).astype(int)
    task = tasks.from_arrays(TOKENS, targets)
    held_out, train = task.held_out_data.targets, task.train_data.targets
    assert task.baseline["accuracy"] == pytest.approx(np.mean(held_out == 0))
    share = (np.bincount(train) + 1) / (len(train) + 2)
    expected = -np.log(share)[held_out].mean()
    assert task.baseline["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": TOKENS[0]}, r"inputs must be .*got int64 of shape \(9,\)"),
        ({"inputs": TOKENS * 1.5}, r"got float64 of shape \(200, 9\)"),
        ({"inputs": TOKENS - 1}, "inputs must be from 0 .* from -1 to 5"),
        ({"inputs": FEATURES}, "without targets inputs must be"),
        ({"inputs": FEATURES * np.inf, "targets": TOKENS}, "with 5,400 that are not"),
        ({"targets": TOKENS[:, :5]}, r"here \(200, 9\), got int64 of shape \(200, 5\)"),
        ({"targets": TOKENS[:7, 0]}, r"here \(200,\), got int64 of shape \(7,\)"),
        ({"targets": TOKENS / 2}, "targets must be integers"),
        ({"targets": TOKENS, "weights": np.ones(9)}, r"\(200, 9\), got float64"),
        ({"targets": TOKENS, "weights": -1.0 * TOKENS}, "finite, 0 or more"),
        ({"targets": TOKENS, "lengths": np.zeros(200, int)}, "lengths .* from 1 to 9"),
        ({"targets": TOKENS, "num_tokens": 3}, "num_tokens must be above 6"),
        ({"targets": TOKENS, "num_classes": 3}, "num_classes must be above 6"),
        (
            {"targets": TOKENS, "held_out_fraction": 0.0},
            "200 to train .* 0 held out",
        ),
        ({"num_classes": 9}, "weights and num_classes None"),
        (
            {"inputs": [[1, 2], [1, 2, 3]]},
            r"inputs .* got \[\[1, 2\], \[1, 2, 3\]\]; pad .* in lengths=",
        ),
        ({"targets": [[1], [1, 2]]}, r"targets must have rows of equal length"),
        (
            {"targets": TOKENS, "weights": [[1], [1, 2]]},
            "weights must have rows of equal length",
        ),
        ({"lengths": [[1], [1, 2]]}, "lengths must have rows of equal length"),
    ],
)
def test_what_does_not_fit_is_told_by_its_shape(given, message):
    with pytest.raises(ValueError, match=message) as raised:
        tasks.from_arrays(**{"inputs": TOKENS} | given)
    assert len(str(raised.value)) < 250


@pytest.mark.slow
def test_a_label_is_told_from_a_text_to_write():
    assert tasks.from_examples(PARITY).name == "labeled_texts"
    assert tasks.from_examples(SUMS).name == "labeled_texts"  # 23 sums of 144 pairs
    task = tasks.from_examples(SUMS, labels=False)
    assert task.name == "text_pairs"
    tasks.check("text_pairs", task)
    batch = _batch(task, task.train_data)
    for i in range(16):
        example = jax.tree.map(lambda x, i=i: x[i], batch)
        assert (task.question(example), task.answer(example.targets)) in SUMS


@pytest.mark.slow
def test_labels_of_texts_keep_their_names():
    pairs = [(source, "odd" if odd else "even") for source, odd in PARITY]
    task = tasks.from_examples(pairs)
    tasks.check("labeled_texts", task)
    assert [task.class_label(c) for c in range(2)] == ["even", "odd"]
    batch = _batch(task, task.train_data)
    for tokens, target, length in zip(
        batch.inputs, batch.targets, batch.lengths, strict=True
    ):
        text = "".join(task.token_label(int(x)) for x in tokens[1:length])
        assert (text.replace("␣", " "), task.class_label(int(target))) in pairs
    np.testing.assert_array_equal(
        task.encode("1 plus 2")[:2], task.encode("11 plus 2")[:2]
    )
    with pytest.raises(ConfigError, match="at least 1 token"):
        task.encode("")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ("text", "must be pairs, got 'text'"),
        ([("a", 1)], "at least 2 pairs, got 1"),
        ([("a", 1), ("b",)], r"got \('b',\) as number 1"),
        ([("a", 1), ("b", 2.5)], "a text or an integer, got 2.5 in number 1"),
        ([("a", 1), ("b", 1)], "at least 2 labels, got only 1"),
    ],
)
def test_what_is_no_pair_is_told_by_its_number(examples, message):
    with pytest.raises(ValueError, match=message):
        tasks.from_examples(examples)


def test_more_tokens_than_rows_can_hold_are_refused():
    with pytest.raises(ValueError, match="vocabulary_size must be .* 16384"):
        tasks.from_examples(SUMS, tokenizer="bpe", vocabulary_size=2**15)


def test_a_config_alone_cannot_give_data():
    task = tasks.from_arrays(TOKENS, TOKENS)
    config = runs.default_config(task)
    assert config.task.name == "arrays"
    assert config.data.sha256 == task.sha256
    assert "arrays" not in tasks.names()
    with pytest.raises(ConfigError, match="data that is given in Python"):
        runs.train(config, "no_folder")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_floats_of_any_width_are_kept_as_float32(dtype, tmp_path):
    inputs, weights = jnp.asarray(FEATURES, dtype), jnp.ones(TOKENS.shape, dtype)
    task = tasks.from_arrays(inputs, jnp.asarray(TOKENS), weights=weights)
    wanted = np.asarray(inputs).astype(np.float32)
    np.testing.assert_array_equal(task.keep().arrays["inputs"], wanted)
    config = runs.default_config(task)
    folder = folders.Folder(tmp_path)
    folders.write_config(folder, config, jax.local_devices()[:1], task)
    again = configuration.make_task(config, tasks.Kept(**folders.read_kept(folder)))
    assert again == task
    for part in ("train_data", "held_out_data"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(again, part), getattr(task, part)
        )
    assert again.train_data.inputs.dtype == again.train_data.weights.dtype == np.float32


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
    with pytest.raises(ConfigError, match=r"data.npz is not as it was written"):
        runs.load_run(folder)


def test_the_documentation_of_a_task_is_enough_to_write_one():
    names = {"dataclasses": dataclasses, "jax": jax, "jnp": jnp}
    exec(docstring.code_of(tasks.Task), names)
    example = tasks.check("Larger", names["Larger"]())
    assert example.inputs.shape == (2,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Same(tasks.Task):
    """The target is the token; arguments are what may be wrong."""

    sequence_length: int = 6
    num_tokens: int | None = 5
    num_classes: int = 5
    baseline: dict = dataclasses.field(
        default_factory=lambda: {"accuracy": 0.2, "loss": 1.6}
    )
    length: int = 6
    largest: int = 5
    dtype: str = "float32"
    others: dict | None = None

    def example(self, key, data):
        inputs = jnp.arange(self.length) % self.largest
        weights = jnp.ones(6, self.dtype)
        return tasks.Example(inputs, inputs, weights, others=self.others)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            {"sequence_length": 0, "num_classes": 2.5, "baseline": {"loss": 1}},
            ["sequence_length must be", "num_classes must be", "baseline must have"],
        ),
        ({"num_tokens": None}, ["either num_tokens or feature_size"]),
        (
            {"length": 5, "dtype": "int32"},
            [r"inputs .* \(6,\), got int32 of shape \(5,\)", "targets", "weights"],
        ),
        ({"largest": 6}, ["inputs .* num_tokens, 5, got 0 to 5", "targets .* 0 to 5"]),
        ({"others": {"image": 1.0}}, ["others must be None"]),
    ],
)
def test_all_that_is_wrong_with_a_task_is_told_at_once(given, messages):
    with pytest.raises(ConfigError) as raised:
        tasks.check("Same", Same(**given))
    for message in messages:
        assert re.search(message, str(raised.value)), (message, str(raised.value))


def test_a_class_without_a_part_is_not_registered():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(tasks.Task):
        sequence_length: int = 1

    with pytest.raises(ConfigError, match="must have example, num_tokens"):
        tasks.register(Half)
    with pytest.raises(TypeError, match="got the class Half"):
        mh.train(Half, "no_folder")


def test_the_tokenizers_are_kept_with_the_data():
    task = tasks.from_examples(SUMS, labels=False)
    stored = json.loads(task.keep().tokenizer)
    assert len(stored["tokenizers"]) == 2
    again = tasks.make("text_pairs", kept=task.keep(), sha256=task.sha256)
    assert again == task
    with pytest.raises(ConfigError, match="the data has changed"):
        tasks.make("text_pairs", kept=task.keep(), sha256="0")


def test_an_error_of_our_own_is_not_the_users():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Fails(Same):
        def example(self, key, data):
            raise KeyError("a part")

    with pytest.raises(ConfigError, match="Fails raised KeyError: 'a part'"):
        tasks.check("Fails", Fails())
    with pytest.raises(KeyError, match="a part"):
        tasks.check("Fails", Fails(), is_own=False)


def _again(task, kept):
    options = tasks.values(task)
    return tasks.make(task.name, kept=kept, **options["task"], **options["data"])


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
@pytest.mark.parametrize("labels", [True, False])
def test_pairs_of_texts_are_made_again_of_what_a_run_keeps(tokenizer, labels):
    pytest.importorskip("tokenizers")
    lone = "\ud800" * (tokenizer == "characters")  # no text of other tokenizers
    pairs = [(f"{text} 🙂\n{lone}", label) for text, label in SUMS]
    task = tasks.from_examples(pairs, labels=labels, tokenizer=tokenizer)
    kept = task.keep()
    again = _again(task, kept)
    assert again == task and again.keep().tokenizer == kept.tokenizer
    for part in ("train_data", "held_out_data"):
        mine, its = (jax.tree.leaves(getattr(x, part)) for x in (task, again))
        jax.tree.map(np.testing.assert_array_equal, mine, its)
    classes = range(task.num_classes)
    assert [*map(again.class_label, classes)] == [*map(task.class_label, classes)]
    name = next(iter(kept.arrays))
    forged = kept._replace(arrays=kept.arrays | {name: kept.arrays[name][1:]})
    with pytest.raises(ConfigError, match="data has changed"):
        _ = _again(task, forged).train_data
    with pytest.raises(ConfigError, match="given in Python"):
        _again(task, None)


def test_labels_of_texts_of_an_older_version_say_how_to_make_them_anew():
    task = tasks.from_arrays(TOKENS, TOKENS[:, 0])
    with pytest.raises(ConfigError, match=r"anew: mh.train\(mh.tasks.from_examples"):
        _again(task, task.keep()._replace(tokenizer='{"labels": ["a", "b"]}'))


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
    with pytest.raises(ConfigError, match="does not exist"):
        tasks.from_file("nowhere.csv")

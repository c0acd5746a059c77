"""Which inputs matter, against one model call per blanked input and whole matrices."""

import csv
import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mha_haiku import tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab.heads.rollout import flow, rollout
from mha_haiku.subjects import conversion
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import replacement as rollouts
from mha_haiku.training import evaluation
from mha_haiku.training.runs import folders

N, T, L = 6, 5, 2
_FOUND = {}


@dataclasses.dataclass(frozen=True)
class Padded(tasks.Task):
    """Random tokens of any length; about half of the valid positions count."""

    name: ClassVar[str] = "padded"
    sequence_length: int = T
    num_tokens: int | None = 7
    num_classes: int = 4

    def example(self, key, data):
        words = jax.random.bits(key, (2 * T + 1,))
        inputs = (words[:T] % 7).astype(jnp.int32)
        length = 1 + (words[-1] % T).astype(jnp.int32)
        counts = (words[T:-1] % 2 == 0) & (jnp.arange(T) < length)
        targets = (words[T:-1] % 4).astype(jnp.int32)
        return tasks.Example(inputs, targets, counts.astype(jnp.float32), length)


@dataclasses.dataclass(frozen=True)
class Masked(Padded):
    """The same with a token that hides others; nothing is padding."""

    name: ClassVar[str] = "masked"
    mask_token: ClassVar[int] = 3

    def example(self, key, data):
        return super().example(key, data)._replace(lengths=None)


@dataclasses.dataclass(frozen=True)
class Features(Padded):
    num_tokens: None = None
    feature_size: int = 3


def _held_out(loaded):
    indices = jnp.arange(N, dtype=jnp.int32)
    return evaluation.held_out_batch(loaded.task, loaded.config.seed, (), indices)


def _looked(loaded, draws=8):
    """Returns what is found of the first examples; of one task once."""
    name = loaded.task.name, draws
    if name not in _FOUND:
        batch = _held_out(loaded), np.arange(N, dtype=np.int32)
        stand_ins = rollouts._stand_ins(loaded.task)
        effects = functools.partial(rollouts.effects, loaded, stand_ins, draws)
        _FOUND[name] = jax.device_get(jax.jit(effects)(loaded.params, batch))
    return jax.tree.map(np.copy, _FOUND[name])


def _probabilities(loaded, example, row):
    """Returns a function of inputs: the probability of the right answer, `[N]`."""

    @jax.jit
    def apply(inputs):
        output = loaded.model.apply(
            loaded.params, None, inputs, lengths=example.lengths, is_training=False
        )
        return jax.nn.softmax(output.logits)

    n = np.arange(len(row))
    targets = np.asarray(example.targets)[n, row]
    return lambda inputs: np.asarray(apply(inputs), np.float64)[n, row, targets]


@pytest.mark.slow
def test_the_mask_stands_in_for_each_input(of_task):
    loaded = of_task(Masked())
    example, found = _held_out(loaded), _looked(loaded)
    inputs = np.asarray(example.inputs)
    asked = (np.asarray(example.weights) > 0) & (inputs == 3)
    np.testing.assert_array_equal(found["asks"], asked.any(1))
    assert asked.any() and not asked.any(1).all()
    for n in np.flatnonzero(found["asks"]):
        assert asked[n, found["row"][n]]
    np.testing.assert_array_equal(found["counted"], inputs != 3)
    probabilities = _probabilities(loaded, example, found["row"])
    for s in range(T):
        blanked = inputs.copy()
        blanked[:, s] = 3
        drop = probabilities(inputs) - probabilities(blanked)
        np.testing.assert_allclose(found["drop"][:, s], drop, atol=1e-6)


@pytest.mark.slow
def test_other_tokens_stand_in_where_there_is_no_mask(of_task):
    loaded = of_task(Padded())
    example = _held_out(loaded)
    inputs, lengths = np.asarray(example.inputs), np.asarray(example.lengths)
    row = lengths - 1
    blanks = np.random.default_rng(0).integers(0, 7, (3, N, T)).astype(np.int32)
    drops = jax.jit(functools.partial(rollouts.drops, loaded))
    found = drops(loaded.params, example, row, blanks)
    probabilities = _probabilities(loaded, example, row)
    for s in range(T):
        drop = 0
        for draw in blanks:
            other = inputs.copy()
            other[:, s] = draw[:, s]
            drop += (probabilities(inputs) - probabilities(other)) / 3
        np.testing.assert_allclose(found[:, s], drop, atol=1e-6)
    valid = np.arange(T) < lengths[:, None]
    np.testing.assert_array_equal(rollouts._counted(loaded, example, row), valid)
    assert not valid.all()
    assert (np.abs(np.asarray(found)[~valid]) < 1e-6).all()  # it cannot be felt


@pytest.mark.slow
def test_what_comes_after_the_question_is_not_ranked_in_causal_models(of_task):
    loaded = of_task(Masked(), model__family="causal")
    example, row = _held_out(loaded), np.array([0, 4, 2, 3, 1, 0])
    expected = (np.arange(T) <= row[:, None]) & (np.asarray(example.inputs) != 3)
    found = rollouts._counted(loaded, example, row)
    np.testing.assert_array_equal(found, expected)
    assert expected.any()


@pytest.mark.slow
def test_questions_are_all_positions_that_ask():
    keys = jax.random.split(jax.random.key(1), 200)
    weights = jnp.array([1.0, 0, 1, 0, 1])
    tokens = jnp.array([3, 3, 0, 1, 3])
    for task, asking in ((Masked(), {0, 4}), (Padded(), {0, 2, 4})):
        question = functools.partial(
            rollouts._question, task, example=tasks.Example(tokens, tokens, weights)
        )
        row, asks = jax.vmap(question)(keys)
        assert set(np.unique(row)) == asking
        assert asks.all()


@pytest.mark.slow
def test_stand_ins_are_all_other_tokens():
    keys = jax.random.split(jax.random.key(0), 200)
    inputs = jnp.array([0, 6, 3, 3, 1])
    blanks = jax.vmap(lambda key: rollouts._blanks(np.arange(7), 2, key, inputs))(keys)
    for s, token in enumerate(inputs):
        assert set(np.unique(blanks[..., s])) == set(range(7)) - {int(token)}


@pytest.mark.slow
def test_measures_are_those_of_the_row_that_is_asked_for(of_task):
    loaded = of_task(Masked())
    example, found = _held_out(loaded), _looked(loaded)

    @jax.jit
    def dense(params):
        maps = loaded.model.apply(params, None, example.inputs, is_training=False).maps
        raw = [layer.weights().mean(1) for layer in maps]
        return raw, [rollout(maps[: i + 1], slice(None)) for i in range(L)]

    raw, rolled = dense(loaded.params)
    n = np.arange(N)
    for i in range(L):
        of_rows = np.asarray(raw[i])[n, found["row"]]
        np.testing.assert_allclose(found["measures"]["raw"][:, i], of_rows, 1e-4, 1e-6)
        of_rows = np.asarray(rolled[i])[n, found["row"]]
        found_rows = found["measures"]["roll-out"][:, i]
        np.testing.assert_allclose(found_rows, of_rows, 1e-4, 1e-6)
    assert set(found["measures"]) == {"raw", "roll-out"}
    for measure in found["measures"].values():
        assert measure.shape == (N, L, T)


@pytest.mark.slow
def test_correlations_are_those_of_scipy_over_examples_that_ask(of_task, monkeypatch):
    loaded = of_task(Masked())
    found = _looked(loaded)
    monkeypatch.setattr(rollouts, "_BATCH_POSITIONS", N * T * T)
    # In two batches; the first has the examples that are found here.
    study = rollouts.rollout(
        Subject.of_folder("anywhere"), examples=N + 2, flow_examples=2
    )
    asks = np.flatnonzero(found["asks"])
    count = len(study.changes["raw"])
    assert (
        study.title
        == f"anywhere (masked), step 4: means over {count} held-out examples"
    )
    assert len(asks) <= count <= len(asks) + 2
    apply = jax.jit(functools.partial(loaded.model.apply, is_training=False))
    maps = apply(loaded.params, None, _held_out(loaded).inputs).maps
    rows = found["row"][:, None]
    flows = [flow(maps[: i + 1], rows)[:, 0] for i in range(L)]
    found["measures"]["flow"] = np.stack(flows, 1)[:2]
    for name, scores in found["measures"].items():
        kept = asks[asks < len(scores)]
        for (k, n), i in itertools.product(enumerate(kept), range(L)):
            counted = found["counted"][n]
            score, drop = scores[n, i][counted], found["drop"][n][counted]
            if len(score) < 2:
                continue
            expected = stats.spearmanr(score, np.abs(drop)).statistic
            np.testing.assert_allclose(study.changes[name][k, i], expected, 1e-6)
            expected = stats.spearmanr(score, drop).statistic
            np.testing.assert_allclose(study.drops[name][k, i], expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("has_masks", [True, False])
def test_an_encoder_is_asked_for_what_is_hidden(of_task, has_masks):
    """Its own answers behind masks that are given, else a token that gets hidden."""
    of_task(Masked())
    subject = Subject.of_folder("anywhere")
    tokens = np.array([[0, 1, 2, 0, 1], [2, 1, 0, 2, 1]], np.int32)
    if has_masks:
        tokens[:, 2] = 3
    found = subject.rollout(tokens, flow_examples=1)
    assert found.title.endswith("means over 2 examples")
    (batch,) = rollouts._with_answers(
        subject, [tasks.Example(tokens, tokens, 0 * tokens)]
    )
    hidden = np.asarray(batch.inputs) == 3
    assert (hidden.sum(1) == 1).all()
    np.testing.assert_array_equal(np.where(hidden, tokens, batch.inputs), tokens)
    own = subject.logits(batch.inputs).argmax(-1)
    targets = np.where(hidden & ~(tokens == 3), tokens, own)
    np.testing.assert_array_equal(batch.targets, targets)
    given = subject.rollout(batch, flow_examples=1)
    np.testing.assert_array_equal(found.drops["raw"], given.drops["raw"])


@pytest.mark.slow
def test_an_encoder_without_a_mask_is_asked_for_its_own_answers(of_task):
    of_task(Padded())
    subject = Subject.of_folder("anywhere")
    rows = [np.array([0, 1, 2, 4, 5]), np.array([6, 5, 4])]
    batch, _ = conversion.batch_of(subject, rows)
    weights = np.float32([[1] * 5, [1] * 3 + [0] * 2])
    own = np.asarray(subject.logits(rows).argmax(-1))
    given = batch._replace(targets=own, weights=weights)
    found, wanted = (subject.rollout(x, flow_examples=1) for x in (rows, given))
    assert len(found.changes["raw"]) == 2
    np.testing.assert_array_equal(found.drops["raw"], wanted.drops["raw"])


def test_ties_share_ranks_and_equal_inputs_have_none():
    scores = np.array([[1.0, 1, 2, 3, 9], [4.0, 4, 4, 4, 0], [3, 2, 1, 0, 0]])
    importance = np.array([0.5, 0.2, 0.2, 0.9, 0.7])
    counted = np.array([True, True, True, True, False])
    found = rollouts._correlations(scores, importance, counted)
    expected = stats.spearmanr(scores[0, :4], importance[:4]).statistic
    np.testing.assert_allclose(found[0], expected)
    assert np.isnan(found[1])


def _study(raw, rolled, published=rollouts.PUBLISHED):
    changes = {"raw": np.array(raw), "roll-out": np.array(rolled)}
    drops = {k: -x for k, x in changes.items()}
    return rollouts.Study("title", changes, drops, published)


def test_means_leave_out_examples_without_a_rank():
    means = rollouts.summary({"raw": np.array([[1.0, 2], [3, np.nan], [5, 8]])})
    expected = [[3, 2 / np.sqrt(3)], [5, 3]]
    np.testing.assert_allclose(means["raw"], expected)


def test_the_verdict_is_of_differences_within_examples():
    # Examples differ much, differences within them little.
    raw, rolled = [[0, -0.9], [0, 0.0], [0, 0.6]], [[0, -0.7], [0, 0.3], [0, 0.9]]
    published, changes, drops = _study(raw, rolled).verdict().split("\n")
    assert published == "Published: roll-out 0.71, raw attention 0.29."
    assert "roll-out 0.17, raw attention -0.10" in changes
    assert changes.endswith("difference 0.267 ± 0.033: the same order.")
    assert drops.endswith("difference -0.267 ± 0.033: NOT the same order.")


def test_no_run_but_the_papers_is_judged_by_the_papers_numbers():
    raw, rolled = [[0, -0.9], [0, 0.0], [0, 0.6]], [[0, -0.7], [0, 0.3], [0, 0.9]]
    study = _study(raw, rolled, {})
    changes, drops = study.verdict().split("\n")
    assert changes.endswith("difference 0.267 ± 0.033: roll-out ranks better.")
    assert drops.endswith("difference -0.267 ± 0.033: raw attention ranks better.")
    assert all(row["published"] is None for row in study.table().rows)


def test_the_csv_has_a_line_per_measure_and_layer(tmp_path):
    study = _study([[0.25, 0.5], [0.75, 0.5]], [[1, 0], [0, 0]])
    path, _ = study.save(tmp_path / "new")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(x["measure"], x["layer"], x["published"]) for x in lines] == [
        ("raw", "1", "0.69"),
        ("raw", "2", "0.1"),
        ("roll-out", "1", "0.32"),
        ("roll-out", "2", "0.38"),
    ]
    assert [float(x["correlation"]) for x in lines] == [0.5, 0.5, 0.5, 0]
    assert [float(x["drop_correlation"]) for x in lines] == [-0.5, -0.5, -0.5, 0]
    assert [float(x["standard_error"]) for x in lines] == [0.25, 0, 0.5, 0]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        study.save(tmp_path / "file")


@pytest.mark.slow
def test_a_path_with_the_suffix_of_a_file_is_one_file(tmp_path):
    study = _study([[0.25, 0.5], [0.75, 0.5]], [[1, 0], [0, 0]])
    table, picture = study.save(tmp_path / "whole")
    for name, wanted in (("its.csv", table), ("its.png", picture)):
        (path,) = study.save(tmp_path / "new" / name)
        assert path == tmp_path / "new" / name
        assert path.read_bytes() == wanted.read_bytes()
    for name in ("its.npz", "its.1"):
        with pytest.raises(ValueError, match=rf"one of \.csv, .*\.png.*; got .*{name}"):
            study.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    # A folder's name may have a dot if it says that it is one, or exists.
    for folder in (f"{tmp_path}/v0.1/", tmp_path / "v0.1"):
        assert len(study.save(folder)) == 2
    assert (tmp_path / "v0.1" / "rollout.png").exists()


@pytest.mark.parametrize(
    ("task", "fields", "options", "message"),
    [
        (Padded(), {}, {"examples": 0}, "examples must be .* got 0"),
        (Padded(), {}, {"examples": 2, "flow_examples": 3}, "flow_examples .* 1 to 2"),
        (Padded(), {}, {"draws": 0}, "draws must be"),
        # The default number of flow's examples fits to any number of examples.
        (Padded(), {}, {"examples": 2, "draws": 0}, "draws must be"),
        (Features(), {}, {}, "needs a task with tokens .*, got padded"),
    ],
)
def test_what_does_not_fit_is_refused(make_config, task, fields, options, message):
    config = make_config(**fields)
    model = folders.make_model(config.model, task)
    subject = Subject(model, None, "run", config=config, task=task)
    with pytest.raises(ConfigError, match=message):
        subject.rollout(**options)

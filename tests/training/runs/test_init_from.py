"""Runs that start from the parameters of another, and parameters that stay frozen."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import models, runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration, folders, init_from
from tests import tiny_runs
from tests.training.runs import faults

WORDS = [f"{a} {b} tail" for a in ("red", "green", "blue") for b in ("ball", "box")]


@pytest.fixture
def make(tmp_path):
    """A function that makes an untrained run of a task over six short texts."""
    table = tmp_path / "rows.csv"
    rows = [f"{each},{each.split()[1]}" for each in WORDS * 4]
    table.write_text("\n".join(["text,label", *rows]))

    def make(name, seed, **fields):
        config = runs.default_config(name).replace(
            data=dict(path=str(table), held_out_fraction=0.3),
            task=dict(sequence_length=7),
            model=dict(
                num_layers=2,
                model_size=12,
                embedding=dict(positions="rotary"),
                attention=dict(num_heads=3),
                feed_forward=dict(hidden_size=10),
                output=dict(pool="mean" if name == "classify" else None),
            ),
        )
        config = tiny_runs.with_fields("config", config, fields)
        return _run(config, seed)

    return make


def _run(config, seed, kept=None):
    task = configuration.make_task(config, kept)
    model = folders.make_model(config.model, task)
    inputs = jnp.ones((1, task.sequence_length), int)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: generator.normal(size=x.shape).astype(x.dtype), shapes
    )
    return folders.Run(config, task, model, params, 9)


def _started(source, new):
    """Returns the parameters with which a run starts from another, as a new task's."""
    kept = source.task.keep()._replace(text=None)
    new = _run(new.config, 5, kept)
    of = init_from.Start("runs/other", source.looped(), kept)
    return new, init_from.params(of, new.config, new.task, new.params)


def _assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_embeddings_and_layers_are_taken_and_logits_are_new(make, is_scanned):
    source = make("masked_language_model", 1, model__scan_layers=not is_scanned)
    new, params = _started(source, make("classify", 2, model__scan_layers=is_scanned))
    its = source.looped().params
    found = models.unstacked(params) if is_scanned else params
    for module in its:
        expected = new.params if module == "logits" else its
        _assert_equal(found[module], expected[module])
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, new.params)
    # [CLS] has the row of [MASK].
    assert new.task.before[0] == source.task.mask_token


def test_logits_are_taken_where_the_classes_are_the_same(make):
    source = make("language_model", 1, model__family="causal")
    new, params = _started(source, make("language_model", 2))
    _assert_equal(params, dict(source.params))
    assert np.any(new.params["logits"]["w"] != params["logits"]["w"])


def test_logits_are_new_where_as_many_classes_have_other_names(make, monkeypatch):
    source = make("language_model", 1, model__family="causal")
    monkeypatch.setattr(
        type(source.task), "class_label", lambda self, c: f"{id(self)} {c}"
    )
    new, params = _started(source, make("language_model", 2))
    _assert_equal(params["logits"], new.params["logits"])
    _assert_equal(params["embedding"], source.params["embedding"])


def test_tokens_that_the_other_run_lacks_have_new_rows(make):
    source = make("language_model", 1)
    new, params = _started(source, make("classify", 2))
    its, own, found = (
        x["embedding"]["embeddings"] for x in (source.params, new.params, params)
    )
    assert len(its) == len(own) - 1
    np.testing.assert_array_equal(found, [*its, own[-1]])
    source = make("classify", 1)
    _, fewer = _started(source, make("language_model", 2))
    np.testing.assert_array_equal(
        fewer["embedding"]["embeddings"], source.params["embedding"]["embeddings"][:-1]
    )


@pytest.mark.parametrize(
    ("fields", "parameters", "field"),
    [
        (
            {"model__feed_forward__hidden_size": 11},
            "encoder/layer_0/feed_forward/hidden b ((10,) there and (11,) here)",
            "config.model.feed_forward.hidden_size: 10 -> 11",
        ),
        (
            {"model__num_layers": 3},
            "encoder/layer_2/attention/key b (None there and (12,) here)",
            "config.model.num_layers: 2 -> 3",
        ),
        (
            {"model__attention__num_heads": 2},
            "what its parameters mean",
            "config.model.attention.num_heads: 3 -> 2",
        ),
    ],
)
def test_other_model_is_refused_by_its_parameters(make, fields, parameters, field):
    source = make("masked_language_model", 1)
    with pytest.raises(ConfigError, match="must be a run of the same model") as refusal:
        _started(source, make("classify", 2, **fields))
    first, second = str(refusal.value).splitlines()
    assert parameters in first and field in second


@pytest.mark.slow
def test_run_with_other_tokens_is_refused(make, whole):
    config = make("classify", 1).config.replace(init_from=str(whole[0]))
    with pytest.raises(ConfigError, match="has no tokenizer, and this .* 'characters'"):
        init_from.load(config)
    config = config.replace(init_from="runs/that/is/not/there")
    with pytest.raises(ConfigError, match="There is no run in runs/that/is/not/there"):
        init_from.load(config)


FROZEN = "embedding,encoder/layer_0"


def _config(make_config, source, **fields):
    return make_config(
        init_from=str(source), seed=8, optimizer__frozen=FROZEN, **fields
    )


@pytest.mark.slow
def test_interrupted_run_goes_on_without_the_other_bit_for_bit(
    copy, make_config, tmp_path, monkeypatch
):
    config = _config(make_config, copy)
    seen = {}
    observer = runs.Observer(30, lambda step, params: seen.update({step: params}))
    faults.train(config, tmp_path / "straight", observers=[observer])
    begins = folders.load_run(copy).params
    _assert_equal(seen[0], begins)
    moved = {
        module: any(np.any(x != begins[module][name]) for name, x in leaves.items())
        for module, leaves in seen[30].items()
    }
    still = ("embedding", "encoder/layer_0")
    assert moved == {module: not module.startswith(still) for module in moved}

    saved = json.loads((tmp_path / "straight" / "config.json").read_text())
    assert saved["config"]["init_from"] == str(copy)
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(15))
        assert faults.train(config, tmp_path / "resumed").interrupted
    shutil.rmtree(copy)
    assert faults.train(config, tmp_path / "resumed").resumed_from == 15
    _assert_equal(
        faults.state(tmp_path / "resumed", config),
        faults.state(tmp_path / "straight", config),
    )
    # No moments are kept of what is frozen.
    state = faults.state(tmp_path / "straight", config)
    sizes = [x.size for x in jax.tree.leaves(state.optimizer_state)]
    trained = sum(
        x.size for x in jax.tree.leaves([seen[30][m] for m in moved if moved[m]])
    )
    assert 2 * trained <= sum(sizes) <= 2 * trained + 8

    config = config.replace(init_from="another")
    with pytest.raises(ConfigError, match="config.init_from must be .*from which the"):
        faults.train(config, tmp_path / "resumed", override_config=True)

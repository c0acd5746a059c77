"""Each refusal of a config, and the difference of two."""

import dataclasses
import json

import pytest

from mha_haiku import models, runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration
from tests import tiny_runs

NAN, INF = float("nan"), float("inf")


def test_good_config_passes(make_config):
    config = make_config(optimizer__clip_norm=None, model__key_size=5)
    tiny_runs.check_devices(config, 4)
    configuration.validate_for_task(config, configuration.make_task(config))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", -1, "config.seed must be an integer from 0 to 4294967295, got -1"),
        ("seed", 2**32, "config.seed must be"),
        ("task__name", "revers", "config.task.name must be .* Did you mean 'reverse'"),
        ("model__family", "encode", "config.model.family .* Did you mean 'encoder'"),
        ("model__scan_layers", "yes", "config.model.scan_layers must be True or False"),
        (
            "model__attention__implementaton",
            "dense",
            "config.model.attention has no field 'implementaton'. Did you mean",
        ),
        ("model__attention", 5, "config.model.attention must be a section of fields"),
        ("optimizer__learning_rate", NAN, "config.optimizer.learning_rate must be"),
        ("optimizer__learning_rate", 0.0, "config.optimizer.learning_rate must be"),
        ("optimizer__clip_norm", INF, "config.optimizer.clip_norm must be"),
        (
            "optimizer__final_learning_rate_fraction",
            1.5,
            r"optimizer.final_learning_rate_fraction must be .*\[0, 1\], got 1.5",
        ),
        ("training__steps", 0, "config.training.steps must be"),
        ("training__steps", 2.5, "config.training.steps must be"),
        ("training__batch_size", 10, "multiple of the 4 devices that share it, got 10"),
        ("training__steps_per_dispatch", -4, "config.training.steps_per_dispatch must"),
        ("training__report_every", 0, "config.training.report_every must be"),
        ("attention__examples", 0, "config.attention.examples must be"),
        ("attention__dtype", "float61", "config.attention.dtype .* mean 'float16'"),
        ("data", {"path": 5}, "config.data has no field 'path'"),
        ("model__heads", 5, "config.model has no field 'heads'. Did you mean"),
        (
            "trainng",
            {},
            "config has no field 'trainng'. Did you mean 'config.training'",
        ),
        ("training", 5, "config.training must be a section of fields, got 5"),
    ],
)
def test_bad_field_is_refused_by_its_path(make_config, field, value, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        config = make_config(**{field: value})
        tiny_runs.check_devices(config, 4)
    assert len(str(refusal.value).splitlines()) <= 2


def test_config_of_json_is_the_same_and_lacking_fields_have_defaults(make_config):
    config = make_config(model__kept_heads=[[0], [0, 1]], optimizer__clip_norm=None)
    values = json.loads(json.dumps(config.to_json()))
    assert configuration.of_json(values) == config
    assert hash(configuration.of_json(values)) == hash(config)
    del values["model"]["attention"]["qk_norm"], values["seed"], values["devices"]
    assert configuration.of_json(values) == config.replace(seed=0)


@pytest.mark.parametrize(("name", "neutral"), [*models.GONE.items()])
def test_a_gone_field_may_only_have_the_value_that_changes_nothing(
    make_config, tmp_path, name, neutral
):
    config, (section, field) = make_config(), name.split(".")
    values = config.to_json()
    values["model"][section][field] = neutral
    assert configuration.of_json(values) == config
    values["model"][section][field] = "other"
    with pytest.raises(ConfigError, match=f"has no field '{field}'"):
        configuration.of_json(values)


def test_replaced_config_leaves_the_other_and_cannot_be_set(make_config):
    config = make_config()
    other = config.replace(seed=4, model=dict(attention=dict(num_heads=4)))
    assert (other.seed, other.model.attention.num_heads) == (4, 4)
    assert (config.seed, config.model.attention.num_heads) == (3, 2)
    assert other.model.feed_forward == config.model.feed_forward
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 5


def test_integer_for_a_float_is_a_float_and_so_is_the_same_config(make_config):
    one, same = (make_config(optimizer__learning_rate=x) for x in (1, 1.0))
    assert json.dumps(one.to_json()) == json.dumps(same.to_json())
    assert type(one.optimizer.learning_rate) is float
    sinks = make_config(model__attention__sinks=1).model.attention.sinks
    assert type(sinks) is int  # a field of several types takes what it is given


def test_another_task_keeps_the_options_that_both_have(make_config):
    config = make_config().replace(task=dict(name="induction", num_tokens=9))
    assert config.task.to_json() == {
        "name": "induction",
        "sequence_length": 6,
        "num_tokens": 9,
    }
    text = config.replace(task=dict(name="language_model"), data=dict(path="x"))
    assert (text.data.path, text.data.tokenizer) == ("x", "characters")
    assert "data" not in text.replace(task=dict(name="sort")).to_json()


def test_config_shows_what_differs_from_defaults():
    config = models.ModelConfig().replace(num_layers=2, attention=dict(num_heads=4))
    assert repr(config) == (
        "ModelConfig(num_layers=2, attention=AttentionConfig(num_heads=4))"
    )


def test_family_must_answer_what_the_task_asks(make_config, task):
    config = make_config(model__family="set_classifier")
    with pytest.raises(ConfigError, match="family must be 'encoder' or 'causal'"):
        configuration.validate_for_task(config, task)

    class OneOfSet(type(task)):
        def example(self, key, data):
            example = super().example(key, data)
            return example._replace(
                targets=example.targets[0], weights=example.weights[0]
            )

    configuration.validate_for_task(config, OneOfSet())
    with pytest.raises(ConfigError, match="family must be 'set_classifier'"):
        configuration.validate_for_task(make_config(), OneOfSet())


def test_a_model_that_would_see_its_targets_is_refused(make_config):
    for name in tasks.names():
        if tasks.of_name(name).continues:
            config = runs.default_config(name).replace(model=dict(family="encoder"))
            with pytest.raises(ConfigError, match="family must be 'causal' for the"):
                configuration.validate_for_task(config, configuration.make_task(config))


def test_models_that_give_no_logits_by_position_train_on_no_task(make_config):
    for field, value in (("logits", False), ("pool", "mean")):
        config = make_config(**{f"model__output__{field}": value})
        message = f"^config.model.output.{field} must be "
        with pytest.raises(ConfigError, match=message) as refusal:
            configuration.validate_for_task(config, configuration.make_task(config))
        assert len(str(refusal.value).splitlines()) <= 2


def test_refused_option_of_a_task_has_its_path(make_config):
    config = make_config(task__name="associative_recall", task__num_pairs=9)
    with pytest.raises(ConfigError, match="^config.task.num_pairs must .*got 9"):
        configuration.make_task(config)


def test_difference_has_a_line_per_changed_field(make_config):
    old = make_config().to_json()
    assert configuration.difference(old, old) == []
    new = make_config(training__steps=40, model__key_size=4).to_json()
    new["task"]["more"] = True
    assert configuration.difference(old, new) == [
        "config.model.attention.key_size: None -> 4",
        "config.training.steps: 30 -> 40",
        "config.task.more: absent -> True",
    ]
    assert "config.task.more: True -> absent" in configuration.difference(new, old)

"""Each refusal of a config, and the difference of two."""

import pytest

from mha_haiku import runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration

NAN, INF = float("nan"), float("inf")


def test_good_config_passes(make_config):
    config = make_config(optimizer__clip_norm=None, model__key_size=5)
    configuration.validate(config, num_devices=4)
    configuration.validate_for_task(config, configuration.make_task(config))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", -1, "config.seed must be an integer from 0 to 4294967295, got -1"),
        ("seed", 2**32, "config.seed must be"),
        ("task__name", "revers", "config.task.name must be .* Did you mean 'reverse'"),
        ("model__family", "encode", "config.model.family .* Did you mean 'encoder'"),
        ("model__num_heads", 3, "config.model.attention.num_heads must divide .*got 3"),
        (
            "model__num_key_value_heads",
            3,
            "config.model.attention.num_key_value_heads must",
        ),
        (
            "model__attention__with_bias",
            1,
            "attention.with_bias must be True or False, got",
        ),
        ("model__rematerialize", 1, "config.model.rematerialize must be True or False"),
        ("model__scan_layers", "yes", "config.model.scan_layers must be True or False"),
        (
            "model__attention__implementation",
            "dens",
            "config.model.attention.implementation must .* Did you mean 'dense'",
        ),
        (
            "model__attention__implementaton",
            "dense",
            "config.model.attention has no field 'implementaton'. Did you mean",
        ),
        ("model__attention", 5, "config.model.attention must be a section of fields"),
        ("model__dropout_rate", 1.0, "config.model.dropout_rate must be"),
        ("optimizer__learning_rate", NAN, "config.optimizer.learning_rate must be"),
        ("optimizer__learning_rate", 0.0, "config.optimizer.learning_rate must be"),
        ("optimizer__weight_decay", -0.1, "config.optimizer.weight_decay must be"),
        ("optimizer__b1", 1.0, "config.optimizer.b1 must be"),
        ("optimizer__b2", NAN, "config.optimizer.b2 must be"),
        ("optimizer__clip_norm", 0.0, "config.optimizer.clip_norm must be"),
        ("optimizer__clip_norm", INF, "config.optimizer.clip_norm must be"),
        ("optimizer__warmup_steps", -1, "config.optimizer.warmup_steps must be"),
        (
            "optimizer__final_learning_rate_fraction",
            1.5,
            r"optimizer.final_learning_rate_fraction must be .*\[0, 1\], got 1.5",
        ),
        ("training__steps", 0, "config.training.steps must be"),
        ("training__steps", 2.5, "config.training.steps must be"),
        (
            "training__batch_size",
            10,
            "multiple of the 4 devices that share it, got 10; .*: 8 and 12",
        ),
        (
            "training__batch_size",
            3,
            "multiple of the 4 devices that share it, got 3; the nearest: 4",
        ),
        ("training__steps_per_dispatch", -4, "config.training.steps_per_dispatch must"),
        ("training__report_every", 0, "config.training.report_every must be"),
        ("training__evaluate_every", 0, "config.training.evaluate_every must be"),
        ("training__evaluation_examples", 0, "config.training.evaluation_examples"),
        ("training__checkpoint_every", 0, "config.training.checkpoint_every must be"),
        ("training__tensorboard", "yes", "config.training.tensorboard must be True or"),
        ("attention__examples", 0, "config.attention.examples must be"),
        ("attention__dtype", "float61", "config.attention.dtype .* mean 'float16'"),
        ("attention__full_length", -1, "config.attention.full_length must be"),
        ("attention__pooled_size", 0, "config.attention.pooled_size must be"),
        ("data", {"path": 5}, "config has no field 'data'"),
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
    config = make_config(**{field: value})
    with pytest.raises(ConfigError, match=message) as refusal:
        configuration.validate(config, num_devices=4)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("section", "field", "message"),
    [
        (None, "seed", "config.seed is missing"),
        (None, "optimizer", "config.optimizer is missing"),
        ("training", "steps", "config.training.steps is missing"),
        ("model", "attention", "config.model.attention is missing"),
        (
            "model__attention",
            "implementation",
            "config.model.attention.implementation is missing",
        ),
        ("model__attention", "qk_norm", "config.model.attention.qk_norm is missing"),
        ("task", "name", "config.task.name is missing"),
    ],
)
def test_missing_field_is_named(make_config, section, field, message):
    config = make_config()
    holder = config
    for name in section.split("__") if section else ():
        holder = holder[name]
    del holder[field]
    with pytest.raises(ConfigError, match=message):
        configuration.validate(config, num_devices=1)


def test_misspelt_field_is_brought_together_with_the_missing_one(make_config):
    config = make_config(training__step=5)
    del config.training["steps"]
    with pytest.raises(ConfigError, match="no field 'step'. Did you mean 'steps'"):
        configuration.validate(config, num_devices=1)


def test_key_size_frees_the_number_of_heads(make_config):
    configuration.validate(make_config(model__num_heads=3, model__key_size=4))


def test_learned_positions_must_reach_the_end(make_config):
    config = make_config(model__max_length=5)
    task = configuration.make_task(config)
    with pytest.raises(
        ConfigError, match="config.model.embedding.max_length .* 6 .*got 5"
    ):
        configuration.validate_for_task(config, task)
    config.model.embedding.positions = "rotary"
    configuration.validate_for_task(config, task)


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
        if tasks.continues(name):
            config = runs.default_config(name)
            config.model.family = "encoder"
            with pytest.raises(ConfigError, match="family must be 'causal' for the"):
                configuration.validate_for_task(config, configuration.make_task(config))


def test_models_that_give_no_logits_by_position_train_on_no_task(make_config):
    for field, value in (("logits", False), ("pool", "mean")):
        config = make_config(**{f"model__output__{field}": value})
        message = f"^config.model.output.{field} must be .* to train"
        with pytest.raises(ConfigError, match=message) as refusal:
            configuration.validate_for_task(config, configuration.make_task(config))
        assert len(str(refusal.value).splitlines()) <= 2


def test_task_is_made_of_its_options(make_config):
    task = configuration.make_task(make_config())
    assert task == tasks.make("reverse", sequence_length=6, num_tokens=5)


def test_refused_option_of_a_task_has_its_path(make_config):
    config = make_config(task__num_tokens=0)
    with pytest.raises(ConfigError, match="^config.task.num_tokens must be .*got 0"):
        configuration.make_task(config)
    with pytest.raises(ConfigError, match="has no option 'path'"):
        configuration.make_task(make_config(data={"path": ""}))


def test_difference_has_a_line_per_changed_field(make_config):
    old = configuration.to_json(make_config())
    assert configuration.difference(old, old) == []
    config = make_config(training__steps=40, model__key_size=4, task__more=True)
    new = configuration.to_json(config)
    assert configuration.difference(old, new) == [
        "config.model.attention.key_size: None -> 4",
        "config.training.steps: 30 -> 40",
        "config.task.more: absent -> True",
    ]
    assert "config.task.more: True -> absent" in configuration.difference(new, old)

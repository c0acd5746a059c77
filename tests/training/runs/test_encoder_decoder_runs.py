"""Runs of models with a decoder: resumed, and shared by devices."""

import json

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration, loop
from tests import tiny_runs
from tests.tiny_runs import with_fields


def _config(**fields):
    config = runs.default_config("reverse_seq2seq")
    own = {
        "task__max_length": 5,
        "model__family": "encoder_decoder",
        "model__decoder__num_layers": 2,
        "model__model_size": 8,
        "model__num_heads": 2,
        "model__hidden_size": 12,
        "optimizer__warmup_steps": 2,
        "training__steps": 12,
        "training__batch_size": 8,
        "training__report_every": 4,
        "training__evaluate_every": 12,
        "training__evaluation_examples": 12,
        "training__checkpoint_every": 12,
    }
    return with_fields("config", config, own | fields)


def _losses(folder, config, count):
    loop.train(config, folder, devices=jax.devices()[:count])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert "held_out_exact_match" in found[-1]
    return [x["loss"] for x in found] + [found[-1]["held_out_loss"]]


@pytest.mark.slow
def test_losses_on_four_devices_are_those_of_one(tmp_path):
    wanted = _losses(tmp_path / "one", _config(), 1)
    assert wanted[0] - wanted[-1] > 0.05
    shared = _config(devices__heads=2, devices__shard_parameters=True)
    found = _losses(tmp_path / "four", shared, 4)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model__family": "causal", "model__decoder__num_layers": None}, "'encoder_"),
        ({"model__embedding__max_length": 5}, "at least the task's .* 6 with learned"),
        ({"devices__heads": 2, "model__num_heads": 3, "model__key_size": 2}, "encoder"),
        ({"devices__sequence": 2}, "sequence must be 1 for an encoder_decoder"),
    ],
)
def test_what_does_not_fit_a_decoder_is_refused(fields, message):
    config = _config(**fields)
    with pytest.raises(ConfigError, match=message):
        tiny_runs.check_devices(config, 2)
        configuration.validate_for_task(config, configuration.make_task(config))


def test_a_task_without_a_decoder_is_refused():
    config = _config()
    config = config.replace(task=dict(name="reverse"))
    with pytest.raises(ConfigError, match="family must be 'encoder' or 'causal' for"):
        configuration.validate_for_task(config, configuration.make_task(config))

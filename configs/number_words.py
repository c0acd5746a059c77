"""Translates numbers in words from English to German, which says units before tens.

Run: python -m experiments.train --config=configs/number_words.py
Expect: not measured yet.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("number_words")

    config.task.largest = 9_999
    config.task.tokenizer = "bpe"
    config.task.vocabulary_size = 305
    config.task.held_out_fraction = 0.5

    config.model.family = "encoder_decoder"
    config.model.num_layers = 2
    config.model.decoder.num_layers = 1
    config.model.model_size = 64
    config.model.embedding.max_length = 13
    config.model.attention.num_heads = 2
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 500
    config.training.batch_size = 128
    config.training.report_every = 50
    config.training.evaluate_every = 250

    return config

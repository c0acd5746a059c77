"""Predicts the next character of Python's documentation: a causal language model.

Run: python -m experiments.train --config=configs/text_lm.py
Expect: 67 percent held-out accuracy, loss 1.26 (unigram 24.7 percent, 3.238); 207 s on
2 CPU cores.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("language_model")

    config.model.num_layers = 3
    config.model.model_size = 128
    config.model.embedding.positions = "rotary"
    config.model.embedding.max_length = 64
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 512

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.01

    config.training.steps = 1500
    config.training.batch_size = 32
    config.training.report_every = 100
    config.training.evaluate_every = 500
    config.training.checkpoint_every = 500

    return config

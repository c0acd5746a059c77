"""Sorts tokens: in layer 1, position t attends to the t-th smallest tokens.

Run: python -m experiments.train --config=configs/sort.py
Expect: 99.98 percent held-out accuracy, loss 0.0013 (chance 24.4 percent, 1.990); 46 s
on 2 CPU cores.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("sort")

    config.task.num_tokens = 20

    config.model.num_layers = 2
    config.model.model_size = 64
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 1500
    config.training.report_every = 100
    config.training.evaluate_every = 500
    config.training.checkpoint_every = 500

    return config

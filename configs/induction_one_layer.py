"""Continues a repeated random sequence with one layer, which cannot do it.

Run: python -m experiments.train --config=configs/induction_one_layer.py
Expect: 12 percent held-out accuracy, loss 2.84 (chance 3.12 percent, 3.466); 42 s on 2
CPU cores. It learns which tokens have not been repeated yet, not which is next.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("induction")

    config.model.model_size = 64
    config.model.embedding.max_length = 32
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 1000
    config.training.batch_size = 64
    config.training.report_every = 100
    config.training.evaluate_every = 500
    config.training.checkpoint_every = 500

    return config

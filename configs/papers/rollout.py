"""Restores hidden characters in six layers, to measure which inputs an answer needs.

Run: python -m experiments.train --config=configs/papers/rollout.py
Expect: 65 percent held-out accuracy, loss 1.33 (unigram 24.7 percent, 3.238); 146 s on
2 CPU cores.

Then `python -m experiments.rollout --workdir=runs/rollout` compares roll-out with raw
attention as Abnar and Zuidema (2020), https://arxiv.org/abs/2005.00928, do in table 1;
with --train it does both. Expect in the last layer correlations of 0.60 (roll-out) and
0.47 (raw; published: 0.71 and 0.29) with the absolute change of the right answer's
probability when an input is replaced. With the signed fall they are 0.21 and 0.24:
roll-out is not better there.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("masked_language_model")

    config.task.sequence_length = 32

    config.model.num_layers = 6
    config.model.model_size = 64
    config.model.embedding.positions = "rotary"
    config.model.embedding.max_length = 32
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.01

    config.training.steps = 1500
    config.training.batch_size = 32
    config.training.report_every = 100
    config.training.evaluate_every = 500
    config.training.checkpoint_every = 500

    return config

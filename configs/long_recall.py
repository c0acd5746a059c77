"""Recalls the values of keys from 8,192 tokens away, on blockwise attention.

Run: python -m experiments.train --config=configs/long_recall.py
Expect: 98.8 percent held-out accuracy, loss 0.052 (chance 6.25 percent, 2.773), after
three commands at shorter lengths; 740 s in all on 2 CPU cores that did other work.

Trained at this length only, it has learnt nothing after 260 steps: the query has to
find one key among 8,192 tokens. So it starts with short sequences. Run the same command
three times before, on the same folder and with --override_config (as this one), with

    --config.task.sequence_length=256 --config.training.batch_size=32
    --config.training.steps=350

    --config.task.sequence_length=1024 --config.training.batch_size=16
    --config.training.steps=400

    --config.task.sequence_length=4096 --config.training.batch_size=8
    --config.training.steps=460
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("associative_recall")

    config.task.sequence_length = 8192
    config.task.num_pairs = 8

    config.model.family = "causal"
    config.model.num_layers = 2
    config.model.model_size = 64
    config.model.embedding.positions = "rotary"
    config.model.embedding.max_length = 8192
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.final_learning_rate_fraction = 1.0
    config.optimizer.b2 = 0.95

    config.training.steps = 560
    config.training.batch_size = 4
    config.training.steps_per_dispatch = 5
    config.training.report_every = 10
    config.training.evaluate_every = 300
    config.training.evaluation_examples = 32
    config.training.checkpoint_every = 100

    config.attention.examples = 2

    return config

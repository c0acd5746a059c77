"""Recalls the values of keys from 8,192 tokens away, on blockwise attention.

Run: python -m experiments.train --config=configs/long_recall.py
Expect: 98.8 percent held-out accuracy, loss 0.052 (chance 6.25 percent, 2.773), after
three commands at shorter lengths; 740 s in all on 2 CPU cores that did other work.

Trained at this length only, it has learned nothing after 260 steps: the query has to
find one key among 8,192 tokens. So it starts with short sequences. Run the same command
three times before, on the same folder and with --override_config (as this one), with

    --config.task.sequence_length=256 --config.training.batch_size=32
    --config.training.steps=350

    --config.task.sequence_length=1024 --config.training.batch_size=16
    --config.training.steps=400

    --config.task.sequence_length=4096 --config.training.batch_size=8
    --config.training.steps=460
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("associative_recall").replace(
        task=dict(sequence_length=8192, num_pairs=8),
        model=dict(
            family="causal",
            num_layers=2,
            model_size=64,
            embedding=dict(positions="rotary", max_length=8192),
            feed_forward=dict(hidden_size=128),
        ),
        optimizer=dict(
            learning_rate=1.5e-3,
            warmup_steps=100,
            final_learning_rate_fraction=1.0,
            b2=0.95,
        ),
        training=dict(
            steps=560,
            batch_size=4,
            steps_per_dispatch=5,
            report_every=10,
            evaluate_every=300,
            evaluation_examples=32,
            checkpoint_every=100,
        ),
        attention=dict(examples=2),
    )

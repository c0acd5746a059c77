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

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("masked_language_model").replace(
        task=dict(sequence_length=32),
        model=dict(
            num_layers=6,
            model_size=64,
            embedding=dict(positions="rotary", max_length=32),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=128),
        ),
        optimizer=dict(learning_rate=2e-3, warmup_steps=100, weight_decay=0.01),
        training=dict(
            steps=1500,
            batch_size=32,
            report_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
    )

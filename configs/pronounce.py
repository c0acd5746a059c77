"""Says how an English word is pronounced: letters to phonemes.

Run: python -m experiments.train --config=configs/pronounce.py
Expect: 69.6 percent held-out exact match with the first pronunciation, 94.7 percent
accuracy, loss 0.161 (unigram 13.6 percent, 3.267); an hour of processor time. Decoded
greedily, 27.0 percent (25.8 to 28.3) of 5,000 held-out words are none of the
dictionary's pronunciations, and 6.6 percent of the phonemes are wrong:
experiments.generate --workdir=runs/pronounce --examples=5000.

Yolchuyeva et al. (2019), https://arxiv.org/abs/2004.06338, report 22.1 percent of
words, on another split of the dictionary. At its end this model knows the words that it
trains on better (97.0 percent accuracy) than new ones.
"""

from mha_haiku import runs


def get_config() -> runs.RunConfig:
    """Returns the config of the run."""
    return runs.default_config("pronounce").replace(
        task=dict(longest=16),
        model=dict(
            num_layers=3,
            decoder=dict(num_layers=2),
            model_size=128,
            embedding=dict(positions="rotary"),
            attention=dict(num_heads=4),
            feed_forward=dict(hidden_size=512),
        ),
        optimizer=dict(
            learning_rate=1.5e-3,
            warmup_steps=400,
            final_learning_rate_fraction=0.02,
            weight_decay=0.1,
        ),
        training=dict(
            steps=20_000,
            batch_size=64,
            report_every=100,
            evaluate_every=2000,
            checkpoint_every=1000,
        ),
    )

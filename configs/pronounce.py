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

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("pronounce")

    config.task.longest = 16

    config.model.num_layers = 3
    config.model.decoder.num_layers = 2
    config.model.model_size = 128
    config.model.embedding.positions = "rotary"
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 512

    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup_steps = 400
    config.optimizer.final_learning_rate_fraction = 0.02
    config.optimizer.weight_decay = 0.1

    config.training.steps = 20_000
    config.training.batch_size = 64
    config.training.report_every = 100
    config.training.evaluate_every = 2000
    config.training.checkpoint_every = 1000

    return config

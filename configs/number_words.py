"""Translates numbers in words from English to German, which says units before tens.

Run: python -m experiments.train --config=configs/number_words.py
Expect: 99.8 percent held-out exact match, 99.98 percent accuracy, loss 0.0005 (unigram
12.3 percent, 2.916); 99.3 percent after 200 steps. 170 s on 2 CPU cores that did other
work, 117 s of processor time, maps included.

Of the 1,018 numbers that it has never seen it gets 1,017 right. Head cross.0.1 has its
largest weight on the English tens while it writes German tens, and on the units while
it writes units, in 92 percent of the rows where their order changes. Many other words
it need not look for: what follows "drei" in front of a hundred is "hundert". With
--config.seed=1 99.7 percent are right, and head cross.1.1 looks there in 95 percent.
"""

from ml_collections import config_dict

from mha_haiku import runs


def get_config() -> config_dict.ConfigDict:
    """Returns the config of the run."""
    config = runs.default_config("number_words")

    config.task.largest = 9_999
    config.task.tokenizer = "bpe"
    config.task.vocabulary_size = 300

    config.model.num_layers = 2
    config.model.model_size = 64
    config.model.embedding.max_length = 16
    config.model.attention.num_heads = 4
    config.model.feed_forward.hidden_size = 128

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100

    config.training.steps = 1000
    config.training.batch_size = 128
    config.training.report_every = 50
    config.training.evaluate_every = 250

    return config

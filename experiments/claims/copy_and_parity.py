"""Copying unique tokens is learned for longer inputs as well; parity is not."""

import numpy as np

from experiments.claims import base

_TRAINED = 16
_LENGTHS = (16, 24, 32, 64)
_LONGER = {"claim": 32, "control": 16}
# By their names in the figure: the task, its extra tokens in front, chance.
_TASKS = {"copy": ("induction", 0, 1 / 32), "parity": ("parity", 1, 1 / 2)}


class CopyAndParity(base.Claim):
    """The same causal model learns to copy and to count ones modulo 2, of 16 tokens.

    Copying: 8 different tokens, and then they come once more, from a random one on;
    the next token is to be said. Parity: after a start token come 16 random bits; at
    each one it is to be said whether the number of ones so far is odd. What counts is
    the second half of the tokens, at lengths up to four times as in training; all of
    it is rescaled so that chance is 0 and no error is 1. Two layers of four heads, with
    ALiBi. The control stays at the length of training, where both are learned.
    """

    sentence = "Copying unique tokens works at twice the length of training, parity not"
    source = base.Source(
        paper="Zhou et al. 2023",
        place="abstract, section 3 from memory",
        published=(
            "tasks with a short program for all lengths generalise in length, as does "
            "copying unique tokens; parity without a scratchpad does not (no number)"
        ),
        arxiv="2310.16028",
    )
    control = "the length of training"
    minutes = 4.0
    tried = (
        "Without positions, one seed: parity is learned as well, and at twice the "
        "length 74 % of the second half are right (chance 50 %)."
    )
    criteria = (
        base.Criterion(
            "rescaled accuracy at twice the length, copy minus parity",
            lambda x: x["copy, longer"] - x["parity, longer"],
            at_least=0.5,
        ),
        base.Criterion(
            "rescaled accuracy lost from training to twice its length, parity minus "
            "copy",
            lambda x: _lost(x, "parity") - _lost(x, "copy"),
            at_least=0.3,
        ),
    )
    curves = (
        base.Curve(
            "Second half of the tokens",
            f"tokens (training: {_TRAINED})",
            "held-out accuracy (0: chance, 1: all right)",
            _LENGTHS,
            {name: f"{name} at {{}}" for name in _TASKS},
            logarithmic=True,
            level=0,
            level_name="chance",
        ),
    )

    def configs(self, arm):
        found = {}
        for name, (task, extra, _) in _TASKS.items():
            config = base.config(task, 1500, batch_size=64, report_every=500).replace(
                task=dict(sequence_length=_TRAINED + extra),
                model=dict(
                    family="causal",
                    num_layers=2,
                    model_size=64,
                    embedding=dict(positions="alibi", max_length=16),
                    attention=dict(num_heads=4),
                    feed_forward=dict(hidden_size=128),
                ),
                optimizer=dict(learning_rate=2e-3, warmup_steps=100),
            )
            if task == "parity":
                config = config.replace(task=dict(has_start=True))
            found[name] = config
        return found

    def of_trained(self, desk, trained, name, arm):
        numbers, (_, extra, chance) = {}, _TASKS[name]
        for length in _LENGTHS if arm == "claim" else _LENGTHS[:1]:
            other = desk.changed(trained, task__sequence_length=length + extra)
            right = _accuracy(desk, other, length // 2)
            numbers[f"{name} at {length}"] = (right - chance) / (1 - chance)
        return numbers | {f"{name}, longer": numbers[f"{name} at {_LONGER[arm]}"]}


def _lost(numbers, name):
    return numbers[f"{name} at {_TRAINED}"] - numbers[f"{name}, longer"]


def _accuracy(desk, trained, count):
    """Returns the accuracy at the last `count` positions, of those that count."""
    example = desk.examples(trained, 1024)
    right = desk.predicted(trained, example) == np.asarray(example.targets)
    weights = np.asarray(example.weights)
    return np.average(right[:, -count:], weights=weights[:, -count:])

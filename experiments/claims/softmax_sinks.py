"""Sinks appear in one to three layers on a toy task; without a denominator not."""

import numpy as np

from experiments.claims import base, gated_attention

_DEPTHS = (1, 2, 3)
_TRIGGERS = 16  # symbols that are triggers, in the claim


class SoftmaxSinks(base.Claim):
    """A Markov chain with triggers, after which the symbol before them comes again.

    A head is active at triggers, where it fetches a symbol, and has nothing to do at
    the others: there the paper finds it on the start token. Measured is that weight at
    other symbols minus the weight at triggers, of the layer where it is largest. Models
    of one to three layers of one head are trained by Adam. For comparison,
    one layer has weights that are sigmoids, without a denominator, and three layers are
    trained by SGD. In the control the triggers are symbols of the chain like all
    others.
    """

    sentence = (
        "Heads that have nothing to do attend to the start token; they need softmax"
    )
    source = base.Source(
        paper="Guo et al. 2024",
        place="abstract; section 2 (in a figure, without a number)",
        published=(
            "sinks arise in transformers of one to three layers on Bigram-Backcopy; "
            "ReLU in place of softmax and SGD in place of Adam mitigate such phenomena "
            "(sigmoids without a denominator, in place of ReLU, are ours)"
        ),
        arxiv="2410.13835",
    )
    control = "a chain whose triggers are symbols like all others"
    minutes = 8.0
    tried = (
        "First the weight on the start token alone was to be compared; but it is 0.6 "
        "on a chain without triggers too, where the head is never needed. So the "
        "weight at triggers is subtracted, as the paper's heads are sinks in one "
        "domain and not in the other; the bounds stayed. Three layers trained by SGD "
        "(momentum 0.9, rate 0.1) learn the task as well and have sinks: 0.97, 0.48 "
        "and 0.90. Without a denominator one seed of three gives the start token a "
        "weight at all symbols (0.62), and most at triggers (1.00). What else was "
        "tried, `gated_attention` says."
    )
    criteria = (
        base.Criterion(
            "weight on the start token, at others minus at triggers, least of one to "
            "three layers",
            lambda x: min(x[f"others minus triggers, {n} layers"] for n in _DEPTHS),
            at_least=0.5,
        ),
        base.Criterion(
            "the same, one layer, less that without a denominator",
            lambda x: (
                x["others minus triggers, 1 layers"]
                - x["others minus triggers, no denominator"]
            ),
            at_least=0.3,
        ),
        base.Criterion(
            "the same, three layers, less that with SGD",
            lambda x: (
                x["others minus triggers, 3 layers"] - x["others minus triggers, SGD"]
            ),
            at_least=0.3,
        ),
    )
    curves = (
        base.Curve(
            title="Attention to the start token (Adam, softmax)",
            across="layers",
            up="weight on the start token",
            points=_DEPTHS,
            lines={
                "where nothing is to be fetched": "others, {} layers",
                "at triggers": "triggers, {} layers",
            },
        ),
    )

    def configs(self, arm):
        triggers = _TRIGGERS if arm == "claim" else 0
        config = gated_attention.backcopy().replace(task=dict(num_triggers=triggers))
        found = {
            f"{n} layers": config.replace(model=dict(num_layers=n)) for n in _DEPTHS
        }
        unnormalized = dict(score="sigmoid", normalizer="none")
        found["no denominator"] = config.replace(model=dict(attention=unnormalized))
        found["SGD"] = config.replace(
            model=dict(num_layers=3),
            optimizer=dict(name="sgd", momentum=0.9, learning_rate=0.1),
        )
        return found

    def of_trained(self, desk, trained, name, arm):
        example = desk.examples(trained, 512)
        starts, _, losses = desk.apply(trained, gated_attention.measured, example)
        inputs = np.asarray(example.inputs)
        is_late = np.arange(inputs.shape[1]) >= 4
        at_triggers = is_late & (inputs < _TRIGGERS)
        others = starts[:, is_late & ~at_triggers].mean(-1)
        triggers = starts[:, at_triggers].mean(-1)
        layer = (others - triggers).argmax()
        return {
            f"others minus triggers, {name}": (others - triggers)[layer],
            f"others, {name}": others[layer],
            f"triggers, {name}": triggers[layer],
            f"loss after triggers, {name}": losses[at_triggers].mean(),
        }

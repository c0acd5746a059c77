"""Attention solves multi-query recall at every width; a window does not."""

import numpy as np

from experiments.claims import base

_WIDTHS = (16, 32, 64)
_WINDOW = 2  # the positions before its own that a windowed query sees


class MultiQueryRecall(base.Claim):
    """Six pairs of a key and a value, then four keys to give the values of.

    Two layers are trained at three widths, with attention to all positions before, and
    with attention to the last few of them. The control asks the same models for the
    values of another example: what they answer then is chance.
    """

    sentence = "Attention solves multi-query recall at every width, a window does not"
    source = base.Source(
        paper="Arora et al. 2023",
        place="section 4, and the authors' summary of it",
        published=(
            "to solve recall in longer sequences gated convolutions need more width, "
            "attention does not (the window is ours)"
        ),
        arxiv="2312.04927",
    )
    control = "values of another example"
    minutes = 2.9
    criteria = (
        base.Criterion(
            "accuracy of attention at its worst width",
            lambda x: min(x[f"attention, width {w}"] for w in _WIDTHS),
            at_least=0.99,
        ),
        base.Criterion(
            "accuracy, attention minus window, at the closest width",
            lambda x: min(
                x[f"attention, width {w}"] - x[f"window, width {w}"] for w in _WIDTHS
            ),
            at_least=0.5,
        ),
    )
    curves = (
        base.Curve(
            title="Recall of the values of queried keys",
            across="model width",
            up="held-out accuracy",
            points=_WIDTHS,
            lines={
                "attention": "attention, width {}",
                "window": "window, width {}",
            },
            logarithmic=True,
            level=1 / 16,
            level_name="chance",
        ),
    )

    def configs(self, arm):
        found = {}
        for kind, window in (("attention", None), ("window", _WINDOW)):
            for width in _WIDTHS:
                config = base.config(
                    "associative_recall", 600, batch_size=64, report_every=300
                ).replace(
                    model=dict(
                        family="causal",
                        num_layers=2,
                        model_size=width,
                        attention=dict(num_heads=1, window=window),
                        feed_forward=dict(hidden_size=0),
                    ),
                    optimizer=dict(learning_rate=1e-2, warmup_steps=50),
                )
                found[f"{kind}, width {width}"] = config
        return found

    def of_trained(self, desk, trained, name, arm):
        example = desk.examples(trained, 1024)
        targets = np.asarray(example.targets)
        if arm == "control":
            targets = np.roll(targets, 1, axis=0)
        right = desk.predicted(trained, example) == targets
        return {name: np.average(right, weights=example.weights)}

"""A claim that needs no training."""

import pytest

from experiments.claims import base


class Halves(base.Claim):
    """The number is 0.5 in the claim and 0 in the control, plus a little per seed."""

    sentence = "A half is more than nothing"
    source = base.Source("Euclid", "book I", "0.5", "")
    control = "nothing"
    planted = "a half"
    effect = "a half is more, by {0}, and lacks {1} nats"
    would_change = "A whole."
    before = base.Before("partly", "It was a third.")
    criteria = (
        base.Criterion(
            "size",
            "size",
            at_least=0.25,
            bound_from=base.HALF,
            published={"book I": 0.5, "book II": 0.6},
        ),
        base.Criterion("lack", lambda x: 1 - x["size"], at_most=0.7, unit="nats"),
    )
    curves = (
        base.Curve("size by step", "step", "size", (1, 2), {"one": "at {}"}, level=0.1),
    )

    def __init__(self):
        self.asked = []

    def measure(self, desk, seed, arm):
        self.asked.append((arm, seed))
        size = (0.0 if arm == "control" else 0.5) + 0.01 * (seed % 100)
        return {"size": size, "at 1": 0.1, "at 2": size}


@pytest.fixture
def halves():
    return Halves()

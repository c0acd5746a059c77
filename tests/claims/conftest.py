"""A claim that needs no training."""

import pytest

from experiments.claims import base


class Halves(base.Claim):
    """The number is 0.5 in the claim and 0 in the control, plus a little per seed."""

    sentence = "A half is more than nothing"
    source = base.Source("Euclid", "book I", "0.5", "")
    control = "nothing"
    minutes = 0.1
    criteria = (
        base.Criterion("size", "size", at_least=0.4, published=0.5),
        base.Criterion("lack", lambda x: 1 - x["size"], at_most=0.7, unit="nats"),
    )
    curves = (
        base.Curve("size by step", "step", "size", (1, 2), {"one": "at {}"}, level=0.1),
    )

    def __init__(self):
        self.asked = []

    def measure(self, desk, seed, arm):
        self.asked.append((arm, seed))
        size = (0.5 if arm == "claim" else 0.0) + 0.01 * seed
        return {"size": size, "at 1": 0.1, "at 2": size}


@pytest.fixture
def halves():
    return Halves()

"""Induction needs two layers, or keys that are mixed with the one before."""

import numpy as np

from experiments.claims import base
from mha_haiku.lab import heads

_STEPS = 800
_EVERY = 20  # steps between two points of a curve
_WINDOW = _STEPS // 10  # steps within which a rise is a jump
_SHOWN = range(_EVERY, _STEPS + 1, _EVERY)


class InductionHeads(base.Claim):
    """Eight random tokens, then the same ones from another place on.

    Trained are one layer, two layers, and one layer whose keys are mixed with the key
    before them ("smeared"), so that a key contains the token before its own. The
    control has one plain layer in the place of all three.
    """

    sentence = "Induction needs two layers, or smeared keys, and comes in a jump"
    source = base.Source(
        paper="Olsson et al. 2022",
        place="arguments 1 and 2",
        published=(
            "models of one layer have no induction heads and no bump in the loss, all "
            "larger ones do; smeared keys give them to one layer (no single number)"
        ),
        arxiv="2209.11895",
    )
    control = "one plain layer in all three places"
    minutes = 1.1
    criteria = (
        base.Criterion(
            "accuracy, two layers minus one",
            lambda x: x["accuracy of two layers"] - x["accuracy of one layer"],
            at_least=0.5,
        ),
        base.Criterion(
            "accuracy of one layer, smeared keys minus plain ones",
            lambda x: x["accuracy of smeared keys"] - x["accuracy of one layer"],
            at_least=0.5,
        ),
        base.Criterion(
            "induction score of the best head, two layers minus one",
            lambda x: x["score of two layers"] - x["score of one layer"],
            at_least=0.3,
        ),
        base.Criterion(
            "steepest rise of accuracy in a tenth of the steps, two layers minus one",
            lambda x: x["rise of two layers"] - x["rise of one layer"],
            at_least=0.3,
        ),
    )
    curves = (
        base.Curve(
            title="Accuracy while they learn",
            across="step",
            up="accuracy of training batches",
            points=tuple(_SHOWN),
            lines={
                "two layers": "two layers at {:.0f}",
                "smeared keys": "smeared keys at {:.0f}",
                "one layer": "one layer at {:.0f}",
            },
            level=1 / 16,
            level_name="chance",
        ),
    )

    def configs(self, arm):
        found = {}
        for name, layers, smeared in (
            ("one layer", 1, False),
            ("two layers", 2, False),
            ("smeared keys", 1, True),
        ):
            config = base.config(
                "induction", _STEPS, batch_size=64, report_every=_EVERY
            ).replace(
                task=dict(sequence_length=16, num_tokens=16),
                model=dict(
                    num_layers=1 if arm == "control" else layers,
                    model_size=32,
                    embedding=dict(max_length=16),
                    attention=dict(num_heads=2, smear_keys=smeared and arm == "claim"),
                    feed_forward=dict(hidden_size=64),
                ),
                optimizer=dict(learning_rate=3e-3, warmup_steps=50),
            )
            found[name] = config
        return found

    def of_trained(self, desk, trained, name, arm):
        batch = desk.examples(trained, 256)
        roles = heads.roles(trained.model, trained.params, [batch])
        learned = {
            line["step"]: line["accuracy"]
            for line in trained.history
            if "accuracy" in line
        }
        rises = [
            learned[step] - learned[step - _WINDOW]
            for step in _SHOWN
            if step - _WINDOW in learned
        ]
        return {
            f"score of {name}": np.nanmax(roles.scores["induction_of_repeated"]),
            f"accuracy of {name}": trained.held_out["accuracy"],
            f"rise of {name}": max(rises),
        } | {f"{name} at {step}": learned[step] for step in _SHOWN}

"""Which positions let a model answer inputs longer than its training inputs."""

from experiments.claims import base

_TRAINED = 16
_LENGTHS = (16, 24, 32, 64)
_LONGER = {"claim": 32, "control": 16}
_KINDS = {"none": "no positions", "alibi": "ALiBi", "learned": "learned"}


class LengthExtrapolation(base.Claim):
    """A repeated sequence of unique tokens is continued, twice as long as in training.

    Two causal layers without a feed-forward part, without positions, with ALiBi and
    with learned ones, of which the later were never trained. The control stays at the
    length of training.
    """

    sentence = (
        "No positions, and ALiBi, reach inputs twice as long; learned ones do not"
    )
    source = base.Source(
        paper="Kazemnejad et al. 2023",
        place="abstract; trained on lengths up to 20, asked up to 40",
        published=(
            "no positions outperform explicit ones on longer inputs; ALiBi, rotary and "
            "absolute ones are not well suited"
        ),
        arxiv="2305.19466",
    )
    control = "the length of training"
    minutes = 3.5
    tried = (
        "ALiBi loses 4 points at four times the length. Without positions 1,000 steps "
        "are not enough for the length of training itself (0.91 right, the others "
        "1.00); at twice the length these models are above learned positions (0.64 "
        "against 0.48), by less than the bound."
    )
    criteria = (
        base.Criterion(
            "accuracy at twice the length, no positions minus learned",
            lambda x: x["no positions, longer"] - x["learned, longer"],
            at_least=0.2,
        ),
        base.Criterion(
            "accuracy at twice the length, ALiBi minus learned",
            lambda x: x["ALiBi, longer"] - x["learned, longer"],
            at_least=0.2,
        ),
        base.Criterion(
            "accuracy at twice the length, no positions minus ALiBi",
            lambda x: x["no positions, longer"] - x["ALiBi, longer"],
            at_least=0.0,
        ),
    )
    curves = (
        base.Curve(
            "Continuing a repeated sequence",
            f"tokens (training: {_TRAINED})",
            "held-out accuracy",
            _LENGTHS,
            {name: f"{name} at {{}}" for name in _KINDS.values()},
            logarithmic=True,
            level=1 / 32,
            level_name="chance",
        ),
    )

    def configs(self, arm):
        found = {}
        for kind, name in _KINDS.items():
            config = base.config(
                "induction", 1000, batch_size=64, report_every=500
            ).replace(
                task=dict(sequence_length=_TRAINED),
                model=dict(
                    num_layers=2,
                    model_size=64,
                    embedding=dict(positions=kind, max_length=_LENGTHS[-1]),
                    attention=dict(num_heads=4),
                    feed_forward=dict(hidden_size=0),
                ),
                optimizer=dict(warmup_steps=100),
            )
            found[name] = config
        return found

    def of_trained(self, desk, trained, name, arm):
        numbers = {}
        for length in _LENGTHS if arm == "claim" else _LENGTHS[:1]:
            other = desk.changed(trained, task__sequence_length=length)
            numbers[f"{name} at {length}"] = desk.evaluate(other)["accuracy"]
        return numbers | {f"{name}, longer": numbers[f"{name} at {_LONGER[arm]}"]}

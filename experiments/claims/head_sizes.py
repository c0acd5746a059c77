"""At a fixed width, more heads help until they are smaller than the input is long."""

import jax

from experiments.claims import base

_HEADS = (1, 4, 16, 64)
_WIDTH = 64
_LENGTH = 16  # of the input, and the head size that does not change
_ENOUGH = _WIDTH // _LENGTH  # the most heads whose size is the length


class HeadSizes(base.Claim):
    """Sorting 16 tokens with 1, 4, 16 and 64 heads, after as many steps.

    At a fixed width of 64 the heads are of size 64, 16, 4 and 1; at a fixed head size
    they are all of size 16, so that queries, keys and values grow with their number. In
    the control all models have one head.
    """

    sentence = "At a fixed width more heads help until heads are smaller than the input"
    source = base.Source(
        paper="Bhojanapalli et al. 2020",
        place="abstract; figure 1 from memory",
        published=(
            "heads of size width / number are a low-rank bottleneck; heads as large as "
            "the input is long, whatever their number, scale better (no number taken)"
        ),
        arxiv="2002.07028",
    )
    control = "one head in all models"
    minutes = 8.0
    tried = (
        "At fixed width, 64 heads are worse than 4 by 0.02 nats in two of three seeds "
        "and as good in the third: the harm is too small to be sure of. No other "
        "length, width or number of steps was tried."
    )
    criteria = (
        base.Criterion(
            "loss at fixed width, 1 head minus 4 heads as large as the input",
            lambda x: x["fixed width, 1 heads"] - x[f"fixed width, {_ENOUGH} heads"],
            at_least=0.01,
            unit="nats",
        ),
        base.Criterion(
            "loss at fixed width, 64 heads minus 4 heads",
            lambda x: x["fixed width, 64 heads"] - x[f"fixed width, {_ENOUGH} heads"],
            at_least=0.01,
            unit="nats",
        ),
        base.Criterion(
            "loss of 64 heads, at fixed width minus at fixed head size",
            lambda x: x["fixed width, 64 heads"] - x["fixed head size, 64 heads"],
            at_least=0.01,
            unit="nats",
        ),
        base.Criterion(
            "growth of the operations from 1 to 64 heads, at fixed head size over "
            "at fixed width",
            lambda x: _growth(x, "fixed head size") / _growth(x, "fixed width"),
            at_least=2.0,
        ),
    )
    curves = (
        base.Curve(
            title=f"Sorting {_LENGTH} tokens at width {_WIDTH}, after 300 steps",
            across="heads",
            up="held-out loss (nats)",
            points=_HEADS,
            lines={
                "head size = width / heads": "fixed width, {} heads",
                f"head size = {_LENGTH}": "fixed head size, {} heads",
            },
            logarithmic=True,
        ),
        base.Curve(
            title="What a pass over 64 inputs costs",
            across="heads",
            up="floating-point operations (millions)",
            points=_HEADS,
            lines={
                "head size = width / heads": "operations, fixed width, {} heads",
                f"head size = {_LENGTH}": "operations, fixed head size, {} heads",
            },
            logarithmic=True,
        ),
    )

    def configs(self, arm):
        found = {}
        for heads in _HEADS:
            count = heads if arm == "claim" else 1
            for name, size in (
                ("fixed width", _WIDTH // count),
                ("fixed head size", _LENGTH),
            ):
                config = base.config(
                    "sort", 300, batch_size=64, report_every=100
                ).replace(
                    task=dict(sequence_length=_LENGTH, num_tokens=20),
                    model=dict(
                        num_layers=2,
                        model_size=_WIDTH,
                        embedding=dict(max_length=_LENGTH),
                        attention=dict(num_heads=count, key_size=size),
                        feed_forward=dict(hidden_size=2 * _WIDTH),
                    ),
                    optimizer=dict(learning_rate=3e-3, warmup_steps=50),
                )
                found[f"{name}, {heads} heads"] = config
        return found

    def of_trained(self, desk, trained, name, arm):
        operations = _operations(desk, trained)
        return {name: trained.held_out["loss"], f"operations, {name}": operations}


def _operations(desk, trained):
    """Returns the millions of operations of a pass over 64 inputs."""
    model, inputs = trained.model, desk.examples(trained, 64).inputs

    def logits(params):
        return model.apply(params, None, inputs, is_training=False).logits

    cost = jax.jit(logits).lower(trained.params).cost_analysis()
    return cost["flops"] / 1e6


def _growth(numbers, kind):
    one, many = (numbers[f"operations, {kind}, {n} heads"] for n in (1, _HEADS[-1]))
    return many / one

"""A fifth to two fifths of the heads of a trained model can be ablated."""

import numpy as np

from experiments.claims import base
from mha_haiku.subjects.verbs import pruned_models

_LAYERS = 2
_HEADS = (4, 8, 16, 32)  # of the whole model
_EXAMPLES = 512
_RANDOM_ORDERS = 8
_LEARNED, _MOST_STEPS = 0.99, 6400
_NOTICED = 0.01  # a fall of accuracy
_SHARES = tuple(i / 16 for i in range(17))


class FreeHeads(base.Claim):
    """Models of 4, 8, 16 and 32 heads continue a sequence that repeats in the input.

    A model has two layers with half of the heads in each; heads are of size 8, and the
    width is 32. The number of steps is doubled, up to 6,400, until 99 % of the held-out
    answers are right. Then heads are ablated in the order of their importance by
    gradients, the least important first, without further training. A share of the heads
    is free if without it the accuracy falls by at most one point, which is our reading
    of "no noticeable loss". The criterion takes the mean share of the models of 8, 16
    and 32 heads; of four heads a single one is already a quarter. The control ablates
    heads in random order, averaged over eight orders. In the planted failure the random
    orders begin with the less important half of the heads.
    """

    sentence = "20 to 40 % of the heads of a trained model are free"
    source = base.Source(
        paper="Michel et al. 2019",
        place="section 4.2",
        published=(
            "20 % of the heads of a translator and 40 % of BERT's go without a "
            "noticeable loss, and then performance drops sharply"
        ),
        arxiv="1905.10650",
    )
    control = "random order"
    planted = "random order, in which the less important half of the heads goes first"
    effect = (
        "share of 8 to 32 heads that can be ablated for at most one point of accuracy: "
        "{0}"
    )
    would_change = (
        "A task that needs more of the heads: continuing a repeated sequence takes two "
        "kinds of heads, and a translator or BERT has more to do."
    )
    version = 2
    before = base.Before(
        "partly",
        "It had one model of 16 heads and asked for at most one point without 3 and "
        "without 6 heads, so that the verdict depended on that model. Now models have "
        "4 to 32 heads and are trained until they have learned, and the free share is "
        "measured.",
    )
    tried = (
        "On the pilot seeds the share grows with the number of heads: 0.08 of 4 heads, "
        "0.17 of 8, 0.35 of 16 and 0.46 of 32 in the mean. With the model of four "
        "heads, the mean of all four is 0.27 with a standard deviation of 0.07; this "
        "model was left out of the criterion before the verdict. Of the two sets of "
        "seeds the first one meets the bound and the second one, with 0.264 (0.177 to "
        "0.351), leaves it undecided: of 32 heads one of its models has 0.19 free, the "
        "other eight models 0.34 to 0.56."
    )
    criteria = (
        base.Criterion(
            "share of heads ablated for at most one point, mean of 8, 16 and 32 heads",
            lambda x: np.mean([x[f"free of {heads}"] for heads in _HEADS[1:]]),
            at_least=0.2,
            bound_from=base.PAPER,
            published={"translator": 0.2, "BERT": 0.4},
        ),
    )
    curves = (
        base.Curve(
            title="Heads ablated, the least important first",
            across="share of the heads that are ablated at most",
            up="fall of held-out accuracy",
            points=_SHARES,
            lines={f"{heads} heads": f"fall of {heads} at {{}}" for heads in _HEADS},
            level=_NOTICED,
            level_name="one point",
        ),
        base.Curve(
            title="Heads that can be ablated for at most one point",
            across="heads of the model",
            up="share of the heads",
            points=_HEADS,
            lines={"free heads": "free of {:.0f}"},
            logarithmic=True,
            level=0.2,
            level_name="published: translator",
        ),
    )

    def configs(self, arm):
        config = base.config("induction", 800, batch_size=64, report_every=400).replace(
            task=dict(sequence_length=16, num_tokens=16),
            model=dict(
                num_layers=_LAYERS,
                model_size=32,
                embedding=dict(max_length=16),
                attention=dict(key_size=8),
                feed_forward=dict(hidden_size=64),
            ),
            optimizer=dict(learning_rate=3e-3, warmup_steps=50),
        )
        return {
            str(heads): config.replace(
                model=dict(attention=dict(num_heads=heads // _LAYERS))
            )
            for heads in _HEADS
        }

    def measure(self, desk, seed, arm):
        numbers = {}
        for heads in _HEADS:
            config = self.configs(arm)[str(heads)]
            trained, has_learned = desk.train_until(
                config, seed, _has_learned, most=_MOST_STEPS
            )
            subject = trained.subject()
            order = pruned_models.order_of(
                subject, "gradient", ablation_value="zero", examples=256
            )
            orders = orders_of(order, arm, np.random.default_rng(seed))
            of = subject.measured(_EXAMPLES, metric="accuracy")
            mistakes = pruned_models.ablated(of, orders, range(heads + 1))
            falls = mistakes - mistakes[:, :1]
            numbers[f"free of {heads}"] = free_share(falls) if has_learned else 0.0
            numbers[f"accuracy of {heads}"] = 1 - mistakes[0, 0]
            for share in _SHARES:
                fall = falls.mean(0)[int(share * heads)]
                numbers[f"fall of {heads} at {share}"] = fall
        return numbers


def _has_learned(trained):
    return trained.held_out["accuracy"] >= _LEARNED


def orders_of(order, arm, generator):
    """Returns the orders in which an arm ablates heads, from the importance order."""
    if arm == "claim":
        return [order]
    parts = [order]
    if arm == base.PLANTED:
        parts = [order[: len(order) // 2], order[len(order) // 2 :]]
    return [
        [part[i] for part in parts for i in generator.permutation(len(part))]
        for _ in range(_RANDOM_ORDERS)
    ]


def free_share(falls):
    """Returns the largest share of heads without a noticeable fall.

    Args:
      falls: `[orders, heads + 1]`, of accuracy without the first heads of an order.

    Returns:
      The mean over orders.
    """
    noticed = falls > _NOTICED
    noticed[:, -1] = True  # without any heads nothing is left
    return float(noticed.argmax(1).mean() - 1) / (falls.shape[1] - 1)

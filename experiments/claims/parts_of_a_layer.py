"""What scaling, layer norm, residual connections and the feed-forward part are for."""

from experiments.claims import base

_PARTS = {
    "scaling": {"attention": {"scale": 1.0}},
    "layer norm": {"norm": {"kind": "none"}},
    "residual": {"attention": {"residual": False}, "feed_forward": {"residual": False}},
    "feed-forward": {"feed_forward": {"hidden_size": 0}},
}
_OTHER_SEED = 1000  # added to the seed, in the control


class PartsOfALayer(base.Claim):
    """A small encoder learns to sort, whole and without one part at a time.

    Two layers of one head with 64 channels. Without scaling dot products are as they
    are, not divided by 8. The control has the whole model, of another seed, in the
    place of each that lacks a part.
    """

    sentence = "Sorting is not learned unscaled; norm, residual, feed-forward each help"
    source = base.Source(
        paper="Vaswani et al. 2017",
        place="section 3.2.1 on scaling, from memory; the rest is this project's own",
        published=(
            "large dot products push the softmax into regions of extremely small "
            "gradients; no number for the other parts"
        ),
        arxiv="1706.03762",
    )
    control = "the whole model with another seed"
    minutes = 5.0
    tried = (
        "Without layer norm two layers learn as well within 600 steps. No deeper "
        "model, other learning rate or longer training was tried."
    )
    criteria = (
        base.Criterion("accuracy lost without scaling", "scaling", at_least=0.2),
        base.Criterion("accuracy lost without layer norm", "layer norm", at_least=0.01),
        base.Criterion("accuracy lost without residual", "residual", at_least=0.01),
        base.Criterion(
            "accuracy lost without feed-forward part", "feed-forward", at_least=0.01
        ),
    )

    def configs(self, arm):
        # A loss that is not finite is a way not to learn.
        config = base.config(
            "sort",
            600,
            batch_size=64,
            report_every=300,
            non_finite="skip",
            max_skips=600,
        ).replace(
            task=dict(num_tokens=20),
            model=dict(num_layers=2, model_size=64, feed_forward=dict(hidden_size=128)),
            optimizer=dict(learning_rate=3e-3, warmup_steps=100),
        )
        found = {"whole": config}
        for part, fields in _PARTS.items() if arm == "claim" else ():
            found[part] = config.replace(model=fields)
        return found

    def measure(self, desk, seed, arm):
        configs = self.configs(arm)
        accuracies = {
            name: desk.train(config, seed).held_out["accuracy"]
            for name, config in configs.items()
        }
        if arm == "control":
            other = desk.train(configs["whole"], seed + _OTHER_SEED)
            accuracies |= dict.fromkeys(_PARTS, other.held_out["accuracy"])
        lost = {part: accuracies["whole"] - accuracies[part] for part in _PARTS}
        return {**lost, "whole": accuracies["whole"]}

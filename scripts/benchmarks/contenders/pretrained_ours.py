"""mha_haiku: a pretrained model, with or without statistics of all its heads."""

import jax
import jax.numpy as jnp
import numpy as np

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import pretrained_models


def prepare(
    model: str,
    use: str,
    batch: int = 1,
    length: int = 0,
    size: int = 1,
) -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "forward", "statistics" (of all heads, with the forward pass), "edges"
        (attribution of all edges) or "load".
    """
    source = pretrained_models.MODELS[model].path
    if use == "load":
        return worker.Program(lambda: _load(source))
    imported = mh.interop.load(source)
    if use == "edges":
        return _edges(imported, pretrained_models.tokens(model, batch, length))
    is_language_model = imported.config.output.logits

    def forward(params, tokens):
        output = imported.model.apply(params, None, tokens, is_training=False)
        result = output.logits if is_language_model else output.output
        if use == "forward":
            return result
        # Layers are alike: their statistics are one compiled program, run L times.
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *output.maps)
        statistics = jax.lax.map(lambda each: each.statistics(pooled=(32, 32)), stacked)
        return result[:, -1], statistics

    tokens = pretrained_models.tokens(model, batch, length)
    call = jax.jit(forward).lower(imported.params, tokens).compile()

    def run():
        for _ in range(size):
            jax.block_until_ready(call(imported.params, tokens))

    return worker.Program(run, units=size)


def _edges(imported, tokens):
    targets, weights = np.asarray(tokens[:, :2]), np.ones((len(tokens), 2), np.float32)
    clean = mh.tasks.Example(np.asarray(tokens), targets, weights)
    corrupted = clean._replace(inputs=np.flip(clean.inputs, 1))
    metric = mh.heads.metrics.logit_difference
    of = mh.heads.Measured(imported.model, metric, imported.params, [clean])

    def run():
        mh.heads.edge_attribution(of, [corrupted])

    return worker.Program(run)


def _load(source):
    jax.block_until_ready(mh.interop.load(source).params)

"""What reaches the logits straight from each head, and what each layer would answer.

B batch, T positions, P attention parts, H heads, V value size per head, D width, L
layers, C classes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import head_weights, running
from mha_haiku.training import tasks

Array = jax.Array


class Contributions(NamedTuple):
    """The parts of logits; they add up to them.

    Arrays have no axis C where classes were chosen, and no T where the model pools
    positions.
    """

    # `[B, T, H, C]` of each attention part; 0 in an encoder with a decoder, which the
    # logits do not read.
    heads: tuple[Array, ...]
    rest: Array  # `[B, T, C]`: embeddings, feed-forward parts, biases


def logit_attribution(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    *,
    classes: Array | None = None,
) -> Contributions:
    """Computes direct logit attribution: the part of each head in the logits.

    The residual stream is a sum, of which a head's output is one term, and logits are
    linear in it once the factors of the norms in between are held constant. Effects
    through other heads and feed-forward parts are not included. A `soft_cap` of logits
    comes after the sum.

    `classes` are `[B, T]` integers (`[B]` where positions are pooled), whose logits are
    split, such as `example.targets`; memory does not grow with C. None: all.

    Raises:
      ValueError: If logits are not such a sum: norms come after the parts, parts are
        without residuals, or a layer that is not linear comes before the logits.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru;
    Elhage et al. 2021, "Path expansion trick",
    https://transformer-circuits.pub/2021/framework/index.html.
    """
    config = head_weights.config_of(model)
    if models.NORM_PLACES[config.norm.position].end:
        raise ValueError(
            "model must have no norms of the sum (norm.position pre, both or "
            "reordered): with them the logits are no sum over heads, got "
            f"{config.norm.position!r}."
        )
    if not (config.attention.residual and config.feed_forward.residual):
        raise ValueError(
            "model must have residual connections around all parts, got "
            f"attention.residual = {config.attention.residual} and "
            f"feed_forward.residual = {config.feed_forward.residual}."
        )
    program, weights = _contributions(model), _weights(config, params, model)
    return running.fetched(program(params, example, weights, classes))


def logit_lens(model: models.Model, params: Any, example: tasks.Example) -> Array:
    """Computes the logits that each layer's input would give, as if it were the last.

    The model must be of one stack of layers, and have logits. The result is `[L + 1, B,
    T, C]`: of what enters layer 0, 1, ..., L - 1, and the model's own logits.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru.
    """
    config = head_weights.config_of(model)
    if config.family == "encoder_decoder" or not config.output.logits:
        raise ValueError(
            "model must have one stack of layers, and logits, got family "
            f"{config.family!r} and output.logits = {config.output.logits}."
        )
    return running.fetched(_lens(model)(params, example))


@running.compiled
def _lens(model, params, example):
    _, streams = running.look(model, params, example, ["stream"])
    last = next(reversed(streams))

    def read(stream):
        edits = {last: lambda _: stream}
        return running.run_edited(model, params, example, edits).logits

    return jax.lax.map(read, jnp.stack(list(streams.values())))


class _Weights(NamedTuple):
    """What is read of the parameters, on the host."""

    outputs: list  # of each part [H, V, D]
    after: list  # the norms after the parts
    ends: list  # the norms before the logits
    unembedding: Array  # [D, C]
    bias: Array  # [C]


def _weights(config, params, model) -> _Weights:
    outputs, after = [], []
    for place in models.heads_of_layers(config):
        w = head_weights.leaves_of(params, f"{place.path}/linear").get("w")
        outputs.append(
            w.reshape(len(place.names), -1, w.shape[-1]) if place.names else None
        )
        name = f"{head_weights.norm_name(place)}_after"
        after.append(head_weights.norm_of(config, params, name))
    ends = head_weights.end_norms(config, params)
    matrix = head_weights.unembedding(model, params)
    bias = params.get("logits", {}).get("b", np.zeros(matrix.shape[1]))
    return jax.tree.map(np.float32, _Weights(outputs, after, ends, matrix, bias))


@running.compiled
def _contributions(model, params, example, weights, classes):
    config = model.config
    stack = "decoder" if config.family == "encoder_decoder" else "encoder"
    at = ["*/heads", "*attention/output", f"{stack}/stream"]
    _, found = running.look(model, params, example, at)
    end = found[f"{stack}/stream"].astype(jnp.float32)
    valid = running.valid(end.shape[1], example, stack)
    if config.family == "set_classifier":  # one logit, of each element
        classes = jnp.zeros(example.inputs.shape[:2], int)

    def read(x):
        """Returns logits of the last layer's output, `[B, T, C]` or of `classes`."""
        x = _normed(config, x, weights.ends[0])
        x = _pooled(config, x, valid)
        for norm in weights.ends[1:]:
            x = _normed(config, x, norm)
        if classes is None:
            return x @ weights.unembedding + _last(weights.bias, x)
        chosen = weights.unembedding.T[classes]
        return jnp.einsum("...d,...d->...", x, chosen) + weights.bias[classes]

    # Factors of norms are held, so that what the parts of a sum add is linear.
    logits, read = jax.linearize(read, end)
    heads_axis, heads = -2 if classes is None else -1, []
    for part, place in enumerate(models.heads_of_layers(config)):
        z = jnp.zeros((*end.shape[:-1], len(place.names), end.shape[-1]))
        if place.names and place.kind != "encoder":
            values = found[f"{place.path}/heads"].astype(jnp.float32)
            z = jnp.einsum("bthv,hvd->bthd", values, weights.outputs[part])
            written = found[f"{place.path}/output"].astype(jnp.float32)
            after = functools.partial(_normed, config, norm=weights.after[part])
            if models.NORM_PLACES[config.norm.position].after:
                z = jax.vmap(jax.linearize(after, written)[1], -2, -2)(z)
        heads.append(jax.vmap(read, -2, heads_axis)(z))
    rest = logits - sum(each.sum(heads_axis) for each in heads)
    return Contributions(tuple(heads), rest)


def _normed(config, x, norm) -> Array:
    """Passes `[..., D]` through a norm, whose factor counts as a constant."""
    if config.norm.kind == "none":
        return x
    x = x - norm.is_centered * x.mean(-1, keepdims=True)
    size = jnp.square(x).mean(-1, keepdims=True)
    factor = jax.lax.stop_gradient(jax.lax.rsqrt(size + config.norm.epsilon))
    return x * factor * _last(norm.scale, x) + _last(norm.offset, x)


def _pooled(config, x, valid) -> Array:
    """Pools `[B, T, ...]` to `[B, ...]`, or returns x itself without pooling."""
    if config.output.pool == "first":
        return x[:, 0]
    if config.output.pool is None:
        return x
    share = valid / jnp.maximum(valid.sum(1, keepdims=True), 1)
    return jnp.einsum("bt,bt...->b...", share, x)


def _last(vector, x) -> Array:
    """Reshapes `[D]` to the number of axes of x, as the last axis."""
    return jnp.reshape(vector, (1,) * (x.ndim - 1) + (-1,))

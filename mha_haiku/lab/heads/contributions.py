"""What reaches the logits straight from each head, and what each layer would answer.

B batch, T positions, H heads, L layers, C classes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import components, head_weights, running
from mha_haiku.training import tasks

Array = jax.Array


class Contributions(NamedTuple):
    """The parts of logits; they add up to them.

    Arrays have no axis C where classes were chosen, and no T where the model pools
    positions.

    Example:
      >>> parts = mh.heads.logit_attribution(model, params, batches[0])
      >>> [x.shape for x in parts.heads], parts.rest.shape
      ([(8, 9, 2, 13), (8, 9, 2, 13)], (8, 9, 13))
      >>> total = sum(x.sum(2) for x in parts.heads) + parts.rest
      >>> logits = model.apply(params, None, tokens, is_training=False).logits
      >>> np.allclose(total, logits, atol=1e-4)
      True
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

    Of a function, as far as its program shows the residual stream and norms.

    The residual stream is a sum, of which a head's output is one term, and logits are
    linear in it once the factors of the norms in between are held constant. Effects
    through other heads and feed-forward parts are not included. A `soft_cap` of logits
    comes after the sum.

    `classes` are `[B, T]` integers (`[B]` where positions are pooled), whose logits are
    split, such as `example.targets`; None: all.

    Raises:
      ValueError: If there is no such class, or logits are not such a sum: norms come
        after the parts, parts are without residuals, or a layer that is not linear
        comes before the logits.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru;
    Elhage et al. 2021, "Path expansion trick",
    https://transformer-circuits.pub/2021/framework/index.html.

    Example:
      >>> right = batches[0].targets
      >>> parts = mh.heads.logit_attribution(model, params, batches[0], classes=right)
      >>> abs(parts.heads[1][:, -1].mean(0).round())  # at the last position, [H]
      array([12.,  0.], dtype=float32)
    """
    if model.config is not None:
        _check_config(model.config)
    is_set = model.config is not None and model.config.family == "set_classifier"
    if classes is not None and not is_set:
        running.check_classes("classes", model, params, example, classes)
    found, curvature = _contributions(model)(params, example, classes)
    components.check_linear(curvature)
    return running.fetched(found)


def _check_config(config) -> None:
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
    head_weights.check_logits(config)


def logit_lens(model: models.Model, params: Any, example: tasks.Example) -> Array:
    """Computes the logits that each layer's input would give, as if it were the last.

    The result is `[L + 1, B, T, C]` (`[L + 1, B, C]` where positions are pooled): of
    what enters layer 0, 1, ..., L - 1, and the model's own logits. In a function the
    residual stream is found by `sites.show_stream`.

    Raises:
      ValueError: If the model has several stacks of layers, no logits, or is a function
        whose program shows no residual stream from its first layer to its last.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru.

    Example:
      >>> logits = mh.heads.logit_lens(model, params, batches[0])
      >>> is_right = logits.argmax(-1) == batches[0].targets
      >>> is_right[:, :, -1].mean(-1)  # before layers 0 and 1, and at the end
      array([0., 0., 1.])
    """
    config = model.config
    is_known = config is not None
    if is_known and (config.family == "encoder_decoder" or not config.output.logits):
        raise ValueError(
            "model must have one stack of layers, and logits, got family "
            f"{config.family!r} and output.logits = {config.output.logits}."
        )
    return running.fetched(_lens(model)(params, example))


@running.compiled
def _lens(model, params, example):
    model = running.shown(model)
    _, streams = running.look(model, params, example, ["stream"], strict=False)
    if len(streams) < 2 or len({x.shape for x in streams.values()}) > 1:
        raise ValueError(
            "the model must show its residual stream, one sum through all its layers: "
            "norms of\nthe sum and several stacks of layers break it. Where it has "
            'one, name what enters each layer, and leaves the last: mh.site("stream", '
            "x)."
        )
    last = next(reversed(streams))

    def read(stream):
        edits = {last: lambda _: stream}
        return running.run_edited(model, params, example, edits).logits

    return jax.lax.map(read, jnp.stack(list(streams.values())))


@running.compiled
def _contributions(model, params, example, classes):
    is_set = model.config is not None and model.config.family == "set_classifier"

    def read(*given):
        logits = components.read_logits(*given)["logits"]
        if not is_set and classes is not None:  # of a set one logit of each element
            logits = jnp.take_along_axis(logits, classes[..., None], -1)[..., 0]
        return {"logits": logits}

    held = components.Held(model, params, example, read).linearized()
    logits = held.ends["logits"]
    numbers = [m for m, x in enumerate(held.components) if x.kind == "head"]
    numbers = np.array(numbers, int)
    if is_set or classes is not None:
        # Backwards, once for all heads: a logit is of what is written at its position.
        axis, gradients = -1, held.pull({"logits": jnp.ones_like(logits)})
        added = held.parts(gradients)[numbers]
        is_pooled = logits.ndim == 1
        added = added.sum(-1) if is_pooled else added[..., : logits.shape[1]]
    else:
        axis = -2
        added = jax.lax.map(lambda m: held.push(held.single(m))["logits"], numbers)
    counts = [held.sources[name].shape[-2] for name in held.heads]
    by_part = jnp.split(added, np.cumsum(counts)[:-1])
    heads = tuple(jnp.moveaxis(x, 0, axis) for x in by_part)
    rest = logits - sum(x.sum(axis) for x in heads)
    return Contributions(heads, rest), held.curvature()

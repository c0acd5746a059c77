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
    split, such as `example.targets`; None: all.

    Raises:
      ValueError: If there is no such class, the model has no config, or logits are not
        such a sum: norms come after the parts, parts are without residuals, or a layer
        that is not linear comes before the logits.

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
    head_weights.check_logits(config)
    if classes is not None and config.family != "set_classifier":
        running.check_classes("classes", model, params, example, classes)
    return running.fetched(_contributions(model)(params, example, classes))


def logit_lens(model: models.Model, params: Any, example: tasks.Example) -> Array:
    """Computes the logits that each layer's input would give, as if it were the last.

    The result is `[L + 1, B, T, C]`: of what enters layer 0, 1, ..., L - 1, and the
    model's own logits.

    Raises:
      ValueError: If the model has no config, several stacks of layers or no logits.

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


@running.compiled
def _contributions(model, params, example, classes):
    has_one = model.config.family == "set_classifier"  # one logit, of each element

    def read(*given):
        logits = components.read_logits(*given)["logits"]
        if not has_one and classes is not None:
            logits = jnp.take_along_axis(logits, classes[..., None], -1)[..., 0]
        return {"logits": logits}

    held = components.Held(model, params, example, read).linearized()
    logits = held.ends["logits"]
    numbers = [m for m, x in enumerate(held.components) if x.kind == "head"]
    numbers = np.array(numbers, int)
    if has_one or classes is not None:
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
    return Contributions(heads, logits - sum(x.sum(axis) for x in heads))

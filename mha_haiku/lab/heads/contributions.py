"""Direct logit attribution of heads, and the logit lens of layers.

B batch, T positions, H heads, L layers, C classes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import circuits, components, model_runs
from mha_haiku.training import tasks

Array = jax.Array


class Contributions(NamedTuple):
    """The parts of logits, which add up to the logits.

    Arrays have no axis C if classes were chosen, and no T if the model pools positions.

    Example:
      >>> parts = mh.heads.logit_attribution(model, params, batches[0])
      >>> [x.shape for x in parts.heads], parts.rest.shape
      ([(8, 9, 2, 13), (8, 9, 2, 13)], (8, 9, 13))
      >>> total = sum(x.sum(2) for x in parts.heads) + parts.rest
      >>> logits = model.apply(params, None, tokens, is_training=False).logits
      >>> np.allclose(total, logits, atol=1e-4)
      True
    """

    # `[B, T, H, C]` of each attention part; 0 in the encoder of an encoder-decoder,
    # which the logits do not read.
    heads: tuple[Array, ...]
    rest: Array  # `[B, T, C]`: embeddings, feed-forward parts, biases


def logit_attribution(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    *,
    classes: Array | None = None,
) -> Contributions:
    """Computes direct logit attribution: the contribution of each head to the logits.

    Works for functions whose program shows the residual stream and norms.

    The residual stream is a sum with a term for each head's output, and logits are
    linear in it once the factors of the norms in between are held constant. Effects
    through other heads and feed-forward parts are not included.

    `classes` are `[B, T]` integers (`[B]` if positions are pooled) whose logits are
    split, such as `example.targets`. Defaults to all classes.

    Raises:
      ValueError: If there is no such class, or logits are not such a sum: norms come
        after the parts, parts have no residuals, or a nonlinear layer comes before the
        logits.

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
    if classes is not None and not components.is_set(model):
        model_runs.check_classes("classes", model, params, example, classes)
    contributions, curvature = _contributions(model)(params, example, classes)
    components.check_linear(curvature)
    return model_runs.fetched(contributions)


def _check_config(config: models.ModelConfig) -> None:
    if config.norm.position == "post":
        raise ValueError(
            "model must have no norms of the sum (norm.position pre): with them the "
            "logits are not a sum over heads, got 'post'."
        )
    if not (config.attention.residual and config.feed_forward.residual):
        raise ValueError(
            "model must have residual connections around all parts, got "
            f"attention.residual = {config.attention.residual} and "
            f"feed_forward.residual = {config.feed_forward.residual}."
        )
    circuits.check_logits(config)


def logit_lens(model: models.Model, params: Any, example: tasks.Example) -> Array:
    """Computes the logits of each layer's input, as if it came from the last layer.

    The result is `[L + 1, B, T, C]` (`[L + 1, B, C]` if positions are pooled), for the
    inputs of layers 0, 1, ..., L - 1, and last the model's logits. In a function
    `sites.show_stream` finds the residual stream.

    Raises:
      ValueError: If the model has several stacks of layers, no logits, or is a function
        without a recognizable residual stream from its first layer to its last.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru.

    Example:
      >>> logits = mh.heads.logit_lens(model, params, batches[0])
      >>> is_right = logits.argmax(-1) == batches[0].targets
      >>> is_right[:, :, -1].mean(-1)  # before layers 0 and 1, and at the end
      array([0., 0., 1.])
    """
    config = model.config
    if config and (config.family == "encoder_decoder" or not config.output.logits):
        raise ValueError(
            "model must have one stack of layers, and logits, got family "
            f"{config.family!r} and output.logits = {config.output.logits}."
        )
    logits, output = model_runs.fetched(_lens(model)(params, example))
    far = np.abs(logits[-1] - output).max() / np.abs(output).max(initial=1e-30)
    if not far < components.LINEAR:
        raise ValueError(
            "the residual stream must determine the logits, but what leaves the last "
            f"layer gives logits that are {far:.1%} off; ask without edits of the "
            "stream or the logits."
        )
    return logits


@model_runs.compiled
def _lens(
    model: models.Model, params: Any, example: tasks.Example
) -> tuple[Array, Array]:
    """Returns the logits of all streams, and the logits of the model."""
    model = model_runs.shown(model)
    # In the order of the program: `model_runs.look` sorts by the kind of attention.
    run = functools.partial(model_runs.run, model)
    look = model_runs.looking(run, ["stream"], example, strict=False)
    output, streams = look(params, example)
    if len(streams) < 2 or len({x.shape for x in streams.values()}) > 1:
        raise ValueError(
            "the model must show its residual stream, one sum through all its layers: "
            "norms of\nthe sum and several stacks of layers break it. If it has one, "
            "name the input of each layer and the output of the last: "
            'mh.site("stream", x).'
        )
    last = next(reversed(streams))

    def read(stream: Array) -> Array:
        edits = {(last,): lambda _: stream}
        return model_runs.run_edited(model, params, example, edits).logits

    return jax.lax.map(read, jnp.stack([*streams.values()])), output.logits


@model_runs.compiled
def _contributions(
    model: models.Model, params: Any, example: tasks.Example, classes: Array | None
) -> tuple[Contributions, Array]:
    is_set = components.is_set(model)

    def read(*run: Any) -> dict[str, Array]:
        logits = model_runs.run(*run).logits
        if not is_set and classes is not None:  # a set has one logit per element
            logits = jnp.take_along_axis(logits, classes[..., None], -1)[..., 0]
        return {"logits": logits}

    held = components.Held(model, params, example, read).linearized()
    logits = held.ends["logits"]
    numbers = np.flatnonzero([x.kind == "head" for x in held.components])
    if is_set or classes is not None:
        # Backward, once for all heads: a logit depends on what is written at its
        # position.
        axis, gradients = -1, held.pull({"logits": jnp.ones_like(logits)})
        added = held.parts(gradients)[numbers]
        added = added.sum(-1) if logits.ndim == 1 else added[..., : logits.shape[1]]
    else:
        axis = -2
        added = jax.lax.map(lambda m: held.push(held.single(m))["logits"], numbers)
    counts = [held.sources[name].shape[-2] for name in held.heads]
    by_part = jnp.split(added, np.cumsum(counts)[:-1])
    heads = tuple(jnp.moveaxis(x, 0, axis) for x in by_part)
    rest = logits - sum(x.sum(axis) for x in heads)
    return Contributions(heads, rest), held.curvature()

"""What reaches the logits straight from each head, and what each layer would answer.

B batch, T positions, P attention parts, H heads, V value size per head, D width, L
layers, C classes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import models, tasks
from mha_haiku.heads import head_weights, subject

Array = jax.Array


class Contributions(NamedTuple):
    """The parts of logits; they add up to them.

    Attributes:
      heads: Of each of the P attention parts `[B, T, H, C]`, without C where classes
        were chosen, and without T where the model pools positions. 0 for the heads of
        an encoder with a decoder: logits do not read them themselves.
      rest: `[B, T, C]` likewise, all else: embeddings, feed-forward parts, biases.
    """

    heads: tuple[Array, ...]
    rest: Array


def logit_attribution(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    *,
    classes: Array | None = None,
) -> Contributions:
    """Returns direct logit attribution: each head's own part of the logits.

    The residual stream is a sum, of which a head's output is one term, and logits are
    linear in it once the factors of the norms in between are held at what they are.
    What the head does to the logits through other heads and feed-forward parts is not
    in it. A `soft_cap` of logits comes after the sum.

    Args:
      model: As `models.build` or `interop.load` makes it.
      params: Its parameters.
      example: A batch.
      classes: `[B, T]` integers (`[B]` where positions are pooled), the class of which
        the logit is asked for, such as `example.targets`: memory does not grow with C.
        None: all.

    Raises:
      ValueError: If logits are not such a sum: norms come after the parts, parts are
        without residuals, or a layer that is not linear comes before the logits.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru;
    Elhage et al. 2021, "Path expansion trick",
    https://transformer-circuits.pub/2021/framework/index.html.
    """
    config = head_weights.config_of(model)
    if config.norm.position == "post":
        raise ValueError(
            "model must have norms before its parts (norm.position pre or both): with "
            "norms behind them the logits are no sum over heads, got 'post'."
        )
    if not (config.attention.residual and config.feed_forward.residual):
        raise ValueError(
            "model must have residual connections around all parts, got "
            f"attention.residual = {config.attention.residual} and "
            f"feed_forward.residual = {config.feed_forward.residual}."
        )
    weights = _weights(model, params)
    found = _contributions(model)(params, weights, example, classes)
    return subject.fetched(found)


def logit_lens(
    model: models.Model,
    params: Any,
    example: tasks.Example,
    *,
    of: Callable[[Array, tasks.Example], Any] | None = None,
) -> Any:
    """Returns the logits that each layer's input would give, as if it were the last.

    Args:
      model: Of one stack of layers, as `models.build` or `interop.load` makes it.
      params: Its parameters.
      example: A batch.
      of: What is kept of the logits of a layer, such as a metric of `heads.metrics`: a
        function of logits and batch; None: all, `[B, T, C]`.

    Returns:
      Arrays with a leading axis L + 1: what enters layer 0, 1, ..., L - 1, and what
      leaves the last one, which are the model's own logits.

    Raises:
      ValueError: If the model has several stacks of layers, or no logits.

    Source: nostalgebraist 2020, https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru.
    """
    config = head_weights.config_of(model)
    if config.family == "encoder_decoder" or not config.output.logits:
        raise ValueError(
            "model must have one stack of layers, and logits, got family "
            f"{config.family!r} and output.logits = {config.output.logits}."
        )
    return subject.fetched(_lens(model, of)(params, example))


@functools.lru_cache(maxsize=8)
def _lens(model, of) -> Callable:
    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        _, streams = subject.look(own, params, example, ["stream"])
        last = next(reversed(streams))

        def read(stream):
            output = subject.run_edited(own, params, example, {last: lambda _: stream})
            return output.logits if of is None else of(output.logits, example)

        return jax.lax.map(read, jnp.stack(list(streams.values())))

    return program


class _Weights(NamedTuple):
    """What is read of the parameters, on the host: see `_weights`."""

    outputs: list  # of each part [H, V, D]
    biases: list  # of each part's last map [D]
    after: list  # scales of the norms behind the parts, or None
    ends: list  # scales and offsets of the norms before the logits
    unembedding: Array  # [D, C]
    bias: Array  # [C]


def _weights(model, params) -> _Weights:
    config, float32 = head_weights.config_of(model), np.float32
    outputs, biases, after = [], [], []
    for part, place in enumerate(models.heads_of_layers(config)):
        leaves = head_weights.part_leaves(config, params, part)
        outputs.append(None)
        if place.names:
            w = leaves["linear/w"]
            outputs[-1] = float32(w.reshape(len(place.names), -1, w.shape[-1]))
        biases.append(float32(leaves.get("linear/b", np.zeros(config.model_size))))
        norm = None
        if config.norm.position == "both":
            norm = float32(
                head_weights.layer_norm_of(config, params, part, "_after").scale
            )
        after.append(norm)
    ends = [
        (float32(norm.scale), float32(norm.offset))
        for norm in head_weights.end_norms(config, params)
    ]
    matrix = float32(head_weights.unembedding(model, params))
    bias = params.get("logits", {}).get("b", np.zeros(matrix.shape[1], float32))
    return _Weights(outputs, biases, after, ends, matrix, float32(bias))


@functools.lru_cache(maxsize=8)
def _contributions(model) -> Callable:
    config = model.config
    places = models.heads_of_layers(config)

    @jax.jit
    def program(params, weights, example, classes):
        stack = "decoder" if config.family == "encoder_decoder" else "encoder"
        own_and_params = subject.compact(model, params)
        at = ["*/heads", f"{stack}/stream"]
        _, found = subject.look(*own_and_params, example, at)
        last = found.pop(f"{stack}/stream")
        outputs = list(found.values())
        end, read = _ends(config, weights, last, example)
        if config.family == "set_classifier":  # one logit, of each element
            classes = jnp.zeros(example.inputs.shape[:2], int)
        heads, rest = [], end
        for part, place in enumerate(places):
            if place.kind == "encoder" or not place.names:
                z = jnp.zeros((*end.shape[:-1], len(place.names), end.shape[-1]))
            else:
                z = read(_written(config, weights, part, outputs[part]))
            rest = rest - z.sum(-2)
            heads.append(_logits(weights, z, classes))
        rest = _logits(weights, rest[..., None, :], classes)
        if classes is None:
            rest = rest[..., 0, :]
            rest = rest + _last(weights.bias, rest)
        else:
            rest = rest[..., 0] + weights.bias[classes]
        return Contributions(tuple(heads), rest)

    return program


def _ends(config, weights, last, example):
    """Returns what logits read `[B, T, D]`, and how they read parts of the stream.

    The latter is a function of `[B, T, X, D]` to `[B, T, X, D]`, without T where
    positions are pooled.
    """
    decoder_or_own = "decoder" if config.family == "encoder_decoder" else ""
    _, lengths = subject.queries(example, decoder_or_own)
    x, steps = last.astype(jnp.float32), []
    for i, (scale, offset) in enumerate(weights.ends):
        if i == 1:
            x, steps = _pooled(config, x, lengths), [*steps, None]
        steps.append((_factor(config, x), scale))
        x = _held(config, x, *steps[-1])
        x = x + _last(offset, x)
    if len(weights.ends) < 2:
        x, steps = _pooled(config, x, lengths), [*steps, None]

    def read(parts):
        for step in steps:
            if step is None:
                parts = _pooled(config, parts, lengths)
            else:
                parts = _held(config, parts, step[0][..., None, :], step[1])
        return parts

    return x, read


def _written(config, weights, part, heads) -> Array:
    """Returns what the heads of a part add to the stream, `[B, T, H, D]`."""
    z = heads.astype(jnp.float32)
    z = jnp.einsum("bthv,hvd->bthd", z, weights.outputs[part])
    if weights.after[part] is None:
        return z
    total = z.sum(-2, keepdims=True) + _last(weights.biases[part], z)
    return _held(config, z, _factor(config, total), weights.after[part])


def _logits(weights, x, classes) -> Array:
    """Returns `[..., X, C]` of `[..., X, D]`; `[..., X]` of chosen classes `[...]`."""
    if classes is None:
        return x @ weights.unembedding
    return jnp.einsum("...xd,...d->...x", x, weights.unembedding.T[classes])


def _factor(config, x) -> Array:
    """Returns what the norm of `[..., D]` multiplies it by, `[..., 1]`."""
    if config.norm.kind == "none":
        return jnp.ones((*x.shape[:-1], 1), x.dtype)
    size = jnp.square(_centered(config, x)).mean(-1, keepdims=True)
    return jax.lax.rsqrt(size + config.norm.epsilon)


def _held(config, x, factor, scale) -> Array:
    """Returns `[..., D]` through a norm of a given factor, without its offset."""
    return _centered(config, x) * factor * _last(scale, x)


def _centered(config, x) -> Array:
    is_centered = config.norm.kind == "layer_norm"
    return x - x.mean(-1, keepdims=True) if is_centered else x


def _pooled(config, x, lengths) -> Array:
    """Returns `[B, ...]` of `[B, T, ...]`, or x itself without pooling."""
    if config.output.pool == "first":
        return x[:, 0]
    if config.output.pool is None:
        return x
    valid = jnp.ones(x.shape[:2], bool)
    if lengths is not None:
        valid = jnp.arange(x.shape[1])[None] < lengths[:, None]
    share = valid / jnp.maximum(valid.sum(1, keepdims=True), 1)
    return jnp.einsum("bt,bt...->b...", share, x)


def _last(vector, x) -> Array:
    """Returns `[D]` beside `[..., D]`."""
    return jnp.reshape(vector, (1,) * (x.ndim - 1) + (-1,))

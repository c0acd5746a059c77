"""Whole models as pure functions, built from a config.

B batch, T positions, D width, H heads, V value size per head, K key size per head, F
hidden units, L layers, C classes. Families differ in their targets: `encoder`
classifies each position, `causal` the same but from earlier positions only, and
`set_classifier` chooses one element of a set, independent of the order.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mha_haiku import attention, checks, display, masks, modules, positions
from mha_haiku.models import architecture, ends

Array = jax.Array


class Output(NamedTuple):
    """What a model returns.

    Attributes:
      logits: `[B, T, C]` float32; `[B, C]` where the config pools positions; of a set
        classifier `[B, T]`, one per element; None where the config wants none.
      maps: One attention map of shape `(B, H, T, T)` per layer.
      hidden: The input of each layer, `[B, T, D]`; () if the model cannot `start`.
      output: What the last norm returns, `[B, T, D]` float32, before any pooling.
    """

    logits: Array | None
    maps: tuple[attention.AttentionMap, ...]
    hidden: tuple[Array, ...] = ()
    output: Array | None = None

    def __repr__(self) -> str:
        return display.record(self)


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: `init(rng, inputs, lengths=None) -> params`.
      apply: `apply(params, rng, inputs, *, lengths=None, segments=None,
        interventions=None, start=None, observe=None, is_training) -> Output`. Inputs
        are tokens `[B, T]` or features `[B, T, D]`; lengths `[B]` are the numbers of
        valid positions; segments `[B, T]` integers, of models that have such (None:
        all 0). `rng` is for dropout, and may be None without it. `interventions`, a
        `modules.Interventions` of L layers, close heads and hidden units. Tokens and
        segments that the model has no row for raise ValueError, but for padding; while
        they or the lengths are traced, as in a jitted function of them, nobody can
        look, and they count as the nearest that there is. `start` is
        `(l, hidden [B, T, D])`: only layers l, ..., L - 1 run, with `hidden` as the
        input of layer l. With l = L none runs, and the last norm and the logits read
        `hidden`: the logit lens (https://www.alignmentforum.org/posts/AcKRB8wDpdaN6v6ru).
        Scanned layers take only 0 and L, or a traced l, and return neither maps nor
        hidden then. `observe` is a function of an attention map: what it returns stands
        in `Output.maps` instead, so that no map outlives its layer.
      scanned: The same model with scanned layers, whose parameters `modules.stacked`
        makes, for programs that compile one layer instead of L; None where layers
        differ, or are scanned already. Replace it along with `apply`.
      description: What it is, in a few words.
    """

    init: Callable[..., Any]
    apply: Callable[..., Output]
    scanned: "Model | None" = None
    description: str = ""

    def __repr__(self) -> str:
        return f"Model({self.description or 'init, apply'})"


def build(
    config: Any,
    *,
    num_tokens: int | None,
    feature_size: int | None,
    num_classes: int,
    implementation: str | Callable | None = None,
) -> Model:
    """Returns the model that a config describes.

    Args:
      config: `config.model`; `architecture.FIELDS` has its fields.
      num_tokens: Vocabulary of the inputs; None where they are features.
      feature_size: Width of the input features; None where they are tokens.
      num_classes: C; with tied logits at most `num_tokens`.
      implementation: That of attention, as in `attend`; None: the config's.

    Raises:
      checks.ConfigError: If a field is out of range, or logits cannot be tied.
    """
    architecture.check(config)
    if config.output.tied and (num_tokens is None or num_tokens < num_classes):
        raise checks.ConfigError(
            "config.model.output.tied needs inputs that are tokens, and a token for "
            f"each of the {num_classes} classes, got {num_tokens or 'no'} tokens."
        )
    make = functools.partial(
        _functions,
        config,
        num_tokens=num_tokens,
        num_classes=num_classes,
        implementation=implementation or config.attention.implementation,
    )
    model = make(is_scanned=config.scan_layers)
    if config.scan_layers or not architecture.are_alike(config):
        return model
    return model._replace(scanned=make(is_scanned=True))


def _functions(config, *, num_tokens, num_classes, implementation, is_scanned):
    """Returns the `Model`, with looped or scanned layers; arguments as in `build`."""
    policy = jmp.get_policy(architecture.PRECISIONS[config.precision])
    make_norm = architecture.make_norm(config)

    def forward(inputs, lengths=None, segments=None, start=None, **options):
        valid = None if lengths is None else _valid(inputs, lengths)
        embedding = ends.make_embedding(config, num_tokens)
        if start is None:
            inputs, first_layer = _zeroed(inputs, valid), 0
            x = ends.embedded(config, embedding, inputs, segments)
        else:
            first_layer, x = start
        stack, is_traced = _stack(config, is_scanned), _is_traced(first_layer)
        if is_traced:
            stack, first_layer = modules.scanned_from(first_layer), 0
        encoder = modules.Encoder(
            config.num_layers,
            functools.partial(_layer, config, implementation),
            make_norm=None if config.norm.position == "post" else make_norm,
            stack=stack,
            name="encoder",
        )
        x, maps, hidden = encoder.encode(
            x,
            _masks(config, lengths),
            bias=_bias(config),
            first_layer=first_layer,
            **options,
        )
        if is_traced:
            maps, hidden = (), ()
        logits = None
        if config.output.logits:
            logits = ends.logits(config, embedding, x, valid, num_classes, policy)
        return Output(logits, maps, hidden, policy.cast_to_output(x))

    transformed = hk.transform(forward)

    def init(rng, inputs, lengths=None):
        inputs = policy.cast_to_param(inputs)
        return transformed.init(rng, inputs, lengths, is_training=False)

    def apply(
        params,
        rng,
        inputs,
        *,
        lengths=None,
        segments=None,
        interventions=None,
        start=None,
        observe=None,
        is_training,
    ):
        if start is not None:
            _check_start(config, start, is_scanned)
        elif num_tokens is not None:
            _check_rows("inputs", inputs, num_tokens, lengths)
        if segments is not None:
            _check_segments(config, inputs, segments)
            _check_rows("segments", segments, config.embedding.segments, lengths)
        params, inputs = policy.cast_to_compute((params, inputs))
        return transformed.apply(
            params,
            rng,
            inputs,
            lengths,
            segments,
            start,
            interventions=interventions,
            observe=observe,
            is_training=is_training,
        )

    return Model(init, apply, description=architecture.description(config))


def _masks(config, lengths):
    """Returns the mask of all layers, or a list of L where windows differ."""
    own = [_mask(config, window, lengths) for window in architecture.windows(config)]
    return own if len(set(architecture.windows(config))) > 1 else own[0]


def _mask(config, window, lengths):
    is_causal = config.family == "causal"
    kinds = []
    if window is not None:
        kinds.append(masks.window(window, 0 if is_causal else window))
    elif is_causal:
        kinds.append(masks.causal())
    if lengths is not None:
        kinds.append(masks.padding(lengths, lengths))
    return functools.reduce(operator.and_, kinds) if kinds else masks.full()


def _is_traced(first_layer) -> bool:
    return isinstance(first_layer, jax.Array)


def _check_start(config, start, is_scanned):
    if _is_traced(start[0]) and is_scanned:
        return
    checks.integer_in("start[0]", start[0], 0, config.num_layers)
    if is_scanned and start[0] not in (0, config.num_layers):
        raise ValueError(
            "start in the middle needs layers that are looped over; models.unstacked "
            "converts the parameters of scanned layers."
        )


def _check_segments(config, inputs, segments):
    if not config.embedding.segments:
        raise ValueError(
            "segments must be None: config.model.embedding.segments is 0, so that the "
            "model has none."
        )
    is_integer = jnp.issubdtype(jnp.result_type(segments), jnp.integer)
    if not is_integer or jnp.shape(segments) != inputs.shape[:2]:
        raise ValueError(
            f"segments must be integers of shape [B, T] = {inputs.shape[:2]}, got "
            f"{jnp.result_type(segments)} of shape {jnp.shape(segments)}."
        )


def _check_rows(name, ids, count, lengths):
    """Raises ValueError where valid ids, if they are known, name no row of a table."""
    if not _is_known(ids) or not _is_known(lengths):
        return
    # In NumPy: what jax computes while something else is traced is traced too.
    ids = np.asarray(ids)
    is_outside = (ids < 0) | (ids >= count)
    if lengths is not None:
        is_outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    if is_outside.any():
        raise ValueError(
            f"{name} must be integers from 0 to {count - 1}, got "
            f"{ids[is_outside][0]} at {np.argwhere(is_outside)[0].tolist()}."
        )


def _is_known(x):
    """Returns whether this process can look at the numbers of an array."""
    is_traced = isinstance(x, jax.core.Tracer)
    return not is_traced and getattr(x, "is_fully_addressable", True)


def _valid(inputs, lengths):
    """Returns the valid positions of inputs `[B, T, ...]`, `[B, T]` booleans."""
    return jnp.arange(inputs.shape[1])[None, :] < jnp.asarray(lengths)[:, None]


def _zeroed(inputs, valid):
    """Returns inputs with zeros in padding, so that NaN there reaches no gradient."""
    if valid is None:
        return inputs
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (inputs.ndim - 2)), inputs, 0)


def _bias(config):
    """Returns the score bias of all layers, or a list of one per pruned layer."""
    if config.embedding.positions == "alibi":
        bias = positions.alibi(config.attention.num_heads)
    elif config.embedding.positions == "t5":
        bias = modules.RelativePositions(
            config.attention.num_heads,
            bidirectional=config.family != "causal",
            name="relative_positions",
        )()
    else:
        return None
    if config.attention.kept_heads is None:
        return bias
    layers = architecture.heads_of_layers(config)
    return [bias.at_heads(heads.names) for heads in layers]


def _layer(config, implementation, i):
    heads = architecture.heads_of_layers(config)[i]
    attention_fields, feed_forward_fields = config.attention, config.feed_forward
    make_norm = architecture.make_norm(config)

    if hk.running_init():  # makes parameters from one example, on one device
        implementation = attention_fields.implementation

    def make_attention():
        if not heads.names:  # all are pruned
            return modules.NoAttention(
                config.model_size,
                with_bias=attention_fields.output_bias,
                name="attention",
            )
        return modules.MultiHeadAttention(
            len(heads.names),
            architecture.key_size(config),
            model_size=config.model_size,
            with_bias=attention_fields.with_bias,
            output_bias=attention_fields.output_bias,
            num_key_value_heads=heads.num_key_value_heads,
            groups=heads.groups,
            make_score=_make_score(attention_fields),
            rotary=_rotary(config, i),
            # The root mean square, whatever the norms of the residual stream are.
            qk_norm=attention_fields.qk_norm
            and functools.partial(modules.RMSNorm, config.norm.epsilon),
            smear=modules.smeared_keys if attention_fields.smear_keys else None,
            implementation=implementation,
            name="attention",
        )

    hidden_size = architecture.hidden_sizes(config)[i]

    def make_feed_forward():
        return modules.FeedForward(
            hidden_size,
            **architecture.ACTIVATIONS[feed_forward_fields.activation]._asdict(),
            with_bias=feed_forward_fields.with_bias,
            name="feed_forward",
        )

    return modules.EncoderLayer(
        make_attention if attention_fields.num_heads else None,
        make_feed_forward if hidden_size else None,
        num_heads=None if attention_fields.num_heads else 0,
        hidden_size=None if hidden_size else 0,
        make_norm=make_norm,
        norm_position=config.norm.position,
        parallel=feed_forward_fields.parallel,
        attention_residual=attention_fields.residual,
        feed_forward_residual=feed_forward_fields.residual,
        dropout_rate=config.dropout_rate,
        name=f"layer_{i}",
    )


def _rotary(config, i):
    """Returns what turns the queries and keys of layer i, or None."""
    if config.embedding.positions != "rotary":
        return None
    return functools.partial(
        positions.rotary,
        max_period=config.embedding.rotary_period,
        frequencies=architecture.frequencies(config)[i],
    )


def _make_score(config):
    """Returns a function of (num_heads, key_size) to the score, or None for default."""
    if config.score == "additive":
        return modules.additive_score
    if config.scale is None and config.soft_cap is None:
        return None  # the default: dot products over sqrt(key_size)
    return lambda num_heads, key_size: attention.dot_product(
        config.scale, config.soft_cap
    )


def _stack(config, is_scanned):
    stack = modules.scanned if is_scanned else modules.looped
    return modules.rematerialized(stack) if config.rematerialize else stack

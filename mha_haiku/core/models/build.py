"""Whole models as pure functions, built from a config, also token by token.

Families differ in their targets: `encoder` classifies each position, `causal` the same
but from earlier positions only, `set_classifier` chooses one element of a set,
independent of the order, and `encoder_decoder` predicts another sequence.

P positions of prompts, S_max the largest length of a text.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax import Array

from mha_haiku.core import (
    arguments,
    attention,
    checks,
    display,
    modules,
    site_primitive,
    sites,
    tiles,
)
from mha_haiku.core.models import architecture, consistency, forward, parts, programs
from mha_haiku.core.models.forward import Output

_Data = Array | np.ndarray  # of a batch


@tiles.pytree
class DecodingCache:
    """The caches of a model's layers, as a pytree of arrays `[B, ...]`."""

    # A cache per layer; for an encoder-decoder a pair, of self-attention and of
    # cross-attention, which has the keys and values of the source. Attention without
    # heads keeps the `attention.Prompt`.
    layers: tuple
    positions: Array  # `[B]`, the position of the next token of each example
    # `[B]`, valid positions of the source, or None if all are or there is no source.
    source_lengths: Array | None
    size: int = tiles.static()  # S_max


class Decoding(NamedTuple):
    """The functions that run a model token by token.

    Logits and maps with a cache equal logits and maps of whole texts.

    Attributes:
      prefill: `prefill(params, prompts, lengths, *, max_length, source=None,
        source_lengths=None) -> (logits, cache)`. Prompts are tokens `[B, P]`, of
        lengths `[B]`; the logits `[B, C]` follow their last tokens. A text may grow to
        `max_length` positions, S_max. For a source see `decoding.generate`. ValueError
        if prompts, lengths, source or `max_length` do not fit.
      step: `step(params, tokens, cache) -> (logits, maps, cache)`. The tokens `[B]` are
        put at the cache's positions; ValueError if it is full, unless positions are
        traced. The maps, one per layer, are `(B, H, 1, S_max)`; maps of an encoder are
        omitted. Examples may be at different positions, so a map is batched by vmap:
        `jax.vmap(lambda row:
        row.weights())(maps[0])`; sites have the value of one example.
      prepare: Converts the parameters to a form that is faster for both. Converting
        them twice changes nothing.
      num_tokens: The vocabulary.
      max_length: The longest text that the model has positions for, or None if any.
      has_source: Whether the model reads a source.
    """

    prefill: Callable[..., tuple[Array, DecodingCache]]
    step: Callable[..., tuple[Array, tuple, DecodingCache]]
    prepare: Callable[[Any], Any]
    num_tokens: int
    max_length: int | None
    has_source: bool


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: `init(rng, inputs, lengths=None, decoder_inputs=None, decoder_lengths=None)
        -> params`.
      apply: `apply(params, rng, inputs, *, lengths=None, segments=None,
        decoder_inputs=None, decoder_lengths=None, is_training) -> Output`. Inputs are
        tokens `[B, T]` or features `[B, T, D]`; lengths `[B]` count valid positions; an
        encoder-decoder takes `[B, S]` of these, and what the decoder reads, tokens
        `[B, T]` from the start token on; segments are `[B, T]` integers, by default 0.
        `rng` is for dropout, and may be None without it. Tokens and segments that the
        model has no row for raise ValueError, except in padding; under tracing values
        cannot be validated, and are clipped to the valid range.
      scanned: The same model with scanned layers, whose parameters `modules.stacked`
        makes, for programs that compile one layer instead of L; None if layers differ,
        or are already scanned. Replace it along with `apply`.
      description: A description in a few words.
      decoding: The same model token by token, for `models.generate`; None if the model
        does not predict the next token.
      config: The config it was built from; None if `build` did not make it.
      edits: The changes made by `edited`, in order.
      num_classes: C, as it was built; None if `build` did not make it.
      loss: From an `Output` and a batch, `[B]` or their mean; None: cross-entropy.

    Example:
      >>> model
      Model(causal: 2 layers of 2 heads, model size 45, learned positions)
      >>> output = model.apply(params, None, tokens, is_training=False)
      >>> output.logits.shape  # [B, T, C]
      (8, 9, 13)
    """

    init: Callable[..., Any]
    apply: Callable[..., Output]
    scanned: "Model | None" = None
    description: str = ""
    decoding: Decoding | None = None
    config: architecture.ModelConfig | None = None
    edits: "tuple[_Edits, ...]" = ()
    num_classes: int | None = None
    loss: Callable[[Output, Any], Array] | None = None

    def __repr__(self) -> str:
        return f"Model({self.description or 'init, apply'})"

    def edited(self, *edits: Mapping[Any, Callable]) -> "Model":
        """Changes values at sites, also token by token; see `mh.edit`."""
        model = self
        for edit in edits:
            decoding = model.decoding
            if decoding is not None:
                decoding = decoding._replace(
                    prefill=sites.edit(decoding.prefill, edit),
                    # The prefill has already edited sites of an encoder.
                    step=sites.edit(decoding.step, edit, strict=False),
                )
            edit = _Edits(edit)
            model = model._replace(
                apply=_Edited(model.apply, edit),
                scanned=None,
                decoding=decoding,
                description=f"{self.description.removesuffix(_EDITED)}{_EDITED}",
                edits=(*model.edits, edit),
            )
        return model

    def unedited(self) -> "tuple[Model, tuple[_Edits, ...]]":
        """Returns the model before its edits, and the edits, a pytree.

        Programs of both can be shared by edits that differ only in numbers.
        """
        apply, edits = self.apply, ()
        while isinstance(apply, _Edited):
            apply, edits = apply.before, (apply.edits, *edits)
        if not edits:
            return self, ()
        before = self.edits[: -len(edits)]
        description = self.description
        if not before:
            description = description.removesuffix(_EDITED)
        fields = {"apply": apply, "edits": before, "description": description}
        return self._replace(decoding=None, **fields), edits


_EDITED = ", edited"


class _Edits(dict):
    """Edits by the patterns of sites; hashed by identity.

    A pytree of the numbers of changes that are `jax.tree_util.Partial`.
    """

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__


def _numbers_of(edits: _Edits) -> tuple[list, Any]:
    are_trees = all(isinstance(x, jax.tree_util.Partial) for x in edits.values())
    return ([*edits.values()], (*edits,)) if are_trees else ([], edits)


def _with_numbers(static: Any, changes: Iterable) -> _Edits:
    if isinstance(static, _Edits):
        return static
    return _Edits(zip(static, changes, strict=True))


jax.tree_util.register_pytree_node(_Edits, _numbers_of, _with_numbers)


class _Edited:
    """The function of a model after edits."""

    def __init__(self, before: Callable[..., Output], edits: _Edits):
        self.before, self.edits = before, edits
        self._run = sites.edit(before, edits)

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        return self._run(*args, **kwargs)


def build(
    config: architecture.ModelConfig,
    *,
    num_tokens: int | None,
    feature_size: int | None,
    num_classes: int,
    implementation: str | Callable | None = None,
) -> Model:
    """Builds the model that a config describes.

    Args:
      config: The section `config.model`.
      num_tokens: The vocabulary of the inputs, or None if they are features.
      feature_size: The width of the input features, or None if they are tokens.
      num_classes: C; in an encoder-decoder also the vocabulary that the decoder reads.
        In other models with tied logits at most `num_tokens`.
      implementation: The implementation of attention, as in `attend`. Defaults to the
        config's.

    Raises:
      ConfigError: If fields do not fit each other, or tied logits lack a token for a
        class.
    """
    consistency.check(config)
    is_tied_to_inputs = config.output.tied and config.family != "encoder_decoder"
    if is_tied_to_inputs and (num_tokens is None or num_tokens < num_classes):
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
    has_decoder = config.family == "encoder_decoder"
    is_pruned = config.attention.kept_heads or config.feed_forward.hidden_sizes
    if config.scan_layers or has_decoder or is_pruned:
        return model
    return model._replace(scanned=make(is_scanned=True))


def of_function(function: Callable[[Any, Array], Array]) -> Model:
    """Wraps any function as a `Model`.

    Its attention is what `mh.sites` finds in it; everything in `heads` that needs no
    config works with it. The function goes from parameters and inputs `[B, T, ...]` to
    logits, or to an `Output`; if examples have lengths, it takes `lengths` by keyword.
    A function with dropout takes a key by keyword, `rng=None`, which training passes.

    Example:
      >>> def attend(params, inputs):
      ...     heads = (inputs @ params)[:, :, None]  # one head
      ...     return mh.attend(heads, heads, heads)[0][:, :, 0]
      >>> model = mh.models.of_function(attend)
      >>> output = model.apply(jnp.eye(3), None, jnp.ones((2, 5, 3)), is_training=False)
      >>> output.logits.shape
      (2, 5, 3)
    """
    run = programs.kept(sites.blockwise(function))
    takes_rng = "rng" in arguments.parameters_of(function)

    def apply(
        params: Any,
        rng: Array | None,
        inputs: Array,
        *,
        is_training: bool = False,
        **options,
    ) -> Output:
        options = {name: x for name, x in options.items() if x is not None}
        if is_training and takes_rng:
            options["rng"] = rng
        params = site_primitive.mark_parameters(params)
        result = run(params, inputs, **options)
        return result if isinstance(result, Output) else Output(result, ())

    init: Any = None  # nothing makes its parameters
    return Model(init, apply, description=getattr(function, "__name__", "a function"))


def _functions(
    config: architecture.ModelConfig,
    *,
    num_tokens: int | None,
    num_classes: int,
    implementation: str | Callable,
    is_scanned: bool,
) -> Model:
    """Builds the `Model`, with looped or scanned layers; arguments as in `build`."""
    policy = jmp.get_policy(architecture.PRECISIONS[config.precision])
    run = functools.partial(
        forward.forward,
        config,
        num_tokens=num_tokens,
        num_classes=num_classes,
        implementation=implementation,
        policy=policy,
    )
    stack = modules.scanned if is_scanned else modules.looped
    has_decoder = config.family == "encoder_decoder"
    transformed = hk.transform(
        lambda *arrays, **options: run(*arrays, **options, stack=stack)[0]
    )

    def init(
        rng: Array,
        inputs: _Data,
        lengths: _Data | None = None,
        decoder_inputs: _Data | None = None,
        decoder_lengths: _Data | None = None,
    ) -> Any:
        _check_decoder_inputs(has_decoder, decoder_inputs, decoder_lengths)
        arrays = policy.cast_to_param(inputs), lengths, None
        arrays = *arrays, decoder_inputs, decoder_lengths
        return transformed.init(rng, *arrays, is_training=False)

    def apply(
        params: Any,
        rng: Array | None,
        inputs: _Data,
        *,
        lengths: _Data | None = None,
        segments: _Data | None = None,
        decoder_inputs: _Data | None = None,
        decoder_lengths: _Data | None = None,
        is_training: bool,
    ) -> Output:
        _check_decoder_inputs(has_decoder, decoder_inputs, decoder_lengths)
        if num_tokens is not None:
            check_rows("inputs", inputs, num_tokens, lengths)
        if segments is not None:
            _check_segments(config, inputs, segments)
            check_rows("segments", segments, config.embedding.segments, lengths)
        if has_decoder:
            check_rows("decoder_inputs", decoder_inputs, num_classes, decoder_lengths)
        params, inputs = policy.cast_to_compute((params, inputs))
        arrays = inputs, lengths, segments, decoder_inputs, decoder_lengths
        return transformed.apply(params, rng, *arrays, is_training=is_training)

    vocabulary = num_classes if has_decoder else num_tokens
    return Model(
        init,
        apply,
        description=parts.description(config),
        decoding=_decoding(config, run, vocabulary, policy),
        config=config,
        num_classes=num_classes,
    )


def _decoding(
    config: architecture.ModelConfig,
    run: Callable,
    num_tokens: int | None,
    policy: jmp.Policy,
) -> Decoding | None:
    """Makes a model run token by token; None if it does not predict the next token."""
    # Steps loop over layers, even if the model scans them.
    has_source = config.family == "encoder_decoder"
    has_logits = config.output.logits and config.output.pool is None
    is_causal = config.family in ("causal", "encoder_decoder")
    # A cache has no key before mixing, which the next smeared key would need.
    has_steps = is_causal and has_logits and not config.attention.smear_keys
    if num_tokens is None or not has_steps:
        return None
    longest = parts.max_length(config)
    transformed = hk.transform(
        functools.partial(run, is_training=False, stack=modules.looped)
    )

    def advance(
        params: Any,
        tokens: Array,
        source: _Data | None,
        source_lengths: Array | None,
        **more,
    ) -> tuple[Array, tuple, Any]:
        """Reads one token: returns its logits, the maps and the updated caches."""
        arrays = {"inputs": tokens}
        if has_source:
            arrays = {"inputs": source, "lengths": source_lengths}
            arrays["decoder_inputs"] = tokens
        output, caches = transformed.apply(params, None, **arrays, **more)
        return output.logits[..., 0, :], output.maps, caches

    def prepare(params: Any) -> Any:
        is_stacked = any(map(modules.is_stacked, params))
        looped = modules.unstacked(params) if is_stacked else params
        return policy.cast_to_compute(looped)

    def prefill(
        params: Any,
        prompts: _Data,
        lengths: _Data,
        *,
        max_length: int,
        source: _Data | None = None,
        source_lengths: Array | None = None,
    ) -> tuple[Array, DecodingCache]:
        checks.integer_in("max_length", max_length, 1, longest)
        prompts = jnp.asarray(prompts)
        if prompts.ndim != 2 or not 1 <= prompts.shape[1] <= max_length:
            raise ValueError(
                "prompts must be [B, P] with P from 1 to max_length = "
                f"{max_length}, got shape {prompts.shape}."
            )
        lengths = tiles.integers("lengths", lengths, 1, prompts.shape[1])
        lengths = jnp.asarray(lengths)
        check_source(has_source, source, source_lengths)
        num_layers = parts.num_decoder_layers(config) or config.num_layers
        begin: list = [attention.Prompt(lengths, max_length)] * num_layers
        if has_source:
            of_source = attention.Prompt(lengths, max_length, is_source=True)
            begin = [(of_target, of_source) for of_target in begin]
            source = policy.cast_to_compute(jnp.asarray(source))
        logits, _, caches = advance(
            prepare(params),
            prompts,
            source,
            source_lengths,
            caches=begin,
            last=lengths - 1,
        )
        return logits, DecodingCache(caches, lengths, source_lengths, max_length)

    def step(
        params: Any, tokens: _Data, cache: DecodingCache
    ) -> tuple[Array, tuple, DecodingCache]:
        positions = tiles.known(cache.positions)
        if positions is not None and (positions >= cache.size).any():
            raise ValueError(
                f"the cache is full: it has room for max_length = {cache.size} tokens."
            )
        params = prepare(params)

        @jax.vmap
        def step_of_one(
            token: Array, caches: tuple, position: Array, source_lengths: Array | None
        ):
            return advance(
                params,
                token[None],
                None,
                source_lengths,
                caches=caches,
                first=position,
            )

        logits, maps, caches = step_of_one(
            jnp.asarray(tokens), cache.layers, cache.positions, cache.source_lengths
        )
        return (
            logits,
            maps,
            dataclasses.replace(cache, layers=caches, positions=cache.positions + 1),
        )

    return Decoding(prefill, step, prepare, num_tokens, longest, has_source)


def check_source(has_source: bool, source: Any, source_lengths: Any) -> None:
    """Raises ValueError if a source is missing, or the model does not read one."""
    if has_source and source is None:
        raise ValueError("source must be given: the model is an encoder-decoder.")
    if not has_source and (source is not None or source_lengths is not None):
        raise ValueError(
            "source and source_lengths must be None: the model has no encoder."
        )


def _check_decoder_inputs(
    has_decoder: bool, inputs: _Data | None, lengths: _Data | None
):
    if has_decoder:
        is_integer = inputs is not None and jnp.issubdtype(
            jnp.result_type(inputs), jnp.integer
        )
        if inputs is None or not is_integer or jnp.ndim(inputs) != 2:
            actual = "None" if inputs is None else display.value(inputs)
            raise ValueError(
                "decoder_inputs must be the tokens [B, T] that the decoder reads, from "
                f"the start token on, got {actual}."
            )
    elif inputs is not None or lengths is not None:
        raise ValueError(
            "decoder_inputs and decoder_lengths must be None: the model has no decoder."
        )


def _check_segments(config: architecture.ModelConfig, inputs: _Data, segments: _Data):
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


def check_rows(name: str, ids: Any, count: int, lengths: Any) -> None:
    """Raises ValueError if valid ids, as far as known, are out of a table's range.

    Example:
      >>> ids = np.array([[3, 7, 7]])
      >>> mh.models.check_rows("inputs", ids, count=7, lengths=np.array([1]))
      >>> mh.models.check_rows("inputs", ids, count=7, lengths=None)
      Traceback (most recent call last):
        ...
      ValueError: inputs must be integers from 0 to 6, got 7 at [0, 1].
    """
    arrays = [x for x in (ids, lengths) if isinstance(x, jax.Array)]
    if not all(map(display.is_known, arrays)):
        return
    # In NumPy, as jax would trace the computation if called inside a trace.
    ids = np.asarray(ids)
    is_outside = (ids < 0) | (ids >= count)
    if lengths is not None:
        is_outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    if is_outside.any():
        raise ValueError(
            f"{name} must be integers from 0 to {count - 1}, got "
            f"{ids[is_outside][0]} at {np.argwhere(is_outside)[0].tolist()}."
        )

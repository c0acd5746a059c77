"""Attention of transformers' models by our engine, masks by our algebra.

A model of transformers looks up its attention function and its mask function by the
name of an implementation. While a wrapped model is traced, `replaced` answers these
lookups: in place of transformers' own plain functions with ours, so that no array of
all queries and keys is made, and maps are exact and factored. A function that somebody
else registered is left alone, and traced. B batch, T queries, S keys, H heads.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import masks, tiles
from mha_haiku.core.attention import implementations, normalizers, scores
from mha_haiku.interop.torch_modules import environment

_PLAIN = "eager", "sdpa"  # implementations that are replaced, of transformers alone
_FUNCTIONS = {name: f"{name}_attention_forward" for name in _PLAIN}
# Of attention; masks hold the windows.
_OPTIONS = {"scaling", "softcap", "is_causal", "sliding_window", "dropout"}


def is_of_transformers(function: Any) -> bool:
    """Checks whether a function is one of transformers', and of nobody else."""
    function = getattr(function, "func", function)  # of functools.partial
    return getattr(function, "__module__", "").startswith("transformers.")


def choose(module: Any) -> None:
    """Sets what cannot be traced in a model of transformers to what can.

    Those are kernels of attention, and products of experts of sizes that depend on the
    data. What is plain already, and functions of the user, are kept, for each config of
    its parts.
    """
    parts = [x for x in module.modules() if hasattr(x, "set_attn_implementation")]
    if not parts:
        return
    from transformers import modeling_utils  # pyright: ignore[reportMissingImports]
    from transformers.integrations import moe  # pyright: ignore[reportMissingImports]

    for part in parts:
        config = part.config
        name = config._attn_implementation
        if name not in _PLAIN and _is_theirs(modeling_utils.AttentionInterface, name):
            name = "sdpa" if part._supports_sdpa else "eager"
            config._attn_implementation_internal = name
        if _is_theirs(moe.ExpertsInterface, config._experts_implementation):
            config._experts_implementation_internal = "batched_mm"


def _is_theirs(table: Any, name: str | None) -> bool:
    """Checks whether a name stands for a function of transformers or of the hub."""
    function = table._global_mapping.get(name)
    return function is None or is_of_transformers(function)


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Enters a context in which models of transformers attend by our engine."""
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            masking_utils,
            modeling_utils,
        )
    except ImportError:  # torch alone
        yield
        return
    attention, mask_table = (
        modeling_utils.AttentionInterface,
        masking_utils.AttentionMaskInterface._global_mapping,
    )
    look_up, before = attention.get_interface, dict(mask_table)

    def get_interface(self: Any, name: str, default: Callable) -> Callable:
        function = look_up(self, name, default)
        is_plain = getattr(function, "__name__", "") in _FUNCTIONS.values()
        if not is_plain or not is_of_transformers(function):
            return function
        return functools.partial(_attend, function)

    attention.get_interface = get_interface
    for name in _PLAIN:
        if is_of_transformers(before[name]):
            mask_table[name] = functools.partial(_lazy_mask, before[name])
    try:
        yield
    finally:
        attention.get_interface = look_up
        mask_table.update(before)


def _attend(
    function: Callable,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Attends like `function`, which does it itself where ours lacks an option.

    Queries are `[B, H, T, K]`; returns heads `[B, T, H, V]` and weights.
    """
    options = {name: x for name, x in options.items() if x is not None}
    is_sdpa = function.__name__ == _FUNCTIONS["sdpa"]
    read = options.keys() & inspect.signature(function).parameters.keys()
    if read - _OPTIONS or options.get("dropout") or not _fits(query, key, value):
        return function(module, query, key, value, attention_mask, **options)
    env = environment.environment()
    arrays = env.t2j_iso((query, key, value))
    queries, keys, values = (jnp.swapaxes(x, 1, 2) for x in arrays)
    scale = options.get("scaling", query.shape[-1] ** -0.5)
    if not isinstance(scale, int | float) or scale < 0:  # a parameter
        queries, scale = queries * env.t2j_iso(scale), 1.0
    mask = bias = normalizer = None
    if getattr(attention_mask, "mask", None) is not None:
        mask = attention_mask.mask
    elif attention_mask is not None:
        whole = env.t2j_iso(attention_mask)
        if is_sdpa and whole.dtype == bool:
            mask = whole
        else:  # eager adds what it gets
            bias = whole.astype(queries.dtype)
    elif is_sdpa and query.shape[2] > 1:
        is_causal = options.get("is_causal", getattr(module, "is_causal", True))
        mask = masks.causal() if is_causal else None
    if "s_aux" in options and not is_sdpa:
        normalizer = normalizers.sink(env.t2j_iso(options["s_aux"]))
    score = scores.dot_product(scale, options.get("softcap"))
    heads, map_ = implementations.attend(
        queries, keys, values, mask=mask, bias=bias, score=score, normalizer=normalizer
    )
    weights = jax.ShapeDtypeStruct(map_.shape, values.dtype)
    return env.j2t_iso(heads), _deferred()(weights, map_.weights)


def _fits(query: Any, key: Any, value: Any) -> bool:
    """Checks whether these are on the device of JAX, and of shapes that ours takes."""
    batch, num_heads, _, size = query.shape
    groups = key.shape[1]
    return (
        hasattr(query, "_env")
        and key.shape == (batch, groups, key.shape[2], size)
        and value.shape[:3] == key.shape[:3]
        and num_heads % groups == 0
    )


def _lazy_mask(
    function: Callable,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Any = None,
    dtype: Any = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Any:
    """Makes the mask that `function` makes, `[B, 1, T, S]`, of no memory."""
    from torchax.ops import mappings  # pyright: ignore[reportMissingImports]
    from transformers import masking_utils  # pyright: ignore[reportMissingImports]

    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    skip = {"allow_is_bidirectional_skip": allow_is_bidirectional_skip}
    offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
    if any(not isinstance(x, int) or x for x in offsets.values()):  # of caches
        options |= sizes | skip | offsets | {"attention_mask": attention_mask}
        return function(mask_function=mask_function, dtype=dtype, **options)
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, 0)
        padding = masking_utils.padding_mask_function(padding)
        mask_function = masking_utils.and_masks(mask_function, padding)
    mask = _as_mask(mask_function, batch_size)
    if isinstance(mask, masks.Full) and allow_is_bidirectional_skip:
        return None
    is_bias = function.__name__ == "eager_mask"
    kind = mappings.t2j_dtype(dtype) if is_bias else jnp.bool_

    def whole() -> jax.Array:
        seen = mask.array(q_length, kv_length)
        seen = tiles.lifted(seen, 3)[:, None]
        if is_bias:
            seen = jnp.where(seen, 0, jnp.finfo(kind).min).astype(kind)
        return jnp.broadcast_to(seen, like.shape)

    like = jax.ShapeDtypeStruct((batch_size, 1, q_length, kv_length), kind)
    return _deferred()(like, whole, mask)


def _as_mask(function: Callable, batch_size: int) -> masks.Mask:
    """Converts a mask function of transformers to a mask.

    Functions that transformers does not make itself are called for each rectangle.
    """
    env = environment.environment()
    parts = inspect.getclosurevars(function).nonlocals
    kind = function.__qualname__.partition(".")[0]
    if not is_of_transformers(function):
        return _OfIndices.of(function, batch_size)
    if kind in ("and_masks", "or_masks"):
        both = operator.and_ if kind == "and_masks" else operator.or_
        made = (_as_mask(part, batch_size) for part in parts["mask_functions"])
        return functools.reduce(both, made)
    if kind == "causal_mask_function":
        return masks.causal()
    if kind == "bidirectional_mask_function":
        return masks.full()
    if kind == "sliding_window_overlay":
        return masks.window(parts["sliding_window"] - 1, None)
    if kind == "sliding_window_bidirectional_overlay":
        return masks.window(*[parts["sliding_window"]] * 2)
    if kind == "padding_mask_function":
        seen = env.t2j_iso(parts["padding_mask"])
        known = tiles.known(seen)
        if known is not None and known.all():
            return masks.full()
        seen = seen.astype(jnp.int32)
        return masks.segments(np.ones((1, 1), np.int32), seen)
    if kind == "packed_sequence_mask_function":
        return masks.segments(env.t2j_iso(parts["packed_sequence_mask"]))
    return _OfIndices.of(function, batch_size)


@tiles.pytree
class _OfIndices(masks.Mask):
    """A mask that a function computes of indices: example, head, query and key."""

    constants: tuple[jax.Array, ...]  # that the function closes over
    program: Any = tiles.static()  # a jaxpr of these and of four numbers
    example: jax.Array | np.ndarray = tiles.array("")

    @classmethod
    def of(cls, function: Callable, batch_size: int) -> "_OfIndices":
        env = environment.environment()

        def of_one(*indices: jax.Array) -> jax.Array:
            return env.t2j_iso(function(*env.j2t_iso(indices)))

        closed = jax.make_jaxpr(of_one)(*[np.int32(0)] * 4)
        example = np.arange(batch_size, dtype=np.int32)
        return cls(tuple(closed.consts), closed.jaxpr, example)

    def aligned_tile(
        self, rows: tiles.Positions, columns: tiles.Positions
    ) -> jax.Array:
        def of_one(*indices: jax.Array) -> jax.Array:
            closed = jax.extend.core.ClosedJaxpr(self.program, self.constants)
            return jax.extend.core.jaxpr_as_fun(closed)(*indices)[0]

        head = np.zeros((), np.int32)
        for axis in (3, 2):
            of_one = jax.vmap(of_one, [0 if i == axis else None for i in range(4)])
        for _ in range(jnp.ndim(self.example)):
            of_one = jax.vmap(of_one, (0, None, None, None))
        at = tiles.as_array(rows), tiles.as_array(columns)
        return of_one(jnp.asarray(self.example), head, *at)[..., None, :, :]

    def at_head(self, example: tuple, head: int | jax.Array) -> "_OfIndices":
        del head
        return dataclasses.replace(self, example=tiles.at_batch(self.example, example))


@functools.cache
def _deferred() -> type:
    """Makes the class of tensors whose numbers are computed when they are read."""
    import torch  # pyright: ignore[reportMissingImports]
    import torchax.tensor  # pyright: ignore[reportMissingImports]
    from torchax.ops import mappings  # pyright: ignore[reportMissingImports]

    class Deferred(torchax.tensor.Tensor):
        """A tensor that is computed when a program reads it; or a mask of no size."""

        def __new__(cls, like: Any, *_: Any):
            return super().__new__(cls, like, environment.environment())

        def __init__(self, like: Any, compute: Callable, mask: Any = None):
            self._env = environment.environment()
            self._like, self._compute, self.mask = like, compute, mask

        @functools.cached_property
        def _elem(self) -> jax.Array:
            return self._compute()

        shape = property(lambda self: torch.Size(self._like.shape))
        ndim = property(lambda self: len(self._like.shape))
        dtype = property(lambda self: mappings.j2t_dtype(self._like.dtype))

        def __getitem__(self, index: Any) -> Any:
            index = index if isinstance(index, tuple) else (index,)
            if index[0] is Ellipsis:
                index = (slice(None),) * (self.ndim + 1 - len(index)) + index[1:]
            pairs = zip(index, self.shape, strict=False)
            # All of it, as of mask[:, :, :, :num_keys].
            if all(
                isinstance(part, slice) and part.indices(size) == (0, size, 1)
                for part, size in pairs
            ):
                return self
            return super().__getitem__(index)

    return Deferred

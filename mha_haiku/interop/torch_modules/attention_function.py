"""Attention of transformers' models by our engine, masks by our algebra.

A model of transformers looks up its attention function and its mask function by the
name of an implementation. While a wrapped model is traced, `replaced` answers with ours
in place of transformers' own plain ones, so that no array of all queries and keys is
made, and maps are exact. Functions that somebody else registered are traced as they
are. B batch, H heads, T queries, S keys.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import masks, tiles
from mha_haiku.core.attention import implementations, normalizers, scores
from mha_haiku.interop.torch_modules import environment

_PLAIN = "eager", "sdpa"  # implementations
_EAGER, SDPA = (f"{name}_attention_forward" for name in _PLAIN)  # their functions
_MOST_READ = 2**16  # numbers of a mask that is computed while tracing
# What ours takes; windows are in the masks.
_OPTIONS = {"scaling", "softcap", "is_causal", "sliding_window", "dropout"}
# Mask functions of transformers, by what they close over. Others are called.
_MASKS: dict[str, Callable[..., masks.Mask]] = {
    "causal_mask_function": masks.causal,
    "bidirectional_mask_function": masks.full,
    "sliding_window_overlay": lambda sliding_window: masks.window(
        sliding_window - 1, None
    ),
    "sliding_window_bidirectional_overlay": lambda sliding_window: masks.window(
        sliding_window, sliding_window
    ),
}


_BOTH = {"and_masks": operator.and_, "or_masks": operator.or_}


def choose(module: Any) -> list[str]:
    """Sets what cannot be traced in a model of transformers to what can; lists it.

    Those are kernels of attention, and products of experts whose sizes depend on the
    data. Plain attention and functions of the user are kept, for each config by itself.
    """
    changes: dict[str, None] = {}
    if "transformers" not in sys.modules:
        return []
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.integrations import moe  # pyright: ignore[reportMissingImports]

    def is_users(table: Any, name: str | None) -> bool:
        function = table._global_mapping.get(name)
        return function is not None and not _is_of_transformers(function)

    has_experts = any("Experts" in type(x).__name__ for x in module.modules())
    for part in module.modules():
        config = getattr(part, "config", None)
        if not isinstance(config, transformers.PreTrainedConfig):
            continue
        name, experts = config._attn_implementation, config._experts_implementation
        is_own = is_users(transformers.AttentionInterface, name)
        if name not in (None, *_PLAIN) and not is_own:
            plain = _PLAIN[bool(getattr(part, "_supports_sdpa", False))]
            config._attn_implementation_internal = plain
            changes[f"attn {plain}, not {name}"] = None
        if not is_users(moe.ExpertsInterface, experts):
            config._experts_implementation_internal = "batched_mm"
            if has_experts and experts != "batched_mm":
                changes[f"experts batched_mm, not {experts}"] = None
    return [*changes]


def _is_of_transformers(function: Any) -> bool:
    function = getattr(function, "func", function)  # of functools.partial
    return getattr(function, "__module__", "").startswith("transformers.")


@contextlib.contextmanager
def looked_up(change: Callable[[Callable], Callable]) -> Iterator[None]:
    """Enters a context in which models get changed functions of transformers.

    Functions of attention that are not of transformers stay as they are.
    """
    import transformers  # pyright: ignore[reportMissingImports]

    look_up = transformers.AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable) -> Callable:
        function = look_up(self, name, default)
        return change(function) if _is_of_transformers(function) else function

    owner = transformers.AttentionInterface
    with environment.swapped(owner, look_up.__name__, get_interface):
        yield


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Enters a context in which models of transformers attend by our engine."""
    if "transformers" not in sys.modules:
        yield
        return
    import transformers  # pyright: ignore[reportMissingImports]

    table = transformers.AttentionMaskInterface._global_mapping
    attention = transformers.AttentionInterface._global_mapping

    def change(function: Callable) -> Callable:
        is_plain = getattr(function, "__name__", "") in (_EAGER, SDPA)
        return functools.partial(_attend, function) if is_plain else function

    with contextlib.ExitStack() as stack:
        for name in _PLAIN:
            functions = table[name], attention.get(name, table[name])
            if all(map(_is_of_transformers, functions)):
                lazy = functools.partial(_lazy_mask, table[name])
                stack.enter_context(environment.swapped(table, name, lazy))
        stack.enter_context(looked_up(change))
        yield


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
    name = function.__name__
    read = inspect.signature(function).parameters.keys() - _OPTIONS
    # A bias is added to scores by blocks where eager attention is recognized.
    read -= {"position_bias"} if name == SDPA else set()
    batch, num_heads, _, size = query.shape
    _, groups, num_keys, _ = key.shape
    if (
        any(options.get(name) is not None for name in read)
        or options.get("dropout")
        or not isinstance(options.get("scaling") or 1.0, int | float)
        or not hasattr(query, "_env")  # of torch itself, in another thread
        or key.shape != (batch, groups, num_keys, size)
        or value.shape[:3] != key.shape[:3]
        or num_heads % groups
    ):
        return function(module, query, key, value, attention_mask, **options)
    env = environment.environment()
    arrays = (jnp.swapaxes(x, 1, 2) for x in env.t2j_iso((query, key, value)))
    mask = getattr(attention_mask, "mask", None)
    whole = attention_mask if mask is None else None
    terms = weighting(name, module, query, whole, options, env.t2j_iso)
    terms |= {} if mask is None else {"mask": mask}
    heads, map_ = implementations.attend(*arrays, **terms)
    weights = jax.ShapeDtypeStruct(map_.shape, heads.dtype)
    return env.j2t_iso(heads), env.deferred(weights, env, map_.weights)


def weighting(
    name: str,
    module: Any,
    query: Any,
    attention_mask: Any,
    options: dict[str, Any],
    array: Callable[[Any], jax.Array],
) -> dict[str, Any]:
    """Returns what `attend` takes for a call of a function of transformers.

    Args:
      name: The name of the function.
      attention_mask: `[B, H, T, S]` of booleans or floats, `[B, S]` of a flash kernel.
      array: Converts a tensor.
    """
    length, size = query.shape[-2:]
    is_eager, is_kernel = name == _EAGER, name not in (_EAGER, SDPA)
    scale = options.get("scaling")
    scale = size**-0.5 if scale is None else float(scale)
    mask, biases = masks.full(), []
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has_mask = is_eager or attention_mask is not None and not is_kernel
    if is_causal and not has_mask and length > 1:
        mask = masks.causal()
    if is_kernel and options.get("sliding_window") is not None:
        mask &= masks.window(options["sliding_window"] - 1, None)
    if attention_mask is not None:
        whole = array(attention_mask)
        if whole.ndim == 2:
            mask &= masks.segments(np.ones((1, 1), np.int32), whole.astype(jnp.int32))
        elif whole.dtype == bool and not is_eager:
            mask &= masks.as_mask(whole)
        else:
            biases.append(whole)  # eager adds booleans, too
    if options.get("position_bias") is not None:
        biases.append(array(options["position_bias"]))
    sinks = options.get("s_aux") if name != SDPA else None
    return {
        "mask": mask,
        "bias": sum(biases[1:], biases[0]).astype(jnp.float32) if biases else None,
        "score": scores.dot_product(scale, options.get("softcap")),
        "normalizer": None if sinks is None else normalizers.sink(array(sinks)),
    }


def _lazy_mask(function: Callable, **options: Any) -> Any:
    """Makes the mask that `function` makes, `[B, 1, T, S]`, of no memory."""
    from torchax.ops import mappings  # pyright: ignore[reportMissingImports]
    from transformers import masking_utils  # pyright: ignore[reportMissingImports]

    offsets = [options.get(name, 0) for name in ("q_offset", "kv_offset")]  # of caches
    if any(not isinstance(x, int) or x for x in offsets):
        return function(**options)
    batch_size, num_keys = options["batch_size"], options["kv_length"]
    num_queries = options["q_length"]
    mask_function: Any = options["mask_function"]
    padding: Any = options.get("attention_mask")
    if padding is not None:
        padding = masking_utils.prepare_padding_mask(padding, num_keys, 0)
        padding = masking_utils.padding_mask_function(padding)
        mask_function = masking_utils.and_masks(mask_function, padding)
    mask = _as_mask(mask_function, batch_size)
    is_bias = function.__name__ == "eager_mask"
    # sdpa leaves a causal mask to the layers, of which some are not causal.
    skips_causal = not is_bias and options.get("allow_is_causal_skip", True)
    skips = options.get("allow_is_bidirectional_skip") and isinstance(mask, masks.Full)
    if skips or skips_causal and repr(mask) == "causal()":
        return None
    dtype = mappings.t2j_dtype(options["dtype"]) if is_bias else jnp.bool_
    like = jax.ShapeDtypeStruct((batch_size, 1, num_queries, num_keys), dtype)

    def whole() -> jax.Array:
        traced = [isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask)]
        is_read = not any(traced) and num_queries * num_keys <= _MOST_READ  # by models
        with jax.ensure_compile_time_eval() if is_read else contextlib.nullcontext():
            seen = tiles.lifted(mask.array(num_queries, num_keys), 3)[:, None]
            if is_bias:
                seen = jnp.where(seen, 0, jnp.finfo(dtype).min).astype(dtype)
            return jnp.broadcast_to(seen, like.shape)

    env = environment.environment()
    return env.deferred(like, env, whole, mask)


def _as_mask(function: Callable, batch_size: int) -> masks.Mask:
    """Converts a mask function of transformers to a mask."""
    parts = inspect.getclosurevars(function).nonlocals
    kind = function.__qualname__.partition(".")[0]
    kind = kind if _is_of_transformers(function) else ""
    if kind in _MASKS:
        return _MASKS[kind](**parts)
    if kind in _BOTH:
        made = (_as_mask(part, batch_size) for part in parts["mask_functions"])
        return functools.reduce(_BOTH[kind], made)
    if kind != "padding_mask_function":
        return _OfIndices.of(function, batch_size)
    seen = environment.environment().t2j_iso(parts["padding_mask"])
    concrete = tiles.known(seen)
    if concrete is not None and concrete.all():
        return masks.full()
    seen = seen if concrete is None else concrete
    return masks.segments(np.ones((1, 1), np.int32), seen.astype(np.int32))


@tiles.pytree
class _OfIndices(masks.Mask):
    """A mask that a function computes of indices: example, head, query and key."""

    constants: list[jax.Array]  # that the function closes over
    program: Any = tiles.static()  # a jaxpr of these and of four numbers
    example: jax.Array | np.ndarray = tiles.array("")

    @classmethod
    def of(cls, function: Callable, batch_size: int) -> "_OfIndices":
        env = environment.environment()

        def of_one(*indices: jax.Array) -> jax.Array:
            return env.t2j_iso(function(*env.j2t_iso(indices)))

        closed = jax.make_jaxpr(of_one)(*[np.int32(0)] * 4)
        return cls(closed.consts, closed.jaxpr, np.arange(batch_size, dtype=np.int32))

    def aligned_tile(
        self, rows: tiles.Positions, columns: tiles.Positions
    ) -> jax.Array:
        pairs = zip(self.constants, self.program.constvars, strict=True)
        with jax.enable_x64(True):  # as the program was traced
            constants = [x.astype(variable.aval.dtype) for x, variable in pairs]
            closed = jax.extend.core.ClosedJaxpr(self.program, constants)
            tile = jax.extend.core.jaxpr_as_fun(closed)
            for axis in (3, 2, *[0] * jnp.ndim(self.example)):
                tile = jax.vmap(tile, [0 if i == axis else None for i in range(4)])
            at = (jnp.asarray(tiles.as_array(x), np.int32) for x in (rows, columns))
            (tile,) = tile(jnp.asarray(self.example), np.int32(0), *at)
        return tile[..., None, :, :]

    def at_head(self, example: tuple, head: int | jax.Array) -> "_OfIndices":
        del head
        return dataclasses.replace(self, example=tiles.at_batch(self.example, example))

"""Attention maps of a PyTorch model's own run, on its device, by its own kernel."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import checks, masks
from mha_haiku.core.attention import AttentionMap, attend
from mha_haiku.interop.torch_modules import attention_function
from mha_haiku.lab.text_maps import TextMaps

_MASKED = -6e4  # lower biases stand for a mask; the lowest float16 is about -65,500


@contextlib.contextmanager
def record(
    model: Any,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator["Calls"]:
    """Keeps what the attention maps of a model of transformers are computed of.

    The model runs as it is: any device, dtype, kernel and cache. Queries and keys stay
    on its device, O(T + S) numbers of each map, until a map is read. Functions of
    attention that are not of transformers are not recorded. Needs no torchax.

        with mh.record(model) as maps:
            model.generate(**inputs)
        maps[0][3].weights()  # of the prompt in layer 3, [B, H, T, S]
        maps[-1].show()  # the map of the last token, [B, H, 1, S], of each layer

    Args:
      layers: The numbers of the maps to keep, in the order of the model's first call.
      heads: The heads to keep.

    Raises:
      ConfigError: If transformers is missing.
      ValueError: If nothing was recorded.
    """
    try:
        import transformers  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise checks.ConfigError(
            "mh.record needs transformers: pip install 'mha_haiku[torch]'."
        ) from None
    calls = Calls(model, layers, heads)
    hook = model.register_forward_pre_hook(calls._begin)
    try:
        with attention_function.looked_up(calls._observed):
            yield calls
    finally:
        hook.remove()
    if not len(calls):
        raise ValueError(
            f"{type(model).__name__} called no attention function of transformers "
            f"(its implementation: {model.config._attn_implementation})."
        )


@dataclasses.dataclass
class _Part:
    """A part of a model that attends; its last keys hold those of earlier calls."""

    layer: int
    key: Any = None


@dataclasses.dataclass
class _Call:
    """The arguments of a call of attention."""

    function: Callable
    module: Any
    query: Any  # [B, H, T, K]
    part: _Part  # whose first `num_keys` keys are the keys
    num_keys: int
    first_query: int
    mask: Any
    options: dict[str, Any]


class Calls(Sequence):
    """The maps of each call of a model, made when they are read.

    `calls[i]` has the maps of a call by layer or by the path of a module. The encoder
    of an encoder-decoder is in the first call.
    """

    def __init__(
        self, model: Any, layers: Sequence[int] | None, heads: Sequence[int] | None
    ):
        self._names = {
            id(part): re.sub(r"\.(\d+)\b", r"_\1", name).replace(".", "/")
            for name, part in model.named_modules()
        }
        self._layers, self._heads = layers, None if heads is None else list(heads)
        self._parts: dict[str, _Part] = {}
        self._calls: list[dict[str, _Call | None]] = []
        self._is_new = True

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        calls = self._calls[index].items()
        return TextMaps({name: self._map(x) for name, x in calls if x is not None})

    def __repr__(self) -> str:
        return f"Calls({len(self)} calls, {len(self._parts)} layers)"

    def _begin(self, *_: Any) -> None:
        self._is_new = True

    def _observed(self, function: Callable) -> Callable:
        def observed(module: Any, *args: Any, **options: Any):
            output = function(module, *args, **options)
            if id(module) in self._names:
                self._keep(function, module, *args, **options)
            return output

        return observed

    def _keep(
        self,
        function: Callable,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        **options: Any,
    ) -> None:
        del value
        name = self._names[id(module)]
        if not self._calls or self._is_new and name in self._calls[-1]:
            self._calls.append({})
        self._is_new = False
        call, path, count = self._calls[-1], name, 1
        while name in call:  # a part that is several layers
            name, count = f"{path}_{count}", count + 1
        part = self._parts.setdefault(name, _Part(len(self._parts)))
        if self._layers is not None and part.layer not in self._layers:
            call[name] = None
            return
        query, key = query.detach(), key.detach()
        if self._heads is not None:
            ratio = query.shape[1] // key.shape[1]
            query = query[:, self._heads]
            key = key[:, [head // ratio for head in self._heads]]
        num_keys, first_query = key.shape[2], 0
        before = 0 if part.key is None else part.key.shape[2]
        if before and num_keys == before + query.shape[2]:
            first_query = before
        # A cache that grew holds the keys of earlier calls: they are kept once.
        if not first_query or not key[:, :, :before].equal(part.key):
            part = self._parts[name] = _Part(part.layer)
        part.key = key
        call[name] = _Call(
            function,
            module,
            query,
            part,
            num_keys,
            first_query,
            attention_mask,
            options,
        )

    def _map(self, call: _Call) -> AttentionMap:
        """Computes the logsumexp of a call, and returns its map."""

        def array(tensor: Any) -> jax.Array:
            is_mask = str(tensor.dtype) == "torch.bool"
            tensor = tensor.detach() if is_mask else tensor.detach().float()
            return jnp.asarray(tensor.cpu().numpy())

        def chosen(tensor: Any) -> jax.Array:  # of masks, biases and sinks
            whole = array(tensor)
            if whole.ndim == 4:
                whole = whole[..., : call.num_keys]
            if self._heads is None or whole.shape[-3:][:1] == (1,):
                return whole
            return whole[self._heads] if whole.ndim == 1 else whole[:, self._heads]

        key = call.part.key[:, :, : call.num_keys]
        query, key = (jnp.swapaxes(array(x), 1, 2) for x in (call.query, key))
        terms = attention_function.weighting(
            call.function, call.module, call.query, call.mask, call.options, chosen
        )
        if (bias := terms["bias"]) is not None:
            hidden = bias < _MASKED
            terms["mask"] = terms["mask"] & masks.as_mask(~hidden)
            terms["bias"] = jnp.where(hidden, 0, bias)
        _, map_ = attend(
            query, key, key[..., :1], **terms, first_query=call.first_query
        )
        return dataclasses.replace(map_, value=None)

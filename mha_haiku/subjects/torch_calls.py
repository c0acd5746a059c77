"""Attention maps of a PyTorch model's own run, on its device, by its own kernel."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import display, masks
from mha_haiku.core.attention import AttentionMap, attend
from mha_haiku.interop.torch_modules import attention_function, conversion
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
    attention that are not of transformers are not recorded, and masks of flex_attention
    are not read. Needs no torchax.

        with mh.record(model) as maps:
            model.generate(**inputs)
        maps[0][3].weights()  # of the prompt in layer 3, [B, H, T, S]
        maps[-1][3].weights()  # of the last token that was read, [B, H, 1, S]

    Args:
      layers: The numbers of the maps to keep, in the order of the model's first call.
      heads: The heads to keep.

    Raises:
      ValueError: If nothing was recorded.
    """
    calls = Calls(model, layers, heads)
    keep = functools.partial(functools.partial, calls._kept)
    with (
        model.register_forward_pre_hook(lambda *_: setattr(calls, "_is_new", True)),
        attention_function.looked_up(keep),
    ):
        yield calls
    if not len(calls):
        raise ValueError(
            f"{type(model).__name__} called no attention function of transformers "
            f"(its implementation: {model.config._attn_implementation})."
        )


@dataclasses.dataclass
class _Part:
    """A part of a model that attends."""

    layer: int
    key: Any = None  # of the last call, which has those of earlier ones


class Calls(Sequence):
    """The maps of each call of a model, made when they are read.

    `calls[i]` has the maps of a call by layer, or by the path of a module. The encoder
    of an encoder-decoder is in the first call.
    """

    def __init__(
        self, model: Any, layers: Sequence[int] | None, heads: Sequence[int] | None
    ):
        self._names = {
            id(part): conversion.site_of(name) for name, part in model.named_modules()
        }
        self._layers, self._heads = layers, None if heads is None else list(heads)
        self._parts: dict[str, _Part] = {}
        self._calls: list[dict[str, Callable[[], AttentionMap] | None]] = []
        self._is_new = True

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        calls = self._calls[index].items()
        return TextMaps({name: make() for name, make in calls if make is not None})

    def __repr__(self) -> str:
        return "Calls({}, {})".format(
            display.count(len(self), "call"), display.count(len(self._parts), "layer")
        )

    def _kept(self, function: Callable, module: Any, *args: Any, **options: Any) -> Any:
        """Calls a function of attention, and keeps what its map is computed of."""
        result, (query, key) = function(module, *args, **options), args[:2]
        if id(module) not in self._names:
            return result
        mask = options.get("attention_mask", args[3] if args[3:] else None)
        path = name = self._names[id(module)]
        if not self._calls or self._is_new and name in self._calls[-1]:
            self._calls.append({})
        self._is_new, call, count = False, self._calls[-1], 1
        while name in call:  # a part that is several layers
            name, count = f"{path}_{count}", count + 1
        part = self._parts.setdefault(name, _Part(len(self._parts)))
        if self._layers is not None and part.layer not in self._layers:
            call[name] = None
            return result
        query, key = query.detach(), key.detach()
        if self._heads is not None:
            ratio = query.shape[1] // key.shape[1]
            query = query[:, self._heads]
            key = key[:, [head // ratio for head in self._heads]]
        before = 0 if part.key is None else part.key.shape[2]
        is_longer = before and key.shape[2] == before + query.shape[2]
        # A cache that grew holds the keys of earlier calls, which are kept once.
        if not is_longer or not key[:, :, :before].equal(part.key):
            part = self._parts[name] = _Part(part.layer)
        part.key = key

        of_call = function.__name__, module, query, mask, options
        place = key.shape[2], before if is_longer else 0
        call[name] = functools.partial(self._map, part, of_call, *place)
        return result

    def _map(
        self, part: _Part, of_call: Any, num_keys: int, first_query: int
    ) -> AttentionMap:
        """Computes the logsumexp of a call, and returns its map.

        The call has the first `num_keys` keys of the part.
        """

        def array(tensor: Any) -> jax.Array:
            tensor = tensor.detach().cpu()
            is_mask = not tensor.is_floating_point()
            return jnp.asarray((tensor if is_mask else tensor.float()).numpy())

        def of_heads(tensor: Any) -> jax.Array:  # of masks, biases and sinks
            whole = array(tensor)
            if whole.ndim == 4:
                whole = whole[..., :num_keys]
                if whole.shape[2] > 1:  # rows are looked up by position
                    before = ((0, 0), (0, 0), (first_query, 0), (0, 0))
                    whole = jnp.pad(whole, before)
            if self._heads is None or whole.ndim == 4 and whole.shape[1] == 1:
                return whole
            return whole[self._heads] if whole.ndim == 1 else whole[:, self._heads]

        name, module, query, mask, options = of_call
        terms = attention_function.weighting(
            name, module, query, mask, options, of_heads
        )
        if (bias := terms["bias"]) is not None:
            hidden = bias < _MASKED
            terms["mask"] = terms["mask"] & masks.as_mask(~hidden)
            terms["bias"] = jnp.where(hidden, 0, bias)
        pair = query, part.key[:, :, :num_keys]
        query, key = (jnp.swapaxes(array(x), 1, 2) for x in pair)
        # Values are of no use, so that one number stands for each.
        _, map_ = attend(query, key, key[..., :1], **terms, first_query=first_query)
        return dataclasses.replace(map_, value=None)

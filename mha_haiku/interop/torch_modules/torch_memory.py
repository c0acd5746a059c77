"""Tensors of torch that are arrays of JAX, of a memory that their views share.

Imports torch and torchax: `environment.environment` imports it where they are needed.
"""

# A subclass of torchax's tensors overrides members with other types than declared.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalOperand=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torchax.tensor  # pyright: ignore[reportMissingImports]
from torch.utils import _mode_utils, _pytree  # pyright: ignore[reportMissingImports]
from torchax.ops import mappings  # pyright: ignore[reportMissingImports]

DEVICE = "privateuseone"  # as torch calls devices that it does not know
# Views that torchax computes; of others torch says which elements they are.
_DIRECT = (
    "view transpose permute t slice select expand unsqueeze split "
    "alias _conj view_as_real view_as_complex"
).split()
# Operations that write, whose functional ones have other names.
_FUNCTIONAL = {"normal_": "normal_functional"}


class Memory:
    """An array that tensors share: a value of its own, or a view of another memory.

    A view is computed again after its base was written, and a write into a view
    changes its base.
    """

    def __init__(self, value: Any, base: Any = None, view: Any = None, put: Any = None):
        self.value, self.base, self.view = value, base, view
        self.put = put or functools.partial(_put, view)
        self.seen = None if base is None else base.read()

    def read(self) -> Any:
        """Returns the array as it is now; it may be computed only here."""
        if callable(self.value):
            self.value = self.value()
        if self.base is not None and (now := self.base.read()) is not self.seen:
            self.seen, self.value = now, self.view(now)
        return self.value

    def write(self, value: jax.Array) -> None:
        """Replaces the array, here and in what it is a view of."""
        if self.base is not None:
            self.base.write(self.put(self.base.read(), value))
            self.seen = self.base.read()
        self.value = value


def _put(view: Any, base: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `base` with other elements where `view` reads them."""
    if base.dtype == bool:
        base, value = base.astype(jnp.uint8), value.astype(jnp.uint8)
        return _put(view, base, value).astype(bool)
    # A view is linear, and its transpose writes each element back; the transpose of
    # JAX does not conjugate.
    back = jax.linear_transpose(view, base)
    one = jnp.full_like(value, 1 + 1j if jnp.iscomplexobj(value) else 1)
    (image,), (count,) = back(jnp.conj(value)), back(one)
    return jnp.where(count != 0, jnp.conj(image), base)


# A value with the gradient of what it replaces, as a write in no_grad has.
_with_gradient_of = jax.custom_jvp(lambda before, value: value)
_with_gradient_of.defjvps(lambda tangent, *_: tangent, None)


class Tensor(torchax.tensor.Tensor):
    """A tensor with a memory that its views share, and with the strides of torch."""

    def __new__(
        cls, elem: Any, env: Any, memory: Memory | None = None, like: Any = None
    ):
        strides = {}  # of torch: `like` is a tensor without numbers
        if like is not None:
            strides = dict(strides=like.stride(), storage_offset=like.storage_offset())
        kind = mappings.j2t_dtype(elem.dtype)
        # A tensor made in inference mode could not be used after it.
        with torch.inference_mode(False):
            tensor = torch.Tensor._make_wrapper_subclass(
                cls, elem.shape, dtype=kind, device="meta", **strides
            )
        tensor._env, tensor.memory = env, memory or Memory(elem)
        return tensor

    def __init__(self, *_: Any): ...

    _elem = property(
        lambda self: self.memory.read(), lambda self, value: self.memory.write(value)
    )
    device = property(lambda self: torch.device(DEVICE, 0))
    data = property(
        lambda self: self.detach(),
        lambda self, other: self.memory.write(self._env.t2j_iso(other)),
    )
    # torch's own, which reach the operations of aten, where torchax has copies.
    flatten, type_as = torch.Tensor.flatten, torch.Tensor.type_as
    detach = torch.Tensor.detach

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _key(key)
        if any(_is_number(part) for part in key):  # which torch would read
            key, value = self._env.t2j_iso((key, value))
            self._elem = self._elem.at[key].set(value)
        else:
            torch.Tensor.__setitem__(self, key, value)

    def detach_(self) -> Any:
        self.memory = self.detach().memory
        return self


class Deferred(Tensor):
    """A tensor that is computed when its numbers are read, or whose mask is read."""

    def __new__(cls, like: Any, env: Any, compute: Callable, mask: Any = None):
        tensor = super().__new__(cls, like, env, Memory(compute))
        tensor._like, tensor.mask = like, mask
        return tensor

    shape = property(lambda self: torch.Size(self._like.shape))
    ndim = property(lambda self: len(self._like.shape))
    dtype = property(lambda self: mappings.j2t_dtype(self._like.dtype))

    def __getitem__(self, key: Any) -> Any:
        pairs = zip(_key(key), self.shape, strict=False)
        # All of it, as of mask[:, :, :, :num_keys].
        is_whole = all(
            isinstance(x, slice) and range(n)[x] == range(n) for x, n in pairs
        )
        return self if is_whole else super().__getitem__(key)


def is_here(x: Any) -> bool:
    """Checks whether a tensor is an array of JAX."""
    return isinstance(x, torchax.tensor.Tensor)


def _is_number(x: Any) -> bool:
    """Checks for a tensor of JAX that is a single integer."""
    is_number = is_here(x) and not x.ndim and x.dtype != torch.bool
    return is_number and not x.is_floating_point()


def _key(key: Any) -> tuple:
    """Makes an index a tuple, and its lists tensors, which torch leaves empty."""
    parts = key if isinstance(key, tuple) else (key,)
    kind = (list, range, np.ndarray)
    return tuple(torch.as_tensor(x) if isinstance(x, kind) else x for x in parts)


def item(x: Any, key: Any) -> Any:
    """Indexes; a single integer that is a tensor of JAX is not read."""
    key = _key(key)
    numbers = [i for i, part in enumerate(key) if _is_number(part)]
    if not numbers:
        return torch.Tensor.__getitem__(x, key)
    return key[numbers[0]]._env.call(lambda x, *parts: x[parts], x, *key)


def view(env: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what shares the memory of its first argument, in torch's strides."""
    (source, *rest), name = args, func._schema.name.partition("::")[2]
    rest, kwargs = _pytree.tree_map_only(  # sizes
        torch.Tensor, lambda x: x.item(), (rest, kwargs)
    )
    memory = source.memory
    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        like = _like(source)
        try:
            metas = func(like, *rest, **kwargs)
        except RuntimeError:
            # Here results are contiguous, where torch may keep other strides.
            like = torch.empty(source.shape, dtype=source.dtype, device="meta")
            metas = func(like, *rest, **kwargs)
        many = isinstance(metas, tuple | list)
        if func._overloadname == "dtype":
            dtype, before = mappings.t2j_dtype(rest[0]), source._elem.dtype
            views = [(lambda x: x.view(dtype), lambda _, x: x.view(before))]
        elif name == "detach":
            views = [(jax.lax.stop_gradient, lambda _, x: x)]
        elif name in _DIRECT:
            op = env._get_op_or_decomp(func).func
            views = [
                (lambda x, i=i: jax.tree.leaves(op(x, *rest, **kwargs))[i], None)
                for i in range(len(metas) if many else 1)
            ]
        else:  # torch itself says which elements these are
            size = source.shape
            if name == "as_strided":  # of the whole memory
                while memory.base is not None:
                    memory = memory.base
                size = [memory.read().size]
                rest = metas.shape, metas.stride(), metas.storage_offset()
            places = func(
                torch.arange(memory.read().size).reshape(size), *rest, **kwargs
            )
            places = [x.int().numpy() for x in (places if many else [places])]
            views = [(lambda x, at=at: x.reshape(-1)[at], None) for at in places]
    result = []
    for (read, put), meta in zip(views, metas if many else [metas], strict=True):
        part = Memory(read(memory.read()), memory, read, put)
        result.append(Tensor(part.value, env, part, meta))
    return type(metas)(result) if many else result[0]


def write(env: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Computes what `func` writes, and writes it back through views."""
    schema = func._schema.arguments
    bound = dict(zip([x.name for x in schema], args, strict=False)) | kwargs
    writes = [x.name for x in schema if x.alias_info and x.alias_info.is_write]
    targets = [name for name in writes if name in bound]
    written = [bound[name] for name in targets]
    if any(isinstance(x, torch.Tensor) and not is_here(x) for x in written):
        raise TypeError(
            "function must write into tensors on the device of its inputs, as of "
            f"torch.zeros(3, device=x.device), got {func} into another one."
        )
    if torch.Tag.inplace_view in func.tags:
        result = view(env, _functional_of(func, ()), args, kwargs)
        with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            func(*args, **kwargs)
        args[0].memory = result.memory  # a view of what it was, as by unsqueeze_
        return args[0]
    functional = _functional_of(func, tuple(targets))
    if functional is None or not all(is_here(x) for x in written):
        return env.call_torchax(func, types, args, kwargs)
    kept = {x.name for x in functional._schema.arguments}
    inputs = {name: x for name, x in bound.items() if name in kept}
    names = [x.name for x in functional._schema.arguments if not x.kwarg_only]
    places = [inputs.pop(name) for name in names if name in inputs]
    with torch.enable_grad():
        results = env.dispatch(functional, types, tuple(places), inputs)
    results = results if isinstance(results, tuple | list) else [results]
    for target, result in zip(written, results, strict=False):
        before = target._elem
        value = jnp.asarray(env.t2j_iso(result)).astype(before.dtype)
        value = jnp.broadcast_to(value, before.shape)
        if not torch.is_grad_enabled() and jnp.issubdtype(value.dtype, jnp.inexact):
            value = _with_gradient_of(before, value)
        target._elem = value
    return written[0] if len(written) == 1 else tuple(written)


def _like(x: Tensor) -> Any:
    """Makes a tensor without numbers, of the same place in memory."""
    pairs = zip(x.shape, x.stride(), strict=True)
    offset = x.storage_offset()
    last = sum((size - 1) * stride for size, stride in pairs) if x.numel() else 0
    whole = torch.empty(offset + last + 1, dtype=x.dtype, device="meta")
    return whole.as_strided(x.shape, x.stride(), offset)


@functools.cache
def _functional_of(func: Any, targets: tuple[str, ...]) -> Any:
    """Finds the operation that returns what `func` writes; None if there is none."""
    name, overload = func._schema.name.partition("::")[2], func._overloadname
    if name.endswith("_") and not name.startswith("__"):
        name = _FUNCTIONAL.get(name, name[:-1])
    elif name.startswith("__i"):
        name = name.replace("__i", "__", 1)
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    names = [x.name for x in func._schema.arguments]
    kept = [name for name in names if name not in targets]
    fits = [
        each
        for each in (getattr(packet, x) for x in packet.overloads())
        if not each._schema.is_mutable
        and [x.name for x in each._schema.arguments] in (names, kept)
    ]
    alike = [each for each in fits if each._overloadname == overload]
    return next(iter(alike or fits), None)

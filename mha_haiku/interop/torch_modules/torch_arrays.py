"""Tensors of torch that are arrays of JAX: views that can be written, and operations.

Imports torch and torchax: `environment.environment` imports it where they are needed.
"""

# A subclass of torchax's tensors overrides members with other types than declared.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalOperand=false

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torchax.tensor  # pyright: ignore[reportMissingImports]
from torch._decomp import decomposition_table  # pyright: ignore[reportMissingImports]
from torch.nn.modules import transformer  # pyright: ignore[reportMissingImports]
from torch.utils import (  # pyright: ignore[reportMissingImports]
    _mode_utils,
    _pytree,
)
from torchax.ops import (  # pyright: ignore[reportMissingImports]
    jaten,
    jax_reimplement,
    mappings,
    ops_registry,
)

from mha_haiku.core.attention import implementations, scores
from mha_haiku.core.masks import relative

_ATEN = torch.ops.aten
_CHECK = "TRANSFORMERS_DISABLE_TORCH_CHECK"
_MOST_FOLDED = 2**16  # numbers of a result that is computed while tracing
_DEVICE = "privateuseone"  # as torch calls devices that it does not know
_WIDE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# With others, all that is computed has 32 bits; indices become integers of 64.
_LONG = {*_WIDE, torch.int64, torch.int32, torch.uint32, torch.uint64}
_RANDOM = torch.rand, torch.randn, torch.randint  # of 32 bits by the lowering of JAX
# Views that are no choice of elements: the view, and its base after a write.
_CONVERSIONS = {
    "detach": (jax.lax.stop_gradient, lambda base, value: value),
    "alias": (lambda x: x, lambda base, value: value),
    "_conj": (jnp.conj, lambda base, value: jnp.conj(value)),
    "view_as_real": (
        lambda x: jnp.stack([x.real, x.imag], -1),
        lambda base, value: jax.lax.complex(value[..., 0], value[..., 1]),
    ),
    "view_as_complex": (
        lambda x: jax.lax.complex(x[..., 0], x[..., 1]),
        lambda base, value: jnp.stack([value.real, value.imag], -1),
    ),
}
# Views that torchax computes; of others torch says which elements they are.
_DIRECT = "view transpose permute t slice select expand unsqueeze split".split()
# Operations that write, whose functional ones have other names.
_FUNCTIONAL = {"normal_": "normal_functional"}
# JAX has a kernel's support next to it, where torchax 0.0.13 has the kernel alone.
jax_reimplement._kernels = {
    name: kernel if callable(kernel) else kernel[-1]
    for name, kernel in jax_reimplement._kernels.items()
}
# What torchax computes as copies, or with other keywords than torch.
_LEFT_TO_TORCH = (
    torch.Tensor.__getitem__,
    torch.tensor_split,
    torch.Tensor.resize_,
    torch.nn.functional.one_hot,
    torch.nn.functional.interpolate,
)


class Memory:
    """An array that tensors share: a value of its own, or a view of another memory.

    A view is computed again after its base was written, and a write into a view
    changes its base.
    """

    def __init__(
        self,
        value: jax.Array,
        base: "Memory | None" = None,
        view: Callable | None = None,
        put: Callable | None = None,
    ):
        self.value, self.base, self.view = value, base, view
        self.put = put or functools.partial(_put, view)
        self.seen = None if base is None else base.read()

    def read(self) -> jax.Array:
        """Returns the array as it is now."""
        if self.base is not None and (now := self.base.read()) is not self.seen:
            assert self.view is not None
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
    # A view is linear, and its transpose writes each element back.
    back = jax.linear_transpose(view, base)
    (image,), (count,) = back(value), back(jnp.ones_like(value))
    return jnp.where(count != 0, image, base)


@jax.custom_jvp
def _with_gradient_of(before: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, with the gradient of `before`, as a write in no_grad has."""
    del before
    return value


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: tuple, tangents: tuple) -> tuple:
    return primals[1], tangents[0]


class Tensor(torchax.tensor.Tensor):
    """A tensor with a memory that its views share, and with the strides of torch."""

    def __new__(
        cls,
        elem: Any,
        env: Any,
        requires_grad: bool = False,
        memory: Memory | None = None,
        like: Any = None,  # a tensor without numbers, of the strides of torch
    ):
        places = {}
        if like is not None:
            places["strides"] = like.stride()
            places["storage_offset"] = like.storage_offset()
        # A tensor made in inference mode could not be used after it.
        with torch.inference_mode(False):
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                dtype=mappings.j2t_dtype(elem.dtype),
                device="meta",
                **places,
            )
        tensor._env, tensor.memory = env, memory or Memory(elem)
        return tensor

    def __init__(self, *_: Any): ...

    @property
    def _elem(self) -> jax.Array:
        return self.memory.read()

    @_elem.setter
    def _elem(self, value: jax.Array) -> None:
        self.memory.write(value)

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

    @property
    def device(self) -> torch.device:
        return torch.device(_DEVICE, 0)

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        self._elem = self._env.t2j_iso(other)


def _is_number(x: Any) -> bool:
    """Checks for a tensor of JAX that is a single integer."""
    is_integer = isinstance(x, torchax.tensor.Tensor) and not x.is_floating_point()
    return is_integer and not x.ndim and x.dtype != torch.bool


class DispatchMode(torchax.tensor.XLADispatchMode):
    """Runs operations of aten, and operations that torch decomposes them into."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", "") == "prims":
            with self:
                return func.impl_aten(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "quantized":
            raise self.env.missing(f"{func} has no counterpart in JAX")
        return super().__torch_dispatch__(func, types, args, kwargs)


class FunctionMode(torchax.tensor.XLAFunctionMode):
    """Runs functions of torch; constants join the inputs where devices are compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverloadPacket):
            return func(*args, **(kwargs or {}))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if not any(x in str(error) for x in ("device", "PrivateUse1")):
                raise
            args, kwargs = self.env.moved((args, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs)


class Environment(torchax.tensor.Environment):
    """Runs operations of torch in JAX, without adding names.

    Integers have 64 bits where torch has them; floats do only where a module asks.
    """

    missing = torchax.tensor.OperatorNotFound

    def __init__(self):
        super().__init__()
        self._function_mode = FunctionMode(self)
        self._dispatch_mode = DispatchMode(self)
        for name, op in self._decomps.items():
            run = functools.partial(self._run_here, op.func)
            self._decomps[name] = dataclasses.replace(op, func=run)
        for function in _LEFT_TO_TORCH:
            self._ops.pop(function, None)
        for functions, override in (
            # torch folds the axes of a batch and of heads, which this keeps apart.
            ((torch.matmul, *_methods("matmul", "__matmul__")), self._matmul),
            ([torch.nn.functional.linear], self._linear),
            (_methods("new_tensor"), _new_tensor),
            (_methods("__getitem__"), _item),
            ([torch.nn.functional.scaled_dot_product_attention], self._attend),
            ([_ATEN.copy.default], self._copy),
            (_overloads(_ATEN.pow), self._pow),
            ([_ATEN.argmax.default], self._argmax),
            ([_ATEN.argmin.default], self._argmin),
            ([_ATEN.normal_functional.default], _normal),
            (_overloads(_ATEN.random), _random),
            ([_ATEN._upsample_bilinear2d_aa.default], self._resize("billinear")),
            ([_ATEN._upsample_bicubic2d_aa.default], self._resize("bicubic2d")),
            ([_ATEN._is_all_true.default], torch.all),
            ([_ATEN._is_any_true.default], torch.any),
        ):
            for function in functions:
                self.override_op_definition(function, override)

    @contextlib.contextmanager
    def running(self, seed: int = 0) -> Iterator[None]:
        """Enters a context in which a module can be called on tensors of JAX.

        The seed alone determines random numbers; torch's own generator is restored.
        """
        device = f"torch.{_DEVICE}"
        state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
        key = jax.random.key(seed)
        sys.modules[device] = torch.privateuseone = torchax.device_module
        validates = torch.distributions.Distribution._validate_args
        check, apply = os.environ.get(_CHECK), torch.autograd.Function.__dict__["apply"]
        torch.default_generator.manual_seed(seed)
        torch.backends.mha.set_fastpath_enabled(False)  # which torchax lacks
        # It reads a mask, to say that one is causal, which changes no number.
        detect, transformer._detect_is_causal_mask = (
            transformer._detect_is_causal_mask,
            lambda mask, is_causal=None, size=None: is_causal is True,
        )
        # Checks of values, which are not there yet.
        torch.distributions.Distribution.set_default_validate_args(False)
        os.environ[_CHECK] = "1"
        torch.autograd.Function.apply = classmethod(
            functools.partial(_apply, self, apply)
        )
        try:
            with torch.inference_mode(False), torch.enable_grad():
                with self.override_property(prng=key), self:
                    yield
        finally:
            torch.autograd.Function.apply = apply
            transformer._detect_is_causal_mask = detect
            os.environ.pop(_CHECK)
            os.environ |= {} if check is None else {_CHECK: check}
            torch.distributions.Distribution.set_default_validate_args(validates)
            torch.set_rng_state(state)
            torch.backends.mha.set_fastpath_enabled(fast)
            for owner, name in (sys.modules, device), (vars(torch), _DEVICE):
                owner.pop(name, None)  # of the pass within which this one ran

    def call(self, function: Callable, *args: Any) -> Any:
        """Calls a function of arrays on tensors."""
        return self.j2t_iso(function(*self.t2j_iso(args)))

    def _matmul(self, input: Any, other: Any) -> Any:
        return self.call(jnp.matmul, input, other)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        heads = self.call(functools.partial(jnp.einsum, "...a,ba->...b"), input, weight)
        return heads if bias is None else heads + bias

    def _pow(self, base: Any, exponent: Any) -> Any:
        are_integers = all(
            isinstance(x, int) or (is_here(x) and not x.is_floating_point())
            for x in (base, exponent)
        )  # torchax computes these as floats
        function = jnp.power if are_integers else jaten._aten_pow
        return self.call(function, base, exponent)

    def _argmax(self, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        def index(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.integer):  # JAX lowers it for 32 bits alone
                x = (x == x.max(dim, keepdims=True)).astype(jnp.int8)
            with jax.enable_x64(False):
                return jnp.argmax(x, dim, keepdims=keepdim)

        return self.call(index, x).long()

    def _argmin(self, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return self._argmax(-x if x.is_floating_point() else ~x, dim, keepdim)

    def _resize(self, kind: str) -> Callable:
        function = getattr(jaten, f"_aten_upsample_{kind}_aa")
        # torchax takes other arguments in front of the scales.
        return lambda *args: self.call(function, *args[:3], None, *args[3:])

    def _copy(self, input: Any, source: Any, non_blocking: bool = False) -> Any:
        copied = lambda x, y: jnp.broadcast_to(y, x.shape).astype(x.dtype)  # noqa: E731
        return self.call(copied, input, source)

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Attends with our engine: a query that sees nothing gets zeros, as in torch.

        Arrays are `[..., H, T, K]`, or `[..., T, K]` of a single head.
        """
        arrays = self.t2j_iso((query, key, value))
        has_heads = query.ndim > 3
        arrays = [x if has_heads else x[..., None, :, :] for x in arrays]
        shape = *arrays[0].shape[:-1], arrays[1].shape[-2]
        mask = bias = None
        if is_causal:
            mask = relative.causal()
        elif attn_mask is not None:
            whole = self.t2j_iso(attn_mask)
            whole = whole if has_heads or whole.ndim < 3 else whole[..., None, :, :]
            whole = jnp.broadcast_to(whole, shape)
            mask, bias = (whole, None) if whole.dtype == bool else (None, whole)
        rng = self.get_and_rotate_prng_key() if dropout_p else None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if scale < 0:
            arrays[0], scale = -arrays[0], -scale
        heads, _ = implementations.attend(
            *(jnp.swapaxes(x, -3, -2) for x in arrays),
            mask=mask,
            bias=bias,
            score=scores.dot_product(scale),
            dropout_rate=dropout_p,
            rng=rng,
        )
        heads = jnp.swapaxes(heads, -3, -2)
        return self.j2t_iso(heads if has_heads else heads[..., 0, :, :])

    def _is_same_device(self, the_tensor: Any, new_device: Any) -> bool:
        # A module may name the CPU; what it computes stays where it is.
        return is_here(the_tensor) or super()._is_same_device(the_tensor, new_device)

    def j2t_iso(self, jaxarray: Any) -> Any:
        return _pytree.tree_map_only(jax.Array, lambda x: Tensor(x, self), jaxarray)

    def t2j_iso(self, torchtensors: Any) -> Any:
        # Tensors made without a device are constants, which torch itself computes up
        # to where they meet others. Single numbers are left to torchax, which lets
        # them take on the dtype of what they meet.
        return super().t2j_iso(self.moved(torchtensors))

    def moved(self, tree: Any) -> Any:
        """Makes constants arrays of JAX; not single numbers."""

        def move(x: Any) -> Any:
            if torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise self.missing("torch.func inside of a module has no counterpart")
            return x if is_here(x) or not x.ndim else Tensor(self.t2j_copy(x), self)

        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            return _pytree.tree_map_only(torch.Tensor, move, tree)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, getattr(func, "_schema", None)
        leaves = _pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        # What torchax adds to a path ends there: it is no module.
        kinds = {x.dtype for x in tensors}
        kinds |= {x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)}
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        is_random = is_random or func in _RANDOM
        is_wide = not is_random and not (tensors and kinds.isdisjoint(_LONG))
        folded = contextlib.nullcontext() if is_random else _folded(leaves, tensors)
        with jax.named_scope("torch::"), jax.enable_x64(is_wide), folded:
            if schema is not None and any(is_here(x) for x in tensors):
                alias = schema.returns[0].alias_info if schema.returns else None
                if schema.is_mutable:
                    return self._write(func, types, args, kwargs)
                if alias is not None and is_here(args[0]) and not _is_composite(func):
                    return self._view(func, args, kwargs)
            result = self._run(func, types, args, kwargs)
            return _pytree.tree_map_only(
                torchax.tensor.Tensor,
                lambda x: self._result(x, tensors, kinds, is_wide),
                result,
            )

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().dispatch(func, types, args, dict(kwargs))
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            # torchax lacks some options of operations that torch itself decomposes.
            other = decomposition_table.get(func)
            if other is None or isinstance(error, jax.errors.JAXTypeError):
                raise
            with self._dispatch_mode:
                return self._run_here(other, *args, **kwargs)

    def _result(
        self, x: Any, tensors: Sequence[Any], kinds: set[Any], is_wide: bool
    ) -> Any:
        """Makes what torchax computed a tensor of ours, with the dtype of torch."""
        is_view = isinstance(x, Tensor) and x.memory.base is not None
        if is_view or any(x is tensor for tensor in tensors):
            return x
        array, dtype = x._elem, x.dtype
        if dtype in _WIDE and kinds.isdisjoint(_WIDE):
            dtype = _WIDE[dtype]
        elif dtype is torch.int32 and not is_wide and dtype not in kinds:
            dtype = torch.int64  # of indices
        if dtype is not x.dtype:
            with jax.enable_x64(True):
                array = array.astype(mappings.t2j_dtype(dtype))
        if not torch.is_grad_enabled():
            array = jax.lax.stop_gradient(array)
        unchanged = isinstance(x, Tensor) and array is x._elem
        return x if unchanged else Tensor(array, self)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what shares the memory of its first argument, in torch's strides."""
        (source, *rest), name = args, func._schema.name.partition("::")[2]
        if not isinstance(source, Tensor):
            source = Tensor(source._elem, self)
        rest, kwargs = _pytree.tree_map_only(  # sizes
            torch.Tensor, lambda x: x.item(), (rest, kwargs)
        )
        memory, views = source.memory, None
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
            elif name in _CONVERSIONS:
                views = [_CONVERSIONS[name]]
            elif name == "as_strided":  # of the whole memory
                while memory.base is not None:
                    memory = memory.base
                numbers = torch.arange(memory.read().size)
                places = torch.as_strided(
                    numbers, metas.shape, metas.stride(), metas.storage_offset()
                )
                views = [_elements(places)]
            elif name in _DIRECT:
                op = self._get_op_or_decomp(func).func
                count = len(metas) if many else 1
                views = [
                    (lambda x, i=i: jax.tree.leaves(op(x, *rest, **kwargs))[i], None)
                    for i in range(count)
                ]
            else:  # torch itself says which elements these are
                numbers = torch.arange(source.numel()).reshape(source.shape)
                places = func(numbers, *rest, **kwargs)
                views = [_elements(x) for x in (places if many else [places])]
        found = []
        for (view, put), meta in zip(views, metas if many else [metas], strict=True):
            part = Memory(view(memory.read()), memory, view, put)
            found.append(Tensor(part.value, self, False, part, meta))
        return type(metas)(found) if many else found[0]

    def _write(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Computes what `func` writes, and writes it back through views."""
        names = [x.name for x in func._schema.arguments]
        bound = dict(zip(names, args, strict=False)) | kwargs
        targets = [
            x.name
            for x in func._schema.arguments
            if x.alias_info is not None and x.alias_info.is_write and x.name in bound
        ]
        written = [bound[name] for name in targets]
        if any(isinstance(x, torch.Tensor) and not is_here(x) for x in written):
            raise TypeError(
                "function must write what it computes into tensors on the device of "
                "its inputs, as of torch.zeros(3, device=x.device), got "
                f"{func} into a tensor made without device=."
            )
        if torch.Tag.inplace_view in func.tags:
            return self._view_in_place(func, args, kwargs)
        functional = _functional_of(func, tuple(targets))
        if functional is None or not all(is_here(x) for x in written):
            return super().dispatch(func, types, args, kwargs)
        kept = {x.name for x in functional._schema.arguments}
        keeps_all = kept.issuperset(targets)
        inputs = {name: x for name, x in bound.items() if name in kept}
        names = [x.name for x in functional._schema.arguments if not x.kwarg_only]
        places = [inputs.pop(name) for name in names if name in inputs]
        with torch.enable_grad():
            results = self.dispatch(functional, types, tuple(places), inputs)
        results = results if isinstance(results, tuple | list) else [results]
        for target, result in zip(written, results, strict=False):
            self._replace(target, self.t2j_iso(result), keeps_all)
        return written[0] if len(written) == 1 else tuple(written)

    def _replace(self, target: Any, value: Any, keeps_shape: bool) -> None:
        before = target._elem
        value = jnp.asarray(value).astype(before.dtype)
        if keeps_shape:
            value = jnp.broadcast_to(value, before.shape)
        if not torch.is_grad_enabled() and jnp.issubdtype(value.dtype, jnp.inexact):
            value = _with_gradient_of(before, value)
        if value.shape == before.shape:
            target._elem = value
        else:  # torch gives out= another size
            target.memory = Memory(value)
            meta = torch.empty(value.shape, device="meta", dtype=target.dtype)
            with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                target.resize_(meta.shape)

    def _view_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes a tensor a view of what it was, as `unsqueeze_` does."""
        target = args[0]
        view = self._view(_functional_of(func, ()), args, kwargs)
        with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            func(*args, **kwargs)
        target.memory = view.memory
        return target

    def _get_op_or_decomp(self, func: Any) -> Any:
        try:
            return super()._get_op_or_decomp(func)
        except torchax.tensor.OperatorNotFound:
            if not isinstance(func, torch._ops.OpOverload):
                raise
            decomposition = decomposition_table.get(func)
            if decomposition is None and _is_composite(func):
                decomposition = func.decompose
            if decomposition is None:
                raise
            # It compares devices.
            run = functools.partial(self._run_here, decomposition)
            options = dict(is_jax_function=False, is_user_defined=False)
            options |= dict(needs_env=False, is_view_op=False)
            return ops_registry.Operator(func, run, **options)

    def _run_here(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.moved((args, kwargs))
        return function(*args, **kwargs)


class _Context:
    """What a `torch.autograd.Function` keeps from its forward to its backward pass."""

    saved_tensors: tuple = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = set_materialize_grads = mark_non_differentiable


def _apply(env: Environment, apply: Any, kind: Any, *args: Any) -> Any:
    """Runs a `torch.autograd.Function` with its own backward pass."""
    places = [i for i, x in enumerate(args) if is_here(x) and x.is_floating_point()]
    if not places:
        return apply.__get__(None, kind)(*args)
    context = _Context()
    context.needs_input_grad = tuple(i in places for i in range(len(args)))
    with torch.no_grad():
        if "setup_context" in vars(kind):
            results = kind.forward(*args)
            kind.setup_context(context, args, results)
        else:
            results = kind.forward(context, *args)
    if not torch.is_grad_enabled():
        return results

    @jax.custom_vjp
    def attached(values: Any, inputs: Any, kept: Any) -> Any:
        return values

    def forward(values: Any, inputs: Any, kept: Any) -> Any:
        return values, (values, inputs, kept)

    def backward(residuals: Any, slopes: Any) -> Any:
        values, inputs, kept = residuals
        arrays = iter(kept)
        filled = lambda x: env.j2t_iso(next(arrays)) if is_here(x) else x  # noqa: E731
        vars(context).update(_pytree.tree_map(filled, fields))
        with env.running():
            grads = kind.backward(context, *env.j2t_iso(list(slopes)))
        grads = grads if isinstance(grads, tuple) else (grads,)
        grads = [None if grads[i] is None else env.t2j_iso(grads[i]) for i in places]
        pairs = zip(grads, inputs, strict=True)
        grads = [jnp.zeros_like(x) if g is None else g for g, x in pairs]
        return None, grads, None

    attached.defvjp(forward, backward)
    many = isinstance(results, tuple)
    fields = dict(vars(context))
    kept = [x._elem for x in _pytree.tree_leaves(fields) if is_here(x)]
    values = env.t2j_iso(list(results) if many else [results])
    inputs = [args[i]._elem for i in places]
    values = env.j2t_iso(attached(values, inputs, kept))
    return tuple(values) if many else values[0]


def _folded(leaves: list, tensors: list) -> contextlib.AbstractContextManager:
    # Positions stay numbers where they depend on no input, so that models can tell a
    # text from packed ones, which have several first positions.
    shapes = [x.shape[::-1] for x in tensors]
    sizes = [max(x) for x in itertools.zip_longest(*shapes, fillvalue=1)]
    if not tensors:
        sizes = [abs(x) for x in leaves if isinstance(x, int) and x]
    is_constant = not any(
        isinstance(x.jax(), jax.core.Tracer) for x in tensors if is_here(x)
    )
    is_folded = is_constant and math.prod(sizes) <= _MOST_FOLDED
    return jax.ensure_compile_time_eval() if is_folded else contextlib.nullcontext()


def is_here(x: Any) -> bool:
    """Checks whether a tensor is an array of JAX."""
    return isinstance(x, torchax.tensor.Tensor)


def _methods(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names]


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.has_kernel_for_dispatch_key(key)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _normal(x: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    return torch.randn_like(x) * std + mean


def _random(x: Any, low: Any = 0, high: Any = None, *, generator: Any = None) -> Any:
    if high is None:
        low, high = 0, low or 2**24  # floats hold integers up to there
    return torch.randint(low, high, x.shape, device=x.device).to(x.dtype)


def _new_tensor(of: Any, data: Any, *, dtype: Any = None, **_: Any) -> Any:
    return torch.as_tensor(data, dtype=dtype or of.dtype)


def _key(key: Any) -> tuple:
    """Makes an index a tuple, and its lists tensors, which torch leaves empty."""
    parts = key if isinstance(key, tuple) else (key,)
    kind = (list, range, np.ndarray)
    return tuple(torch.as_tensor(x) if isinstance(x, kind) else x for x in parts)


def _item(x: Any, key: Any) -> Any:
    """Indexes; a single integer that is a tensor of JAX is not read."""
    key = _key(key)
    numbers = [i for i, part in enumerate(key) if _is_number(part)]
    if not numbers:
        return torch.Tensor.__getitem__(x, key)
    return key[numbers[0]]._env.call(lambda x, *parts: x[parts], x, *key)


def _elements(places: Any) -> tuple[Callable, None]:
    """Returns the view of these elements."""
    places = places.int().numpy()
    return (lambda x: x.reshape(-1)[places]), None


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
    packet = getattr(_ATEN, name, None)
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

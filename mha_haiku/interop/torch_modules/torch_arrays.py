"""Operations of torch on arrays of JAX.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]
import torchax.tensor  # pyright: ignore[reportMissingImports]
from torch._decomp import decomposition_table  # pyright: ignore[reportMissingImports]
from torch.nn.modules import transformer  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree  # pyright: ignore[reportMissingImports]
from torchax.ops import jaten, jax_reimplement, mappings  # pyright: ignore

from mha_haiku.core import masks
from mha_haiku.core.attention import implementations, scores
from mha_haiku.interop.torch_modules import environment, torch_memory
from mha_haiku.interop.torch_modules.torch_memory import Tensor, is_here

_ATEN, _DEVICE = torch.ops.aten, torch_memory.DEVICE
_CHECK, _DETECT = "TRANSFORMERS_DISABLE_TORCH_CHECK", "_detect_is_causal_mask"
_LOCK = threading.RLock()  # of what is set on torch while a module is traced
_FUNCTION = torch.autograd.function._SingleLevelFunction
_MOST_FOLDED = 2**16  # numbers of a result that is computed while tracing
_WIDE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# With others, all that is computed has 32 bits; indices become integers of 64.
_LONG = {*_WIDE, torch.int64, torch.int32, torch.uint32, torch.uint64}
_OF_VALUES = jax.errors.JAXTypeError, jax.errors.JAXIndexError
_RANDOM = torch.rand, torch.randn, torch.randint  # of 32 bits by the lowering of JAX
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


class DispatchMode(torchax.tensor.XLADispatchMode):
    """Runs operations of aten, and operations that torch decomposes them into."""

    def __torch_dispatch__(self, func: Any, *call: Any) -> Any:
        if func.namespace == "prims":
            with self:
                return func.impl_aten(*call[1], **call[2])
        if func.namespace == "quantized":
            raise self.env.missing(f"{func} has no counterpart in JAX")
        return super().__torch_dispatch__(func, *call)


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

    missing, deferred = torchax.tensor.OperatorNotFound, torch_memory.Deferred

    def __init__(self):
        super().__init__()
        self._function_mode = FunctionMode(self)
        self._dispatch_mode = DispatchMode(self)
        for name, op in self._decomps.items():
            run = functools.partial(self._run_here, op.func)
            self._decomps[name] = dataclasses.replace(op, func=run)
        for function in _LEFT_TO_TORCH:
            self._ops.pop(function, None)
        # torch folds the axes of a batch and of heads, which this keeps apart.
        matmul = functools.partial(self.call, jnp.matmul)
        power = functools.partial(self.call, jnp.power)
        overrides = {
            torch.matmul: matmul,
            torch.Tensor.matmul: matmul,
            torch.Tensor.__matmul__: matmul,
            torch.nn.functional.linear: self._linear,
            torch.nn.functional.interpolate: _interpolate,
            torch.nn.functional.embedding_bag: _embedding_bag,
            torch.Tensor.new_tensor: lambda x, data, dtype=None, **_: torch.as_tensor(
                data, dtype=dtype or x.dtype
            ),
            torch.Tensor.__getitem__: torch_memory.item,
            torch.nn.functional.scaled_dot_product_attention: self._attend,
            _ATEN.copy.default: lambda x, y, *_: y.expand(x.shape).to(x.dtype),
            _ATEN.argmax.default: self._argmax,
            _ATEN.argmin.default: lambda x, *options, **named: self._argmax(
                -x if x.is_floating_point() else ~x, *options, **named
            ),
            _ATEN.normal_functional.default: lambda x, mean=0.0, std=1.0, **_: (
                torch.randn_like(x) * std + mean
            ),
            _ATEN._upsample_bilinear2d_aa.default: self._resize("billinear"),
            _ATEN._upsample_bicubic2d_aa.default: self._resize("bicubic2d"),
            _ATEN._is_all_true.default: torch.all,
            _ATEN._is_any_true.default: torch.any,
            **dict.fromkeys(_overloads(_ATEN.pow), power),
            **dict.fromkeys(_overloads(_ATEN.random), _random),
        }
        for function, override in overrides.items():
            self.override_op_definition(function, override)

    @contextlib.contextmanager
    def running(self, rng: jax.Array | None = None) -> Iterator[None]:
        """Enters a context in which a module can be called on tensors of JAX.

        Random numbers follow the key, or are the same in each; torch's own generator is
        restored.
        """
        swapped, apply = environment.swapped, functools.partial(_apply, self)
        with (
            _LOCK,
            swapped(sys.modules, f"torch.{_DEVICE}", torchax.device_module),
            swapped(vars(torch), _DEVICE, torchax.device_module),
            # Checks of values, which are not there yet.
            swapped(os.environ, _CHECK, "1"),
            swapped(torch.distributions.Distribution, "_validate_args", False),
            # It reads a mask, to say that one is causal, which changes no number.
            swapped(vars(transformer), _DETECT, lambda *x: x[1] is True),
            swapped(vars(torch.backends.mha), "_is_fastpath_enabled", False),
            # What `Function.apply` calls, which a module may have kept.
            swapped(_FUNCTION, "apply", classmethod(apply)),
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            self.override_property(prng=jax.random.key(0) if rng is None else rng),
            self,
        ):
            torch.default_generator.manual_seed(0)
            yield

    def call(self, function: Callable, *args: Any) -> Any:
        """Calls a function of arrays on tensors."""
        return self.j2t_iso(function(*self.t2j_iso(args)))

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        heads = self.call(functools.partial(jnp.einsum, "...a,ba->...b"), input, weight)
        return heads if bias is None else heads + bias

    def _argmax(self, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        def index(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.integer):  # JAX lowers it for 32 bits alone
                x = (x == x.max(dim, keepdims=True)).astype(jnp.int8)
            with jax.enable_x64(False):
                return jnp.argmax(x, dim, keepdims=keepdim)

        return self.call(index, x).long()

    def _resize(self, kind: str) -> Callable:
        function = getattr(jaten, f"_aten_upsample_{kind}_aa")
        # torchax takes other arguments in front of the scales.
        return lambda *args: self.call(function, *args[:3], None, *args[3:])

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """Attends with our engine: a query that sees nothing gets zeros, as in torch.

        Arrays are `[..., H, T, K]`, or `[..., T, K]` of a single head.
        """
        shape, size = (*query.shape[:-1], key.shape[-2]), query.shape[-1]
        is_single, scale = query.ndim < 4, options.get("scale")
        scale = size**-0.5 if scale is None else scale
        arrays = query if scale > 0 else -query, key, value
        mask = masks.causal() if is_causal else None
        if attn_mask is not None:  # whose leading axes may be missing, or 1
            rows = torch.broadcast_shapes(attn_mask.shape, shape[-2:])
            attn_mask = attn_mask.expand(rows)[(None,) * (len(shape) - len(rows))]
        *arrays, whole = (
            x if x is None or not is_single else x[..., None, :, :]
            for x in self.t2j_iso((*arrays, attn_mask))
        )
        is_bias = whole is not None and whole.dtype != bool
        heads, _ = implementations.attend(
            *(jnp.swapaxes(x, -3, -2) for x in arrays),
            mask=mask if is_bias or whole is None else whole,
            bias=whole if is_bias else None,
            score=scores.dot_product(abs(scale)),
            dropout_rate=dropout_p,
            rng=self.get_and_rotate_prng_key() if dropout_p else None,
        )
        heads = jnp.swapaxes(heads, -3, -2)
        return self.j2t_iso(heads[..., 0, :, :] if is_single else heads)

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
        is_folded = not is_random and _is_folded(tensors, leaves)
        folded = jax.ensure_compile_time_eval if is_folded else contextlib.nullcontext
        with jax.named_scope("torch::"), jax.enable_x64(is_wide), folded():
            if schema is not None and any(is_here(x) for x in tensors):
                alias = schema.returns[0].alias_info if schema.returns else None
                if schema.is_mutable:
                    return torch_memory.write(self, func, types, args, kwargs)
                if alias is not None and is_here(args[0]) and not _is_composite(func):
                    return torch_memory.view(self, func, args, kwargs)
            result = self.call_torchax(func, types, args, kwargs)
            return _pytree.tree_map_only(
                torchax.tensor.Tensor,
                lambda x: self._result(x, tensors, kinds, is_wide),
                result,
            )

    def call_torchax(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation of torchax, or what torch decomposes it into."""
        try:
            return super().dispatch(func, types, args, dict(kwargs))
        except Exception as error:  # torchax lacks operations, and options of some
            other = decomposition_table.get(func)
            if isinstance(error, self.missing) and _is_composite(func):
                other = other or func.decompose
            if other is None or isinstance(error, _OF_VALUES):
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
        return Tensor(array, self)

    def _run_here(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.moved((args, kwargs))
        return function(*args, **kwargs)


class _Context(torch.autograd.function.FunctionCtx):
    """The values that a `torch.autograd.Function` keeps for its backward pass."""

    to_save: tuple = ()
    saved_tensors = property(lambda self: self.to_save)


def _apply(env: Environment, kind: Any, *args: Any) -> Any:
    """Runs a `torch.autograd.Function` with its own backward pass."""
    places = [i for i, x in enumerate(args) if is_here(x) and x.is_floating_point()]
    if not places:
        return super(_FUNCTION, kind).apply(*args)
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
    fields, structure = _pytree.tree_flatten(vars(context))

    def backward(residuals: Any, slopes: Any) -> Any:
        kept, inputs = residuals
        whole = [env.j2t_iso(kept.get(i, x)) for i, x in enumerate(fields)]
        vars(context).update(_pytree.tree_unflatten(whole, structure))
        with env.running():
            grads = kind.backward(context, *env.j2t_iso(list(slopes)))
        grads = env.t2j_iso(grads if isinstance(grads, tuple) else (grads,))
        pairs = ((grads[i], x) for i, x in zip(places, inputs, strict=True))
        return None, None, [jnp.zeros_like(x) if g is None else g for g, x in pairs]

    attached = jax.custom_vjp(lambda values, *_: values)
    attached.defvjp(lambda values, *residuals: (values, residuals), backward)
    kept = {i: x._elem for i, x in enumerate(fields) if is_here(x)}
    inputs = [args[i]._elem for i in places]
    values, form = _pytree.tree_flatten(results)
    values = env.j2t_iso(attached(env.t2j_iso(values), kept, inputs))
    return _pytree.tree_unflatten(values, form)


def _is_folded(tensors: Sequence[Any], arguments: Sequence[Any]) -> bool:
    # Positions stay numbers where they depend on no input, so that models can tell a
    # text from packed ones, which have several first positions.
    shapes = [x.shape[::-1] for x in tensors]
    sizes = [max(x) for x in itertools.zip_longest(*shapes, fillvalue=1)]
    sizes = sizes or [abs(x) for x in arguments if isinstance(x, int)]
    is_constant = not any(
        isinstance(x.jax(), jax.core.Tracer) for x in tensors if is_here(x)
    )
    return is_constant and math.prod(filter(None, sizes)) <= _MOST_FOLDED


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    is_aten = isinstance(func, torch._ops.OpOverload)
    return is_aten and func.has_kernel_for_dispatch_key(key)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _interpolate(
    x: Any, size: Any = None, scale_factor: Any = None, *options: Any, **named: Any
) -> Any:
    sides, mode = x.shape[2:], options[0] if options else named.get("mode", "nearest")
    if scale_factor is not None and "cubic" not in mode:
        # An axis whose size stays is kept by torch, whatever its factor.
        many = isinstance(scale_factor, list | tuple)
        factors = scale_factor if many else [scale_factor] * len(sides)
        pairs = zip(factors, sides, strict=True)
        scale_factor = [1.0 if int(n * y) == n else y for y, n in pairs]
    return torch.nn.functional.interpolate(x, size, scale_factor, *options, **named)


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    *options: Any,
    per_sample_weights: Any = None,
    **named: Any,
) -> Any:
    function = torch.nn.functional.embedding_bag
    mode = options[3] if len(options) > 3 else named.get("mode", "mean")
    if per_sample_weights is None and mode != "max":
        return function(input, weight, offsets, *options, **named)
    rows = torch.nn.functional.embedding(input, weight)
    if per_sample_weights is not None:  # which torchax leaves out
        rows = rows * per_sample_weights[..., None]
    if input.ndim == 2:
        return rows.amax(1) if mode == "max" else rows.sum(1)
    places = torch.arange(len(input), device=offsets.device)
    bags = (places[:, None] >= offsets).sum(1) - 1
    if mode == "max":
        every = bags[:, None] == torch.arange(len(offsets), device=offsets.device)
        return torch.where(every[..., None], rows[:, None], -torch.inf).amax(0)
    return rows.new_zeros(len(offsets), rows.shape[1]).index_add(0, bags, rows)


def _random(x: Any, low: Any = 0, high: Any = None, *, generator: Any = None) -> Any:
    # Floats hold integers up to 2^24.
    low, high = (0, low or 2**24) if high is None else (low, high)
    return torch.randint(low, high, x.shape, device=x.device).to(x.dtype)

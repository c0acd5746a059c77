"""The environment in which torchax runs operations of PyTorch in JAX."""

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import checks

# Overloads of aten that torchax 0.0.13 names as it is imported, and that torch 2.13 no
# longer has, as it has no named axes.
_DROPPED = (
    "all.dimname all.dimname_out index_add.dimname index_copy.dimname "
    "index_copy_.dimname index_fill.Dimname_Scalar index_fill.Dimname_Tensor "
    "index_fill_.Dimname_Scalar index_fill_.Dimname_Tensor norm.names_ScalarOpt_dim "
    "norm.names_ScalarOpt_dim_dtype norm.names_dtype_out norm.names_out "
    "prod.dim_Dimname std.correction_names std.correction_names_out std.names_dim "
    "std.names_out std_mean.correction_names std_mean.names_dim unbind.Dimname"
).split()
_MOST_FOLDED = 2**16  # numbers of a result that is computed while tracing


@functools.cache
def environment() -> Any:
    """Imports torchax, and makes its environment, which runs torch in JAX."""
    try:
        _define_dropped()
        import torch  # pyright: ignore[reportMissingImports]
        import torchax.interop  # pyright: ignore[reportMissingImports]
        import torchax.tensor  # pyright: ignore[reportMissingImports]
        import torchax.view  # pyright: ignore[reportMissingImports]
        from torch.utils import _pytree  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise checks.ConfigError(
            "A PyTorch module needs torch and torchax: pip install 'mha_haiku[torch]'."
            f"\n{error}"
        ) from None

    here = (torchax.tensor.Tensor, torchax.view.View)

    def _new_tensor(of: Any, data: Any, *, dtype: Any = None, **_: Any):
        return torch.as_tensor(data, dtype=dtype or of.dtype)

    class Environment(torchax.tensor.Environment):
        """Runs operations of torch in JAX, without adding names."""

        def __init__(self):
            super().__init__()
            # torch folds the axes of a batch and of heads, which this keeps apart.
            for name in torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__:
                self.override_op_definition(name, self._matmul)
            self.override_op_definition(torch.Tensor.new_tensor, _new_tensor)

        def _matmul(self, *args: Any):
            return self.j2t_iso(jnp.matmul(*self.t2j_iso(args)))

        def _is_same_device(self, the_tensor: Any, new_device: Any):
            # A module may name the CPU; what it computes stays where it is.
            is_here = isinstance(the_tensor, here)
            return is_here or super()._is_same_device(the_tensor, new_device)

        def t2j_iso(self, torchtensors: Any):
            # Tensors made without a device are constants, which torch itself computes
            # up to where they meet others. Single numbers are left to torchax, which
            # lets them take on the dtype of what they meet.
            def moved(x: Any):
                return x if isinstance(x, here) or not x.ndim else self.to_xla(x)

            torchtensors = _pytree.tree_map_only(torch.Tensor, moved, torchtensors)
            return super().t2j_iso(torchtensors)

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any = None):
            if getattr(getattr(func, "_schema", None), "is_mutable", False):
                written = (kwargs or {}).get("out", args[0])
                if not isinstance(written, here) and any(
                    isinstance(x, here) for x in args
                ):
                    raise TypeError(
                        "function must write what it computes into tensors on the "
                        "device of its inputs, as of torch.zeros(3, device=x.device), "
                        f"got {func} into a tensor made without device=."
                    )
            # What torchax adds to a path ends there: it is no module.
            with jax.named_scope("torch::"), _folded(func, (args, kwargs)):
                return super().dispatch(func, types, args, kwargs)

    def _folded(func: Any, arguments: Any) -> Any:
        # Positions stay numbers where they depend on no input, so that models can tell
        # a text from packed ones, which have several first positions.
        leaves = _pytree.tree_leaves(arguments)
        tensors = [x for x in leaves if isinstance(x, here)]
        shapes = [x.shape[::-1] for x in tensors]
        sizes = [max(x) for x in itertools.zip_longest(*shapes, fillvalue=1)]
        is_constant = bool(tensors)
        for x in tensors:
            while isinstance(x, torchax.view.View):
                x = x.parent
            is_constant = is_constant and not isinstance(x.jax(), jax.core.Tracer)
        if func in (torch.arange, torch.ones, torch.zeros):
            is_constant, sizes = True, [x for x in leaves if isinstance(x, int) and x]
        if is_constant and math.prod(sizes) <= _MOST_FOLDED:
            return jax.ensure_compile_time_eval()
        return contextlib.nullcontext()

    return Environment()


@functools.cache  # torch crashes where what is defined is dropped again
def _define_dropped() -> Any:
    """Defines the overloads that torchax names, and torch does not have."""
    import torch  # pyright: ignore[reportMissingImports]

    library = torch.library.Library("aten", "FRAGMENT")
    for whole in _DROPPED:
        name, overload = whole.split(".")
        if not hasattr(getattr(torch.ops.aten, name), overload):
            # Nothing calls it, so that any arguments will do.
            library.define(f"{whole}(str dropped) -> ()")
    return library

"""The environment in which torchax runs operations of PyTorch in JAX."""

import contextlib
import functools
from collections.abc import Iterator, MutableMapping
from typing import Any

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


@functools.cache
def environment() -> Any:
    """Imports torchax, and makes its environment, which runs torch in JAX."""
    try:
        import torch  # pyright: ignore[reportMissingImports]

        _define_dropped()
        # torchax renames torch's backend for devices of others, by which torch then
        # takes every process for one that has such a device.
        with contextlib.ExitStack() as stack:
            for function in (
                (torch.utils, "rename_privateuse1_backend"),
                (torch, "_register_device_module"),
                (torch.backends.mha, "set_fastpath_enabled"),
            ):
                stack.enter_context(swapped(*function, lambda *_: None))
            import torchax.interop  # noqa: F401  # pyright: ignore
        from mha_haiku.interop.torch_modules import torch_arrays
    except ImportError as error:
        raise checks.ConfigError(
            "A PyTorch module needs torch and torchax: pip install 'mha_haiku[torch]'."
            f"\n{error}"
        ) from None
    return torch_arrays.Environment()


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Enters a context in which an attribute or an item of a mapping is another."""
    is_mapping = isinstance(owner, MutableMapping)
    put = owner.__setitem__ if is_mapping else functools.partial(setattr, owner)
    before = (owner if is_mapping else vars(owner)).get(name)
    put(name, value)
    try:
        yield
    finally:
        if before is None:
            del owner[name]
        else:
            put(name, before)


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

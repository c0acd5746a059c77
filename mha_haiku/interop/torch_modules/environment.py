"""The environment in which torchax runs operations of PyTorch in JAX."""

import contextlib
import functools
from collections.abc import Iterator, MutableMapping
from typing import Any

from mha_haiku.core import checks


@functools.cache
def environment() -> Any:
    """Imports torchax, and makes its environment, which runs torch in JAX."""
    try:
        import torch  # pyright: ignore[reportMissingImports]

        # torchax renames torch's backend for devices of others, by which torch then
        # takes every process for one that has such a device.
        packet = torch._ops.OpOverloadPacket
        look_up = packet.__getattr__

        def overload(operation: Any, name: str) -> Any:
            try:
                return look_up(operation, name)
            except AttributeError:
                if name.startswith("_"):
                    raise
                return operation, name

        with (
            swapped(torch.utils, "rename_privateuse1_backend", lambda *_: None),
            swapped(torch, "_register_device_module", lambda *_: None),
            swapped(torch.backends.mha, "set_fastpath_enabled", lambda *_: None),
            # torchax names overloads with named axes, which torch no longer has.
            swapped(packet, "__getattr__", overload),
        ):
            import torchax.interop  # noqa: F401  # pyright: ignore

            from mha_haiku.interop.torch_modules import torch_arrays

            return torch_arrays.Environment()
    except ImportError as error:
        raise checks.ConfigError(
            "A PyTorch module needs torch and torchax: pip install 'mha_haiku[torch]'."
            f"\n{error}"
        ) from None


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Enters a context in which an attribute or an item of a mapping is another."""
    is_mapping = isinstance(owner, MutableMapping)
    put = owner.__setitem__ if is_mapping else functools.partial(setattr, owner)
    drop = owner.__delitem__ if is_mapping else functools.partial(delattr, owner)
    before = (owner if is_mapping else vars(owner)).get(name)
    put(name, value)
    try:
        yield
    finally:
        drop(name) if before is None else put(name, before)

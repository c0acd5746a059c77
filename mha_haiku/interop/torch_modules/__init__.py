"""PyTorch modules as functions of JAX, by torchax.

There is no table of families: a module is traced, and its attention is recognized like
in any JAX function.
"""

from mha_haiku.interop.torch_modules.certificate import Certificate, Certifier
from mha_haiku.interop.torch_modules.conversion import TorchModule, convert, is_module
from mha_haiku.interop.torch_modules.host_values import ReadsInputsError, bound
from mha_haiku.interop.torch_modules.module_files import save, smaller
from mha_haiku.interop.torch_modules.pretrained import load

__all__ = [
    "Certificate",
    "Certifier",
    "ReadsInputsError",
    "TorchModule",
    "bound",
    "convert",
    "is_module",
    "load",
    "save",
    "smaller",
]

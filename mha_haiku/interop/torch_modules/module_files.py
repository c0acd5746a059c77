"""Writes a PyTorch module with other parameters than its own."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp


def save(folder: Path, module: Any, params: Mapping[str, Any], tokenizer: Any) -> None:
    """Writes a module, which stays as it is, with parameters by its names for them.

    `from_pretrained` opens a model of transformers; the file of any other module is its
    `state_dict`, for `load_state_dict`.
    """
    import safetensors.torch
    import torch  # pyright: ignore[reportMissingImports]

    new = {  # tied parameters stay one tensor; integers of 64 bits are not among them
        id(x): torch.from_dlpack(jnp.asarray(params[name])).to(x)
        for name, x in _tensors(module).items()
        if name in params
    }
    state = module.state_dict(keep_vars=True)
    state: dict[str, Any] = {name: new.get(id(x), x) for name, x in state.items()}
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder, state_dict=state)
    else:
        state = {name: x.detach().clone().contiguous() for name, x in state.items()}
        safetensors.torch.save_file(state, folder / "model.safetensors")
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif hasattr(tokenizer, "save"):  # of the library tokenizers
        tokenizer.save(str(folder / "tokenizer.json"))


def smaller(module: Any, params: Mapping[str, Any], heads: int) -> Any:
    """Makes a smaller model of transformers that these parameters fit.

    None unless its config can say so: it names the size of a head, and all layers have
    as many heads and groups.
    """
    config = copy.deepcopy(getattr(module, "config", None))
    for groups in range(getattr(config, "num_key_value_heads", None) or 1, 0, -1):
        for name, x in ("num_attention_heads", heads), ("num_key_value_heads", groups):
            if hasattr(config, name):  # `attribute_map` of a config knows other names
                setattr(config, name, x)
        try:
            result = type(module)(config)
        except Exception:  # sizes that do not fit each other, in many ways
            continue
        shapes = {name: x.shape for name, x in _tensors(result).items()}
        if all(shapes.get(name) == x.shape for name, x in params.items()):
            return result.to(module.dtype)
    return None


def _tensors(module: Any) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}

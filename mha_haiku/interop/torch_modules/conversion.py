"""PyTorch modules as functions of JAX, with sites named after the modules. B batch."""

import copy
import dataclasses
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.interop.torch_modules import (
    attention_function,
    environment,
    module_facts,
)

# Keywords of its `forward`; a decoder's begin with "decoder_".
_TOKENS, _FEATURES, _MASK = "input_ids", "inputs_embeds", "attention_mask"


class TorchModule(NamedTuple):
    """A PyTorch module as a JAX function."""

    # A function of params and inputs `[B, ...]`, by keyword `lengths`,
    # `decoder_inputs`, `decoder_lengths`, in training `rng`, and other arguments of the
    # module; returns its first result, or an `Output` if it also gives a loss.
    function: Callable[..., Any]
    params: dict[str, jax.Array]  # and buffers, by the names that the module gives them
    names: tuple[str, ...]  # of the inputs, among the keywords of the module
    has_decoder: bool
    start: int | None  # the token in front of what a decoder writes
    padding: int | None  # the token that a decoder reads where no label counts
    predicts_next: bool  # whether labels are shifted by one, as in causal models
    max_length: int | None  # of inputs, where positions have a table
    end_tokens: tuple[int, ...]  # those that end a text
    # Of the tables of input_ids and decoder_input_ids, None where there is none.
    num_tokens: tuple[int | None, int | None]
    takes_labels: bool  # by keyword, for a loss of its own
    fixed: tuple[str, ...]  # names of tensors that are not trained, such as buffers

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.function.__name__.partition(" ")[0]


def is_module(value: Any) -> bool:
    """Checks whether a value is a PyTorch module; imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def convert(module: Any) -> TorchModule:
    """Converts a `torch.nn.Module` to a JAX function.

    The module is not changed. A copy that shares its parameters is set to options that
    can be traced: evaluation, plain attention and experts, no cache.

    Raises:
      ConfigError: If torchax is missing.
    """
    torch_environment = environment.environment()
    module = _copied(getattr(module, "_orig_mod", module)).eval()  # not as compiled
    attention_function.choose(module)
    known = inspect.signature(module.forward).parameters
    first = next(iter(known.values()), None)
    first = first.name if first and first.kind is not first.VAR_KEYWORD else None
    main = getattr(module, "main_input_name", None) or first or _TOKENS
    _name_parts(module)
    trained = list(module.named_parameters())
    params, run = _as_function(module, torch_environment)

    def forward(
        params: Mapping[str, jax.Array],
        inputs: jax.Array | np.ndarray,
        *,
        lengths: jax.Array | np.ndarray | None = None,
        rng: jax.Array | None = None,
        **given: Any,
    ):
        side = {"": (inputs, lengths)}
        if (decoder_inputs := given.pop("decoder_inputs", None)) is not None:
            side["decoder_"] = decoder_inputs, given.pop("decoder_lengths", None)
        for prefix, (array, lengths) in side.items():
            name = prefix + _TOKENS if prefix else main
            is_embedded = jnp.issubdtype(array.dtype, jnp.floating)
            if is_embedded and name == prefix + _TOKENS:
                name = prefix + _FEATURES
            given[name] = array
            if lengths is not None:
                mask = prefix + _MASK
                if mask not in known:
                    raise ValueError(
                        "inputs must be of one length each call: "
                        f"{type(module).__name__} takes no {mask}, by which padding is "
                        "known."
                    )
                valid = np.arange(array.shape[1])[None] < jnp.asarray(lengths)[:, None]
                given[mask] = valid.astype(np.int32)
        if "use_cache" in known:
            given.setdefault("use_cache", False)
        with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
            # int64 is asked for everywhere, and is int32 in JAX.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            given = jax.tree.map(
                lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, given
            )
            # Its name may be no keyword.
            args = (given.pop(main),) if main in given and main == first else ()
            return run(params, args, given, rng)

    forward.__name__ = f"{type(module).__name__} of PyTorch"
    of_model, of_text = (
        getattr(module, f"{x}config", None) for x in ("", "generation_")
    )
    start, padding = "decoder_start_token_id", "pad_token_id"
    has_decoder = getattr(of_model, "is_encoder_decoder", False) is True
    return TorchModule(
        forward,
        params,
        (main, _FEATURES) if main == _TOKENS else (main,),
        has_decoder,
        getattr(of_model, start, getattr(of_text, start, None)),
        getattr(of_model, padding, getattr(of_text, padding, None)),
        module_facts.predicts_next(module),
        module_facts.max_length(module) if main == _TOKENS else None,
        module_facts.end_tokens(of_text or of_model),
        (
            module_facts.num_tokens(module),
            module_facts.num_tokens(module.get_decoder()) if has_decoder else None,
        ),
        "labels" in known,
        tuple(params.keys() - {x for x, y in trained if y.requires_grad}),
    )


def _copied(module: Any) -> Any:
    """Copies a module, which shares its parameters and buffers with the copy.

    Tensors that it computed and stored are copied without their history, as torch
    refuses to copy that.
    """
    import torch  # pyright: ignore[reportMissingImports]

    class Values(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ):
            if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
                tensor, memo = args
                args = tensor.detach(), memo
                memo[id(tensor)] = func(*args)
                return memo[id(tensor)]
            return func(*args, **(kwargs or {}))

    tensors = (*module.parameters(), *module.buffers())
    with Values():
        return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _as_function(
    module: Any, torch_environment: Any
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """Returns a module's tensors by name, and the module as a function.

    The function takes tensors, arguments and keywords. Tensors are parameters and
    buffers, each once, and attributes. What a module computes, such as a parametrized
    weight, is none.
    """
    import torch  # pyright: ignore[reportMissingImports]

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}" if name else key] = value

    def run(
        params: Mapping[str, jax.Array],
        args: tuple,
        given: dict[str, Any],
        rng: jax.Array | None,
    ):
        module.train(rng is not None)  # a copy, which only this function runs
        options = {} if rng is None else {"prng": rng}
        seeded = torch_environment.override_property(**options)
        with torch_environment, seeded, attention_function.replaced():
            found = torch.func.functional_call(
                module, *torch_environment.j2t_iso((dict(params), args, given))
            )
        loss = torch_environment.t2j_iso(_loss(found))
        first = torch_environment.t2j_iso(_first(found))
        return first if loss is None else models.Output(first, (), loss=loss)

    return torch_environment.t2j_copy(tensors), run


def _name_parts(module: Any) -> None:
    """Enters a scope in each part of a module that computes something.

    A list of modules does not, so its name is joined with the names of its items.
    """
    has_forward = {"": True}
    for name, part in module.named_modules():
        if not name:
            continue
        has_forward[name] = "_forward_unimplemented" not in part.forward.__qualname__
        if has_forward[name]:
            parts = name.split(".")
            start = len(parts) - 1
            while not has_forward[".".join(parts[:start])]:
                start -= 1
            part.forward = _scoped(part.forward, "_".join(parts[start:]))


def _scoped(function: Callable, name: str) -> Callable:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any):
        with jax.named_scope(name):
            return function(*args, **kwargs)

    return scoped


def _first(output: Any) -> Any:
    """Takes the logits out of a module's result, or else its first output.

    A loss is only taken where there is nothing else; None is skipped.
    """
    values = _values(output)
    if values is None:
        return output
    loss = _loss(output)
    others = [x for x in values.values() if x is not loss]
    return _first(values.get("logits", next(iter(others), loss)))


def _loss(output: Any) -> Any:
    """Takes the loss out of a module's result: a single number; or None."""
    values = _values(output) or {}
    numbers = [x for x in values.values() if getattr(x, "ndim", None) == 0]
    loss = values.get("loss", numbers[0] if numbers else None)
    return loss if getattr(loss, "ndim", None) == 0 else None


def _values(output: Any) -> dict[Any, Any] | None:
    """Lists the parts of a module's result that are not None; None of a tensor.

    Dataclasses and named tuples are searched by field name, as mappings are.
    """
    names = getattr(output, "_fields", None)
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        names = [field.name for field in dataclasses.fields(output)]
    if names is not None:
        output = {name: getattr(output, name) for name in names}
    if isinstance(output, tuple | list):
        output = dict(enumerate(output))
    if not isinstance(output, Mapping):
        return None
    return {name: x for name, x in output.items() if x is not None}

"""PyTorch modules as functions of JAX, with sites named after the modules. B batch."""

import copy
import dataclasses
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.core.models import programs
from mha_haiku.interop.torch_modules import (
    attention_function,
    environment,
    host_values,
    module_facts,
)

_UNREADABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Keywords of its `forward`; a decoder's begin with "decoder_".
_TOKENS, _FEATURES, _MASK = "input_ids", "inputs_embeds", "attention_mask"
_PIXELS = "pixel_values"
FIRST = "output"  # among a module's outputs: the logits, or else the first one
# What may be its loss, if it is a single number.
_LOSSES = ("['loss']", ".loss", "[0]", FIRST)


class TorchModule(NamedTuple):
    """A PyTorch module as a JAX function."""

    # A function of params and inputs `[B, ...]`, by keyword `lengths`,
    # `decoder_inputs`, `decoder_lengths`, in training `rng`, and other arguments of the
    # module; returns an `Output`, of its first result, and its loss if it computes one.
    function: Callable[..., Any]
    params: dict[str, jax.Array]  # and buffers, by the names that the module gives them
    name: str  # of the class
    original: Any  # the module, in evaluation
    copy: Any  # which runs in JAX
    changes: list[str]  # what is set in the copy
    # From inputs and keywords of the function to arguments of the module.
    arguments: Callable[..., tuple[tuple, dict[str, Any]]]
    # The function, but returns all tensors of the module's result by name, or what its
    # keyword `read` reads of it.
    run: Callable[..., Any]
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
    fixed: tuple[str, ...]  # names of arrays that are not trained, such as buffers
    image_tokens: tuple[int, ...]  # in whose places pictures are put
    reads: list[str]  # where the module reads values of inputs, once that is known


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
    whole = getattr(module, "_orig_mod", module)  # not as compiled
    original, module = _copied(whole).eval(), _copied(whole).eval()
    changes = attention_function.choose(module)
    signature = inspect.signature(module.forward).parameters
    first = next(iter(signature.values()), None)
    first = first.name if first and first.kind is not first.VAR_KEYWORD else None
    main: Any = getattr(module, "main_input_name", None)
    main = main if main in signature else first or main or _TOKENS
    pixels = _PIXELS if main == _PIXELS and _TOKENS in signature else _FEATURES
    main = _TOKENS if pixels == _PIXELS else main  # of a text about a picture
    changes += ["no cache"] if "use_cache" in signature else []
    _name_parts(module)
    kind = type(module).__name__
    trained = {name for name, x in module.named_parameters() if x.requires_grad}
    params, function = _as_function(module, torch_environment)
    traced = programs.kept(function)

    def arguments(
        inputs: jax.Array | np.ndarray,
        *,
        lengths: jax.Array | np.ndarray | None = None,
        **keywords: Any,
    ) -> tuple[tuple, dict[str, Any]]:
        side = {"": (inputs, lengths)}
        if (decoder_inputs := keywords.pop("decoder_inputs", None)) is not None:
            side["decoder_"] = decoder_inputs, keywords.pop("decoder_lengths", None)
        for prefix, (array, lengths) in side.items():
            name = prefix + _TOKENS if prefix else main
            is_embedded = jnp.issubdtype(array.dtype, jnp.floating)
            if is_embedded and name == prefix + _TOKENS:
                name = pixels if array.ndim == 4 else prefix + _FEATURES
            keywords[name] = array
            if lengths is not None:
                mask = prefix + _MASK
                if mask not in signature:
                    raise ValueError(
                        f"inputs must be of one length each call: {kind} takes no "
                        f"{mask}, by which padding is known."
                    )
                valid = np.arange(array.shape[1])[None] < lengths[:, None]
                keywords[mask] = valid.astype(np.int32)
        if "use_cache" in signature:
            keywords.setdefault("use_cache", False)
        # Its name may be no keyword.
        args = (keywords.pop(main),) if main in keywords and main == first else ()
        return args, keywords

    def run(
        params: Mapping[str, jax.Array],
        *inputs: Any,
        read: Callable[[Any], Any] | None = None,
        rng: jax.Array | None = None,
        **keywords: Any,
    ) -> Any:
        whole = dict(params), *arguments(*inputs, **keywords), rng
        with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
            # Some functions of JAX ask for int64, and get int32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            return traced(*whole) if read is None else function(*whole, read)

    def forward(
        params: Mapping[str, jax.Array], *inputs: Any, rng: Any = None, **keywords: Any
    ) -> Any:
        outputs = run(params, *inputs, rng=rng, **keywords)
        named = (outputs[x] for x in _LOSSES if x in outputs)
        loss = next((x for x in named if not x.ndim), None)
        return models.Output(outputs[FIRST], (), loss=loss)

    forward.__name__ = f"{kind} of PyTorch"
    configs = "config", "generation_config"
    of_model, of_text = (getattr(module, name, None) for name in configs)
    start, padding = "decoder_start_token_id", "pad_token_id"
    has_decoder = getattr(of_model, "is_encoder_decoder", False) is True
    decoder = module.get_decoder() if has_decoder else None
    return TorchModule(
        forward,
        params,
        *(kind, original, module, changes, arguments, run),
        tuple(dict.fromkeys((main, _FEATURES, pixels))) if main == _TOKENS else (main,),
        has_decoder,
        getattr(of_model, start, getattr(of_text, start, None)),
        getattr(of_model, padding, getattr(of_text, padding, None)),
        module_facts.predicts_next(module),
        module_facts.max_length(module) if main == _TOKENS else None,
        module_facts.end_tokens(of_text or of_model),
        (module_facts.num_tokens(module), decoder and module_facts.num_tokens(decoder)),
        "labels" in signature,
        tuple(params.keys() - trained),
        module_facts.image_tokens(of_model),
        [],
    )


def _copied(module: Any) -> Any:
    """Copies a module, which shares its parameters and buffers with the copy."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

    memo = {id(x): x for x in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        for x in _pytree.tree_leaves(vars(part)):
            if isinstance(x, torch.Tensor) and not x.is_leaf:
                memo[id(x)] = x.detach().clone()  # torch copies no history
    return copy.deepcopy(module, memo)


def _as_function(
    module: Any, torch_environment: Any
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """Returns a module's tensors by name, and the module as a function.

    The function takes tensors, arguments, keywords, a key of training mode or None, and
    what reads the result. Tensors are parameters and buffers, each once, and
    attributes. What a module computes, such as a parametrized weight, is none.
    """
    import torch  # pyright: ignore[reportMissingImports]

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}" if name else key] = value

    # Integers of 64 bits are constants of the program, which no parameter holds, and so
    # are booleans, which modules read.
    constant = torch.int64, torch.bool
    fixed = {name: x for name, x in tensors.items() if x.dtype in constant}
    arrays = {name: x for name, x in tensors.items() if name not in fixed}

    def traced(
        params: Any, args: tuple, keywords: dict, rng: Any, read: Any = tensors_of
    ) -> Any:
        module.train(rng is not None)  # a copy, which only this function runs
        tensor, is_host = (
            functools.partial(_tensor, torch_environment),
            host_values.is_host,
        )
        inputs = jax.tree.map(tensor, (args, keywords), is_leaf=is_host)
        try:
            with torch_environment.running(rng), attention_function.replaced():
                every = {name: x.clone() for name, x in fixed.items()}
                every |= torch_environment.j2t_iso(dict(params))
                results = torch.func.functional_call(module, every, *inputs)
                results = torch_environment.t2j_iso(read(results))
        except (*_UNREADABLE, NotImplementedError, torch_environment.missing) as cause:
            raise host_values.error(module, cause, (args, keywords)) from None
        # 64 bits become the 32 that JAX has by default.
        kind = jax.dtypes.canonicalize_dtype
        return jax.tree.map(lambda x: x.astype(kind(x.dtype)), results)

    return torch_environment.t2j_copy(arrays), traced


def _tensor(torch_environment: Any, x: Any) -> Any:
    """Makes an array a tensor; integers have 64 bits in torch."""
    import torch  # pyright: ignore[reportMissingImports]

    if not hasattr(x, "dtype"):
        return x
    is_long = x.dtype in (np.int32, np.int64)
    if host_values.is_host(x):
        return torch.from_numpy(np.array(x, np.int64 if is_long else x.dtype))
    with jax.enable_x64(is_long):
        x = jnp.asarray(x, np.int64 if is_long else None)
    return torch_environment.j2t_iso(x)


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
            part.forward = jax.named_scope("_".join(parts[start:]))(part.forward)


def first_of(output: Any) -> Any:
    """Takes the logits out of a module's result, or else its first output.

    Dataclasses and named tuples are searched by field name, as mappings are; None is
    skipped, and a single number, such as a loss, where there is more.
    """
    if hasattr(output, "_asdict"):
        output = output._asdict()
    elif dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, tuple | list):
        output = dict(enumerate(output))
    if not isinstance(output, Mapping):
        return output
    values = {name: x for name, x in output.items() if x is not None}
    arrays = [x for x in values.values() if getattr(x, "ndim", 1)]
    first = next(iter(arrays or values.values()), None)
    return first_of(values.get("logits", first))


def tensors_of(output: Any) -> dict[str, Any]:
    """Names the tensors of a module's result; its first output comes first."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

    first = first_of(output)
    others, _ = _pytree.tree_flatten_with_path(output)
    others = {_pytree.keystr(path): x for path, x in others if x is not first}
    tensors = {FIRST: first} | others
    return {x: y for x, y in tensors.items() if isinstance(y, torch.Tensor)}


def site_of(name: str) -> str:
    """Makes the path of the sites of a module."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"_\1", name).replace(".", "/")

"""PyTorch modules as functions of JAX, by torchax, with sites named after the modules.

There is no table of families: a module is traced, and its attention is recognized like
in any JAX function. B batch, T positions.
"""

import copy
import dataclasses
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.interop import loader, sources
from mha_haiku.interop.families import FAMILIES
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

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
# Methods of a model of transformers that choose what can be traced.
_OPTIONS = {
    "set_attn_implementation": "eager",
    # The default takes grouped products, which torchax lacks, or sizes that depend on
    # the data.
    "set_experts_implementation": "batched_mm",
}
# Keywords of its `forward`; a decoder's begin with "decoder_".
_TOKENS, _FEATURES, _MASK = "input_ids", "inputs_embeds", "attention_mask"
_MOST_OFFSET = 2  # rows of a table of positions in front of the first one's


class TorchModule(NamedTuple):
    """A PyTorch module as a JAX function."""

    # A function of params and inputs `[B, ...]`, by keyword `lengths`,
    # `decoder_inputs`, `decoder_lengths` and other arguments of the module; returns its
    # first result.
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
    environment = _environment()
    module = _copied(getattr(module, "_orig_mod", module)).eval()  # not as compiled
    for method, option in _OPTIONS.items():
        if hasattr(module, method):
            getattr(module, method)(option)
    known = inspect.signature(module.forward).parameters
    first = next(iter(known.values()), None)
    first = first.name if first and first.kind is not first.VAR_KEYWORD else None
    main = getattr(module, "main_input_name", None) or first or _TOKENS
    _name_parts(module)
    params, run = _as_function(module, environment)

    def forward(
        params: Mapping[str, jax.Array],
        inputs: jax.Array | np.ndarray,
        *,
        lengths: jax.Array | np.ndarray | None = None,
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
            return run(params, args, given)

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
        _predicts_next(module),
        _max_length(module) if main == _TOKENS else None,
        _end_tokens(of_text or of_model),
        (
            _num_tokens(module),
            _num_tokens(module.get_decoder()) if has_decoder else None,
        ),
    )


def _end_tokens(config: Any) -> tuple[int, ...]:
    """Finds the tokens that end a text in a config of transformers."""
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


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
    module: Any, environment: Any
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

    def run(params: Mapping[str, jax.Array], args: tuple, given: dict[str, Any]):
        with environment:
            found = torch.func.functional_call(
                module, *environment.j2t_iso((dict(params), args, given))
            )
        return environment.t2j_iso(_first(found))

    return environment.t2j_copy(tensors), run


def _predicts_next(module: Any) -> bool:
    """Checks whether a module without a separate encoder predicts the next token.

    In transformers a model's class names its loss; classes without a loss of their own
    use the causal one, except models for pretraining. Decoders taken out of an
    encoder-decoder get labels that are already shifted. Any other module is assumed to
    predict the next token, like a function.
    """
    kind, of_model = getattr(module, "loss_type", None), getattr(module, "config", None)
    is_cut = getattr(type(of_model), "is_encoder_decoder", False) is True
    is_next = kind in (None, "ForCausalLM", "ForConditionalGeneration")
    return is_next and not is_cut and not type(module).__name__.endswith("PreTraining")


def _embedding(module: Any) -> Any:
    """Finds a model's table of tokens; None if it has none."""
    try:
        found = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # of modules without such a table
        return None
    return found if hasattr(found, "num_embeddings") else None


def _num_tokens(module: Any) -> int | None:
    """Counts the rows of a model's table of tokens; None if it has none."""
    return getattr(_embedding(module), "num_embeddings", None)


def _max_length(module: Any) -> int | None:
    """Counts the positions of a model's table of positions; None if it has none.

    Rotary and relative positions have no end, whatever the config says.
    """
    most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    of_tokens = getattr(_embedding(module), "weight", None)
    for name, part in module.named_modules():
        rows = getattr(part, "num_embeddings", None)
        is_relative = "rel" in name.rpartition(".")[2]
        if rows is None or part.weight is of_tokens or is_relative:
            continue
        before = part.padding_idx
        # Some tables count from the row after the padding, others have extra rows.
        if before is not None and rows == most:
            return most - before - 1
        if most <= rows <= most + _MOST_OFFSET:
            return most
    # Sines of positions, as in GPT-J.
    is_table = any(x.ndim == 2 and len(x) == most for x in module.buffers())
    return most if is_table else None


def load(found: sources.Source, *, dtype: Any = None) -> tuple[Any, Any] | None:
    """Loads a model of transformers whose family has no table here, and its tokenizer.

    No code of the source is run.

    Raises:
      ConfigError: If transformers does not know the family or cannot read the model, or
        the extra `torch` is missing.
    """
    kind = found.config.get("model_type")
    if found.folder is None or kind in (*FAMILIES, loader.OWN):
        return None
    try:
        loader.family_of(found.config)
    except checks.ConfigError as error:
        unknown = str(error)
    try:
        _environment()
        import transformers  # pyright: ignore[reportMissingImports]
    except (ImportError, checks.ConfigError):
        raise checks.ConfigError(
            f"{unknown}\nOther families are read by transformers and torchax, which "
            "are missing: pip install 'mha_haiku[torch]'."
        ) from None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise checks.ConfigError(f"{unknown}\nNor does transformers know it.")
    options = {"trust_remote_code": False, "local_files_only": True}
    model_class = _class_of(found, kind)
    try:
        module, report = model_class.from_pretrained(
            found.folder,
            config=transformers.CONFIG_MAPPING[kind].from_dict(_plain(found.config)),
            attn_implementation=_OPTIONS["set_attn_implementation"],
            dtype=str(jnp.dtype(dtype or np.float32)),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of transformers, of the file, of its config
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise checks.ConfigError(
            f"{found.name} could not be read by transformers.\n{reason}"
        ) from None
    _check_whole(found, model_class, report)
    tokenizer, files = None, ("tokenizer.json", "tokenizer_config.json")
    if any((found.folder / name).exists() for name in files):
        with tokenization.errors_named(f"the tokenizer in {found.name}"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                found.folder, **options
            )
    return module, tokenizer


def _plain(config: Any) -> Any:
    """Drops implementations from a config: they may name code on the hub to run."""
    if isinstance(config, list):
        return [_plain(value) for value in config]
    if not isinstance(config, dict):
        return config
    return {
        name: _plain(value)
        for name, value in config.items()
        if "_implementation" not in name
    }


@checks.user_mistakes()
def _class_of(found: sources.Source, kind: str) -> Any:
    """Finds the class of transformers that config.json names.

    Any other class may lack the head, and give hidden states in place of logits.
    """
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.models.auto import (  # pyright: ignore[reportMissingImports]
        modeling_auto,
    )

    names = found.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    config_class = transformers.CONFIG_MAPPING[kind]
    if (
        isinstance(model_class, type)
        and issubclass(model_class, transformers.PreTrainedModel)
        and issubclass(config_class, model_class.config_class or ())
    ):
        return model_class
    tables = [
        table[kind]
        for title, table in vars(modeling_auto).items()
        if title.startswith("MODEL_") and title.endswith("_NAMES") and kind in table
    ]
    choices = {x for entry in tables for x in np.atleast_1d(entry).tolist()}
    title = "config.json's architectures"
    return getattr(transformers, checks.choice(title, name, sorted(choices)))


def _check_whole(
    found: sources.Source, model_class: Any, report: Mapping[str, Any]
) -> None:
    """Raises ConfigError unless the file's arrays are the model's."""
    sizes = {name: x[:2] for name, *x in report["mismatched_keys"]}
    missing = sorted({*report["missing_keys"]} - {*sizes})
    unexpected = sorted(report["unexpected_keys"])
    # A layer's arrays change what it computes; others belong to other heads.
    in_layers = [x for x in unexpected if _is_of_layer(found, x)]
    if sizes:
        name, (stored, wanted) = next(iter(sorted(sizes.items())))
        raise checks.ConfigError(
            f"{found.name} has {name} of shape {tuple(stored)}; the model of its "
            f"config.json needs {tuple(wanted)}."
        )
    if differ := checks.lacks_and_has(missing, in_layers):
        raise checks.ConfigError(
            f"{found.name} does not hold the arrays of {model_class.__name__}, which "
            f"its config.json names (architectures):\n{differ}."
        )
    if unexpected:
        _logger.warning(
            f"{found.name}: {model_class.__name__} leaves out "
            f"{checks.listed(unexpected)}."
        )


def _is_of_layer(found: sources.Source, name: str) -> bool:
    """Checks whether an array is a parameter of a layer, and not a stored constant."""
    array = found.arrays.get(name)
    is_constant = name.endswith("inv_freq") or (
        array is not None
        and (not array.shape or not jnp.issubdtype(array.read().dtype, jnp.floating))
    )
    return not is_constant and any(part.isdigit() for part in name.split("."))


@functools.cache
def _environment() -> Any:
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
            with jax.named_scope("torch::"):
                return super().dispatch(func, types, args, kwargs)

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

    Dataclasses and named tuples are searched by field name, as mappings are; None is
    skipped.
    """
    names = getattr(output, "_fields", None)
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        names = [field.name for field in dataclasses.fields(output)]
    if names is not None:
        output = {name: getattr(output, name) for name in names}
    if isinstance(output, tuple | list):
        output = dict(enumerate(output))
    if not isinstance(output, Mapping):
        return output
    values = {name: x for name, x in output.items() if x is not None}
    return _first(values.get("logits", next(iter(values.values()), None)))

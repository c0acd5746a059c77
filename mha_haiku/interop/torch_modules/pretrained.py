"""Models of transformers whose family has no table here, read from a folder."""

import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.interop import loader, sources
from mha_haiku.interop.families import FAMILIES
from mha_haiku.interop.torch_modules import environment
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")


def load(source: sources.Source, *, dtype: Any = None) -> tuple[Any, Any] | None:
    """Loads a model of transformers whose family has no table here, and its tokenizer.

    No code of the source is run.

    Raises:
      ConfigError: If transformers does not know the family or cannot read the model, or
        the extra `torch` is missing.
    """
    kind = source.config.get("model_type")
    if source.folder is None or kind in (*FAMILIES, loader.OWN):
        return None
    try:
        loader.family_of(source.config)
    except checks.ConfigError as error:
        unknown = str(error)
    try:
        environment.environment()
        import transformers  # pyright: ignore[reportMissingImports]
    except (ImportError, checks.ConfigError):
        raise checks.ConfigError(
            f"{unknown}\nOther families are read by transformers and torchax, which "
            "are missing: pip install 'mha_haiku[torch]'."
        ) from None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise checks.ConfigError(f"{unknown}\nNor does transformers know it.")
    options = {"trust_remote_code": False, "local_files_only": True}
    model_class = _class_of(source, kind)
    try:
        module, report = model_class.from_pretrained(
            source.folder,
            config=transformers.CONFIG_MAPPING[kind].from_dict(_plain(source.config)),
            dtype=str(jnp.dtype(dtype or np.float32)),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of transformers, of the file, of its config
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise checks.ConfigError(
            f"{source.name} could not be read by transformers.\n{reason}"
        ) from None
    _check_whole(source, model_class, report)
    tokenizer, files = None, ("tokenizer.json", "tokenizer_config.json")
    if any((source.folder / name).exists() for name in files):
        with tokenization.errors_named(f"the tokenizer in {source.name}"):
            # A processor has the tokenizer of a model of texts and pictures.
            names = "processor_config.json", "preprocessor_config.json"
            is_file = any((source.folder / name).exists() for name in names)
            has_both = is_file and "vision_config" in source.config
            reader = (
                transformers.AutoProcessor if has_both else transformers.AutoTokenizer
            )
            tokenizer = reader.from_pretrained(source.folder, **options)
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
def _class_of(source: sources.Source, kind: str) -> Any:
    """Finds the class of transformers that config.json names.

    Any other class may lack the head, and give hidden states in place of logits.
    """
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.models.auto import (  # pyright: ignore[reportMissingImports]
        modeling_auto,
    )

    names = source.config.get("architectures")
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
    source: sources.Source, model_class: Any, report: Mapping[str, Any]
) -> None:
    """Raises ConfigError unless the file's arrays are the model's."""
    sizes = {name: x[:2] for name, *x in report["mismatched_keys"]}
    missing = sorted({*report["missing_keys"]} - {*sizes})
    unexpected = sorted(report["unexpected_keys"])
    # A layer's arrays change what it computes; others belong to other heads.
    in_layers = [x for x in unexpected if _is_of_layer(source, x)]
    if sizes:
        name, (stored, needed) = next(iter(sorted(sizes.items())))
        raise checks.ConfigError(
            f"{source.name} has {name} of shape {tuple(stored)}; the model of its "
            f"config.json needs {tuple(needed)}."
        )
    if differ := checks.lacks_and_has(missing, in_layers):
        raise checks.ConfigError(
            f"{source.name} does not hold the arrays of {model_class.__name__}, which "
            f"its config.json names (architectures):\n{differ}."
        )
    if unexpected:
        _logger.warning(
            f"{source.name}: {model_class.__name__} leaves out "
            f"{checks.listed(unexpected)}."
        )


def _is_of_layer(source: sources.Source, name: str) -> bool:
    """Checks whether an array is a parameter of a layer, and not a stored constant."""
    array = source.arrays.get(name)
    is_constant = name.endswith("inv_freq") or (
        array is not None
        and (not array.shape or not jnp.issubdtype(array.read().dtype, jnp.floating))
    )
    return not is_constant and any(part.isdigit() for part in name.split("."))

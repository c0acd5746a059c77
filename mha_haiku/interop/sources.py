"""Sources of models: folders and files, installed packages, the hub.

A source from any place has the fields of a `config.json`, arrays that are read on
demand, and a tokenizer.
"""

import functools
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mha_haiku.core import arrays, checks
from mha_haiku.interop import gguf_files
from mha_haiku.training.tasks import tokenization

PACKAGE = "package:"
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"
_GENERATION = "generation_config.json"
_SUFFIXES = (*arrays.PICKLED, ".gguf", ".json", ".safetensors")  # of files
_HUB_NAME = re.compile(
    r"(\w[\w.-]*/)?\w[\w.-]*"
)  # gpt2 and other old names lack owners
# Files that transformers reads too, for a family that has no table here.
_OTHER_TOKENIZERS = "*token*.json", "vocab.*", "merges.txt", "*.model", "*.spm"


class Source(NamedTuple):
    """A stored model."""

    name: str  # what to call it in messages
    config: Mapping[str, Any]  # what its `config.json` says
    arrays: Mapping[str, arrays.Stored]  # its arrays, by their names there
    # From the rows of the model's embedding to its tokenizer, or None.
    read_tokenizer: Callable[[int], tokenization.Tokenizer | None]
    folder: Path | None = None  # in the layout of the hub, if it is one

    @property
    def title(self) -> str:
        """The model's name by its card, or the name of its file or folder."""
        card = self.folder and self.folder / "README.md"
        if card and card.is_file():
            text = card.read_text("utf-8", errors="replace")
            if heading := re.search(r"^# +(\S+) *$", text, re.MULTILINE):
                return heading[1]
        path = Path(self.name)
        return path.stem if path.suffix == ".gguf" else path.name


def find(source: str | os.PathLike) -> Source:
    """Finds the model at a place; see `interop.load`."""
    text = os.fspath(source)
    if text.startswith(PACKAGE):
        return _open(_in_package(text.removeprefix(PACKAGE)))
    path = checks.as_path(text)
    if path.exists():
        return _open(path)
    siblings = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    nearest = checks.nearest(path.name, siblings)
    if not _HUB_NAME.fullmatch(text) or path.suffix in _SUFFIXES:
        raise checks.ConfigError(
            f"source {text!r} does not exist.{nearest}\n"
            "It must be a folder with config.json and model.safetensors, a .gguf file, "
            "package:NAME, or a name on the hub such as gpt2 or owner/name."
        )
    return _of_hub(text, nearest)


def _open(path: Path) -> Source:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    _refuse_pickled([path])
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        return _open_folder(path.parent, path)
    raise checks.ConfigError(
        f"source must be a folder, a .safetensors or a .gguf file, got {path}."
    )


def _open_folder(folder: Path, weights: Path | None = None) -> Source:
    files = sorted(file.name for file in folder.iterdir())
    config = folder / _CONFIG
    if not config.exists():
        ggufs = [file for file in files if file.endswith(".gguf")]
        if len(ggufs) == 1 and weights is None:
            return _open_gguf(folder / ggufs[0])
        raise checks.ConfigError(
            f"{folder} has no config.json, which says what model it is; it has "
            f"{checks.listed(files) or 'no files'}."
        )
    if weights is not None or (folder / _WEIGHTS).exists():
        stored = arrays.read_safetensors(weights or folder / _WEIGHTS)
    elif (folder / _INDEX).exists():
        stored = arrays.read_shards(folder / _INDEX)
    else:
        _refuse_pickled([folder / file for file in files])
        raise checks.ConfigError(
            f"{folder} has no {_WEIGHTS}; it has {checks.listed(files)}."
        )

    def read_tokenizer(rows: int):
        file = folder / _TOKENIZER
        if not file.exists():
            return None
        ends = _end_tokens(folder, contents)
        return tokenization.read_file(file, rows, rows, ends)

    contents = arrays.read_json(config)
    return Source(str(folder), contents, stored, read_tokenizer, folder)


def _end_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Reads which tokens end a text: one, a list, or none."""
    file = folder / _GENERATION
    contents = arrays.read_json(file) if file.exists() else config
    ends = contents.get("eos_token_id")
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _open_gguf(path: Path) -> Source:
    fields, stored = gguf_files.read(path)
    config, stored = gguf_files.translated(path, fields, stored)

    read_tokenizer = functools.partial(gguf_files.tokenizer, path, fields)
    return Source(str(path), config, stored, read_tokenizer)


def _refuse_pickled(files: list[Path]) -> None:
    pickled = [str(file) for file in files if file.suffix in arrays.PICKLED]
    if pickled:
        raise checks.ConfigError(
            f"{checks.listed(pickled)}: pickled weights are not read, as opening them "
            "runs any code that is in them.\nSave the model as safetensors where you "
            "trust it: model.save_pretrained(folder)."
        )


def _in_package(name: str) -> Path:
    """Finds the only model among the files of an installed package; runs no code."""
    files = _files_of_package(name)
    folders = {file.parent for file in files if file.name == _CONFIG}
    places = {file for file in files if file.suffix == ".gguf"}
    stored = {file.parent for file in files if file.name in (_WEIGHTS, _INDEX)}
    places |= stored & folders
    if not places:
        # Pickled files without a config.json are other data.
        _refuse_pickled([file for file in files if file.parent in folders])
        raise checks.ConfigError(
            f"The package {name!r} has no model: neither config.json next to "
            "model.safetensors, nor a .gguf file."
        )
    if len(places) > 1:
        names = checks.listed(sorted(map(str, places)))
        raise checks.ConfigError(
            f"The package {name!r} has {len(places)} models; give the path of one: "
            f"{names}."
        )
    return places.pop()


def _files_of_package(name: str) -> list[Path]:
    try:
        files = importlib.metadata.distribution(name).files or ()
    except (importlib.metadata.PackageNotFoundError, ValueError):
        installed = [x.name or "" for x in importlib.metadata.distributions()]
        raise checks.ConfigError(
            f"There is no installed package {name!r}.{checks.nearest(name, installed)}"
        ) from None
    return [Path(str(file.locate())) for file in files]


def _of_hub(name: str, nearest: str) -> Source:
    """Fetches a model from the hub, which also knows old names without an owner."""
    missing = f"source {name!r} is not a file or folder here"
    try:
        import huggingface_hub
    except ImportError:
        raise checks.ConfigError(
            f"{missing}, and a name on the hub needs huggingface_hub: "
            f"pip install 'mha_haiku[interop]'.{nearest}"
        ) from None
    # Not all files: many names hold the same weights in several forms.
    patterns = [_CONFIG, _TOKENIZER, _INDEX, "model*.safetensors", *_OTHER_TOKENIZERS]
    whole = name
    try:
        if "/" not in name:
            whole = huggingface_hub.model_info(name).id
            print(f"{name} is {whole} on the hub.")
        folder = huggingface_hub.snapshot_download(whole, allow_patterns=patterns)
    except Exception as error:  # of httpx, of the hub, of the disk
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise checks.ConfigError(
            f"{missing}, and could not be fetched from the hub.{nearest}\n{reason}"
        ) from None
    return _open(Path(folder))._replace(name=whole)

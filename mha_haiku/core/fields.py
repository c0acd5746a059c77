"""Configs: frozen dataclasses whose fields are declared once, next to their code.

A section names its path in the whole config, and declares the default, the meaning and
the valid values of each field:

    class AttentionConfig(Section, path="config.model.attention"):
        num_heads: int = field(1, "query heads of each layer", integer(0, 2**20))
        qk_norm: bool = field(False, "whether keys are normalized", boolean)

The defaults, the checks, the text of `--help` and the names in config.json follow from
it.
"""

import dataclasses
import difflib
import functools
import json
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from mha_haiku.core import checks

__all__ = ["Field", "OneOf", "Section", "declared", "field", "integer"]

Check = Callable[[str, Any], Any]


class Field(NamedTuple):
    """The declaration of a field."""

    default: Any  # the value of the field unless a config says otherwise
    meaning: str  # its meaning, in a line
    # Called with the field's whole name and a value that is not None; raises
    # ValueError. If None, only the annotation is checked.
    check: Check | None = None
    kind: Any = object  # the annotation of its values
    is_needed: bool = False  # whether a config must set it, as there is no default
    is_path: bool = False  # whether it names a file of the user's data

    @property
    def explained(self) -> str:
        """The meaning, with the choices if there are any."""
        if self.kind is not str or not isinstance(self.check, OneOf):
            return self.meaning
        *others, last = self.check.choices
        return f"{self.meaning}: {', '.join(others)} or {last}"

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of its values other than None."""
        is_union = isinstance(self.kind, types.UnionType)
        kinds = typing.get_args(self.kind) if is_union else (self.kind,)
        return tuple(typing.get_origin(x) or x for x in kinds if x is not type(None))

    @property
    def may_be_none(self) -> bool:
        return type(None) in typing.get_args(self.kind)

    def checked(self, name: str, value: Any) -> Any:
        """Checks a value; raises ValueError if it is not valid for the field."""
        if value is None and (self.may_be_none or self.is_needed):
            return None
        if self.check is not None:
            return self.check(name, value)
        if not set(self.kinds) <= set(_WANTED):
            return value
        kinds = tuple(_ABSTRACT.get(kind, kind) for kind in self.kinds)
        # A boolean is an integer, too.
        if not (bool in kinds if isinstance(value, bool) else isinstance(value, kinds)):
            expected = " or ".join(_WANTED[kind] for kind in self.kinds)
            raise ValueError(f"{name} must be {expected}, got {checks.shown(value)}.")
        return value


_WANTED = {bool: "True or False", int: "an integer", float: "a number", str: "text"}
_ABSTRACT: dict[type, type] = {int: numbers.Integral, float: numbers.Real}


def integer(low: int, high: int) -> Check:
    """Returns the check that a value is an integer from `low` to `high`."""
    return lambda name, value: checks.integer_in(name, value, low, high)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Checks that a value is one of some choices, which `--help` lists."""

    choices: Collection[str]  # read on each call: optional modules may add choices

    def __call__(self, name: str, value: Any) -> Any:
        return checks.choice(name, value, self.choices)


def field(
    default: Any,
    meaning: str,
    check: Check | None = None,
    *,
    section: str = "task",
    is_path: bool = False,
) -> Any:
    """Declares a field of a section, or of a task (of `section` "task" or "data")."""
    declared = Field(default, meaning, check, is_path=is_path)
    return dataclasses.field(
        default=default, metadata={"declared": declared, "section": section}
    )


def declared(cls: type) -> dict[str, Field]:
    """Returns the declarations of a dataclass's fields, without its sections."""
    # A user's task may have fields with only an annotation and a default.
    if "_declared" in vars(cls):
        return vars(cls)["_declared"]
    try:
        kinds = typing.get_type_hints(cls)
    except NameError:  # a class inside a function, with annotations as text
        kinds = {}
    entries = {}
    for field_ in dataclasses.fields(cls):
        kind = kinds.get(field_.name, object)
        if not field_.init or (isinstance(kind, type) and issubclass(kind, Section)):
            continue
        entry = field_.metadata.get("declared")
        if entry is None and field_.default is not dataclasses.MISSING:
            entry = Field(field_.default, "")
        elif entry is None and field_.default_factory is not dataclasses.MISSING:
            entry = Field(_frozen(field_.default_factory()), "")
        elif entry is None:
            entry = Field(None, "must be given", is_needed=True)
        entries[field_.name] = entry._replace(kind=kind)
    cls._declared = entries
    return entries


# Without field_specifiers: they are known by keyword, and `default` is positional.
@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """A section of a config: a frozen dataclass of fields and of other sections.

    Lists become tuples, so that sections can be hashed.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # of subclasses
    _path: ClassVar[str]  # the section's whole name, as "config.model"

    def __init_subclass__(cls, *, path: str):
        super().__init_subclass__()
        cls._path = path
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls)

    @checks.user_mistakes()
    def __post_init__(self):
        for name, field_ in declared(type(self)).items():
            value = getattr(self, name)
            if value is field_.default:
                continue
            value = _frozen(value)
            field_.checked(f"{self._path}.{name}", value)
            if type(value) is int and field_.kinds == (float,):
                value = float(value)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        lines = [
            f"{field_.name}={getattr(self, field_.name)!r}"
            for field_ in dataclasses.fields(self)
            if getattr(self, field_.name) != field_.default
        ]
        return f"{type(self).__name__}({', '.join(lines)})"

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Section):
            return NotImplemented
        return (self._path, vars(self)) == (other._path, vars(other))

    def __hash__(self) -> int:
        return hash((self._path, *vars(self).items()))

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def replace(self, **changes: Any) -> Self:
        """Replaces values by name; a section also by a dictionary of changes.

        As in `config.replace(model=dict(num_layers=2))`. Raises ConfigError if there is
        no such field, or the value is not valid.
        """
        for name, value in changes.items():
            if name not in self:
                names = [f"{self._path}.{one}" for one in vars(self)]
                names += [one for one, *_ in flat(self)]
                raise checks.ConfigError(
                    f"{self._path} has no field {name!r}."
                    f"{nearest(f'{self._path}.{name}', names)}"
                )
            before = getattr(self, name)
            if not isinstance(before, Section):
                continue
            if isinstance(value, Mapping):
                changes[name] = before.replace(**value)
            elif not isinstance(value, Section) or value._path != before._path:
                raise checks.ConfigError(
                    f"{before._path} must be a section of fields, got "
                    f"{checks.shown(value)}."
                )
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Converts the values to JSON, without sections that have no fields."""
        plain = {
            name: value.to_json() if isinstance(value, Section) else value
            for name, value in vars(self).items()
            if not isinstance(value, Section) or vars(value)
        }
        return json.loads(json.dumps(plain, default=_plain))


def flat(section: Section) -> Iterator[tuple[str, Field, Any]]:
    """Yields the whole name, the declaration and the value of each field."""
    fields = declared(type(section))
    for name, value in vars(section).items():
        if name in fields:
            yield f"{section._path}.{name}", fields[name], value
        else:
            yield from flat(value)


def check_needed(section: Section) -> None:
    """Raises ConfigError if a required field has no value."""
    for name, field_, value in flat(section):
        if field_.is_needed and value is None:
            raise checks.ConfigError(f"{name} must be given.")


def section_of(
    name: str, path: str, fields: Mapping[str, Field]
) -> Callable[..., Section]:
    """Makes a class of sections whose fields are known only at run time."""
    body: dict[str, Any] = {
        key: dataclasses.field(default=field_.default, metadata={"declared": field_})
        for key, field_ in fields.items()
    }
    body["__annotations__"] = {key: field_.kind for key, field_ in fields.items()}
    return type(name, (Section,), body, path=path)


def flattened(nested: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flattens nested values to dotted names, which begin with `path`."""
    result = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            result |= flattened(value, f"{path}{name}.")
        else:
            result[path + name] = value
    return result


def nested(flattened: Mapping[str, Any]) -> dict[str, Any]:
    """Nests values with dotted names, as `Section.replace` takes them."""
    result: dict[str, Any] = {}
    for name, value in flattened.items():
        *sections, last = name.split(".")
        section = result
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise checks.ConfigError(
                    f"{part} of {name} has both a value and fields."
                )
        if section.setdefault(last, value) is not value:
            raise checks.ConfigError(f"{name} has both a value and fields.")
    return result


# What other libraries call some fields.
_ALIASES = {
    "lr": "learning_rate",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "clip": "clip_norm",
    "grad_clip": "clip_norm",
    "batch": "batch_size",
    "bs": "batch_size",
    "epochs": "steps",
    "max_steps": "steps",
    "dropout": "dropout_rate",
    "layers": "num_layers",
    "n_layer": "num_layers",
    "depth": "num_layers",
    "heads": "num_heads",
    "n_head": "num_heads",
    "dim": "model_size",
    "width": "model_size",
    "d_model": "model_size",
    "hidden_dim": "hidden_size",
    "d_ff": "hidden_size",
    "head_dim": "key_size",
    "vocab_size": "num_tokens",
    "dtype": "precision",
    "seq_len": "sequence_length",
}


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the field with the most similar whole name."""
    # The same field of another section is more likely meant than a similar field of
    # this one, so last parts are compared before whole names.
    names, word = list(names), name.rpartition(".")[-1]
    lasts = {whole.rpartition(".")[-1]: whole for whole in reversed(names)}
    near = difflib.get_close_matches(_ALIASES.get(word, word), lasts, n=1)
    return f" Did you mean {lasts[near[0]]!r}?" if near else checks.nearest(name, names)


@functools.cache
def kinds_of(record: type) -> dict[str, Any]:
    """Finds the types of a record's fields, by name; empty if it is not a record."""
    if dataclasses.is_dataclass(record) or hasattr(record, "_fields"):
        return typing.get_type_hints(record)
    return {}


def decoded(kind: Any, value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Decodes a value of a type from JSON.

    Args:
      kind: A named tuple or a dataclass, `tuple[...]`, `Mapping[str, ...]`, one of
        these or None, an array, text, a number, or Any.
      value: The parsed JSON, with names of arrays in place of arrays.
      arrays: The arrays by name.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        (one_kind,) = (part for part in parts if part is not types.NoneType)
        return decoded(one_kind, value, arrays)
    if kind is np.ndarray:
        return arrays[value]
    if origin is tuple:
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        pairs = zip(kinds, value, strict=True)
        return tuple(decoded(type_, part, arrays) for type_, part in pairs)
    if origin is Mapping:
        return {key: decoded(parts[1], part, arrays) for key, part in value.items()}
    if kinds := kinds_of(kind):
        return kind(**{key: decoded(kinds[key], x, arrays) for key, x in value.items()})
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value.item() if isinstance(value, np.generic) else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else repr(value)

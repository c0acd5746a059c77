"""Fields of a config: each is declared once, beside the code that reads it.

A section maps names to fields, and to the sections in it:

    FIELDS = {
        "num_layers": Field(1, "layers of the model", integer(1, 10_000)),
        "attention": {"qk_norm": Field(False, "whether keys are normalized", boolean)},
    }

From it come the default values, the check of given ones, and what `--help` shows.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mha_haiku.core import checks

if TYPE_CHECKING:
    import ml_collections

Check = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config.

    Attributes:
      default: Its value unless a config says otherwise.
      meaning: What it is, in a line.
      check: Called with the field's whole name and a value; raises ValueError.
      kind: The type of its values where the default is None.
    """

    default: Any
    meaning: str
    check: Check
    kind: type | None = None

    @property
    def explained(self) -> str:
        """The meaning, with the choices where there are some."""
        if not isinstance(self.check, OneOf):
            return self.meaning
        *others, last = self.check.choices
        return f"{self.meaning}: {', '.join(others)} or {last}"


Section = Mapping[str, "Field | Section"]


def integer(low: int, high: int) -> Check:
    """Returns the check that a value is an integer from `low` to `high`."""
    return lambda name, value: checks.integer_in(name, value, low, high)


def optional(check: Check) -> Check:
    """Returns a check that lets None pass, too."""
    return lambda name, value: None if value is None else check(name, value)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Checks that a value is one of some, which `--help` lists."""

    choices: Collection[str]  # looked at anew each time: wings add to some

    def __call__(self, name: str, value: Any) -> Any:
        return checks.choice(name, value, self.choices)


def boolean(name: str, value: Any) -> bool:
    """Checks that a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {checks.shown(value)}.")
    return value


def text(name: str, value: Any) -> str:
    """Checks that a value is text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {checks.shown(value)}.")
    return value


def portion(name: str, value: Any) -> float:
    """Checks that a value is a number in [0, 1]."""
    if checks.non_negative_number(name, value) > 1:
        raise ValueError(
            f"{name} must be a number in [0, 1], got {checks.shown(value)}."
        )
    return value


def option(default: Any, meaning: str, check: Check, section: str = "task") -> Any:
    """Returns a field of a task, which is a dataclass; see `Field` and `tasks.Task`.

    It stands in the section "task" or "data" of a config.
    """
    declared = Field(default, meaning, check)
    return dataclasses.field(
        default=default, metadata={"declared": declared, "section": section}
    )


def from_dataclass(field: dataclasses.Field) -> Field:
    """Returns the declaration of a dataclass's field that was made without `option`.

    Its type alone is checked; where it has no default, a config must give it.
    """
    default, kind, is_needed = None, field.type, True
    if field.default is not dataclasses.MISSING:
        default, is_needed = field.default, False
    elif field.default_factory is not dataclasses.MISSING:
        default, is_needed = field.default_factory(), False
    if default is not None:
        kind = type(default)
    wanted = {bool: "True or False", int: "an integer", float: "a number", str: "text"}
    if kind not in wanted:
        kind = object

    def check(name, value):
        if value is None and is_needed:
            raise ValueError(f"{name} must be given.")
        accepted = (int, float) if kind is float else kind
        is_bool = isinstance(value, bool) and kind in (int, float)
        if value is not None and (not isinstance(value, accepted) or is_bool):
            raise ValueError(
                f"{name} must be {wanted[kind]}, got {checks.shown(value)}."
            )
        return value

    return Field(default, "must be given" if is_needed else "", check, kind)


def defaults(section: Section) -> "ml_collections.ConfigDict":
    """Returns the default of every field of a section."""
    import ml_collections

    config = ml_collections.ConfigDict()
    for name, entry in section.items():
        if not isinstance(entry, Field):
            config[name] = defaults(entry)
        elif entry.default is None:
            config[name] = ml_collections.config_dict.placeholder(entry.kind or object)
        else:
            config[name] = entry.default
    return config


def flat(path: str, section: Section) -> Iterator[tuple[str, Field]]:
    """Yields each field with its whole name, in the order of declaration."""
    for name, entry in section.items():
        if isinstance(entry, Field):
            yield f"{path}.{name}", entry
        else:
            yield from flat(f"{path}.{name}", entry)


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns nested values by their dotted names, which begin with `path`."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{path}{name}.")
        else:
            flat[path + name] = value
    return flat


@checks.user_mistakes()
def check(path: str, values: Any, section: Section) -> None:
    """Checks that `values` has the fields of a section and no others, all in range.

    Raises:
      ConfigError: At the first field that is missing, unknown or out of its range.
    """
    _check_names(path, values, section)
    _check_values(path, values, section)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the whole name of a field that `name` is like.

    The right field of another section is a likelier wish than a similar one of this, so
    last parts count before whole names.
    """
    names = list(names)
    lasts = {each.rpartition(".")[-1]: each for each in reversed(names)}
    near = difflib.get_close_matches(name.rpartition(".")[-1], lasts, n=1)
    return f" Did you mean {lasts[near[0]]!r}?" if near else checks.nearest(name, names)


def _check_names(path, values, section) -> None:
    if not isinstance(values, Mapping):
        raise checks.ConfigError(
            f"{path} must be a section of fields, got {checks.shown(values)}."
        )
    missing = [name for name in section if name not in values]
    unknown = [name for name in values if name not in section]
    if unknown:
        suggestion = checks.nearest(str(unknown[0]), missing)
        if not suggestion:
            names = [f"{path}.{name}" for name in section]
            names += [name for name, _ in flat(path, section)]
            suggestion = nearest(f"{path}.{unknown[0]}", names)
        raise checks.ConfigError(f"{path} has no field {unknown[0]!r}.{suggestion}")
    for name, entry in section.items():
        if not isinstance(entry, Field) and name in values:
            _check_names(f"{path}.{name}", values[name], entry)
    if missing:
        raise checks.ConfigError(f"{path}.{missing[0]} is missing.")


def _check_values(path, values, section) -> None:
    for name, entry in section.items():
        if isinstance(entry, Field):
            entry.check(f"{path}.{name}", values[name])
        else:
            _check_values(f"{path}.{name}", values[name], entry)

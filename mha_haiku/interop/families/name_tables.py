"""Families of models: a table of names.

A `Family` maps the fields of a `config.json` to the fields of `config.model`, and its
arrays to our parameters. `save` renames parameters back to arrays. A row that does not
apply (a bias that a model lacks) is left out, as the model itself declares its
parameters.

Rules declare the keys that they read. They get the result of `checked`, in
which every key is present, of the right type and in range.

Linear maps of torch are `[out, in]`, ours are `[in, out]`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks, fields, models

_OURS = {
    name.removeprefix("config.model."): field
    for name, field, _ in fields.flat(models.ModelConfig())
} | dict.fromkeys(
    ("num_tokens", "feature_size", "num_classes"),
    fields.Field(None, "", fields.integer(1, 2**31 - 1), int),
)


def key(
    default: Any, check: fields.Check | None = None, kind: Any = object
) -> fields.Field:
    """Declares a key of `config.json`.

    Args:
      default: The default of `transformers` for a missing key.
      check: Raises ValueError for invalid values; None if `kind` is enough.
      kind: Its type, as an annotation; only a type with None may be null.
    """
    return fields.Field(default, "", check, kind)


Arrays = list[np.ndarray]


class Change(NamedTuple):
    """A transformation of arrays and its inverse."""

    to_ours: Callable[[Arrays], Arrays]
    to_theirs: Callable[[Arrays], Arrays]
    # Whether a narrower dtype would lose numbers of theirs: ours are float32 at least,
    # and are written in the dtype of the other arrays.
    is_wide: bool = False


def each(to_ours: Callable, to_theirs: Callable, *, is_wide: bool = False) -> Change:
    """Makes the change that maps every array by itself."""
    return Change(
        lambda arrays: [*map(to_ours, arrays)],
        lambda arrays: [*map(to_theirs, arrays)],
        is_wide,
    )


as_it_is = each(lambda x: x, lambda x: x)
transposed = each(lambda x: x.T, lambda x: x.T)


class Row(NamedTuple):
    """One or more of our arrays, and one or more of theirs with the same content."""

    # Names such as `attention/query/w`, without `encoder/layer_i/`.
    ours: tuple[str, ...]
    # Names such as `attention.self.query.weight`, without the layer's prefix.
    theirs: tuple[str, ...]
    change: Change  # from theirs to ours

    def below(self, ours: str, theirs: str) -> "Row":
        """Puts a prefix before all of our names, and one before all of theirs."""
        own = tuple(ours + name for name in self.ours)
        its = tuple(theirs + name for name in self.theirs)
        return Row(own, its, self.change)


def row(ours: str, theirs: str, change: Change = as_it_is) -> Row:
    """Makes the row of one array."""
    return Row((ours,), (theirs,), change)


def linear(ours: str, theirs: str, change: Change = transposed) -> tuple[Row, ...]:
    """Makes the rows of a linear map: weight and bias."""
    return (
        row(f"{ours}/w", f"{theirs}.weight", change),
        row(f"{ours}/b", f"{theirs}.bias"),
    )


def norm(ours: str, theirs: str, change: Change = as_it_is) -> tuple[Row, ...]:
    """Makes the rows of a norm: scale, and offset if it has one."""
    return (
        row(f"{ours}/scale", f"{theirs}.weight", change),
        row(f"{ours}/offset", f"{theirs}.bias"),
    )


class Rule(NamedTuple):
    """Fields of `config.model` that follow from keys of `config.json`."""

    read: Callable[[Mapping[str, Any]], dict[str, Any]]  # from all keys, checked
    keys: Mapping[str, fields.Field] = {}  # those that no rule before it declares


def setting(
    ours: str, theirs: str, default: Any = None, names: Mapping[str, Any] | None = None
) -> Rule:
    """Makes the rule of a field of `config.model` that is a key of `config.json`.

    Args:
      ours: Its name within `config.model`, as `feed_forward.hidden_size`; or one of the
        other arguments of `models.build`: num_tokens, feature_size, num_classes.
      theirs: Its name there.
      default: The default of `transformers` for a missing key; None if it must be
        there.
      names: Other names of values: theirs to ours.
    """
    if names is not None:
        declared = key(default, fields.OneOf(names), str)
        return Rule(lambda config: {ours: names[config[theirs]]}, {theirs: declared})
    declared = key(default, _OURS[ours].check, _OURS[ours].kind)
    return Rule(lambda config: {ours: config[theirs]}, {theirs: declared})


class OutputHead(NamedTuple):
    """The module that reads the last layer."""

    architecture: str  # its class in `transformers`, as `BertForMaskedLM`
    fields: Mapping[str, Any]  # what it sets in `config.model`
    rows: tuple[Row, ...] = ()  # its arrays, by their whole names
    # Prefixes of arrays that the class stores and this head does not read.
    unused: tuple[str, ...] = ()
    # Names under which files may repeat an array: theirs to theirs.
    copies: Mapping[str, str] = {}
    rules: tuple[Rule, ...] = ()  # how it reads `config.json`


class Family(NamedTuple):
    """A family of models."""

    name: str  # its `model_type` in `config.json`
    prefix: str  # of names of the model's arrays, if it has a head
    layer: str  # what names of a layer's arrays begin with; `{}` is its number
    fields: Mapping[str, Any]  # what all its models have in `config.model`
    rules: tuple[Rule, ...]  # how the rest is read from `config.json`
    rows: tuple[Row, ...]  # arrays outside of the layers
    layer_rows: tuple[Row, ...]  # arrays of a layer
    heads: tuple[OutputHead, ...]  # what may read the last layer
    # Values of fields of `config.json` that change numbers and have to be as here,
    # where they are there at all.
    supported: Mapping[str, tuple[Any, ...]] = {}
    buffers: tuple[str, ...] = ()  # ends of names of arrays that hold no parameters
    # Ends and parts of names that older files have, and what they are now.
    renamed: Mapping[str, str] = {}


def all_rows(family: Family, head: OutputHead, num_layers: int) -> list[Row]:
    """Makes the rows of all arrays that a model may have, with whole names."""
    rows = [row.below("", family.prefix) for row in family.rows]
    rows += head.rows
    for i in range(num_layers):
        theirs = (family.prefix + family.layer).format(i)
        rows += [x.below(f"encoder/layer_{i}/", theirs) for x in family.layer_rows]
    return rows


def keys_of(family: Family, head: OutputHead) -> dict[str, fields.Field]:
    """Collects the keys of `config.json` that a family and a head read."""
    rules = (*family.rules, *head.rules)
    return {name: field for rule in rules for name, field in rule.keys.items()}


@checks.user_mistakes()
def checked(
    family: Family, head: OutputHead, theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads a `config.json`: checks all that is read, and adds defaults.

    Raises ConfigError where a key has a value of a wrong type or out of range, or one
    that would change numbers and is not supported.
    """
    for name, accepted in family.supported.items():
        if name in theirs and theirs[name] not in accepted:
            raise checks.ConfigError(
                f"config.json's {name} = {checks.shown(theirs[name])} is not "
                "supported: it would change numbers; "
                f"{' or '.join(map(repr, accepted))} is."
            )
    result = dict(theirs)
    for name, declared in keys_of(family, head).items():
        value = theirs.get(name, declared.default)
        result[name] = declared.checked(f"config.json's {name}", value)
    return result

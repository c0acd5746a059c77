"""Records of heads in named columns: what heads do, and how much they matter.

L layers, H heads of a layer, N examples, M columns that rank heads.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.records import archive, means, ranks, tables
from mha_haiku.records.results import Result

ROLE = "role"  # the column with the roles of heads
OFFSET = "offset"  # the column with t - s of a query t and the key s it sees most
_MOST_SAID = 3  # columns in a repr


class Layer(NamedTuple):
    """A layer and its heads.

    Attributes:
      name: "layer 1", "cross 0".
      heads: The names of its heads, which are their numbers in the unpruned model.
      kind: "encoder", "decoder" or "cross"; "" if all layers are of one kind.
      index: The number of the layer in the model, over all kinds, or None without a
        model.
      number: The number of the layer among its kind, or None without a model.
    """

    name: str
    heads: tuple[str, ...]
    kind: str = ""
    index: int | None = None
    number: int | None = None

    @classmethod
    def of_model(
        cls, kind: str, number: int, index: int, heads: Iterable[int]
    ) -> "Layer":
        """Makes a layer of a model, with the names of some of its heads."""
        name = f"{kind or 'layer'} {number}"
        return cls(name, tuple(map(str, heads)), kind, index, number)

    @classmethod
    def of_kinds(
        cls, kinds: Sequence[str], heads: Sequence[Iterable[int]]
    ) -> tuple["Layer", ...]:
        """Makes the layers of a model, numbered among their kinds.

        Without `kinds` all are of one kind. `heads` has the names of the heads of each
        layer.
        """
        kinds = list(kinds) or [""] * len(heads)
        return tuple(
            cls.of_model(kind, i - kinds.index(kind), i, names)
            for i, (kind, names) in enumerate(zip(kinds, heads, strict=True))
        )

    @property
    def address(self) -> str:
        """The layer's name in a flag: "3", or "cross.3" if there are kinds."""
        return f"{self.kind}.{self.number}" if self.kind else f"{self.number}"


class Column(NamedTuple):
    """A number for each head, or a name and the score that decided it.

    Attributes:
      mean: `[L, H]`, over examples; NaN where there is no number, as in a layer with
        fewer heads.
      unit: The unit of the number.
      label: The meaning of the number, in a few words.
      standard_error: `[L, H]`, of the mean; None if unknown.
      ranks: `[L, H, 2]`, an interval of likely ranks, 1 for the largest number; None if
        unknown.
      names: `[L, H]` strings, in a column of names; "" where there is none.
      per_example: `[N, L, H]`, the numbers of the examples; None if unknown.

    Example:
      >>> column = mh.heads.ablation(measured)["ablation"]
      >>> abs(column.mean.round(1))  # [L, H]
      array([[3., 0.],
             [3., 0.]])
      >>> column.label
      'change of the loss when the head is ablated'
    """

    mean: np.ndarray
    unit: str
    label: str
    standard_error: np.ndarray | None = None
    ranks: np.ndarray | None = None
    names: np.ndarray | None = None
    per_example: np.ndarray | None = None

    @classmethod
    def of_examples(cls, per_example: np.ndarray, unit: str, label: str) -> "Column":
        """Averages numbers `[N, L, H]` over examples."""
        mean, error = means.mean(per_example), means.standard_error(per_example)
        return cls(mean, unit, label, error, per_example=per_example)

    @property
    def is_ranked(self) -> bool:
        """Whether the number ranks heads by importance."""
        return self.ranks is not None or self.per_example is not None

    def with_ranks(self) -> "Column":
        """Adds intervals of the ranks of heads, from the examples."""
        return self._replace(ranks=ranks.rank_intervals(self))


Columns = Mapping[str, Column]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Heads(Result):
    """Numbers of the heads of a model: `heads["ablation"].mean` is `[L, H]`.

    Attributes:
      title: The model, and how the numbers were measured.
      layers: `[L]`, with the names of their heads.
      columns: The columns, by name.
      step: The training step, or None outside of training.
      notes: Notes on the columns, in lines.
      file_name: The name of the files that it is saved as, without a suffix.

    Example:
      >>> found = mh.heads.roles(model, params, batches)
      >>> found["role"].names.tolist()
      [['previous_token', 'no_clear_role'], ['induction', 'no_clear_role']]
      >>> found["offset"].mean[:, 0]  # of head 0 of each layer
      array([1., 3.])
    """

    title: str
    layers: tuple[Layer, ...]
    columns: Mapping[str, Column]
    step: int | None = None
    notes: tuple[str, ...] = ()
    file_name: str = "heads"

    @classmethod
    def of(
        cls, title: str, columns: Columns, kinds: Sequence[str] = (), **more
    ) -> Self:
        """Makes the record of all heads of a model, named by their indices.

        `kinds` has the kind of each layer. By default all are of one kind.
        """
        num_layers, num_heads = next(iter(columns.values())).mean.shape
        layers = Layer.of_kinds(kinds, [range(num_heads)] * num_layers)
        return cls(title, layers, columns, **more)

    @classmethod
    def of_examples(
        cls,
        per_example: np.ndarray,
        kinds: Sequence[str] = (),
        *,
        name: str = "importance",
        unit: str = "",
        label: str = "importance",
    ) -> Self:
        """Makes the record of a number per example and head, `[N, L, H]`."""
        examples = display.count(len(per_example), "example")
        title = f"{name.capitalize()} of heads, {examples}"
        return cls.of(
            title, {name: Column.of_examples(per_example, unit, label)}, kinds
        )

    def named(self, names: Sequence[Iterable[int]]) -> Self:
        """Renames the heads of each layer, for example those left after pruning.

        Example:
          >>> found = mh.heads.Heads.of_examples(np.ones((1, 2, 2)))
          >>> [layer.heads for layer in found.named([(0, 5), (2,)]).layers]
          [('0', '5'), ('2',)]
        """
        pairs = zip(self.layers, names, strict=True)
        layers = tuple(x._replace(heads=tuple(map(str, heads))) for x, heads in pairs)
        return dataclasses.replace(self, layers=layers)

    def __repr__(self) -> str:
        parts = [display.count(len(self.layers), "layer")]
        parts += [self._said(*pair) for pair in [*self.columns.items()][:_MOST_SAID]]
        if more := [*self.columns][_MOST_SAID:]:
            parts.append(f"also {', '.join(more)}")
        return f"Heads({self.title!r}: {'; '.join(parts)})"

    def _said(self, name: str, column: Column) -> str:
        if column.names is not None:
            counts = collections.Counter(x for x in np.ravel(column.names) if x)
            listed = ", ".join(f"{count} {x}" for x, count in counts.most_common())
            return f"{name}: {listed or 'none'}"
        if not column.mean.size or np.isnan(column.mean).all():
            return name
        place = np.unravel_index(np.nanargmax(column.mean), column.mean.shape)
        unit = f"{column.unit and ' '}{column.unit}"
        least, most = f"{np.nanmin(column.mean):.3g}", f"{column.mean[place]:.3g}"
        if least == most:
            return f"{name} {most}{unit}"
        return (
            f"{name} from {least} to {most}{unit}, the largest of "
            f"{self.name_of(*place)}"
        )

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise KeyError(f"heads have no {name!r}; they have {', '.join(self)}")
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def first(self) -> Column:
        """The first column."""
        return next(iter(self.columns.values()))

    @property
    def mean(self) -> np.ndarray:
        """The means of the first column, `[L, H]`."""
        return self.first.mean

    @property
    def standard_error(self) -> np.ndarray | None:
        """The standard errors of the first column, `[L, H]`; None if unknown."""
        return self.first.standard_error

    @property
    def per_example(self) -> np.ndarray | None:
        """The first column of each example, `[N, L, H]`; None if unknown."""
        return self.first.per_example

    @property
    def numbers(self) -> dict[str, Column]:
        """The columns of numbers."""
        return {name: x for name, x in self.columns.items() if x.names is None}

    @property
    def names(self) -> dict[str, np.ndarray]:
        """The names in columns of names, `[L, H]`."""
        return {x: y.names for x, y in self.columns.items() if y.names is not None}

    @property
    def agreement(self) -> np.ndarray:
        """Spearman's rank correlation of the columns that rank heads, `[M, M]`."""
        ranked = [x for x in self.columns.values() if x.is_ranked]
        return np.array(
            [[ranks.rank_correlation(a, b) for b in ranked] for a in ranked]
        )

    def name_of(self, layer: SupportsIndex, head: SupportsIndex) -> str:
        """Returns the name of a head by its indices."""
        names = self.layers[layer].heads
        return f"{self.layers[layer].name}, head {names[head] if names else head}"

    def at(self, layers: Sequence[Layer]) -> dict[str, Column]:
        """Finds the columns of the heads of some layers, of the same model.

        They are NaN for heads that are not in this record, and for missing heads of
        smaller layers.
        """
        places = {
            (layer.index, head): (i, h)
            for i, layer in enumerate(self.layers)
            for h, head in enumerate(layer.heads)
        }
        sources = [[places.get((x.index, head)) for head in x.heads] for x in layers]
        return columns_at(sources, self.columns)

    def table(self, by: str = "layer") -> tables.Table:
        """Makes a row per head, with its numbers, their standard errors and ranks.

        `by` is the column whose largest number comes first, or "layer".

        Raises:
          ValueError: If there is no such column.
        """
        checks.choice("by", by, ["layer", *self.numbers])
        rows = list(self._rows())
        if by != "layer":
            rows.sort(key=lambda row: -np.nan_to_num(row[by][0], nan=-np.inf))
            rows = [{"rank": i, **row} for i, row in enumerate(rows, start=1)]
        has_kinds = any(layer.kind for layer in self.layers)
        keys = ["rank"] * (by != "layer") + ["kind"] * has_kinds
        keys += ["layer", "head", *self.names]
        columns = list(map(tables.Column, keys))
        for name, column in self.numbers.items():
            pattern = tables.WITH_ERROR if column.is_ranked else "{0:.3g}"
            csv = (name, f"{name}_standard_error")
            columns.append(tables.Column(name, column.unit, pattern, csv))
            if column.ranks is not None and not np.isnan(column.ranks).all():
                csv = (f"{name}_rank_low", f"{name}_rank_high")
                columns.append(tables.Column(f"{name} rank", "", tables.RANGE, csv))
        return tables.Table(columns, rows, num_keys=len(keys))

    def _rows(self) -> Iterator[dict]:
        lacks = [np.asarray(x) == "" for x in self.names.values()]
        lacks += [np.isnan(column.mean) for column in self.numbers.values()]
        for i, h in np.argwhere(~np.all(lacks, 0)).tolist():
            layer = self.layers[i]
            if h >= len(layer.heads):
                continue
            row = {"layer": layer.number, "head": int(layer.heads[h])}
            row["kind"] = layer.kind
            row |= {name: str(values[i, h]) for name, values in self.names.items()}
            for name, column in self.numbers.items():
                error = column.standard_error
                error = math.nan if error is None else float(error[i, h])
                row[name] = (float(column.mean[i, h]), error)
                if column.ranks is not None:
                    row[f"{name} rank"] = tuple(map(float, column.ranks[i, h]))
            yield row

    def legend(self) -> str:
        """Writes a line per column, with its meaning and its unit."""
        size = max(map(len, self.numbers), default=0)
        return "\n".join(
            f"{name:<{size}}  {column.label}{column.unit and ', '}{column.unit}"
            for name, column in self.numbers.items()
        )

    def text(self, count: int | None = 20, *, by: str | None = None) -> str:
        """Writes the table as text, with its legend and notes below it.

        Args:
          count: Number of rows. Defaults to 20; None means all heads.
          by: The column by which heads are ranked, or "layer". Defaults to the first
            column that ranks heads; without any, to "layer".

        Raises:
          ValueError: If there is no such column.
        """
        ranked = [name for name, x in self.columns.items() if x.is_ranked]
        by = by or next(iter(ranked), "layer")
        table = self.table(by).text(count=count)
        parts = [table, "\n".join([self.legend(), *self.notes])]
        if len(ranked) > 1 and np.sum(~np.isnan(self.first.mean)) > 1:
            columns = [tables.Column("agreement")]
            columns += [tables.Column(name, "", "{:.2f}") for name in ranked]
            rows = [
                {"agreement": name, **dict(zip(ranked, row, strict=True))}
                for name, row in zip(ranked, self.agreement.tolist(), strict=True)
            ]
            parts.append(tables.Table(columns, rows).text())
            parts[-1] += "\nagreement: Spearman's rank correlation"
        return "\n\n".join(parts)

    def top(self, count: int = 10, *, by: str | None = None) -> list[dict[str, Any]]:
        """Lists the rows of the heads with the largest numbers in a column.

        `by` defaults to the first column.
        """
        by = by or next(iter(self.numbers), "layer")
        return list(map(dict, self.table(by).rows[:count]))

    def writers(self) -> dict[str, Callable[[Path], Path]]:
        """Writes the record as .npz, for pages of maps."""
        return {".npz": self.write}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the record to an `.npz` file atomically.

        Raises:
          ConfigError: If the file cannot be written.
        """
        plain = {x.name: getattr(self, x.name) for x in dataclasses.fields(Heads)}
        return archive.save(path, Heads(**plain))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, written_by: str) -> "Heads":
        """Loads a record from a file of `write`.

        `written_by` is the command that writes such files, for error messages.

        Raises:
          ConfigError: If the file is missing, damaged or of another version.
        """
        return archive.load(path, Heads, written_by=written_by)


def columns_at(
    places: Sequence[Sequence[tuple[int, int] | None]], columns: Columns
) -> dict[str, Column]:
    """Indexes columns at (layer, head), a list per layer; None gives no number."""
    return {
        name: column._replace(
            mean=_at(places, column.mean),
            standard_error=_at(places, column.standard_error),
            ranks=_at(places, column.ranks),
            names=_at(places, column.names, ""),
            per_example=None,
        )
        for name, column in columns.items()
    }


def _at(
    places: Sequence[Sequence[tuple[int, int] | None]],
    values: np.ndarray | None,
    missing: float | str = np.nan,
) -> np.ndarray | None:
    if values is None:
        return None
    shape = len(places), max(map(len, places), default=0), *values.shape[2:]
    dtype = object if missing == "" else np.result_type(values, np.float32)
    result = np.full(shape, missing, dtype)
    for i, row in enumerate(places):
        for h, place in enumerate(row):
            if place is not None:
                result[i, h] = values[place]
    return result

"""Answers of a subject with their labels; they display themselves in a notebook.

B batch, T positions, S keys, L layers, N examples.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mha_haiku.records import Result
from mha_haiku.showing import markup, measurements, plots, readings
from mha_haiku.showing.measurements import Grid, rows_table, shows, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lens(Result):
    """The logit lens of one text: the model's answer if a layer were the last one.

    Example:
      >>> subject.lens(tokens[0])
                        12 11 3  2  1  11 3  2  1
        before layer 0  12 12 12 12 12 12 12 12 12
        before layer 1  12 12 12 12 12 12 12 12 12
                output  12 12 12 12 12 3  2  1  11
    """

    tokens: tuple[str, ...]  # the text of the T tokens that are read
    # `[L + 1, T]`, the likeliest token after each position: from the inputs of layers
    # 0, 1, ..., L - 1, and from the output of the last one.
    texts: np.ndarray
    probabilities: np.ndarray  # `[L + 1, T]`
    logits: jax.Array  # `[L + 1, T, C]`
    layers: tuple[int, ...] = ()  # numbers in the model; () for 0, 1, ..., L - 1

    title = "Logit lens: the likeliest next token after each layer"
    file_name = "lens"

    @property
    def names(self) -> list[str]:
        """The name of each row."""
        numbers = self.layers or range(len(self.texts) - 1)
        return [*(f"before layer {i}" for i in numbers), "output"]

    def __repr__(self) -> str:
        rows = [("", self.tokens), *zip(self.names, self.texts, strict=True)]
        rows = [(name, [ascii(str(text))[1:-1] for text in row]) for name, row in rows]
        width = max(len(text) for _, row in rows for text in row)
        return "\n".join(
            f"{name:>16}  " + " ".join(f"{text:{width}}" for text in row)
            for name, row in rows
        )

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each layer and position."""
        return [
            {"after": name, "position": t, "token": self.tokens[t]}
            | {"likeliest": str(texts[t]), "probability": float(probabilities[t])}
            for name, texts, probabilities in zip(
                self.names, self.texts, self.probabilities, strict=True
            )
            for t in range(len(self.tokens))
        ]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compositions(Result):
    """How much each head reads from every other head, from weights only."""

    kind: str  # through which a head reads: "q", "k" or "v"
    # `[L, H, L, H]`, the writing head first, in [0, 1]; NaN where a head cannot read
    # the other.
    scores: np.ndarray
    file_name = "compositions"

    @property
    def title(self) -> str:
        """The title, with the kind."""
        return f"{self.kind.upper()}-composition of heads, from weights alone"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each pair of heads, the highest score first."""
        places = np.argwhere(~np.isnan(self.scores)).tolist()
        ends = ("sender_layer", "sender_head", "receiver_layer", "receiver_head")
        rows = [
            dict(zip(ends, place, strict=True))
            | {"kind": self.kind, "composition": float(self.scores[tuple(place)])}
            for place in places
        ]
        return sorted(rows, key=lambda row: -row["composition"])

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.scores.shape))
        return f"Compositions({self.kind}-composition, {shape})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Strongest(Result):
    """The places where a head attends most in the examples of a data set.

    Example:
      >>> found = subject.strongest(layer=0, head=0, count=2)
      >>> [(row["query"], row["key"]) for row in found.rows()]
      [(1, 0), (1, 0)]
    """

    layer: int
    head: int
    examples: np.ndarray  # `[N]`, their numbers
    queries: np.ndarray  # `[N]`, positions
    keys: np.ndarray  # `[N]`, the positions with the largest weights
    weights: np.ndarray  # `[N]`, from the largest on
    tokens: tuple[tuple[str, ...], ...] = ()  # the queries of each; () of features
    key_tokens: tuple[tuple[str, ...], ...] = ()  # the keys; (): as the queries

    file_name = "strongest"

    @property
    def title(self) -> str:
        """The title, with the head."""
        return f"Layer {self.layer}, head {self.head}: largest weights"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each place, with the text in front of it."""
        rows = []
        for i, (example, query, key, weight) in enumerate(
            zip(self.examples, self.queries, self.keys, self.weights, strict=True)
        ):
            row: dict[str, Any] = {"example": int(example)}
            row |= {"query": int(query), "key": int(key), "weight": float(weight)}
            if self.tokens:
                text = self.tokens[i]
                row["query token"] = text[query]
                row["key token"] = (self.key_tokens or self.tokens)[i][key]
                row["text"] = " ".join(text[max(0, query - 8) : query + 1])
            rows.append(row)
        return rows


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rollout(Result):
    """How much of each input reaches a position, up to each layer.

    Example:
      >>> subject.rollout(tokens[0]).shares.round(2)[-1]
      array([0.  , 0.  , 0.06, 0.01, 0.19, 0.13, 0.06, 0.3 , 0.25],
            dtype=float32)
    """

    title: str
    tokens: tuple[str, ...]  # the texts of the T inputs
    shares: np.ndarray  # `[L, T]`, a row sums to 1
    layers: tuple[int, ...]  # their L numbers in the model
    file_name = "rollout"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each input, with its share up to each layer."""
        return [
            {"position": t, "token": token}
            | {
                f"layer {i}": float(x)
                for i, x in zip(self.layers, self.shares[:, t], strict=True)
            }
            for t, token in enumerate(self.tokens)
        ]


def _of_rollout(rollout: Rollout) -> Grid:
    return Grid(
        rollout.shares,
        [f"up to layer {i}" for i in rollout.layers],
        [visible(x) for x in rollout.tokens],
        "share",
        title=rollout.title,
        note="A cell is the share of an input in the position, up to a layer.",
    )


def _of_lens(lens: Lens) -> Grid:
    return Grid(
        lens.probabilities,
        lens.names,
        [visible(x) for x in lens.tokens],
        "probability",
        title=lens.title,
        note="The color is the probability. Columns are the tokens that are read.",
        texts=np.vectorize(visible, otypes=[str])(lens.texts),
    )


def _of_compositions(compositions: Compositions) -> Grid:
    is_number = ~np.isnan(compositions.scores)
    senders, receivers = (
        np.argwhere(is_number.any(others)).tolist() for others in ((2, 3), (0, 1))
    )
    if not senders:
        raise ValueError("there is no layer that reads another one.")
    values = np.array(
        [[compositions.scores[*a, *b] for b in receivers] for a in senders]
    )
    rows, columns = (
        [f"{layer}.{head}" for layer, head in x] for x in (senders, receivers)
    )
    return Grid(
        values,
        rows,
        columns,
        "composition",
        title=compositions.title,
        note="Random weights are not at 0.",
        axes=("writing head", "reading head"),
    )


shows(Lens, _of_lens)
shows(Rollout, _of_rollout)
shows(Compositions, _of_compositions)


@readings.fragment.register
def _(strongest: Strongest) -> markup.Html:
    return markup.block(
        strongest.title,
        rows_table(strongest.rows(), digits=3),
        note="Positions count from 0; the text ends at the query.",
    )


@plots.figure_of.register(Strongest)
def _(strongest: Strongest, *, title: str | None) -> "Figure":
    names = []
    for row in strongest.rows():
        query, key = (visible(row.get(f"{x} token", "")) for x in ("query", "key"))
        place = f"{row['query']} {query} to {row['key']} {key}"
        names.append(f"example {row['example']}: {place}")
    weights = strongest.weights.tolist()
    return measurements.bars(names, weights, "weight", title=title or strongest.title)

"""What each head of a run does, in numbers: means over held-out examples.

Dimensions: N examples, L layers, H heads, T positions.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, display, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment, running
from mha_haiku.showing import collecting, per_head, tables
from mha_haiku.showing.map_set import Layer, PerHead
from mha_haiku.subjects.studies.workbench import Bench

_BATCH_POSITIONS = 2**13  # of all examples in a batch
_WIDTH_OF_ROLES = max(map(len, heads.ROLES))


class HeadStatistics(NamedTuple):
    """What the heads of a run do."""

    title: str  # the run, its step, and what means are over
    layers: tuple[Layer, ...]  # each with the heads of the unpruned layer
    # By the names of `attention.STATISTICS`, `[L, H]`, NaN where a head was pruned.
    # Statistics that need tokens are left out where inputs are features, and NaN for
    # cross-attention, whose queries and keys are of two texts.
    numbers: dict[str, PerHead]
    roles: heads.Roles | None = None
    file_name = "head_statistics"

    def __repr__(self) -> str:
        return f"HeadStatistics({self.title})"

    _repr_html_, show, plot = display.html, display.show, display.plot

    def table(self) -> tables.Table:
        """Makes a table with a row per head; as text it shows means only."""
        return per_head.table(
            self.numbers,
            self.layers,
            roles=None if self.roles is None else self.roles.names,
            shown="{0:.3g}",
        )

    def text(self) -> str:
        """Writes the table as text, with a legend of its numbers and roles."""
        text = f"{self.table().text()}\n\n{per_head.legend(self.numbers)}"
        found = set() if self.roles is None else set(self.roles.names.flat)
        meanings = {
            name: f"at least {role.threshold:g} of: {role.label}"
            for name, role in heads.ROLES.items()
        } | {heads.MIXED: "none of the roles"}
        lines = [
            f"role {name:<{_WIDTH_OF_ROLES}}  {meaning}"
            for name, meaning in meanings.items()
            if name in found
        ]
        return "\n".join([text, *lines])

    @property
    def picture(self) -> functools.partial:
        """Draws a heat map of each statistic."""
        return functools.partial(
            per_head.statistics_picture, self.numbers, self.layers, title=self.title
        )


def measure(
    bench: Bench, *, examples: int = 64, layers: Sequence[int | str] | None = None
) -> HeadStatistics:
    """Measures what the heads of a run do on held-out examples.

    No map is stored, so inputs may have any length. Padding is left out, and all
    examples have the same weight. Where the task says where the rows of cross-attention
    should look, the shares of its alignments are among the numbers; see
    `heads.alignment`. Layers are chosen as `chosen_layers` says.
    """
    names = models.heads_of_layers(bench.run.config.model)
    layers = chosen_layers(bench.run.config.model, layers)
    is_all = len(layers) == len(names)
    bench = (bench.compact() if is_all else bench).placed()
    batch_size = bench.batch_size(examples, _BATCH_POSITIONS)

    def observe(params, example):
        def known(attention_map, kind):
            return collecting.known(
                attention_map,
                kind,
                tokens=running.tokens(example, kind),
                lengths=running.key_lengths(example, kind),
            )

        return example, bench.observed(params, example, known, layers)[1]

    batches = bench.observations(
        bench.program(observe),
        range(examples),
        batch_size=batch_size,
        name="head statistics",
    )
    aligned = []
    for example, of_layers in batches:
        alignments = alignment.of_batch(bench.run.task.alignments, example)
        aligned.append([each.aligned(alignments) for each in of_layers])
    known = jax.tree.map(lambda *x: np.concatenate(x), *aligned)
    columns = [names[i].names for i in layers]
    numbers = collecting.summary([each.numbers for each in known], columns)
    if np.isnan(numbers["entropy"].mean).all():
        raise ConfigError(
            f"In {examples} held-out examples every query is fully masked."
        )
    plural = "" if examples == 1 else "s"
    title = f"{bench.title}: means over {examples} held-out example{plural}"
    kinds = tuple(names[i].kind for i in layers if names[i].kind)
    roles = collecting.roles(known, columns=columns, kinds=kinds)
    every = range(numbers["entropy"].mean.shape[1])
    shown = [Layer.of_model(names[i].kind, names[i].layer, i, every) for i in layers]
    return HeadStatistics(title, tuple(shown), numbers, roles)


def chosen(name: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    """Checks and lists the wanted layers or heads of `count`; None means all."""
    if wanted is None:
        return list(range(count))
    if not wanted:
        raise ConfigError(f"{name} must not be empty.")
    with checks.user_mistakes():
        return [checks.integer_in(name, index, 0, count - 1) for index in wanted]


def chosen_layers(
    config: models.ModelConfig, wanted: Sequence[int | str] | None
) -> list[int]:
    """Finds the indices of the wanted layers, counted over all kinds.

    They are indices, addresses ("cross.0"; "3" where there is one kind), or kinds
    ("cross"), which are all layers of them; None means all.
    """
    layers = models.heads_of_layers(config)
    result = None if wanted is None else []
    for each in wanted or ():
        own = [i for i, layer in enumerate(layers) if layer.kind == each]
        is_text = isinstance(each, str)
        result += own or [models.find_part(config, each) if is_text else each]
    return chosen("layers", result, len(layers))

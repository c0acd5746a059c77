"""What each head does: numbers over held-out examples, and roles.

Dimensions: N examples, L layers, H heads, T positions.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment, running
from mha_haiku.showing import collecting, per_head, tables
from mha_haiku.showing.map_set import Layer, PerHead
from mha_haiku.subjects import programs, results
from mha_haiku.subjects.subject import EXAMPLES, Part, Subject, parts_of, verb

_BATCH_POSITIONS = 2**13  # of all examples in a batch
_WIDTH_OF_ROLES = max(map(len, heads.ROLES))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadStatistics(results.Result):
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


@verb(command="head_statistics", folder="attention")
def statistics(
    subject: Subject,
    examples: int | Any = EXAMPLES,
    *,
    layers: Sequence[int | str] | None = None,
) -> HeadStatistics:
    """Measures and draws what each head does, over held-out examples.

    No map is stored, so inputs may have any length. Padding is left out, and all
    examples have the same weight. Where the task says where the rows of cross-attention
    should look, the shares of its alignments are among the numbers; see
    `heads.alignment`.

    Args:
      subject: The model.
      examples: Number of held-out examples to average over, or texts.
      layers: Layers, as 0,2 or, of an encoder-decoder, cross.0,decoder; default: all.
    """
    own = programs.batches_given(subject, examples, targets=False)
    parts = parts_of(subject, own and own[0])
    layers = chosen_layers(parts, layers)
    if len(layers) == len(parts):
        subject = programs.compact(subject)
    parts = [parts[i] for i in layers]
    subject = programs.placed(subject)

    def observe(params, example):
        def known(attention_map, kind):
            return collecting.known(
                attention_map,
                kind,
                tokens=running.tokens(example, kind),
                lengths=running.key_lengths(example, kind),
            )

        return example, programs.observed(subject, params, example, known, parts)[1]

    program = programs.program(subject, observe)
    if own is None:
        size = programs.batch_size(subject, examples, _BATCH_POSITIONS)
        batches = programs.observations(
            subject,
            program,
            range(examples),
            batch_size=size,
            name="head statistics",
        )
    else:
        batches = (jax.device_get(program(subject.params, batch)) for batch in own)
    aligned = []
    for example, of_layers in batches:
        alignments = {}
        if subject.task is not None:
            alignments = alignment.of_batch(subject.task.alignments, example)
        aligned.append([each.aligned(alignments) for each in of_layers])
    known = jax.tree.map(lambda *x: np.concatenate(x), *aligned)
    columns = [part.names for part in parts]
    numbers = collecting.summary([each.numbers for each in known], columns)
    count = examples if own is None else sum(len(batch.inputs) for batch in own)
    what = f"{'held-out ' if own is None else ''}example{'' if count == 1 else 's'}"
    if np.isnan(numbers["entropy"].mean).all():
        raise ConfigError(f"In {count} {what} every query is fully masked.")
    title = f"{subject.title}: means over {count} {what}"
    kinds = tuple(part.kind for part in parts if part.kind)
    roles = collecting.roles(known, columns=columns, kinds=kinds)
    every = range(numbers["entropy"].mean.shape[1])
    shown = [
        Layer.of_model(part.kind, part.layer, i, every)
        for i, part in zip(layers, parts, strict=True)
    ]
    return HeadStatistics(title, tuple(shown), numbers, roles)


@verb
def roles(subject: Subject, examples: Any = EXAMPLES) -> heads.Roles:
    """Finds the role of each head on so many examples, or on texts."""
    align = None if subject.task is None else subject.task.alignments
    batches = programs.batches_given(subject, examples, targets=False)
    if batches is None:
        batches = programs.batches_of(subject, examples, name="examples")
    return heads.roles(subject.model, subject.params, batches, align=align)


@verb
def measured(
    subject: Subject, examples: Any = EXAMPLES, metric: str | None = None
) -> heads.Measured:
    """Returns what measures of `mh.heads` take; arguments as in `importance`."""
    return programs.measured(subject, examples, metric=metric, name="examples")


def chosen(name: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    """Checks and lists the wanted layers or heads of `count`; None means all."""
    if wanted is None:
        return list(range(count))
    if not wanted:
        raise ConfigError(f"{name} must not be empty.")
    with checks.user_mistakes():
        return [checks.integer_in(name, index, 0, count - 1) for index in wanted]


def chosen_layers(
    parts: Sequence[Part], wanted: Sequence[int | str] | None
) -> list[int]:
    """Finds the indices of the wanted layers, counted over all kinds.

    They are indices, addresses ("cross.0"; "3" where there is one kind), or kinds
    ("cross"), which are all layers of them; None means all.
    """
    result = None if wanted is None else []
    addresses = [part.address for part in parts]
    for each in wanted or ():
        own = [i for i, part in enumerate(parts) if part.kind == each]
        if not own and isinstance(each, str):
            with checks.user_mistakes():
                checks.choice("a layer", each.strip(), addresses)
            own = [addresses.index(each.strip())]
        result += own or [each]
    return chosen("layers", result, len(parts))

"""Reports of a claim: a page, a figure, and a row of the table of claims."""

import collections
import dataclasses
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.claims import base, records, verdicts
from mha_haiku.showing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GALLERY = """# Replications of published claims

`python -m experiments.reproduce --table` writes this page from the JSON lines in this
folder. Intervals are 90 % intervals of the mean over seeds. A criterion holds if its
whole interval is on the right side of the bound, fails if it is on the wrong side, and
is undecided if the bound is within; a criterion that also holds in the control is void.
Where an end of the interval of three seeds is closer to the bound than half the
interval's width, six seeds are measured.
A claim is *reproduced* if all criteria hold, *partly* reproduced if some do, and *not
reproduced* if none does. It is *inconclusive* if the verdict depends on undecided
criteria, or if two disjoint sets of seeds disagree. Names link to the pages of the
claims, with their figures.
"""
_HEAD = """| claim | the paper | result: mean (90 % interval) | control | verdict |
|---|---|---|---|---|"""
_COLUMNS = 3  # of panels in a figure
_FEW_POINTS = 8  # of a curve, of which each has its tick
_COLORS = {"claim": "C0", "control": "0.5"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A claim and its measurements.

    Attributes:
      claim: The claim.
      measured: Measurements by arm and seed, of the verdict's seeds and all others.
      seeds: The seeds of the verdict.
    """

    claim: base.Claim
    measured: Mapping[str, Mapping[int, records.Record]]
    seeds: tuple[int, ...]

    @classmethod
    def read(
        cls, claim: base.Claim, folder: Path, seeds: Sequence[int] | None = None
    ) -> "Outcome":
        """Reads the measurements of a claim's current design from a folder.

        `seeds` defaults to the seeds of the verdict: as many as the claim says, or
        `verdicts.MOST_SEEDS` if the interval of so many comes close to a bound.
        """
        stored = records.read(records.path_of(folder, claim.name))
        measured = records.current(claim, stored)
        outcome = cls(claim, measured, tuple(seeds or _seeds(claim.seeds)))
        return outcome if seeds else dataclasses.replace(outcome, seeds=outcome._whole)

    @property
    def _whole(self) -> tuple[int, ...]:
        """The seeds of the verdict."""
        first = dataclasses.replace(self, seeds=_seeds(self.claim.seeds))
        numbers = first.numbers("claim")
        if len(numbers) == len(first.seeds) < verdicts.MOST_SEEDS:
            judged = verdicts.judge(self.claim.criteria, numbers).judged
            if any(map(verdicts.is_close, judged)):
                return _seeds(verdicts.MOST_SEEDS)
        return first.seeds

    @property
    def verdicts(self) -> "dict[str, verdicts.Verdict]":
        """The verdict on each arm that was measured with these seeds."""
        found = {}
        for arm in reversed(base.ARMS):  # the control first
            if numbers := self.numbers(arm):
                control = found.get("control")
                found[arm] = verdicts.judge(self.claim.criteria, numbers, control)
        return dict(reversed(found.items()))

    def numbers(self, arm: str) -> dict[int, base.Numbers]:
        """Returns the measurements of an arm with these seeds."""
        by_seed = self.measured[arm]
        return {x: by_seed[x].numbers for x in self.seeds if x in by_seed}

    @property
    def second(self) -> "verdicts.Verdict | None":
        """The verdict on the claim's second set of seeds, or None if not measured."""
        seeds = _seeds(len(self._whole), base.SECOND_SEED)
        other = dataclasses.replace(self, seeds=seeds)
        is_whole = len(other.numbers("claim")) == len(other.seeds)
        return other.verdicts["claim"] if is_whole else None

    @property
    def word(self) -> str:
        """The verdict of both sets of seeds together."""
        second = self.second
        return verdicts.both(self.verdicts["claim"].word, second and second.word)

    @property
    def pilot(self) -> "Pilot":
        """The pilot: all seeds below the verdict's seeds."""
        pilots = {
            seed: record.numbers
            for seed, record in self.measured["claim"].items()
            if seed < base.VERDICT_SEED
        }
        return Pilot(self.claim, pilots)

    @property
    def seconds(self) -> float:
        """The total duration of the measurements of these seeds."""
        return sum(
            self.measured[arm][seed].seconds
            for arm in base.ARMS
            for seed in self.numbers(arm)
        )

    def missing(self, is_pilot: bool = False) -> list[tuple[str, int]]:
        """Returns the arms and seeds that are not measured yet.

        The planted failure is among them if the seeds are the verdict's.
        """
        arms = base.ARMS[:1] if is_pilot else base.ARMS
        wanted = [(arm, seed) for seed in self.seeds for arm in arms]
        if self.seeds == self._whole:
            wanted.append((base.PLANTED, self.seeds[0]))
        return [(arm, seed) for arm, seed in wanted if seed not in self.measured[arm]]

    def picture(self) -> "Figure":
        """Draws the figure."""
        measured = {arm: list(self.numbers(arm).values()) for arm in self.verdicts}
        return picture(self.claim, self.verdicts, measured)

    def result(self) -> str:
        """Returns verdict and criteria in Markdown. Something must be measured."""
        judged = self.verdicts
        told = [f"Seeds {_range(self.seeds)}: {_told(judged['claim'])}. {self.effect}"]
        if "control" in judged:
            told.append(f"Control ({self.claim.control}): {_absence(judged)}.")
        rows = [["measured", "wanted", *judged], ["---"] * (2 + len(judged))]
        for i, criterion in enumerate(self.claim.criteria):
            judged_arms = [verdict.judged[i] for verdict in judged.values()]
            found = [f"{one.interval.text()}: {one.word}" for one in judged_arms]
            rows.append([criterion.name, _wanted(criterion), *found])
        return "\n".join([*told, "", *map(_row, rows)])

    @property
    def effect(self) -> str:
        """The size of the effect, a sentence."""
        judged = self.verdicts["claim"].judged
        told = self.claim.effect.format(
            *(criterion.interval.text() for criterion in judged)
        )
        return told[0].upper() + told[1:] + "."

    def page(self) -> str:
        """Returns the page of the claim in Markdown. Something must be measured."""
        claim, source = self.claim, self.claim.source
        name, before = claim.name, claim.before
        second, planted = self.second, self.measured[base.PLANTED]
        told = [
            f"# {claim.sentence}",
            f"**{self.word}**",
            "## What the paper says",
            f"{self._paper()}, {source.place}: {source.published}.",
            "## What we did",
            inspect.cleandoc(type(claim).__doc__),
            f"Control: {claim.control}.",
            f"![{name}]({name}.png)",
            "## Verdict",
            self.result(),
            *_bounds(claim),
        ]
        if second:
            told.append(f"Seeds {_range(second.seeds)}: {_told(second)}.")
        if planted:
            held = [
                [criterion.name, f"{criterion.value(record.numbers):.3g}"]
                for record in planted.values()
                for criterion in claim.criteria
            ]
            numbers = "; ".join(" ".join(pair) for pair in held)
            told.append(
                f"The control can fail: with a failure planted ({claim.planted}) it "
                f"shows the effect ({numbers})."
            )
        if len(self.pilot.numbers) > 1:
            told.append(str(self.pilot))
        if before:
            told.append(f"An earlier design: *{before.verdict}*. {before.why}")
        told += [claim.tried] if claim.tried else []
        told.append(f"It took {self.seconds / 60:.1f} minutes, on shared cores.")
        told += ["## What would change it", claim.would_change]
        return "\n\n".join(told) + "\n"

    def _paper(self) -> str:
        source = self.claim.source
        return f"[{source.paper}]({source.url})" if source.url else source.paper

    def row(self) -> str:
        """Returns the row of the table of all claims, next to their pages."""
        claim, judged = self.claim, self.verdicts
        control = _absence(judged) if "control" in judged else "not measured"
        verdict = f"**{self.word}**{_before(claim)}"
        verdict += "" if self.second else "; one set of seeds"
        cells = [self._name(), claim.source.published, self.effect]
        return _row([*cells, f"{claim.control}: {control}", verdict])

    def _name(self) -> str:
        claim = self.claim
        return f"[{claim.sentence}]({claim.name}.md) ({self._paper()})"


@dataclasses.dataclass(frozen=True)
class Pilot:
    """Measurements on separate seeds, before the number of seeds was fixed.

    Attributes:
      claim: The claim.
      numbers: Measurements of the claim's arm by seed.
    """

    claim: base.Claim
    numbers: Mapping[int, base.Numbers]

    @property
    def seeds_needed(self) -> int:
        """The number of seeds that the verdict takes, see `verdicts.seeds_needed`."""
        return verdicts.seeds_needed(self.claim.criteria, self.numbers)

    def __str__(self) -> str:
        values = [
            [criterion.value(measured) for measured in self.numbers.values()]
            for criterion in self.claim.criteria
        ]
        spread = [f"{np.mean(x):.3g} ± {np.std(x, ddof=1):.2g}" for x in values]
        return (
            f"Pilot, seeds {_range(self.numbers)}, mean and standard deviation of each "
            f"criterion: {'; '.join(spread)}. The verdict takes {self.seeds_needed} "
            f"seeds."
        )


def _seeds(count: int, first: int = base.VERDICT_SEED) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def _by_verdict(outcomes: Sequence[Outcome]) -> tuple[str, list[Outcome]]:
    """Counts the claims with each verdict, and sorts those that have one by it."""
    measured = [outcome for outcome in outcomes if outcome.verdicts]
    ordered = sorted(measured, key=lambda outcome: verdicts.WORDS.index(outcome.word))
    counts = collections.Counter(outcome.word for outcome in ordered)
    count = ", ".join(f"{number} {word}" for word, number in counts.items())
    return f"Claims by verdict: {count}.", ordered


def gallery(outcomes: Sequence[Outcome]) -> str:
    """Returns the README of all claims: their table, and what is not measured yet."""
    told, ordered = _by_verdict(outcomes)
    rows = [outcome.row() for outcome in ordered]
    waiting = [
        f"- {outcome.claim.sentence} ({outcome._paper()}){_before(outcome.claim)}"
        for outcome in outcomes
        if not outcome.verdicts
    ]
    if waiting:
        waiting = ["", "Not measured yet, by the rules above:", "", *waiting]
    return "\n".join([_GALLERY, told, "", _HEAD, *rows, *waiting, ""])


# The meaning of a verdict on an arm.
_IN_WORDS = {
    "claim": {
        verdicts.REPRODUCED: "Criteria met",
        verdicts.PARTLY: "Some criteria met",
        verdicts.NOT: "Criteria not met",
        verdicts.INCONCLUSIVE: "Inconclusive",
    },
    "control": {
        verdicts.REPRODUCED: "the control shows the effect, too (it should not)",
        verdicts.PARTLY: "the control shows a part of the effect (it should not)",
        verdicts.NOT: "the control does not show the effect (as it should)",
        verdicts.INCONCLUSIVE: "the control may show some of the effect",
    },
}


def picture(
    claim: base.Claim,
    judged: Mapping[str, verdicts.Verdict],
    measured: Mapping[str, Sequence[base.Numbers]],
) -> "Figure":
    """Returns a claim's figure: curves, and a panel per criterion with both arms."""
    count = len(claim.criteria) + len(claim.curves)
    columns = 2 if count == 4 else min(_COLUMNS, count)
    rows = -(-count // columns)
    said = "; ".join(_IN_WORDS[arm][verdict.word] for arm, verdict in judged.items())
    control = f"Control: {claim.control}. " if "control" in judged else ""
    note = (
        f"{said}. {control}Dots are seeds, bars 90 % intervals of their mean; "
        "all of a bar must lie on the shaded side."
    )
    width = 4.2 * columns
    sheet = canvas.sheet(width, 1.0 + 3.1 * rows, title=claim.sentence, note=note)
    grid = sheet.subplots(rows, columns, squeeze=False)
    cells = iter(grid.flat)
    for curve in claim.curves:
        _draw_curve(next(cells), curve, measured)
    for i in range(len(claim.criteria)):
        _draw_criterion(next(cells), {arm: x.judged[i] for arm, x in judged.items()})
    for axes in cells:
        axes.set_axis_off()
    return sheet


def _draw_criterion(axes: "Axes", judged: Mapping[str, verdicts.Judged]) -> None:
    criterion = next(iter(judged.values())).criterion
    finite = [criterion.bound]
    for i, (arm, result) in enumerate(judged.items()):
        values = result.values
        finite += values[np.isfinite(values)].tolist()
        color = _COLORS[arm]
        spread = i + 0.12 * (np.arange(len(values)) - (len(values) - 1) / 2)
        axes.plot(spread, values, ".", color=color, markersize=8)
        _, low, high = result.interval
        if np.isfinite([low, high]).all():
            finite += [low, high]
            middle = (low + high) / 2
            bar = {"fmt": "_", "color": color, "capsize": 5, "markersize": 16}
            axes.errorbar(i - 0.3, middle, [[middle - low], [high - middle]], **bar)
    for i, (place, number) in enumerate(criterion.published.items()):
        finite.append(number)
        style = {"color": "C3", "ls": ("--", ":", "-.")[i % 3], "lw": 1.2}
        label = textwrap.fill(f"published: {place}", 30)
        axes.axhline(number, label=label, **style)
    low, high = min(finite), max(finite)
    room = 0.12 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - room, high + room)
    is_above = criterion.at_most is None
    ends = (criterion.bound, high + room) if is_above else (low - room, criterion.bound)
    wanted = f"wanted: {'at least' if is_above else 'at most'} {criterion.bound:g}"
    axes.axhspan(*ends, color="C2", alpha=0.13, lw=0, label=wanted)
    axes.set_xlim(-0.6, len(judged) + 0.9)  # room for the legend, which hides no dot so
    labels = [f"{arm}:\n{result.word}" for arm, result in judged.items()]
    axes.set_xticks(range(len(judged)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    _titles(axes, criterion.name, "", criterion.unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, loc="center right")


def _draw_curve(
    axes: "Axes", curve: base.Curve, measured: Mapping[str, Sequence[base.Numbers]]
) -> None:
    points = np.array(curve.points, float)
    lines = {}  # color, arm and values by seed, by the label
    for arm, by_seed in measured.items():
        for i, (name, template) in enumerate(curve.lines.items()):
            names = [template.format(x) for x in curve.points]
            values = np.array([[x.get(y, np.nan) for y in names] for x in by_seed])
            label = name if arm == "claim" else f"{name}, control"
            if np.isfinite(values).any():
                lines[label] = f"C{i}", arm, values
    for label, covered in _seen({x: y.mean(0) for x, (*_, y) in lines.items()}).items():
        color, arm, values = lines[label]
        controls = [x for x, (_, its, _) in lines.items() if its == "control"]
        if covered:
            same = "all controls" if covered == controls else "; ".join(covered)
            label = textwrap.fill(f"{label} (and {same})", 40)
        style = {"color": color, "ls": "-" if arm == "claim" else ":"}
        axes.plot(points, values.mean(0), marker=".", label=label, **style)
        band = values.min(0), values.max(0)
        axes.fill_between(points, *band, color=color, alpha=0.15, lw=0)
    if curve.level is not None:
        axes.axhline(curve.level, color="0.4", ls=":", lw=1, label=curve.level_name)
    if curve.logarithmic:
        axes.set_xscale("log", base=2)
    if curve.logarithmic or len(points) <= _FEW_POINTS:
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.minorticks_off()
    axes.tick_params(labelsize=7)
    _titles(axes, curve.title, curve.across, curve.up)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.6)


def _seen(lines: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """Returns the labels of lines that can be seen, each with those that it covers.

    A line is covered by an earlier one if none of its points is further away from it
    than a hundredth of the height of all lines.
    """
    every = np.concatenate([np.zeros(0), *lines.values()])
    close = 0.01 * (np.nanmax(every) - np.nanmin(every)) if len(every) else 0.0
    seen = {}
    for label, values in lines.items():
        finite = np.isfinite(values)
        for other in seen:
            far = np.abs(values - lines[other])[finite]
            if (far <= close).all():  # NaN, where there is no other, is not
                seen[other].append(label)
                break
        else:
            seen[label] = []
    return seen


def _titles(axes: "Axes", title: str, across: str, up: str) -> None:
    text = textwrap.fill(title, 48)
    axes.set_title(text, fontsize=8.5, loc="left", parse_math=False)
    axes.set_xlabel(across, fontsize=8, parse_math=False)
    axes.set_ylabel(up, fontsize=8, parse_math=False)


def _told(verdict: verdicts.Verdict) -> str:
    counts = collections.Counter(criterion.word for criterion in verdict.judged)
    told = [
        f"{counts[word]} of {len(verdict.judged)} {word}"
        for word in (verdicts.UNDECIDED, verdicts.VOID)
        if counts[word]
    ]
    return f"**{verdict.word}**" + (f" ({', '.join(told)})" if told else "")


def _absence(judged: Mapping[str, verdicts.Verdict]) -> str:
    """Returns whether the control shows the effect, in words."""
    control = judged["control"]
    count = len(control.judged)
    if not control.holding:
        return "no effect"
    return f"{control.holding} of {count} criteria hold there, too"


def _bounds(claim: base.Claim) -> list[str]:
    """Returns a sentence on where the bounds are from."""
    told = []
    for criterion in claim.criteria:
        places = [f"{place}: {x:g}" for place, x in criterion.published.items()]
        published = f" (published: {'; '.join(places)})" if places else ""
        told.append(f"{_wanted(criterion)}, {criterion.bound_from}{published}")
    return [f"Where the bounds are from: {'; '.join(told)}."]


def _before(claim: base.Claim) -> str:
    """Returns the verdict of an earlier design, in brackets, or ""."""
    return f" (before: {claim.before.verdict})" if claim.before else ""


def _range(seeds: Iterable[int]) -> str:
    """Returns "100 to 102" for seeds in a row, else all of them."""
    seeds = sorted(seeds)
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _wanted(criterion: base.Criterion) -> str:
    sign = "≥" if criterion.at_most is None else "≤"
    return f"{sign} {criterion.bound:g}{criterion.unit and ' ' + criterion.unit}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"

"""What is said of a claim: a paragraph, a figure, and the rows of README's table."""

import collections
import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.claims import base, records, verdicts
from mha_haiku.core.checks import ConfigError
from mha_haiku.showing import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEGIN = "<!-- claims: python -m experiments.reproduce --table writes this table -->"
END = "<!-- end of claims -->"
_GALLERY = """# Claims of papers: what was measured

Written by `python -m experiments.reproduce --table`, from the lines of JSON beside it.
Intervals are of the mean over seeds, 90 %. A criterion holds where all of its interval
is on the right side of the bound, fails where all is on the wrong one, and is undecided
between; one that holds in the control too is void. All hold: *reproduced*; some do:
*partly*; none does: *not*.
"""
_HEAD = (
    "| claim | published | measured: mean (90 % interval), wanted | control | verdict |"
    "\n|---|---|---|---|---|"
)
_ROWS = 5  # of the table in README.md
_COLUMNS = 3  # of panels in a figure
_FEW_POINTS = 8  # of a curve, of which each has its tick
_COLOURS = {"claim": "C0", "control": "0.5"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A claim and what was measured of it.

    Attributes:
      claim: The claim.
      measured: By arm and seed.
    """

    claim: base.Claim
    measured: Mapping[str, Mapping[int, records.Record]]

    @classmethod
    def read(cls, claim: base.Claim, folder: Path) -> "Outcome":
        """Returns what the file of a claim in a folder says, as the claim is now."""
        found = records.read(records.path_of(folder, claim.name))
        return cls(claim, records.current(claim, found))

    @property
    def verdicts(self) -> dict[str, verdicts.Verdict]:
        """The verdict on each arm that was measured."""
        found = {}
        for arm in reversed(base.ARMS):  # the control first
            if by_seed := self.measured[arm]:
                numbers = {seed: record.numbers for seed, record in by_seed.items()}
                control = found.get("control")
                found[arm] = verdicts.judge(self.claim.criteria, numbers, control)
        return dict(reversed(found.items()))

    @property
    def seconds(self) -> float:
        """What all measurements took together."""
        return sum(
            record.seconds
            for by_seed in self.measured.values()
            for record in by_seed.values()
        )

    def missing(self, seeds: Iterable[int]) -> list[tuple[str, int]]:
        """Returns the arms and seeds that have not been measured."""
        return [
            (arm, seed)
            for seed in seeds
            for arm in base.ARMS
            if seed not in self.measured[arm]
        ]

    def picture(self, format: str = "png") -> bytes:
        """Returns the figure, a file's bytes."""
        measured = {
            arm: [record.numbers for record in by_seed.values()]
            for arm, by_seed in self.measured.items()
            if by_seed
        }
        return picture(self.claim, self.verdicts, measured, format=format)

    def paragraph(self) -> str:
        """Returns what is told of it in Markdown: a paragraph, and a table of numbers.

        Something must have been measured.
        """
        claim, source, judged = self.claim, self.claim.source, self.verdicts
        where = f"{self._paper()}, {source.place}"
        told = [f"**{claim.sentence}.** {where}: {source.published}."]
        for arm, verdict in judged.items():
            what = "Here" if arm == "claim" else f"Control ({claim.control})"
            told.append(f"{what}, {len(verdict.seeds)} seeds: {_told(verdict)}.")
        told += [claim.tried] if claim.tried else []
        told.append(f"It took {self.seconds / 60:.1f} minutes.")
        rows = [["measured", "wanted", *judged], ["---"] * (2 + len(judged))]
        for i, criterion in enumerate(claim.criteria):
            each = [verdict.judged[i] for verdict in judged.values()]
            found = [f"{one.interval.text()}: {one.word}" for one in each]
            rows.append([criterion.name, _wanted(criterion), *found])
        return "\n".join([*told, "", *map(_row, rows)])

    def _paper(self) -> str:
        source = self.claim.source
        return f"[{source.paper}]({source.url})" if source.url else source.paper

    def row(self) -> str:
        """Returns the row of README's table."""
        claim, source, judged = self.claim, self.claim.source, self.verdicts
        control = judged.get("control")
        cells = [
            f"{claim.sentence} ({self._paper()})",
            source.published,
            "; ".join(map(_number, judged["claim"].judged)),
            f"{claim.control}: {control.word if control else 'not measured'}",
            _told(judged["claim"]),
        ]
        return _row(cells)


def with_table(readme: Path, outcomes: Sequence[Outcome]) -> str:
    """Returns the text of a README with the first rows of the table of claims.

    Raises:
      ConfigError: If the marks around it are not there.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{readme} cannot be read: {error.strerror}.") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} must have the lines\n{BEGIN} and {END}")
    told, rows = _table(outcomes)
    table = "\n".join([_HEAD, *rows[:_ROWS]])
    return f"{before}{BEGIN}\n\n{told}\n\n{table}\n\n{END}{after}"


def _table(outcomes: Sequence[Outcome]) -> tuple[str, list[str]]:
    """Returns how many claims have each verdict, and a row for each, by verdict."""
    found = [
        (verdicts.WORDS.index(each.verdicts["claim"].word), i, each.row())
        for i, each in enumerate(outcomes)
        if each.measured["claim"]
    ]
    counts = collections.Counter(place for place, *_ in found)
    count = ", ".join(f"{counts[i]} {verdicts.WORDS[i]}" for i in sorted(counts))
    return f"Claims by verdict: {count}.", [row for *_, row in sorted(found)]


def gallery(outcomes: Sequence[Outcome]) -> str:
    """Returns the README of all claims: their table, a paragraph and a figure each."""
    told, rows = _table(outcomes)
    parts = [_GALLERY, "\n".join([told, "", _HEAD, *rows, ""])]
    for each in outcomes:
        if each.measured["claim"]:
            name = each.claim.name
            parts.append(f"## {name}\n\n{each.paragraph()}\n\n![{name}]({name}.png)\n")
    return "\n".join(parts)


# What a verdict on an arm means.
_IN_WORDS = {
    "claim": {
        verdicts.REPRODUCED: "Criteria met",
        verdicts.PARTLY: "Some criteria met",
        verdicts.NOT: "Criteria not met",
        verdicts.OPEN: "Too few seeds to tell",
    },
    "control": {
        verdicts.REPRODUCED: "the control shows the effect, too (it should not)",
        verdicts.PARTLY: "the control shows a part of the effect (it should not)",
        verdicts.NOT: "the control does not show the effect (as it should)",
        verdicts.OPEN: "too few seeds of the control to tell",
    },
}


@drawing.picture
def picture(
    claim: base.Claim,
    judged: Mapping[str, verdicts.Verdict],
    measured: Mapping[str, Sequence[base.Numbers]],
) -> "Figure":
    """Returns a claim's figure: curves, and a panel per criterion with both arms."""
    count = len(claim.criteria) + len(claim.curves)
    columns = 2 if count == 4 else min(_COLUMNS, count)
    rows = -(-count // columns)
    said = "; ".join(_IN_WORDS[arm][each.word] for arm, each in judged.items())
    control = f"Control: {claim.control}. " if "control" in judged else ""
    note = (
        f"{said}. {control}Dots are seeds, bars 90 % intervals of their mean; "
        "all of a bar must lie on the shaded side."
    )
    width = 4.2 * columns
    sheet = drawing.sheet(width, 1.0 + 3.1 * rows, title=claim.sentence, note=note)
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
    for i, (arm, each) in enumerate(judged.items()):
        values = each.values
        finite += values[np.isfinite(values)].tolist()
        colour = _COLOURS[arm]
        spread = i + 0.12 * (np.arange(len(values)) - (len(values) - 1) / 2)
        axes.plot(spread, values, ".", color=colour, markersize=8)
        _, low, high = each.interval
        if np.isfinite([low, high]).all():
            finite += [low, high]
            middle = (low + high) / 2
            bar = {"fmt": "_", "color": colour, "capsize": 5, "markersize": 16}
            axes.errorbar(i - 0.3, middle, [[middle - low], [high - middle]], **bar)
    if criterion.published is not None:
        finite.append(criterion.published)
        axes.axhline(
            criterion.published, color="C3", ls="--", lw=1.2, label="published"
        )
    low, high = min(finite), max(finite)
    room = 0.12 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - room, high + room)
    is_above = criterion.at_most is None
    ends = (criterion.bound, high + room) if is_above else (low - room, criterion.bound)
    wanted = f"wanted: {'at least' if is_above else 'at most'} {criterion.bound:g}"
    axes.axhspan(*ends, color="C2", alpha=0.13, lw=0, label=wanted)
    axes.set_xlim(-0.6, len(judged) + 0.9)  # room for the legend, which hides no dot so
    labels = [f"{arm}:\n{each.word}" for arm, each in judged.items()]
    axes.set_xticks(range(len(judged)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    _titles(axes, criterion.name, "", criterion.unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, loc="center right")


def _draw_curve(
    axes: "Axes", curve: base.Curve, measured: Mapping[str, Sequence[base.Numbers]]
) -> None:
    points = np.array(curve.points, float)
    lines = {}  # colour, arm and values by seed, by the label
    for arm, by_seed in measured.items():
        for i, (name, template) in enumerate(curve.lines.items()):
            names = [template.format(x) for x in curve.points]
            values = np.array([[x.get(y, np.nan) for y in names] for x in by_seed])
            label = name if arm == "claim" else f"{name}, control"
            if np.isfinite(values).any():
                lines[label] = f"C{i}", arm, values
    for label, covered in _seen({x: y.mean(0) for x, (*_, y) in lines.items()}).items():
        colour, arm, values = lines[label]
        controls = [x for x, (_, its, _) in lines.items() if its == "control"]
        if covered:
            same = "all controls" if covered == controls else "; ".join(covered)
            label = textwrap.fill(f"{label} (and {same})", 40)
        style = {"color": colour, "ls": "-" if arm == "claim" else ":"}
        axes.plot(points, values.mean(0), marker=".", label=label, **style)
        band = values.min(0), values.max(0)
        axes.fill_between(points, *band, color=colour, alpha=0.15, lw=0)
    if curve.level is not None:
        axes.axhline(curve.level, color="0.4", ls=":", lw=1, label=curve.level_name)
    if curve.logarithmic:
        axes.set_xscale("log", base=2)
    if curve.logarithmic or len(points) <= _FEW_POINTS:
        axes.set_xticks(points, [f"{each:g}" for each in points])
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
        own = np.isfinite(values)
        for other in seen:
            far = np.abs(values - lines[other])[own]
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
    counts = collections.Counter(each.word for each in verdict.judged)
    told = [
        f"{counts[word]} of {len(verdict.judged)} {word}"
        for word in (verdicts.UNDECIDED, verdicts.VOID)
        if counts[word]
    ]
    return f"**{verdict.word}**" + (f" ({', '.join(told)})" if told else "")


def _number(judged: verdicts.Judged) -> str:
    wanted = _wanted(judged.criterion)
    return f"{judged.criterion.name} {judged.interval.text()}, {wanted}: {judged.word}"


def _wanted(criterion: base.Criterion) -> str:
    sign = "≥" if criterion.at_most is None else "≤"
    return f"{sign} {criterion.bound:g}{criterion.unit and ' ' + criterion.unit}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"

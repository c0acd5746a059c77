"""What is said of a claim: a paragraph, a figure, and the rows of README's table."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mha_haiku.checks import ConfigError
from mha_haiku.claims import base, pictures, records, verdicts
from mha_haiku.runs import files

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
        return pictures.picture(self.claim, self.verdicts, measured, format=format)

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


def write_readme(readme: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the table between the two marks of a README.

    Raises:
      ConfigError: If the marks are not there.
    """
    files.write(readme, with_table(readme, outcomes))


def with_table(readme: Path, outcomes: Sequence[Outcome]) -> str:
    """Returns the text of a README with the table of all claims that were measured."""
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{readme} cannot be read: {error.strerror}.") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} must have the lines\n{BEGIN} and {END}")
    found = [
        (verdicts.WORDS.index(each.verdicts["claim"].word), i, each.row())
        for i, each in enumerate(outcomes)
        if each.measured["claim"]
    ]
    counts = collections.Counter(place for place, *_ in found)
    count = ", ".join(f"{counts[i]} {verdicts.WORDS[i]}" for i in sorted(counts))
    table = "\n".join([_HEAD, *(row for *_, row in sorted(found))])
    told = f"Claims by verdict: {count}."
    return f"{before}{BEGIN}\n\n{told}\n\n{table}\n\n{END}{after}"


def gallery(outcomes: Sequence[Outcome]) -> str:
    """Returns a README of its own: the paragraph and the figure of each claim."""
    parts = [_GALLERY]
    for each in outcomes:
        if each.measured["claim"]:
            name = each.claim.name
            parts.append(f"## {name}\n\n{each.paragraph()}\n\n![{name}]({name}.png)\n")
    return "\n".join(parts)


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

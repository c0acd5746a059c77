"""Tests published claims, on several seeds and against a control.

Run: python -m experiments.reproduce --claim=multi_query_recall
"""

import pathlib

from experiments import claims
from experiments.claims import claim_pages, measurements
from mha_haiku import commands
from mha_haiku.commands.groups import Cache, Pictures
from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files

STORED = pathlib.Path(__file__).resolve().parent / "claims"


@commands.command
def reproduce(
    *,
    claim: str = "",
    all: bool = False,
    list: bool = False,
    table: bool = False,
    seeds: str = "",
    pilot: bool = False,
    workdir: str = "runs/claims",
    store: bool = False,
    pictures: Pictures,
    cache: Cache,
) -> None:
    """Tests published claims, on several seeds and against a control.

    Run: python -m experiments.reproduce --list
         python -m experiments.reproduce --claim=multi_query_recall
         python -m experiments.reproduce --all
         python -m experiments.reproduce --table

    The first command lists the claims and their durations. The second measures a claim
    and its control, in which the effect must vanish, and reports reproduced, partly,
    not reproduced or inconclusive, with a 90 % interval over the seeds. The same
    command resumes after an interruption; stored measurements are not repeated, unless
    the claim has changed since. --seeds=200-202 takes other seeds; --pilot measures
    only the claim and says how many seeds the verdict takes. With --store the results
    also go to experiments/claims/; from there --table writes
    experiments/claims/README.md, a page and a figure for each claim, and runs no model.

    Args:
      claim: Claims, by their names with commas between.
      all: All claims; faults of one do not stop the others.
      list: Print the claims, and end.
      table: Write the README of experiments/claims from the stored results.
      seeds: First and last seed, 200-202. Defaults to the seeds of each claim.
      pilot: Measure only the claim, on seeds 0-2 or --seeds.
      workdir: Folder of results, figures and runs.
      store: Keep results and figures in experiments/claims/ too.
    """
    if sum([bool(claim), all, list, table]) != 1:
        raise ConfigError(
            "--claim=... is missing.\nOr one of --all, --list and --table."
        )
    with checks.user_mistakes():
        names = claim.split(",") if claim else claims.names()
        wanted = [claims.load(name.strip()) for name in names]
    if list:
        _list(wanted)
    elif table:
        _write_tables(wanted)
    else:
        for outcome in claims.reproduce(
            wanted,
            workdir,
            seeds=_seeds(seeds),
            is_pilot=pilot,
            formats=pictures.format,
            goes_on=all,
        ):
            told = outcome.pilot if pilot else outcome.result()
            print(f"{outcome.claim.name}\n{told}\n", flush=True)
            if store:
                measurements.store(outcome.claim, pathlib.Path(workdir), STORED)
        print(f"Results and figures: {workdir}")


def _list(wanted: list) -> None:
    for claim in wanted:
        minutes = claim_pages.Outcome.read(claim, STORED).seconds / 60
        print(f"{claim.name} (took {minutes:.0f} min): {claim.sentence}")
        about = f"{claim.seeds} seeds; control: {claim.control}"
        print(f"    {claim.source.paper}; {about}")


def _write_tables(wanted: list) -> None:
    outcomes = [claim_pages.Outcome.read(claim, STORED) for claim in wanted]
    gallery = files.write(STORED / "README.md", claim_pages.gallery(outcomes))
    for outcome in outcomes:
        measurements.draw(outcome, STORED)
        measurements.page(outcome, STORED)
    print(f"Table: {gallery}\nPages and figures: {STORED}")


def _seeds(text: str) -> range | None:
    """Returns the seeds from the first to the last, of "200-202"."""
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(
            f"--seeds must be the first and the last seed, as 200-202, got {text}"
        )
    return range(int(first), int(last) + 1)


if __name__ == "__main__":
    commands.main("reproduce")

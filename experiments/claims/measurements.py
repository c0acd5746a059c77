"""Measures claims: only missing measurements, and nothing twice."""

import importlib.util
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.claims import base, claim_pages, records, verdicts
from experiments.claims.desk import Desk
from mha_haiku.core import checks, outputs
from mha_haiku.core.checks import ConfigError
from mha_haiku.showing import result_files
from mha_haiku.training.runs import files, progress

_logger = logging.getLogger("mha_haiku")


def reproduce(
    claims: Sequence[base.Claim],
    workdir: str | os.PathLike,
    *,
    seeds: Sequence[int] | None = None,
    is_pilot: bool = False,
    formats: Sequence[str] = ("png",),
    goes_on: bool = False,
) -> Iterator[claim_pages.Outcome]:
    """Yields each claim's outcome, once all its seeds have been measured.

    Stored measurements are not repeated if the claim's version and configs are the
    same. A measurement is stored at once, so that an interrupted command can resume.

    Args:
      claims: The claims.
      workdir: A folder: NAME.jsonl, a figure and NAME.md for each claim, and the runs
        that were trained.
      seeds: The seeds of both arms. Default to each claim's seeds and planted failure.
      is_pilot: Whether to measure only the claim's arm, to see how many seeds it takes
        (`Outcome.pilot`). Pilots have seeds below 100, by default 0 to 2.
      formats: File formats of figures, which are left out if matplotlib is missing.
      goes_on: Whether to leave out claims whose packages are missing, and to continue
        with the next one after a fault.

    Raises:
      ConfigError: If a package is missing, or the folder holds files of anyone else.
      RuntimeError: At the end, with `goes_on`, if claims were left out by a fault.
    """
    folder = checks.as_path(workdir)
    outputs.check("workdir", folder)
    failed, ready = [], []
    for claim in claims:
        find = importlib.util.find_spec
        if packages := [name for name in claim.needs if find(name) is None]:
            message = (
                f"{claim.name} needs {', '.join(packages)}: pip install "
                f"'mha_haiku[models]' or the package itself."
            )
            if not goes_on:
                raise ConfigError(message)
            _logger.warning(f"Left out: {message}")
        else:
            ready.append(claim)
    if is_pilot and seeds is None:
        seeds = range(verdicts.FEWEST_SEEDS)
    outcomes = [claim_pages.Outcome.read(claim, folder, seeds) for claim in ready]
    total = sum(len(outcome.missing(is_pilot)) for outcome in outcomes)
    with progress.bar(total, unit="measurement", name="claims", leave=True) as bar:
        for claim, outcome in zip(ready, outcomes, strict=True):
            desk = Desk(folder)  # its programs are dropped with it
            written = (f"{claim.name}.{kind}" for kind in ("jsonl", "md", *formats))
            outputs.claim(folder, ["runs", "imported", *written])
            try:
                while pairs := outcome.missing(is_pilot):
                    for arm, seed in pairs:
                        bar.set_postfix_str(f"{claim.name}, {arm}, seed {seed}")
                        desk.seeds = (seed,) if arm == base.PLANTED else outcome.seeds
                        record = measure(claim, desk, arm, seed)
                        records.append(records.path_of(folder, claim.name), record)
                        bar.update()
                    # More seeds, if three came close to a bound.
                    outcome = claim_pages.Outcome.read(claim, folder, seeds)
                    bar.total += len(outcome.missing(is_pilot))
                if not is_pilot:
                    _write(outcome, folder, formats)
            except Exception as error:
                if not goes_on:
                    raise
                failed.append(claim.name)
                _logger.error(f"{claim.name}: {type(error).__name__}: {error}")
            else:
                yield outcome
    if failed:
        raise RuntimeError(f"{', '.join(failed)} could not be measured.")


def measure(claim: base.Claim, desk: Desk, arm: str, seed: int) -> records.Record:
    """Returns one measurement.

    Raises:
      TypeError: If a result is not a number.
    """
    before = time.perf_counter()
    numbers = {
        name: float(value) for name, value in claim.measure(desk, seed, arm).items()
    }
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        _logger.warning(
            f"{claim.name}, {arm}, seed {seed}: not finite: {', '.join(bad)}."
        )
    for criterion in claim.criteria:
        criterion.value(numbers)  # a name that is missing shows now
    return records.Record(
        claim=claim.name,
        arm=arm,
        seed=seed,
        numbers=numbers,
        seconds=round(time.perf_counter() - before, 1),
        key=records.key_of(claim, arm),
        versions=records.versions(),
    )


def store(claim: base.Claim, workdir: Path, folder: Path) -> None:
    """Copies the measurements of a claim to the folder that READMEs quote.

    Measurements of the current design that are only in this folder are kept. Writes the
    figure and the page, too.
    """
    new = claim_pages.Outcome.read(claim, workdir).measured
    old = claim_pages.Outcome.read(claim, folder).measured
    kept = [
        record
        for arm, by_seed in new.items()
        for _, record in sorted((old[arm] | by_seed).items())
    ]
    records.write(records.path_of(folder, claim.name), kept)
    outcome = claim_pages.Outcome.read(claim, folder)
    draw(outcome, folder)
    page(outcome, folder)


def draw(outcome: claim_pages.Outcome, folder: Path) -> None:
    """Writes the figure of the stored measurements, if there are any."""
    if outcome.verdicts:
        path = folder / f"{outcome.claim.name}.png"
        result_files.write_pictures(path, outcome.picture, ["png"])


def page(outcome: claim_pages.Outcome, folder: Path) -> None:
    """Writes the page of the stored measurements, if there are any."""
    if outcome.verdicts:
        files.write(folder / f"{outcome.claim.name}.md", outcome.page())


def _write(outcome, folder, formats) -> None:
    page(outcome, folder)
    path = folder / f"{outcome.claim.name}.png"
    result_files.write_pictures(path, outcome.picture, formats)

"""Measurements as lines of JSON: one per claim, arm and seed."""

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import haiku
import jax

from experiments.claims import base
from experiments.claims.desk import digest_of, essence
from mha_haiku.training.runs import files


class Record(NamedTuple):
    """One measurement.

    Attributes:
      claim: The claim's name.
      arm: "claim", "control" or "planted".
      seed: The seed.
      numbers: The measured numbers by name.
      seconds: Duration, training included.
      key: Key of the claim's design; see `key_of`.
      versions: Versions of Python, jax and haiku.
    """

    claim: str
    arm: str
    seed: int
    numbers: dict[str, float]
    seconds: float
    key: str
    versions: dict[str, str]


def key_of(claim: base.Claim, arm: str) -> str:
    """Computes a key that shows whether a measurement is of the current design.

    It changes with the claim's version and with the differences of its configs from the
    defaults.
    """
    configs = {name: essence(config) for name, config in claim.configs(arm).items()}
    return digest_of([claim.version, configs])[:16]


def versions() -> dict[str, str]:
    """Returns the versions that a measurement was made with."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "haiku": haiku.__version__,
    }


def path_of(folder: Path, name: str) -> Path:
    """Returns the file of a claim's measurements."""
    return folder / f"{name}.jsonl"


def read(path: Path) -> list[Record]:
    """Returns the measurements in a file, in order, or none without a file."""
    return [
        Record(**{name: line[name] for name in Record._fields})
        for line in files.read_lines(path)
        if set(Record._fields) <= set(line)
    ]


def append(path: Path, record: Record) -> None:
    """Writes one measurement at the end of a file, at once."""
    with files.LineWriter(path) as lines:
        lines.append(record._asdict())


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a file of measurements anew."""
    path.unlink(missing_ok=True)
    for record in records:
        append(path, record)


def current(
    claim: base.Claim, records: Iterable[Record]
) -> dict[str, dict[int, Record]]:
    """Returns the newest measurements of the current design by arm and seed."""
    arms = (*base.ARMS, base.PLANTED)
    keys = {arm: key_of(claim, arm) for arm in arms}
    found: dict[str, dict[int, Record]] = {arm: {} for arm in arms}
    for record in records:
        if record.claim == claim.name and keys.get(record.arm) == record.key:
            found[record.arm][record.seed] = record
    return found

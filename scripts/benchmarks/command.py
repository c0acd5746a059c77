"""The command line that the benchmarks share: their flags, tables and samples.

A benchmark is a docstring for `--help` and named cases: functions of the case's name,
and of whether the run is quick, that return its duels.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mha_haiku import commands
from mha_haiku.commands import groups
from mha_haiku.core import checks
from scripts.benchmarks import duel, results

_PACKAGES = ("jax", "dm-haiku", "optax", "flax", "equinox", "torch", "transformers")


class Duel(NamedTuple):
    """One table of a benchmark."""

    case: str
    title: str
    unit: str  # of work
    contenders: tuple[duel.Contender, ...]
    bases: tuple[str, ...]  # the first that takes part is what the others are held to
    promises: tuple[results.Promise, ...]
    retries: int = 2
    with_memory: bool = False  # whether the peak of memory is measured in any case


@dataclasses.dataclass(frozen=True)
class Flags(groups.Group):
    """The flags of a benchmark.

    Args:
      case: One of the named cases; all if left out.
      rounds: Samples of each contender.
      contenders: Names of contenders, with commas between; all if left out.
      quick: Tiny samples, 2 rounds, to test that it runs. Times are void.
      memory: Always measure the peak of memory.
      json: File for all samples.
    """

    case: str = ""
    rounds: int = 7
    contenders: str = ""
    quick: bool = False
    memory: bool = False
    json: str = ""


Cases = Mapping[str, Callable[[str, bool], list[Duel]]]


def command(cases: Cases, description: str) -> Callable[[Sequence[str]], int]:
    """Makes a benchmark's `run`, which takes argv and returns the exit status.

    Args:
      cases: Its cases, by name.
      description: The docstring of the script.
    """
    return commands.program(functools.partial(_main, cases), description)


def contender(name: str, module: str, **options: Any) -> duel.Contender:
    """Returns the contender of a module in scripts/benchmarks/contenders."""
    return duel.Contender(name, f"scripts.benchmarks.contenders.{module}", options)


def _main(cases: Cases, values: Flags) -> int:
    duels = _chosen(values, cases)
    record = {"machine": machine(), "duels": []}
    print("\n".join(record["machine"].values()), flush=True)
    is_faulty = False
    for chosen in duels:
        ended = duel.duel(
            chosen.contenders,
            rounds=min(2, values.rounds) if values.quick else values.rounds,
            retries=0 if values.quick else chosen.retries,
            with_memory=values.memory or chosen.with_memory,
        )
        there = [result.name for result in ended if not result.fault]
        base = next((name for name in (*chosen.bases, *there) if name in there), "")
        lines = results.table(ended, base if chosen.bases else "", chosen.unit)
        if not values.quick:
            lines += [results.verdict(promise, ended) for promise in chosen.promises]
        lines += results.troubles(ended, "-e '.[bench]'")
        print("\n".join(["", chosen.title, *lines]), flush=True)
        is_faulty |= any(result.fault and not result.missing for result in ended)
        record["duels"].append(_record(chosen, ended))
    if values.quick:
        print("\n--quick: these times mean nothing, and no promise is judged by them.")
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(record, indent=1) + "\n")
    return int(is_faulty)


def _chosen(values, cases) -> list[Duel]:
    """Returns the duels that the flags ask for, after checking the flags."""
    with checks.user_mistakes():
        if values.case:
            checks.choice("--case", values.case, tuple(cases))
        checks.positive_integer("--rounds", values.rounds)
    folder = pathlib.Path(values.json).parent
    if not folder.is_dir() or pathlib.Path(values.json or "-").is_dir():
        raise checks.ConfigError(
            f"--json must be a file in a folder that exists, got {values.json!r}."
        )
    chosen = [values.case] if values.case else list(cases)
    duels = [each for name in chosen for each in cases[name](name, values.quick)]
    wanted = [word for word in values.contenders.split(",") if word]
    there = dict.fromkeys(one.name for each in duels for one in each.contenders)
    with checks.user_mistakes():
        for word in wanted:
            checks.choice("--contenders", word, tuple(there))
    if not wanted:
        return duels
    with_them = []
    for each in duels:
        contenders = tuple(one for one in each.contenders if one.name in wanted)
        if contenders:
            with_them.append(each._replace(contenders=contenders))
    return with_them


def machine() -> dict[str, str]:
    """Returns lines about versions and processors, for the head of a result."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} missing")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return {
        "versions": ", ".join(versions),
        "processors": f"{os.cpu_count()} {platform.machine()} processors; load {load} "
        f"(1, 5 and 15 minutes) at {datetime.datetime.now():%Y-%m-%d %H:%M}",
    }


def _record(chosen, ended) -> dict:
    return {
        "case": chosen.case,
        "title": chosen.title,
        "promises": [promise._asdict() for promise in chosen.promises],
        "results": [
            vars(result) | {"samples": [sample._asdict() for sample in result.samples]}
            for result in ended
        ],
    }

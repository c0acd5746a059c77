"""Measures training, attention and start-up beside Haiku, Flax and PyTorch.

Run: python scripts/bench_training.py --case=reverse
     python scripts/bench_training.py --case=attention --contenders=ours,haiku

All contenders build the same model, of as many parameters, and run in turn in processes
of their own; ratios are of times, so that below 1 is faster than the base. Needs
pip install -e '.[bench]'; who is missing is skipped and named. On a machine that does
other work no promise about time is judged.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import command_line  # noqa: E402

_CASES = ("reverse", "length_64", "attention", "start", "map")
_PACKAGES = ("jax", "dm-haiku", "optax", "flax", "torch")

FLAGS = command_line.flag_values(
    {
        "case": (str, "", f"One of {', '.join(_CASES)}; all if left out."),
        "rounds": (int, 7, "Samples of each contender."),
        "contenders": (str, "", "Who takes part, with commas between; else all."),
        "quick": (bool, False, "Tiny samples, 2 rounds: does it run? Times are void."),
        "memory": (bool, False, "Always measure the peak of memory."),
        "json": (str, "", "File for all samples."),
    }
)


def main() -> int:
    from scripts import bench_cases, duel, duel_table

    duels = _chosen(bench_cases)
    record = {"machine": _machine(), "duels": []}
    print("\n".join(record["machine"].values()), flush=True)
    is_faulty = False
    for chosen in duels:
        results = duel.duel(
            chosen.contenders,
            rounds=min(2, FLAGS.rounds) if FLAGS.quick else FLAGS.rounds,
            retries=0 if FLAGS.quick else chosen.retries,
            with_memory=FLAGS.memory or chosen.with_memory,
            say=_say if sys.stderr.isatty() else lambda line: None,
        )
        there = [result.name for result in results if not result.fault]
        base = next((name for name in (*chosen.bases, *there) if name in there), "")
        lines = duel_table.table(results, base if chosen.bases else "", chosen.unit)
        if not FLAGS.quick:
            lines += [duel_table.verdict(each, results) for each in chosen.promises]
        lines += duel_table.troubles(results, "-e '.[bench]'")
        print("\n".join(["", chosen.title, *lines]), flush=True)
        is_faulty |= any(result.fault and not result.missing for result in results)
        record["duels"].append(_record(chosen, results))
    if FLAGS.quick:
        print("\n--quick: these times mean nothing, and no promise is judged by them.")
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps(record, indent=1) + "\n")
    return int(is_faulty)


def _chosen(bench_cases):
    """Returns the duels that the flags ask for, after checking the flags."""
    from mha_haiku import checks

    if FLAGS.case:
        checks.choice("--case", FLAGS.case, _CASES)
    checks.positive_integer("--rounds", FLAGS.rounds)
    folder = pathlib.Path(FLAGS.json).parent
    if not folder.is_dir() or pathlib.Path(FLAGS.json or "-").is_dir():
        raise checks.ConfigError(
            f"--json must be a file in a folder that exists, got {FLAGS.json!r}."
        )
    names = [FLAGS.case] if FLAGS.case else _CASES
    duels = bench_cases.cases(names, is_quick=FLAGS.quick)
    wanted = [word for word in FLAGS.contenders.split(",") if word]
    there = dict.fromkeys(one.name for each in duels for one in each.contenders)
    for word in wanted:
        checks.choice("--contenders", word, tuple(there))
    if not wanted:
        return duels
    chosen = []
    for each in duels:
        contenders = tuple(one for one in each.contenders if one.name in wanted)
        if contenders:
            chosen.append(each._replace(contenders=contenders))
    return chosen


def _machine() -> dict[str, str]:
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


def _record(chosen, results) -> dict:
    return {
        "case": chosen.case,
        "title": chosen.title,
        "promises": [promise._asdict() for promise in chosen.promises],
        "results": [
            vars(result) | {"samples": [sample._asdict() for sample in result.samples]}
            for result in results
        ],
    }


def _say(line: str) -> None:
    print(f"\r{line:60}\r", end="", file=sys.stderr, flush=True)


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

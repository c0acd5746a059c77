"""Injects real faults into runs, and prints how many the runs survived.

Run: python scripts/check_reliability.py
     python scripts/check_reliability.py --quick --only=kills,full_disks

Every run is a process that trains configs/reverse.py for 300 steps, with a checkpoint
every 20; it must end with the same bits as an undisturbed run. The exit status is 1 if
any fault was not survived. Faults that this machine cannot produce are left out, with a
message.
"""

import logging
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mha_haiku import commands  # noqa: E402


class _Line(NamedTuple):
    """A line of the scorecard."""

    title: str
    case: Callable[..., Iterator[str | None]]
    count: int
    quick: int


def _lines() -> dict[str, _Line]:
    from scripts import reliability_faults, reliability_uses

    return {
        "kills": _Line("kill -9 at a random moment", reliability_faults.kills, 50, 3),
        "signals": _Line(
            "SIGTERM, SIGINT: under 5 s, no lost step",
            reliability_faults.signals,
            20,
            2,
        ),
        "exits": _Line(
            "exit or exception right after a save", reliability_faults.exits, 4, 4
        ),
        "corruptions": _Line(
            "bits flipped; files cut, missing, added",
            reliability_faults.corruptions,
            300,
            40,
        ),
        "full_disks": _Line(
            "full disk, then room again", reliability_faults.full_disks, 5, 5
        ),
        "second_writers": _Line(
            "a second writer", reliability_uses.second_writers, 4, 4
        ),
        "changed_configs": _Line(
            "another config or model", reliability_uses.changed_configs, 5, 5
        ),
        "device_counts": _Line(
            "1 to 4 devices and back", reliability_uses.device_counts, 2, 2
        ),
        "not_finite_steps": _Line(
            "gradients not finite, spikes", reliability_uses.not_finite_steps, 4, 4
        ),
    }


def main(*, quick: bool = False, only: str = "", seed: int = 0) -> int:
    """Measures, and prints the scorecard.

    Args:
      quick: Inject only a few faults of each kind, to test that it works.
      only: Names of lines, with commas between; all if left out.
      seed: Seed of the random moments and places of faults.
    """
    import tqdm

    from mha_haiku.core import checks
    from scripts import reliability_subject

    lines = _lines()
    names = only.split(",") if only else list(lines)
    with checks.user_mistakes():
        for name in names:
            checks.choice("--only", name, lines)
    counts = {x: lines[x].quick if quick else lines[x].count for x in names}
    # Deliberate damage needs no warning here.
    logging.getLogger("mha_haiku").setLevel(logging.ERROR)
    scorecard, is_full = [], True
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm.tqdm(total=sum(counts.values()), file=sys.stderr, unit="fault") as bar,
    ):
        subject = reliability_subject.Subject(pathlib.Path(folder))
        for name in names:
            title, case = lines[name].title, lines[name].case
            bar.set_description(name)
            chance = random.Random(f"{seed} {name}")
            good = 0
            try:
                for failure in case(subject, counts[name], chance):
                    good += failure is None
                    bar.update()
                    if failure is not None:
                        bar.write(f"{name}: {failure}", file=sys.stderr)
            except reliability_subject.UnavailableError as why:
                scorecard.append(f"{title:41} left out: {why}")
                continue
            scorecard.append(f"{title:41} {good:3} of {counts[name]}")
            is_full &= good == counts[name]
    print("\n".join(scorecard))
    return 0 if is_full else 1


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

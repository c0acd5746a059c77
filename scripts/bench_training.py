"""Measures training, attention and start-up beside Haiku, Flax and PyTorch.

Run: python scripts/bench_training.py --case=reverse
     python scripts/bench_training.py --case=attention --contenders=ours,haiku

All contenders build the same model, of as many parameters, and run in turn in processes
of their own; ratios are of times, so that below 1 is faster than the base. Needs
pip install -e '.[bench]'; who is missing is skipped and named. On a machine that does
other work no promise about time is judged.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import bench_command  # noqa: E402

_CASES = ("reverse", "length_64", "attention", "start", "map")


def _load_cases() -> bench_command.Cases:
    from scripts import bench_training_cases

    return bench_training_cases.CASES


# Takes argv; returns the exit status.
run = bench_command.command(_CASES, _load_cases, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

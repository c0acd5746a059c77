"""Measures attention, its statistics, its scaling and its compilation.

Run: python scripts/bench_attention.py --case=module_512
     python scripts/bench_attention.py --case=core_8192 --rounds=3

On the CPU in float32. "module" is multi-head attention with its projections, beside
Haiku, Flax, Equinox, jax.nn and PyTorch; "core" is attention of [B, T, H, K] arrays,
beside PyTorch. All run in turn in processes of their own; ratios are of times, so that
below 1 is faster than the base, and memory is its peak above what the process held
before. Needs pip install -e '.[bench]'; who is missing is skipped and named. On a
machine that does other work no promise about time is judged.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import bench_command  # noqa: E402

_CASES = (
    "module_128",
    "module_512",
    "module_2048_causal",
    "module_8192_causal",
    "core_8192",
    "core_32768",
    "statistics_2048",
    "statistics_8192",
    "statistics_32768",
    "scaling",
    "compile",
)


def _load_cases() -> bench_command.Cases:
    from scripts import bench_attention_cases

    return bench_attention_cases.CASES


# Takes argv; returns the exit status.
run = bench_command.command(_CASES, _load_cases, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

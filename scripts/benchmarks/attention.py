"""Measures attention and its statistics.

Run: python scripts/benchmarks/attention.py --case=module_512
     python scripts/benchmarks/attention.py --case=core_8192 --rounds=3

On the CPU in float32. "module" is multi-head attention with its projections, compared
with Haiku and PyTorch; "core" is attention of [B, T, H, K]
arrays, compared with PyTorch. All take turns in separate processes; ratios are of
times, so that below 1 is faster than the base, and memory is the peak above the memory
before. Needs pip install -e '.[bench]'; missing libraries are skipped and named. On a
machine with other load no promise about time is judged.
"""

import pathlib
import sys
from typing import NamedTuple

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402
from scripts.benchmarks.contenders import sizes  # noqa: E402

# Contender: its module in scripts/benchmarks/contenders.
_LIBRARIES = {"ours": "ours", "haiku": "haiku_module", "torch": "torch_eager"}
_CORE = {"ours": "core_attention", "torch": "torch_eager"}

_QUICK = 64  # divisor of long lengths in a quick run

_PEAK = "peak MiB"


class _Module(NamedTuple):
    """A case of the whole module."""

    size: sizes.AttentionSize
    direction: str
    calls: int  # in a sample
    promises: tuple[results.Promise, ...]


_MODULES = {
    "module_512": _Module(
        sizes.AttentionSize(8, 512, 512, 8),
        "forward_and_backward",
        2,
        (results.Promise("ours", 0.68, "haiku"),),
    ),
    "module_2048_causal": _Module(
        sizes.AttentionSize(2, 2048, 512, 8, is_causal=True),
        "forward_and_backward",
        1,
        (
            results.Promise("ours", 0.5, "haiku"),
            results.Promise("ours", 1 / 10, "haiku", _PEAK),
        ),
    ),
    "module_8192_causal": _Module(
        sizes.AttentionSize(1, 8192, 256, 4, is_causal=True),
        "forward",
        1,
        (
            results.Promise("ours", 0.25, "haiku"),
            results.Promise("ours", 1 / 50, "haiku", _PEAK),
        ),
    ),
}

_BOTH = "forward_and_backward"
_FULL = {"is_causal": False}


class _Core(NamedTuple):
    """A case of attention without projections."""

    size: sizes.CoreSize
    calls: int  # in a sample
    shares: dict[str, float]  # of PyTorch's time that are promised, by direction


_CORES = {
    "core_2048": _Core(sizes.CoreSize(2048, 8), 5, {"forward": 1.5, _BOTH: 1.5}),
    "core_2048_full": _Core(sizes.CoreSize(2048, 9, **_FULL), 4, {"forward": 1.3}),
    "core_8192": _Core(sizes.CoreSize(8192, 4), 1, {"forward": 1.45, _BOTH: 1.45}),
    "core_32768": _Core(sizes.CoreSize(32768, 1), 1, {"forward": 1.2, _BOTH: 1.1}),
    "core_512": _Core(sizes.CoreSize(512, 8, batch=8, **_FULL), 6, {"forward": 1.25}),
    "core_512_narrow": _Core(
        sizes.CoreSize(512, 12, 32, batch=8, **_FULL), 6, {"forward": 1.25}
    ),
    "core_128": _Core(
        sizes.CoreSize(128, 8, 32, batch=32, **_FULL), 20, {"forward": 1.4}
    ),
}

# Case: H, and calls in a sample.
_STATISTICS = {
    "statistics_2048": (8, 2),
    "statistics_8192": (4, 1),
    "statistics_32768": (1, 1),
}


def _module(case, is_quick) -> list[command.Duel]:
    size, direction, calls, promises = _MODULES[case]
    if is_quick:
        size, calls = size._replace(batch=1, length=max(32, size.length // _QUICK)), 1
    title = (
        f"{case}: the attention module, {_words(direction)}; batch {size.batch}, "
        f"length {size.length}, width {size.width}, heads {size.heads}"
        f"{', causal' * size.is_causal}; {calls} calls a sample"
    )
    contenders = tuple(
        command.contender(
            name, module, case=direction, size=calls, attention=size._asdict()
        )
        for name, module in _LIBRARIES.items()
    )
    return [_duel(case, title, contenders, "haiku", promises)]


def _core(case, is_quick) -> list[command.Duel]:
    core, calls, shares = _CORES[case]
    if is_quick:
        core, calls = core._replace(length=max(32, core.length // _QUICK), batch=1), 1
    duels = []
    for direction, limit in shares.items():
        contenders = tuple(
            command.contender(
                name, module, case=direction, size=calls, core=core._asdict()
            )
            for name, module in _CORE.items()
        )
        title = f"{case}: attention alone, {_words(direction)}; {_described(core)}"
        promise = results.Promise("ours", limit, "torch")
        duels.append(_duel(case, title, contenders, "torch", (promise,)))
    return duels


def _statistics(case, is_quick) -> list[command.Duel]:
    num_heads, calls = _STATISTICS[case]
    core = sizes.CoreSize(_length(case, is_quick), num_heads)
    calls = 1 if is_quick else calls
    contenders = tuple(
        command.contender(
            use, "map_statistics", use=use, size=calls, core=core._asdict()
        )
        for use in ("forward", "statistics")
    )
    promise = results.Promise("statistics", 1.6, "forward")
    title = (
        f"{case}: attention with all statistics of its map and 32 x 32 of its cells, "
        f"compared with attention alone; {_described(core)}; {calls} calls a sample"
    )
    return [_duel(case, title, contenders, "forward", (promise,))]


def _duel(case, title, contenders, base, promises) -> command.Duel:
    return command.Duel(
        case, title, "call", contenders, (base,), promises, with_memory=True
    )


def _length(case, is_quick) -> int:
    """Returns the length that the name of a case ends with, less in a quick run."""
    return int(case.rpartition("_")[2]) // (_QUICK if is_quick else 1)


def _words(direction) -> str:
    return direction.replace("_", " ")


def _described(core) -> str:
    heads = "head" if core.heads == 1 else "heads"
    return (
        f"batch {core.batch}, length {core.length}, {core.heads} {heads} of "
        f"{core.head_width}{', causal' * core.is_causal}"
    )


CASES = {
    **dict.fromkeys(_MODULES, _module),
    **dict.fromkeys(_CORES, _core),
    **dict.fromkeys(_STATISTICS, _statistics),
}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

"""The traffic of a compiled program between devices, read from its text."""

import math
import re
from collections import defaultdict
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2}
_BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)


class Traffic(NamedTuple):
    """The bytes that one device sends in a call, by the kind of collective."""

    by_kind: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())


def of_program(text: str) -> Traffic:
    """Returns the average traffic of a device, in rings of the participating devices.

    A loop counts as often as it runs if XLA knows that, else once.

    Args:
      text: A compiled program's, as `compiled.as_text()` gives it.
    """
    computations, entry = _computations(text)
    found: dict[str, dict[str, float]] = {}

    def of(name) -> dict[str, float]:
        if name not in found:
            sums: dict[str, float] = defaultdict(float)
            for line in computations.get(name, ()):
                _add(sums, line, of)
            found[name] = sums
        return found[name]

    return Traffic(dict(of(entry)))


def _add(sums, line, of) -> None:
    collective = _COLLECTIVE.search(line)
    if collective:
        kind = collective[2]
        sums[kind] += _size(collective[1]) * _share(kind, line)
        return
    times = 1
    if " while(" in line:
        trips = _TRIPS.search(line)
        times = int(trips[1]) if trips else 1
    for called in _CALLED.findall(line):
        for name in re.findall(r"%([\w.\-]+)", called):
            for kind, size in of(name).items():
                sums[kind] += times * size


def _computations(text) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation, and which one is the program."""
    computations, entry, name = {}, "", ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _size(shape) -> int:
    return sum(
        _BYTES.get(dtype, 4) * math.prod(int(x) for x in sizes.split(",") if x)
        for dtype, sizes in _ARRAY.findall(shape)
    )


def _share(kind, line) -> float:
    """Returns how many times its result's size a device sends."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
        ends = re.findall(r"(\d+),(\d+)", pairs[1])
        return sum(source != target for source, target in ends) / len(ends)
    group = _group_size(line)
    return {
        "all-reduce": 2 * (group - 1) / group,
        "reduce-scatter": group - 1,
    }.get(kind, (group - 1) / group)


def _group_size(line) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    grid = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if grid:
        return int(grid[1])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\].*?\{('\w+'(?:,'\w+')*)\}", line)
    if mesh is None:
        raise ValueError(f"a collective of unknown groups: {line.strip()[:200]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))

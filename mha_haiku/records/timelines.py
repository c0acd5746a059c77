"""Heads over the steps of a training: rows of a table, and alarms.

n records, L layers, H heads of a layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mha_haiku.records.heads import Heads

KEYS = "step,layer,head,site"  # the first columns of the table
LOOKS_BACK = 21  # records that an alarm compares
_LARGE_SCORE = 100.0  # softmax over such scores is one-hot, whatever the inputs are


def rows(heads: Heads, names: Iterable[str]) -> str:
    """Formats a record as lines of a CSV file, one per head; NaN where it has none."""
    empty = np.full(
        (len(heads.layers), max(len(x.heads) for x in heads.layers)), np.nan
    )
    numbers = [heads[x].mean if x in heads else empty for x in names]
    lines = []
    for i, layer in enumerate(heads.layers):
        for h, head in enumerate(layer.heads):
            keys = [heads.step, i, head, layer.name.replace(",", ";")]
            lines.append([*map(str, keys), *(f"{x[i, h]:.6g}" for x in numbers)])
    return "".join(",".join(line) + "\n" for line in lines)


def alarms(records: Sequence[Heads], raised: set[tuple]) -> Iterator[str]:
    """Yields what has gone wrong in the last record; `raised` are alarms so far."""
    last = records[-1]
    records = [x for x in records if x.layers == last.layers]
    steps = np.array([x.step for x in records])
    for name, measure, sentence in _ALARMS:
        if name in last:
            values = np.stack([x[name].mean for x in records])
            measured = measure(steps, values)
            for i, h in np.argwhere(~np.isnan(measured)).tolist():
                number, most = measured[i, h], np.nanmax(values[-1, i], initial=-np.inf)
                words = {"i": i, "h": h, "number": number, "most": most}
                if (sentence, i, h) not in raised:
                    raised.add((sentence, i, h))
                    yield sentence.format(step=last.step, **words)


# What is wrong now, from steps [n] and numbers [n, L, H]: [L, H] or, of a layer,
# [L, 1]; NaN where nothing is.
_Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _crossed(bound: float, side: int) -> _Measure:
    def measure(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
        over = side * (values - bound)
        # A head that begins there, as a sink of a trained model, has not changed.
        return np.where((over[-1] > 0) & (over <= 0).any(0), values[-1], np.nan)

    return measure


def _doubled(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    largest = np.nan_to_num(values, nan=-np.inf).max(-1)
    is_half = (2 * largest <= largest[-1]) & (largest[-1] > _LARGE_SCORE)
    duration = steps[-1] - np.where(is_half, steps[:, None], -np.inf).max(0)
    return np.where(np.isfinite(duration), duration, np.nan)[:, None]


def _lost(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    is_lost = np.isfinite(values).any(0) & ~np.isfinite(values[-1])
    return np.where(is_lost.any(-1), 1, np.nan)[:, None]


_HEAD, _AT = "layer {i}, head {h}: ", " at step {step:,}"
_ALARMS: tuple[tuple[str, _Measure, str], ...] = (
    ("entropy", _crossed(0.05, -1), f"{_HEAD}entropy fell below 0.05 nats{_AT}"),
    ("first_token", _crossed(0.9, 1), f"{_HEAD}over 0.9 on the first token{_AT}"),
    ("padding", _crossed(0.01, 1), f"{_HEAD}over 0.01 on padding{_AT}"),
    (
        "max_score",
        _doubled,
        f"largest score {{most:.3g}} in layer {{i}}{_AT}, doubling every "
        "{number:,.0f} steps",
    ),
    ("entropy", _lost, f"layer {{i}}: entropy is not finite{_AT}"),
)

"""Orders of heads: by their values, or greedily.

L layers, H heads of a layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab.heads import importance, model_runs
from mha_haiku.lab.heads.ablation_values import AblationValue, zero
from mha_haiku.lab.heads.model_runs import Measured


def order(values: np.ndarray) -> list[tuple[int, int]]:
    """Returns (layer, index in the layer) of values `[L, H]`, the smallest first.

    Example:
      >>> mh.heads.order(np.array([[0.3, 0.1], [0.0, 0.2]]))
      [(1, 0), (0, 1), (1, 1), (0, 0)]
    """
    heads = np.argwhere(~np.isnan(values))
    ranks = np.argsort(values[tuple(heads.T)], kind="stable")
    return [tuple(head) for head in heads[ranks].tolist()]


class Step(NamedTuple):
    """A step of a greedy order: the head ablated next, and the metric after it.

    Example:
      >>> first = mh.heads.greedy_order(measured, steps=1)[0]
      >>> round(first.metric, 2)  # the loss without the head that is needed least
      0.02
    """

    head: tuple[int, int]  # (layer, index in the layer)
    metric: float  # mean over the examples, with this and all earlier heads ablated


def greedy_order(
    subject: Measured,
    *,
    ablation_value: AblationValue = zero,
    steps: int | None = None,
    worst: float | None = None,
    tries: int | None = None,
    progress: Callable = iter,
) -> list[Step]:
    """Ablates heads one after the other, always the one that harms the metric least.

    Unlike an order by single ablations, it keeps one of two heads that do the same.

    Args:
      steps: The largest number of heads to ablate. Defaults to all.
      worst: End before the mean metric exceeds this value. Unlimited by default.
      tries: The number of heads to try at a time, starting with those that harmed least
        when last tried. A step ends when the remaining heads all harmed more when last
        tried than the best head does now, as more ablations seldom make a head
        harmless. By default a step tries all remaining heads.
      progress: Wraps the range of steps, as `tqdm.tqdm` does.

    Raises:
      ValueError: If `steps` or `tries` is below 1, or the metric is not finite,
        whichever head is ablated next.

    Example:
      >>> steps = mh.heads.greedy_order(measured, worst=1.0)
      >>> sorted(step.head for step in steps)  # the heads that are not needed
      [(0, 1), (1, 1)]
    """
    for name, value in (("steps", steps), ("tries", tries)):
        if value is not None:
            checks.positive_integer(name, value)
    example = next(iter(subject.batches))
    numbers = model_runs.num_heads(subject.model, subject.params, example)
    exists = model_runs.exists(numbers)
    gates = exists.astype(np.float32)
    latest = np.where(exists, -np.inf, np.inf)  # the metric when a head was last tried
    order = []
    for _ in progress(range(min(steps or exists.size, int(exists.sum())))):
        candidates = np.argwhere((gates > 0) & exists)
        last = latest[tuple(candidates.T)]
        likeliest = np.argsort(last, kind="stable")
        least, best = np.inf, None
        for start in range(0, len(candidates), tries or len(candidates)):
            chunk = likeliest[start : start + tries] if tries else likeliest
            if last[chunk[0]] > least:
                break
            tried = candidates[np.sort(chunk)]
            metric = _one_more_ablated(subject, gates, tried, ablation_value)
            latest[tuple(tried.T)] = metric
            if metric.min() < least:
                layer, head = tried[metric.argmin()].tolist()
                least, best = metric.min(), (layer, head)
        if worst is not None and least > worst:
            break
        if best is None:
            raise ValueError("metric must be finite when another head is ablated.")
        gates[best] = 0
        order.append(Step(best, float(least)))
    return order


# The number of patterns of gates that a step of the greedy order runs in one call:
# constant, so that all steps use the same compiled program.
_PATTERNS = 16


def _one_more_ablated(
    subject: Measured,
    gates: np.ndarray,
    heads: np.ndarray,
    ablation_value: AblationValue,
) -> np.ndarray:
    """Computes the mean metric `[P]` with one more of the heads `[P, 2]` ablated."""
    metrics, options = [], {"ablation_value": ablation_value}
    size = min(_PATTERNS, int(np.size(gates)))
    for start in range(0, len(heads), size):
        chunk = heads[start : start + size]
        patterns = np.repeat(gates[None], size, axis=0)
        patterns[(np.arange(len(chunk)), *chunk.T)] = 0
        metric = importance.gated_metric(subject, patterns, **options)
        metrics.append(metric.mean(0)[: len(chunk)])
    return np.concatenate(metrics)

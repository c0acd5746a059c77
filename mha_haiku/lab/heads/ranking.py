"""Orders of heads: which goes first, alone, in pairs, or one after the other.

L layers, H heads of a layer, P pairs of heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mha_haiku.core import checks
from mha_haiku.lab.heads import importance, running
from mha_haiku.lab.heads.ablation_values import AblationValue, zero


def order(values: np.ndarray) -> list[tuple[int, int]]:
    """Returns (layer, index in the layer) of values `[L, H]`, the least first.

    Example:
      >>> mh.heads.order(np.array([[0.3, 0.1], [0.0, 0.2]]))
      [(1, 0), (0, 1), (1, 1), (0, 0)]
    """
    heads = np.argwhere(~np.isnan(values))
    ranks = np.argsort(values[tuple(heads.T)], kind="stable")
    return [tuple(head) for head in heads[ranks].tolist()]


def pairs(
    subject: running.Measured, *, ablation_value: AblationValue = zero
) -> np.ndarray:
    """Measures the mean change of the metric when two heads are ablated.

    It is `[L, H, L, H]` float64, symmetric; on the diagonal one head is ablated.

    Example:
      >>> change = mh.heads.pairs(measured)
      >>> change[0, 0, :, 0].round(1)  # of head (0, 0): alone, and with head (1, 0)
      array([3., 3.])
    """
    exists = _existing(subject)
    heads = np.argwhere(exists)
    firsts, seconds = np.triu_indices(len(heads))
    gates = np.ones((1 + len(firsts), *exists.shape), np.float32)
    rows = np.arange(1, len(gates))
    for which in (firsts, seconds):
        gates[(rows, *heads[which].T)] = 0
    metric = importance.gated_metric(
        subject, gates, ablation_value=ablation_value
    ).mean(0)
    change = np.full((*exists.shape, *exists.shape), np.nan)
    for one, other in ((firsts, seconds), (seconds, firsts)):
        change[(*heads[one].T, *heads[other].T)] = metric[1:] - metric[0]
    return change


class Step(NamedTuple):
    """A step of a greedy order: the head that is ablated next, and the metric then.

    Example:
      >>> first = mh.heads.greedy_order(measured, steps=1)[0]
      >>> round(first.metric, 2)  # the loss without the head that is needed least
      0.02
    """

    head: tuple[int, int]  # (layer, index in the layer)
    metric: float  # mean over the examples, with it and all before it ablated


def greedy_order(
    subject: running.Measured,
    *,
    ablation_value: AblationValue = zero,
    steps: int | None = None,
    worst: float | None = None,
    tries: int | None = None,
    progress: Callable = iter,
) -> list[Step]:
    """Ablates head after head, each time the one that harms the metric least.

    Unlike an order by single ablations, it keeps one of two heads that do the same.

    Args:
      subject: The model to measure.
      ablation_value: Values that ablated heads pass on.
      steps: Number of heads to ablate at most; None: all.
      worst: The order ends before the mean metric is above this; None: it does not.
      tries: Number of heads that a step tries at a time, first those that harmed least
        when they were tried last. It ends where all others harmed more then than the
        best does now: ablating more seldom makes a head harmless. None: each step tries
        all remaining heads.
      progress: Wraps the range of steps, as `tqdm.tqdm` does.

    Raises:
      ValueError: If `steps` or `tries` is below 1.

    Example:
      >>> steps = mh.heads.greedy_order(measured, worst=1.0)
      >>> sorted(step.head for step in steps)  # the heads that are not needed
      [(0, 1), (1, 1)]
    """
    for name, value in (("steps", steps), ("tries", tries)):
        if value is not None:
            checks.positive_integer(name, value)
    exists = _existing(subject)
    gates = exists.astype(np.float32)
    found = np.where(exists, -np.inf, np.inf)  # the metric when a head was tried last
    order = []
    for _ in progress(range(min(steps or exists.size, int(exists.sum())))):
        candidates = np.argwhere((gates > 0) & exists)
        last = found[tuple(candidates.T)]
        likeliest = np.argsort(last, kind="stable")
        least, best = np.inf, None
        for start in range(0, len(candidates), tries or len(candidates)):
            chunk = likeliest[start : start + tries] if tries else likeliest
            if last[chunk[0]] > least:
                break
            tried = candidates[np.sort(chunk)]
            metric = _one_more_ablated(subject, gates, tried, ablation_value)
            found[tuple(tried.T)] = metric
            if metric.min() < least:
                least, best = metric.min(), tuple(tried[metric.argmin()].tolist())
        if worst is not None and least > worst:
            break
        gates[best] = 0
        order.append(Step(best, float(least)))
    return order


# Patterns of gates that a step of the greedy order measures in one call: a constant, so
# that one compiled program serves all steps.
_PATTERNS = 16


def _one_more_ablated(subject, gates, heads, ablation_value) -> np.ndarray:
    """Measures the mean metric `[P]` with one more of the heads `[P, 2]` ablated."""
    found = []
    size = min(_PATTERNS, int(np.size(gates)))
    for start in range(0, len(heads), size):
        own = heads[start : start + size]
        patterns = np.repeat(gates[None], size, axis=0)
        patterns[(np.arange(len(own)), *own.T)] = 0
        metric = importance.gated_metric(
            subject, patterns, ablation_value=ablation_value
        )
        found.append(metric.mean(0)[: len(own)])
    return np.concatenate(found)


def _existing(subject) -> np.ndarray:
    """Marks the heads that each layer has, `[L, H]` booleans."""
    example = next(iter(subject.batches))
    return running.exists(running.num_heads(subject.model, subject.params, example))

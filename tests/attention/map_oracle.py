"""What is asked of attention maps, computed once more from whole float64 matrices.

`B...` batch axes, H heads, T query positions, S key positions.
"""

import numpy as np


def statistics_of(
    weights: np.ndarray,
    *,
    query_offset: int = 0,
    counted: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    key_tokens: np.ndarray | None = None,
    unseen: np.ndarray | None = None,
    per_query: bool = False,
) -> dict[str, np.ndarray]:
    """Returns the statistics of weights `[B..., H, T, S]` by name."""
    counts = weights.sum(-1) > 0
    if counted is not None:
        counts = counts & counted[..., None, :]
    weights = np.where(counts[..., None], weights, 0)
    num_queries, num_keys = weights.shape[-2:]
    t = query_offset + np.arange(num_queries)[:, None]
    s = np.arange(num_keys)[None, :]
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    mass = lambda where: (weights * where).sum(-1)  # noqa: E731
    rows = {
        "entropy": entropy,
        "perplexity": np.exp(entropy),
        "squared_weights": (weights**2).sum(-1),
        "largest_weight": weights.max(-1),
        "distance": mass(np.abs(t - s)),
        "first_position": mass(s == 0),
    }
    for name, offset in (("previous", -1), ("same", 0), ("next", 1)):
        rows[f"{name}_position"] = mass(s == t + offset)
        largest = weights == weights.max(-1, keepdims=True)
        rows[f"largest_at_{name}"] = (largest & (s == t + offset)).any(-1)
    if positions is not None:
        rows["chosen_positions"] = mass(positions[..., None, None, :])
    if tokens is not None:
        key_tokens = tokens if key_tokens is None else key_tokens
        own = tokens[..., None, :, None]
        rows["same_token"] = mass(key_tokens[..., None, None, :] == own)
        before = np.roll(key_tokens, 1, -1)[..., None, None, :]
        rows["induction"] = mass((before == own) & (s > 0) & (s <= t))
    squared = mass((t - s) ** 2)
    count = counts.sum(-1)
    if per_query:
        found = {name: np.where(counts, row, 0) for name, row in rows.items()}
        found["rms_distance"] = np.sqrt(np.where(counts, squared, 0))
    else:
        mean = lambda row: np.where(counts, row, 0).sum(-1) / np.maximum(count, 1)  # noqa: E731
        found = {name: mean(row) for name, row in rows.items()}
        found["rms_distance"] = np.sqrt(mean(squared))
    received = weights.sum(-2)
    if unseen is None:
        unseen = np.zeros(num_keys, bool)
    unseen = np.broadcast_to(unseen, received.shape)
    gini = np.zeros(received.shape[:-1])
    for index in np.ndindex(gini.shape):
        amounts = received[index][~unseen[index]]
        if amounts.sum() > 0:
            differences = np.abs(amounts[:, None] - amounts[None, :]).sum()
            gini[index] = differences / (2 * len(amounts) * amounts.sum())
    return found | {"received": received, "received_gini": gini, "num_queries": count}


def pooled_of(weights: np.ndarray, row_edges, column_edges) -> np.ndarray:
    """Returns the mean mass of each cell, `[B..., H, P, Q]`."""
    counts = weights.sum(-1) > 0
    cells = np.zeros((*weights.shape[:-2], len(row_edges) - 1, len(column_edges) - 1))
    for i, j in np.ndindex(cells.shape[-2:]):
        rows = slice(row_edges[i], row_edges[i + 1])
        columns = slice(column_edges[j], column_edges[j + 1])
        count = np.maximum(counts[..., rows].sum(-1), 1)
        cells[..., i, j] = weights[..., rows, columns].sum((-1, -2)) / count
    return cells


def divergence_of(weights: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the mean Jensen-Shannon divergences, `[B..., H, H']` in nats."""

    def relative_entropy(p, q):
        safe_p, safe_q = np.where(p > 0, p, 1), np.where(p > 0, q, 1)
        return (p * np.log(safe_p / safe_q)).sum(-1)

    p, q = weights[..., :, None, :, :], others[..., None, :, :, :]
    middle = (p + q) / 2
    of_rows = (relative_entropy(p, middle) + relative_entropy(q, middle)) / 2
    counts = (p.sum(-1) > 0) & (q.sum(-1) > 0)
    return np.where(counts, of_rows, 0).sum(-1) / np.maximum(counts.sum(-1), 1)

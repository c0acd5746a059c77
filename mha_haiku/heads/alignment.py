"""How well cross-attention keeps to an alignment that is known.

N examples, H heads, T target and S source positions.
"""

import numpy as np

UNIT = "share"


def label(name: str) -> str:
    """Returns what the share of an alignment is, by its name in `Task.alignments`."""
    which = (
        "those that have an aligned key" if name == "aligned" else f"the {name} ones"
    )
    return f"rows whose largest weight is aligned, of {which}"


def scores(weights: np.ndarray, alignment: np.ndarray) -> np.ndarray:
    """Returns how often a head looks where it should.

    That is the share of the rows with an aligned key whose largest weight lies on one.

    Args:
      weights: `[N, H, T, S]`.
      alignment: Booleans `[N, T, S]`, true where a row should look.

    Returns:
      `[N, H]` in [0, 1]; NaN in an example without an aligned row.
    """
    aligned = np.asarray(alignment, bool)[:, None]
    largest = np.asarray(weights).argmax(-1)[..., None]
    broad = np.broadcast_to(aligned, (*largest.shape[:3], aligned.shape[-1]))
    is_right = np.take_along_axis(broad, largest, -1)[..., 0]
    has_key = aligned.any(-1)
    count = has_key.sum(-1)
    right = (is_right & has_key).sum(-1)
    return np.where(count > 0, right / np.maximum(count, 1), np.nan)

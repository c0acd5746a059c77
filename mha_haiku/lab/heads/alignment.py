"""The share of cross-attention that follows a known alignment.

N examples, H heads, T target and S source positions.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training import tasks

Array = jax.Array | np.ndarray

UNIT = "share"

# From one example, on the host, to the source positions that its target rows should
# look at, booleans `[T, S]` by name, or {} if not known; `Task.alignments`, for
# example.
Align = Callable[[tasks.Example], Mapping[str, np.ndarray]]


def label(name: str) -> str:
    """Describes the share of an alignment, by its name in `Task.alignments`."""
    if name == "on_image":
        return "attention of words on image tokens"
    which = "rows that have an aligned key" if name == "aligned" else f"{name} rows"
    return f"share of {which} whose largest weight is aligned"


def of_batch(align: Align, example: tasks.Example) -> dict[str, np.ndarray]:
    """Finds where the rows of a batch should look, booleans `[N, T, S]` by name.

    Rows of examples without a known alignment are False. The batch is on the host.
    """
    if example.decoder_inputs is None:
        return {}
    rows = range(len(example.inputs))
    of_rows = [align(jax.tree.map(operator.itemgetter(i), example)) for i in rows]
    shape = example.decoder_inputs.shape[1], example.inputs.shape[1]
    names = dict.fromkeys(name for row in of_rows for name in row)
    aligned = {name: np.zeros((len(of_rows), *shape), bool) for name in names}
    for i, row in enumerate(of_rows):
        for name, x in row.items():  # a user's examples may be shorter than the task's
            x = x[: shape[0], : shape[1]]
            aligned[name][i, : x.shape[0], : x.shape[1]] = x
    return aligned


def shares(places: Array, alignment: Array) -> Array:
    """Computes the share of rows with an aligned key that look at such a key.

    `places` `[N, H, T]` are the keys with the largest weight of each row, negative for
    a row that sees nothing; `alignment` `[N, T, S]` is true where a row should look.
    The result is `[N, H]` in [0, 1], NaN for an example without an aligned row.
    """
    xnp: Any = jnp if isinstance(places, jax.Array) else np
    places = xnp.asarray(places)[..., None]
    aligned = xnp.asarray(alignment, bool)[:, None]
    broad = xnp.broadcast_to(aligned, (*places.shape[:3], aligned.shape[-1]))
    is_right = (xnp.take_along_axis(broad, places, -1) & (places >= 0))[..., 0]
    count = aligned.any(-1).sum(-1)
    return xnp.where(count > 0, is_right.sum(-1) / xnp.maximum(count, 1), xnp.nan)


def evidence(aligned: Mapping[str, Array]) -> dict[str, Array]:
    """Makes the evidence of alignment for `heads.role_evidence` from `shares`."""
    if "aligned" not in aligned:
        return {}
    share = aligned["aligned"]
    xnp = jnp if isinstance(share, jax.Array) else np
    return {"aligned": xnp.stack([xnp.nan_to_num(share), ~xnp.isnan(share)], -1)}

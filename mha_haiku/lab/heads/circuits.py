"""Circuits of heads from their weights alone: where a head looks, and what it copies.

D width, H heads, K query/key and V value size per head, N tokens, C classes. Vectors
are rows. A head's score of a query vector x and a key vector y is `x QK y^T` (times its
scale), and it adds `y OV` to the residual stream for what it looks at: two matrices of
low rank say what it does. Everything is float64 NumPy, and works on small factors: no
`[N, N]` array is made.

Source: Elhage et al. 2021, https://transformer-circuits.pub/2021/framework/index.html.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab.heads import head_weights
from mha_haiku.lab.heads.head_weights import HeadWeights

KINDS = ("q", "k", "v")  # through which a head reads what another has written


def ov(weights: HeadWeights) -> np.ndarray:
    """Computes the OV circuit, `[D, D]`, from a vector looked at to the output."""
    return weights.value @ weights.output


def copying_score(
    weights: HeadWeights, embedding: np.ndarray, unembedding: np.ndarray
) -> np.ndarray:
    """Divides the sum of the OV circuit's eigenvalues by the sum of their sizes.

    In [-1, 1]: 1 where the head copies, -1 where it takes away what it looks at, about
    0 for random weights. With the ends, `[N, D]` of `token_embedding` and `[D, N]` of
    `unembedding`, it is of the circuit from tokens to logits: a positive eigenvalue is
    a direction of tokens that makes the same tokens likelier. With weights of several
    heads the result has their leading axis.

    Raises:
      ValueError: If the ends are not of the same tokens.

    Source: Elhage et al. 2021, "Detecting copying behavior".
    """
    if embedding.shape != unembedding.shape[::-1]:
        raise ValueError(
            "embedding [N, D] and unembedding [D, N] must be of the same tokens, "
            f"got shapes {embedding.shape} and {unembedding.shape}."
        )
    inner = unembedding @ embedding
    # A B and B A share their nonzero eigenvalues, and B A is V x V instead of N x N.
    return _positivity(weights.output @ inner @ weights.value)


def matching_score(
    weights: HeadWeights,
    embedding: np.ndarray,
    *,
    earlier: HeadWeights | None = None,
) -> np.ndarray:
    """Computes `copying_score` of the QK circuit: 1 if a head seeks equal tokens.

    `embedding` `[N, D]` has the tokens as both sides read them. With an earlier head,
    of a layer below, keys are made of what that head has written: 1 where the head
    looks for positions at which the earlier head has read the query's token, which is
    induction where that head looks one back.

    Source: Elhage et al. 2021, "Checking the mechanistic theory".
    """
    inner = embedding.T @ embedding
    if earlier is not None:  # keys are tokens, through OV of the earlier head
        inner = ov(earlier).mT @ inner
    # E Q K^T (E OV)^T, and K^T OV^T E^T E Q of the same eigenvalues.
    return _positivity(weights.key.mT @ inner @ weights.query)


def composition(kind: str, earlier: HeadWeights, later: HeadWeights) -> np.ndarray:
    """Measures how much of a head's input another head has written, in [0, 1].

    The Frobenius norm of the product of the two circuits over the product of their
    norms: of `OV` of the earlier head with `QK` (kind "q"), its transpose ("k"), or
    `OV` ("v") of the later head. Random weights do not give 0, but about one over the
    root of D: compare heads with each other. The result is `[H, H']`, without an axis
    for a single head; 0 for one that writes nothing.

    Raises:
      ValueError: If there is no such kind.

    Source: Elhage et al. 2021, "Three kinds of composition".
    """
    checks.choice("kind", kind, KINDS)
    read, rest = {
        "q": (later.query, later.key),
        "k": (later.key, later.query),
        "v": (later.value, later.output.mT),
    }[kind]
    # |X M Y^T| = |R M S^T| with X = Q R and Y = P S: small matrices instead of D x D.
    written = np.linalg.qr(earlier.value, mode="r") @ earlier.output  # [H.., V, D]
    taken = read @ np.linalg.qr(rest, mode="r").mT  # [H'.., D, K]
    both = np.einsum(
        "gvd,hdk->ghvk",
        written.reshape(-1, *written.shape[-2:]),
        taken.reshape(-1, *taken.shape[-2:]),
        optimize=True,
    )
    norms = map(np.linalg.matrix_norm, (written, taken))
    sizes = np.multiply.outer(*norms)
    found = np.linalg.matrix_norm(both).reshape(sizes.shape)
    return found / np.where(sizes > 0, sizes, 1)


def compositions(model: models.Model, params: Any, kind: str) -> np.ndarray:
    """Computes `composition` of all heads with all heads that can read them.

    The result is `[P, H, P, H]` for P
    attention parts, the earlier head first; NaN where the second does not read the
    first without other heads in between.

    Raises:
      ValueError: If there is no such kind, or the model has no config.
    """
    checks.choice("kind", kind, KINDS)
    places = models.heads_of_layers(head_weights.config_of(model))
    kinds = [place.kind for place in places]
    widest = max(len(place.names) for place in places)
    result = np.full((len(places), widest) * 2, np.nan)
    own = {
        i: head_weights.weights(model, params, i)
        for i, place in enumerate(places)
        if place.names
    }
    for i, earlier in own.items():
        for j, later in own.items():
            if kind in kinds_read(kinds, i, j):
                found = composition(kind, earlier, later)
                result[i, : found.shape[0], j, : found.shape[1]] = found
    return result


def kinds_read(kinds: Sequence[str], sender: int, receiver: int) -> str:
    """Finds through which of q, k and v heads of one part read heads of another.

    "" where they do not without other heads in between, as in a layer below. `kinds`
    has the kind of every part, "" where there is one kind.
    """
    first, second = kinds[sender], kinds[receiver]
    if first == "encoder" and second == "cross":
        return "kv"
    if "encoder" in (first, second) and first != second:
        return ""
    # Within a layer of a decoder, cross-attention comes second.
    at, after = (
        (sum(kind == kinds[i] for kind in kinds[:i]), kinds[i] == "cross")
        for i in (sender, receiver)
    )
    if after <= at:
        return ""
    return "q" if second == "cross" else "qkv"


def _positivity(matrix: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvals(matrix)
    sizes = np.abs(values).sum(-1)
    return values.sum(-1).real / np.where(sizes > 0, sizes, 1)

"""QK and OV circuits of heads, from their weights.

D width, H heads, K query/key and V value size per head, N tokens, C classes. Vectors
are rows. A head's score of a query vector x and a key vector y is `x QK y^T` (times its
scale), and it adds `y OV` to the residual stream for a key it looks at: two matrices of
low rank describe the head. Everything is float64 NumPy, and works on small factors: no
`[N, N]` array is made.

Source: Elhage et al. 2021, https://transformer-circuits.pub/2021/framework/index.html.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab.heads import head_weights
from mha_haiku.lab.heads.head_weights import HeadWeights

KINDS = ("q", "k", "v")  # how a head reads what another wrote


def ov(weights: HeadWeights) -> np.ndarray:
    """Computes the OV circuit, `[D, D]`, from an attended vector to the output."""
    return weights.value @ weights.output


def copying_score(
    weights: HeadWeights, embedding: np.ndarray, unembedding: np.ndarray
) -> np.ndarray:
    """Divides the sum of the OV circuit's eigenvalues by the sum of their magnitudes.

    In [-1, 1]: 1 if the head copies, -1 if it subtracts what it looks at, about 0 for
    random weights. The circuit goes from tokens to logits, through `token_embedding`
    `[N, D]` and `unembedding` `[D, N]`: a positive eigenvalue is a direction of tokens
    that makes the same tokens likelier. With weights of several heads the result has
    their leading axis.

    Raises:
      ValueError: If embedding and unembedding have different tokens.

    Source: Elhage et al. 2021, "Detecting copying behavior".
    """
    if embedding.shape != unembedding.shape[::-1]:
        raise ValueError(
            "embedding [N, D] and unembedding [D, N] must have the same tokens, "
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
    from a lower layer, keys are computed from what that head wrote: 1 if the head looks
    for positions at which the earlier head read the query's token, which is induction
    if that head looks one back.

    Source: Elhage et al. 2021, "Checking the mechanistic theory".
    """
    inner = embedding.T @ embedding
    if earlier is not None:  # keys are tokens, through the OV of the earlier head
        inner = ov(earlier).mT @ inner
    # E Q K^T (E OV)^T has the same eigenvalues as K^T OV^T E^T E Q.
    return _positivity(weights.key.mT @ inner @ weights.query)


def composition(kind: str, earlier: HeadWeights, later: HeadWeights) -> np.ndarray:
    """Computes how much of a head's input another head wrote, in [0, 1].

    The Frobenius norm of the product of the two circuits over the product of their
    norms: of `OV` of the earlier head with `QK` (kind "q"), its transpose ("k"), or
    `OV` ("v") of the later head. Random weights do not give 0, but about one over the
    square root of D: compare heads with each other. The result is `[H, H']`, without
    the axis of a single head; 0 for a head that writes nothing.

    Raises:
      ValueError: If `kind` is unknown.

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
    of_rest: Any = np.linalg.qr(rest, mode="r")
    taken = read @ of_rest.mT  # [H'.., D, K]
    both = np.einsum(
        "gvd,hdk->ghvk",
        written.reshape(-1, *written.shape[-2:]),
        taken.reshape(-1, *taken.shape[-2:]),
        optimize=True,
    )
    norms = map(np.linalg.matrix_norm, (written, taken))
    sizes = np.multiply.outer(*norms)
    products = np.linalg.matrix_norm(both).reshape(sizes.shape)
    return products / np.where(sizes > 0, sizes, 1)


def compositions(model: models.Model, params: Any, kind: str) -> np.ndarray:
    """Computes the `composition` of all heads with all heads that can read them.

    The result is `[P, H, P, H]` for P attention parts, the earlier head first; NaN
    where the second does not read the first directly, without other heads in between.

    Raises:
      ValueError: If `kind` is unknown, or the model has no config.
    """
    checks.choice("kind", kind, KINDS)
    places = models.heads_of_layers(head_weights.config_of(model))
    kinds = [place.kind for place in places]
    widest = max(len(place.names) for place in places)
    result = np.full((len(places), widest) * 2, np.nan)
    weights = {
        i: head_weights.weights(model, params, i)
        for i, place in enumerate(places)
        if place.names
    }
    for i, earlier in weights.items():
        for j, later in weights.items():
            if kind in kinds_read(kinds, i, j):
                shares = composition(kind, earlier, later)
                result[i, : shares.shape[0], j, : shares.shape[1]] = shares
    return result


def kinds_read(kinds: Sequence[str], sender: int, receiver: int) -> str:
    """Returns which of q, k and v of one part's heads read the heads of another.

    "" if none do directly, without other heads in between, as for a lower layer.
    `kinds` has the kind of every part, "" if there is only one kind.
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

"""The matrices of heads, and their QK and OV circuits.

D width, H heads, G key/value heads, K query/key and V value size per head. Vectors are
rows: a head's query is `x @ query + query_bias`, and its output `z` `[V]` is written to
the residual stream as `z @ output`. A head's score of a query vector x and a key vector
y is `x QK y^T` (times its scale), and it adds `y OV` to the residual stream for a key
it looks at: two matrices of low rank describe the head.
Everything is float64 NumPy, and works on small factors.

Source: Elhage et al. 2021, https://transformer-circuits.pub/2021/framework/index.html.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.core.modules import anatomy
from mha_haiku.lab.heads import model_runs

KINDS = ("q", "k", "v")  # how a head reads what another wrote


class HeadWeights(NamedTuple):
    """The weights of a head, or of all heads of a layer with a leading axis H.

    The bias of the output belongs to the layer, not to a head.
    """

    query: np.ndarray  # `[D, K]`, from the head's input to its queries
    key: np.ndarray  # `[D, K]`
    value: np.ndarray  # `[D, V]`
    output: np.ndarray  # `[V, D]`, from its output to the residual stream
    query_bias: np.ndarray  # `[K]`; zeros if the model has no biases
    key_bias: np.ndarray  # `[K]`
    value_bias: np.ndarray  # `[V]`


def weights(
    model: models.Model,
    params: Any,
    layer: int,
    head: int | None = None,
) -> HeadWeights:
    """Extracts the four matrices of one head from the parameters, float64.

    Grouped heads have the key and value of their group. Later operations (rotary
    positions, norms of queries and keys, smeared keys, the score's scale and
    sinks and gates) are not included.

    Args:
      model: A model from `models.build` or `interop.load`.
      params: Its parameters, looped or stacked, pruned or not.
      layer: The attention part.
      head: The index of the head in the layer, as for gates. Defaults to all H heads.

    Raises:
      ValueError: If there is no such layer or head.

    Source: Elhage et al. 2021, "Virtual weights and the residual stream",
    https://transformer-circuits.pub/2021/framework/index.html.
    """
    config = model_runs.config_of(model)
    parts = models.heads_of_layers(config)
    place = parts[checks.integer_in("layer", layer, 0, len(parts) - 1)]
    num_heads, num_groups = len(place.names), place.num_key_value_heads
    if not num_heads:
        raise ValueError(f"{place.label} has no heads: all are pruned.")
    groups = place.groups or [h * num_groups // num_heads for h in range(num_heads)]
    maps = []
    for name in ("query", "key", "value"):
        leaves = _leaves_of(params, f"{place.path}/{name}")
        count = num_heads if name == "query" else num_groups
        w = leaves["w"].reshape(len(leaves["w"]), count, -1).swapaxes(0, 1)
        b = leaves.get("b", np.zeros(w.shape[0] * w.shape[2])).reshape(count, -1)
        if name != "query":
            w, b = w[np.asarray(groups)], b[np.asarray(groups)]
        maps.append((w, b))
    output = _leaves_of(params, f"{place.path}/linear")["w"]
    output = output.reshape(num_heads, -1, output.shape[-1])
    (query, key, value), biases = zip(*maps, strict=True)
    result = HeadWeights(query, key, value, output, *biases)
    if head is None:
        return result
    checks.integer_in("head", head, 0, num_heads - 1)
    return HeadWeights(*(x[head] for x in result))


def check_logits(config: models.ModelConfig) -> None:
    """Raises ValueError unless logits are linear in the last layer's output."""
    output = config.output
    if output.hidden is not None or not output.logits:
        raise ValueError(
            "the model must have logits that are linear in its last vectors, got "
            f"output.hidden = {output.hidden!r} and output.logits = {output.logits}."
        )


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
    through = read @ of_rest.mT  # [H'.., D, K]
    both = (x.reshape(-1, *x.shape[-2:]) for x in (written, through))
    both = np.einsum("gvd,hdk->ghvk", *both, optimize=True)
    norms = map(np.linalg.matrix_norm, (written, through))
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
    places = models.heads_of_layers(model_runs.config_of(model))
    kinds = [place.kind for place in places]
    widest = max(len(place.names) for place in places)
    result = np.full((len(places), widest) * 2, np.nan)
    of_parts = {i: weights(model, params, i) for i, x in enumerate(places) if x.names}
    for i, earlier in of_parts.items():
        for j, later in of_parts.items():
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


def _leaves_of(params: Any, module: str) -> dict[str, np.ndarray]:
    """Returns a module's arrays by name, in float64, or {}; layers may be stacked."""
    leaves, layer = params.get(module), anatomy.layer_of(module)
    if leaves is None and layer is not None:
        stacked = params.get(str(layer._replace(index=None)), {})
        leaves = {name: x[layer.index] for name, x in stacked.items()}
    return {name: np.asarray(x, np.float64) for name, x in (leaves or {}).items()}

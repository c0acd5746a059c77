"""Independent float64 NumPy versions of the package's functions, for all tests.

Each oracle is written in another way than the package: pair by pair, or from whole
matrices. First attention itself, then what is asked of attention maps, then the parts
of a layer and whole models.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads, K
query/key size, V value size per head and D model width. Parameters are as in one of
our modules: `{"query": {"w": ..., "b": ...}, ...}`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Reference(NamedTuple):
    """The expected result of attention, float64."""

    values: np.ndarray  # [B..., T, H, V]
    logsumexp: np.ndarray  # [B..., H, T]
    weights: np.ndarray  # [B..., H, T, S]


def unseen_and_masked(mask, num_queries, num_keys, first_query=0):
    """Returns what a mask says of itself: keys unseen `[B..., (H,) S]`, queries masked.

    No oracle, but what tests compare with one, in the shape of `mask.array`.
    """
    rows = range(first_query, first_query + num_queries)
    array, aligned = mask.tile(rows, range(num_keys)), mask.aligned(mask.batch_ndim())
    sizes = num_queries, num_keys, first_query

    def flags(found, wanted, size):
        found = np.full(1, not size) if found is None else np.asarray(found)
        if not aligned.has_heads() and found.ndim > 1:
            found = found.squeeze(-2)
        return np.broadcast_to(found, wanted.shape)

    return (
        flags(aligned.unseen_keys(*sizes), array.any(-2), num_queries),
        flags(aligned.fully_masked(*sizes), array.any(-1), num_keys),
    )


def dot_product(query, key, head, *, scale=None, soft_cap=None):
    """Returns the scaled dot product of two vectors `[K]`, smoothly capped."""
    del head
    scale = 1 / math.sqrt(len(query)) if scale is None else scale
    product = scale * float(query @ key)
    return product if soft_cap is None else soft_cap * math.tanh(product / soft_cap)


def log_sigmoid(query, key, head, *, scale=None, offset=0.0):
    """Returns the log of the sigmoid of a scaled dot product plus an offset."""
    inside = dot_product(query, key, head, scale=scale) + offset
    return -math.log(1 + math.exp(-inside))


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    score: Callable = dot_product,
    sinks: np.ndarray | None = None,
    is_normalized: bool = True,
    tap: Callable = lambda scores: scores,
) -> Reference:
    """Returns attention computed one query at a time.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
      allowed: Booleans that broadcast to `[B..., H, T, S]`.
      bias: Floats that broadcast to `[B..., H, T, S]`.
      score: `score(query [K], key [K], head)`.
      sinks: `[H]`, a score more in the denominator of each row; None: none.
      is_normalized: Whether weights are over a denominator; its log is 0 if not.
      tap: From scores `[B..., H, T, S]`, -inf where not allowed, to those that count.
    """
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    *batch, num_queries, num_heads, _ = query.shape
    num_keys, num_key_heads = key.shape[-3:-1]
    shape = (*batch, num_heads, num_queries, num_keys)
    allowed = np.broadcast_to(True if allowed is None else allowed, shape)
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, float), shape)
    values = np.zeros((*batch, num_queries, num_heads, value.shape[-1]))
    logsumexp, weights = np.full(shape[:-1], -np.inf), np.zeros(shape)
    groups = num_heads // num_key_heads
    all_scores = np.full(shape, -np.inf)
    for *b, h, t, s in np.argwhere(allowed):
        of_pair = score(query[*b, t, h], key[*b, s, h // groups], h)
        all_scores[*b, h, t, s] = of_pair + bias[*b, h, t, s]
    all_scores = tap(all_scores)
    for *b, h, t in np.ndindex(shape[:-1]):
        b, g = tuple(b), h // groups
        seen = np.flatnonzero(allowed[*b, h, t])
        if not len(seen):
            continue
        scores = all_scores[*b, h, t, seen]
        if sinks is not None:
            scores = np.append(scores, sinks[h])
        masses = np.exp(scores - scores.max())
        logsumexp[*b, h, t] = scores.max() + math.log(masses.sum())
        shares = masses / masses.sum()
        if not is_normalized:
            logsumexp[*b, h, t], shares = 0, np.exp(scores)
        weights[*b, h, t, seen] = shares[: len(seen)]
        values[*b, t, h] = weights[*b, h, t, seen] @ value[*b, seen, g]
    return Reference(values, logsumexp, weights)


def map_statistics(
    weights: np.ndarray,
    *,
    query_offset: int = 0,
    counted: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    key_tokens: np.ndarray | None = None,
    unseen: np.ndarray | None = None,
    per_query: bool = False,
    scores: np.ndarray | None = None,
    xp: Any = np,
) -> dict[str, np.ndarray]:
    """Returns the statistics of weights `[B..., H, T, S]`, scores -inf where masked.

    Arrays are of `xp`: of jax.numpy they have gradients.
    """
    counts = (weights != 0).any(-1)
    if counted is not None:
        counts = counts & counted[..., None, :]
    weights = xp.where(counts[..., None], weights, 0)
    num_queries, num_keys = weights.shape[-2:]
    t = query_offset + np.arange(num_queries)[:, None]
    s = np.arange(num_keys)[None, :]
    entropy = -(weights * xp.log(xp.where(weights > 0, weights, 1))).sum(-1)
    mass = lambda where: (weights * where).sum(-1)  # noqa: E731
    root = lambda x: xp.where(x == 0, 0, xp.sqrt(xp.where(x == 0, 1, x)))  # noqa: E731
    rows = {
        "entropy": entropy,
        "perplexity": xp.exp(entropy),
        "squared_weights": (weights**2).sum(-1),
        "largest_weight": weights.max(-1),
        "distance": mass(np.abs(t - s)),
        "first_token": mass(s == 0),
    }
    offsets = {"previous_token": -1, "own_position": 0, "next_token": 1}
    for name, offset in offsets.items():
        rows[name] = mass(s == t + offset)
        largest = weights == weights.max(-1, keepdims=True)
        at = f"largest_at_{name.partition('_')[0]}"
        rows[at] = (largest & (s == t + offset)).any(-1)
    if positions is not None:
        rows["chosen_positions"] = mass(positions[..., None, None, :])
    if tokens is not None:
        key_tokens = tokens if key_tokens is None else key_tokens
        own = tokens[..., None, :, None]
        rows["same_token"] = mass(key_tokens[..., None, None, :] == own)
        before = np.roll(key_tokens, 1, -1)[..., None, None, :]
        rows["after_same_token"] = mass((before == own) & (s > 0) & (s <= t))
    if scores is not None:
        rows["max_score"] = xp.where(counts, scores.max(-1), -np.inf)
    squared = mass((t - s) ** 2)
    count = counts.sum(-1)
    if per_query:
        found = {name: xp.where(counts, row, 0) for name, row in rows.items()}
        found["rms_distance"] = root(xp.where(counts, squared, 0))
    else:
        mean = lambda row: xp.where(counts, row, 0).sum(-1) / xp.maximum(count, 1)  # noqa: E731
        found = {name: mean(row) for name, row in rows.items()}
        if scores is not None:
            found["max_score"] = xp.where(count, rows["max_score"].max(-1), 0)
        found["rms_distance"] = root(mean(squared))
    received = weights.sum(-2)
    if unseen is None:
        unseen = np.zeros(num_keys, bool)
    among = ~xp.broadcast_to(unseen, received.shape)
    apart = xp.abs(received[..., None] - received[..., None, :])
    apart = (apart * (among[..., None] & among[..., None, :])).sum((-1, -2))
    total = (received * among).sum(-1)
    total = 2 * among.sum(-1) * xp.where(total > 0, total, 0)
    gini = apart / xp.where(total > 0, total, np.inf)
    return found | {"received": received, "received_gini": gini, "num_queries": count}


def pooled_map(
    weights: np.ndarray, row_edges, column_edges, *, counts=None, xp: Any = np
) -> np.ndarray:
    """Returns the mean mass of each cell, `[B..., H, P, Q]`, of queries that count.

    Without `counts`, `[B..., H, T]`, these are those that see anything.
    """
    counts = weights.sum(-1) > 0 if counts is None else counts

    def cell(rows, columns):
        count = xp.maximum(counts[..., slice(*rows)].sum(-1), 1)
        return weights[..., slice(*rows), slice(*columns)].sum((-1, -2)) / count

    cells = [
        [cell(rows, columns) for columns in itertools.pairwise(column_edges)]
        for rows in itertools.pairwise(row_edges)
    ]
    return xp.stack([xp.stack(row, -1) for row in cells], -2)


def divergence(weights: np.ndarray, others: np.ndarray, xp: Any = np) -> np.ndarray:
    """Returns the mean Jensen-Shannon divergences, `[B..., H, H']` in nats."""

    def relative_entropy(p, q):
        safe_p, safe_q = xp.where(p > 0, p, 1), xp.where(p > 0, q, 1)
        return (p * xp.log(safe_p / safe_q)).sum(-1)

    p, q = weights[..., :, None, :, :], others[..., None, :, :, :]
    middle = (p + q) / 2
    of_rows = (relative_entropy(p, middle) + relative_entropy(q, middle)) / 2
    counts = (p.sum(-1) > 0) & (q.sum(-1) > 0)
    return xp.where(counts, of_rows, 0).sum(-1) / xp.maximum(counts.sum(-1), 1)


def float64(tree):
    """Returns a tree of dicts with its arrays in float64."""
    if isinstance(tree, dict):
        return {name: float64(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def nested(parameters, prefix):
    """Returns Haiku's parameters below a module's name, a dict for each level."""
    tree = {}
    for path, leaves in parameters.items():
        if path != prefix and not path.startswith(prefix + "/"):
            continue
        branch = tree
        for name in filter(None, path.removeprefix(prefix).split("/")):
            branch = branch.setdefault(name, {})
        branch.update(float64(leaves))
    return tree


def linear(parameters, x):
    """Returns `x w + b`, or without b where there is none."""
    return x @ parameters["w"] + parameters.get("b", 0.0)


def softmax(scores):
    """Returns the softmax over the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def layer_norm(x, parameters, epsilon=1e-5, tap=lambda factor: factor):
    """Returns features with mean 0 and variance 1, scaled and shifted."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normal = (x - mean) * tap(1 / np.sqrt(variance + epsilon))
    return normal * parameters["scale"] + parameters["offset"]


def rms_norm(x, parameters, epsilon=1e-5, tap=lambda factor: factor):
    """Returns features with mean square 1, scaled."""
    factor = tap(1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon))
    return x * factor * parameters["scale"]


def gelu(x):
    """Returns `x P(X <= x)` of a normal X."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    """Returns the approximation of `gelu` by a tanh."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


def silu(x):
    """Returns `x sigmoid(x)`."""
    return x / (1 + np.exp(-x))


def turned(x, frequencies):
    """Returns `[B, T, H, K]` with features i and i + K / 2 as a complex number, turned.

    Args:
      x: `[B, T, H, K]`.
      frequencies: `[K / 2]`, radians per position.
    """
    real, imaginary = np.split(x, 2, axis=-1)
    angles = np.outer(np.arange(x.shape[1]), frequencies)[:, None]
    number = (real + 1j * imaginary) * np.exp(1j * angles)
    return np.concatenate([number.real, number.imag], axis=-1)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "swiglu": silu,
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
}


def transformer(
    parameters,
    tokens,
    config,
    *,
    segments=None,
    lengths=None,
    num_classes=None,
    decoder_tokens=None,
    decoder_lengths=None,
    tap=lambda name, x: x,
):
    """Returns the logits of a model of `models.build`, layer by layer.

    Args:
      parameters: Of looped layers, by the names of their modules.
      tokens: `[B, T]`, or features `[B, T, D]`.
      config: `config.model`, with positions learned, rotary or none.
      segments: `[B, T]`; None: all 0.
      lengths: `[B]`, numbers of valid positions; None: all are.
      num_classes: C, where it is less than the vocabulary and logits are tied.
      decoder_tokens: `[B, T]`, what the decoder of an encoder_decoder reads, and then
        `tokens` are `[B, S]`.
      decoder_lengths: `[B]`, numbers of valid positions of these; None: all are.
      tap: Each value goes through it, by the name of its site in the model (and
        `attention/gates`, which is none), to be looked at or replaced; see `recorded`.

    Returns:
      `[B, T, C]`, `[B, C]` where they are pooled, or `[B, T]` of a set classifier.
    """
    parameters = float64(parameters)
    own, embedding, end = config.attention, config.embedding, config.output
    num_layers = config.num_layers
    num_decoder = (config.decoder.num_layers or num_layers) * (
        decoder_tokens is not None
    )

    def valid_of(tokens, lengths):
        lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
        return np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]

    valid, decoder_valid = valid_of(tokens, lengths), None

    def allowed(valid, is_causal):
        size = valid.shape[1]
        back = np.subtract.outer(np.arange(size), np.arange(size))
        seen = back >= 0 if is_causal else np.ones_like(back, bool)
        seen = seen if own.window is None else seen & (abs(back) <= own.window)
        return seen & valid[:, None, :, None] & valid[:, None, None, :]

    def embedded(prefix, tokens):
        own_embedding = parameters[prefix + "embedding"]
        if "embeddings" in own_embedding:
            x = own_embedding["embeddings"][tokens]
        else:
            x = linear(own_embedding, np.float64(tokens))
        x = tap(prefix + "token_embedding", embedding.scale * x)
        if prefix + "positions" in parameters:
            x = x + parameters[prefix + "positions"]["positions"][: x.shape[1]]
        if embedding.segments and not prefix:
            own_segments = np.zeros_like(tokens) if segments is None else segments
            x = x + parameters["segments"]["embeddings"][own_segments]
        x = normed(prefix + "embedding_norm", x) if embedding.norm else x
        return tap(prefix + "embedding", x)

    def normed(name, x):
        kinds = {"layer_norm": layer_norm, "rms_norm": rms_norm}
        if config.norm.kind == "none":
            assert name not in parameters
            return x
        norm, its_tap = (
            kinds[config.norm.kind],
            functools.partial(tap, f"{name}/factor"),
        )
        return norm(x, parameters[name], config.norm.epsilon, its_tap)

    def attended(name, x, *, keys=None, seen):
        maps = nested(parameters, name)
        is_cross = keys is not None
        keys = keys if is_cross else x

        def heads(kind, x):
            projected = linear(maps[kind], x)
            return projected.reshape(*x.shape[:2], -1, own.key_size)

        query, key, value = (
            heads(kind, y) for kind, y in (("query", x), ("key", keys), ("value", keys))
        )

        def normed_heads(kind, y):
            if not own.qk_norm:
                return y
            factor = functools.partial(tap, f"{name}/{kind}_norm/factor")
            return rms_norm(y, maps[f"{kind}_norm"], config.norm.epsilon, factor)

        def rotated(x):
            if embedding.positions != "rotary" or is_cross:
                return x
            pairs = np.arange(own.key_size // 2)
            turns = embedding.rotary_period ** (-2 * pairs / own.key_size)
            if embedding.frequencies is not None:
                turns = np.asarray(embedding.frequencies)
            return turned(x, turns)

        query = tap(f"{name}/query", rotated(normed_heads("query", query)))
        key = normed_heads("key", key)
        if own.smear_keys and not is_cross:
            share = 1 / (1 + np.exp(-maps["smear"]))[:, None]
            before = np.concatenate([key[:, :1], key[:, :-1]], axis=1)
            key = share * key + (1 - share) * before
        key, value = tap(f"{name}/key", rotated(key)), tap(f"{name}/value", value)

        def score(query, key, head):
            if own.score == "sigmoid":
                return log_sigmoid(query, key, head, scale=own.scale, offset=own.offset)
            return dot_product(query, key, head, scale=own.scale)

        sinks = maps.get("sinks")
        if own.sinks not in (None, "learned"):
            sinks = np.full(query.shape[-2], own.sinks)
        assert ("sinks" in maps) == (own.sinks == "learned")
        weights = attention(
            query,
            key,
            value,
            allowed=seen,
            score=score,
            sinks=sinks,
            is_normalized=own.normalizer != "none",
            tap=functools.partial(tap, f"{name}/scores"),
        ).weights
        weights = tap(f"{name}/weights", weights)
        value = np.repeat(value, query.shape[-2] // value.shape[-2], axis=-2)
        values = np.einsum("bhts,bshv->bthv", weights, value)
        assert ("head_gate" in maps) == (own.gate != "none")
        if own.gate != "none":
            opened = 1 / (1 + np.exp(-x @ maps["head_gate"]["w"]))
            opened = tap(f"{name}/gates", opened.reshape(*values.shape[:3], -1))
            values = values * opened
        values = tap(f"{name}/heads", values)
        values = values.reshape(*x.shape[:2], -1)
        return tap(f"{name}/output", linear(maps["linear"], values))

    def fed_forward(name, x):
        maps = nested(parameters, name)
        activation = ACTIVATIONS[config.feed_forward.activation]
        hidden = linear(maps["hidden"], x)
        if config.feed_forward.activation.endswith(("glu", "glu_tanh")):
            hidden = hidden * activation(linear(maps["gate"], x))
        else:
            assert "gate" not in maps
            hidden = activation(hidden)
        hidden = tap(f"{name}/hidden", hidden)
        return tap(f"{name}/output", linear(maps["output"], hidden))

    def added(x, part, name, has_residual):
        is_post = config.norm.position == "post"
        output = part(x if is_post else normed(name, x))
        output = x + output if has_residual else output
        return normed(name, output) if is_post else output

    def layer(name, x, *, valid, is_causal, cross=None):
        x, number = tap(f"{name}/stream", x), 1
        if own.num_heads:
            attend = functools.partial(
                attended,
                f"{name}/attention",
                seen=allowed(valid, is_causal),
            )
            x = added(x, attend, f"{name}/norm_1", own.residual)
        x = tap(f"{name}/stream_after_attention", x)
        if cross is not None:
            attend = functools.partial(attended, f"{name}/cross_attention", **cross)
            x, number = added(x, attend, f"{name}/norm_2", own.residual), 2
            x = tap(f"{name}/stream_after_cross_attention", x)
        if config.feed_forward.hidden_size:
            feed = functools.partial(fed_forward, f"{name}/feed_forward")
            has_residual = config.feed_forward.residual
            x = added(x, feed, f"{name}/norm_{number + 1}", has_residual)
        return tap(f"{name}/stream_after_feed_forward", x)

    x = embedded("", tokens)
    for i in range(num_layers):
        x = layer(
            f"encoder/layer_{i}",
            x,
            valid=valid,
            is_causal=config.family == "causal",
        )
    x = tap("encoder/stream", x)
    if config.norm.position != "post":
        x = normed("encoder/norm", x)
    table = parameters["embedding"].get("embeddings")
    if num_decoder:
        encoded, table = x, parameters["decoder_embedding"]["embeddings"]
        decoder_valid = valid_of(decoder_tokens, decoder_lengths)
        x = embedded("decoder_", decoder_tokens)
        for i in range(num_decoder):
            x = layer(
                f"decoder/layer_{i}",
                x,
                valid=decoder_valid,
                is_causal=True,
                cross={
                    "keys": encoded,
                    "seen": decoder_valid[:, None, :, None] & valid[:, None, None, :],
                },
            )
        x = tap("decoder/stream", x)
        if config.norm.position != "post":
            x = normed("decoder/norm", x)
    if end.pool is not None:
        counted = valid if end.pool == "mean" else np.arange(x.shape[1]) == 0
        counted = np.broadcast_to(counted, valid.shape)
        x = np.stack([row[count].mean(0) for row, count in zip(x, counted)])  # noqa: B905
    if end.hidden is not None:
        x = ACTIVATIONS[end.hidden](linear(parameters["output_hidden"], x))
    if end.norm:
        x = normed("output_norm", x)
    if end.tied:
        x = x @ table[:num_classes].T + parameters.get("logits", {}).get("b", 0.0)
    else:
        x = linear(parameters["logits"], x)
    if config.family == "set_classifier":
        x = np.where(valid, x[..., 0], -np.inf)
    return tap("logits", x)


def recorded(*args, changes=None, **given):
    """Returns what `transformer` returns, and each value by the name of its site.

    Args:
      *args: Of `transformer`.
      changes: Functions of values by name, which change them.
      **given: Of `transformer`.
    """
    values, changes = {}, changes or {}

    def tap(name, x):
        values[name] = changes[name](x) if name in changes else x
        return values[name]

    logits = transformer(*args, tap=tap, **given)
    unknown = set(changes) - set(values)
    assert not unknown, f"no values {sorted(unknown)}"
    return logits, values

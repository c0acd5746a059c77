"""Attention and its surroundings written again in float64 NumPy, in other ways.

The four published implementations that the project grew from come first, each in its
own manner. Parameters are those of one of our modules: `{"query": {"w": ..., "b":
...}, ...}`. The notation of shapes is each source's own.
"""

import math

import numpy as np


def haiku_style(parameters, query, key, value, mask, *, d_model, num_heads):
    """(a) Attention with a 0/1 mask `(B, 1, S)` that returns its weights.

    Returns:
      The output `(B, T, d_model)` and the weights `(B, h, T, S)`.
    """
    batch_size, depth = query.shape[0], d_model // num_heads

    def split(x):
        return x.reshape(batch_size, -1, num_heads, depth).transpose(0, 2, 1, 3)

    query = split(linear(parameters["query"], query))
    key = split(linear(parameters["key"], key))
    value = split(linear(parameters["value"], value))
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(depth)
    scores = np.where(mask[:, None] == 0, -1e9, scores)
    weights = softmax(scores)
    attended = (weights @ value).transpose(0, 2, 1, 3)
    attended = attended.reshape(batch_size, -1, d_model)
    return linear(parameters["linear"], attended), weights


def block_of_single_heads(parameters, x, *, num_heads):
    """(b) A pre-norm block; its attention is a list of heads, each with its own maps.

    Args:
      parameters: `attention`, `feed_forward`, `norm_1` and `norm_2`.
      x: `(B, T, D)`.
      num_heads: How many heads there are in the list.
    """

    def head(index, x):
        own = {}
        for name in ("query", "key", "value"):
            whole = parameters["attention"][name]
            own[name] = {k: np.split(v, num_heads, -1)[index] for k, v in whole.items()}
        query, key, value = (linear(own[n], x) for n in ("query", "key", "value"))
        scores = np.stack([q @ k.T for q, k in zip(query, key, strict=True)])
        return softmax(scores / math.sqrt(query.shape[-1])) @ value

    hidden = layer_norm(x, parameters["norm_1"])
    heads = [head(index, hidden) for index in range(num_heads)]
    x = x + linear(parameters["attention"]["linear"], np.concatenate(heads, -1))
    hidden = layer_norm(x, parameters["norm_2"])
    hidden = gelu(linear(parameters["feed_forward"]["hidden"], hidden))
    return x + linear(parameters["feed_forward"]["output"], hidden)


def valid_lens_attention(
    parameters, queries, keys, values, valid_lens, *, num_heads, score_weights=None
):
    """(c) Attention without biases to the first `valid_lens` keys, heads in the batch.

    Args:
      parameters: The four maps.
      queries: `(B, T, D)`.
      keys: `(B, S, D)`.
      values: `(B, S, D)`.
      valid_lens: `(B,)`, or `(B, T)`: one length per query.
      num_heads: h.
      score_weights: `(h, K)` to score by `w . tanh(q + k)`; None: dot products.

    Returns:
      The output `(B, T, hiddens)` and the weights `(B, h, T, S)`.
    """

    def into_batch(x):
        x = x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    batch_size, num_queries = queries.shape[:2]
    queries, keys, values = (
        into_batch(x @ parameters[name]["w"])
        for name, x in (("query", queries), ("key", keys), ("value", values))
    )
    if score_weights is None:
        scores = np.einsum("nqk,nsk->nqs", queries, keys) / queries.shape[-1] ** 0.5
    else:
        features = np.tanh(queries[:, :, None] + keys[:, None])
        weights = np.concatenate([score_weights] * batch_size)
        scores = np.stack([f @ w for f, w in zip(features, weights, strict=True)])
    if valid_lens.ndim == 1:
        valid_lens = np.repeat(valid_lens[:, None], num_queries, axis=1)
    valid_lens = np.repeat(valid_lens, num_heads, axis=0)
    for i, row in np.ndindex(valid_lens.shape):
        scores[i, row, valid_lens[i, row] :] = -1e6
    weights = softmax(scores)
    attended = (weights @ values).reshape(batch_size, num_heads, num_queries, -1)
    attended = attended.swapaxes(1, 2).reshape(batch_size, num_queries, -1)
    weights = weights.reshape(batch_size, num_heads, num_queries, -1)
    return attended @ parameters["linear"]["w"], weights


def unbatched_attention(parameters, x, *, hidden, heads):
    """(d) Self-attention of one sequence `[T, D]`, scaled by sqrt(hidden / heads)."""
    scale = math.sqrt(hidden / heads)
    query, key, value = (
        linear(parameters[name], x).reshape(len(x), heads, hidden // heads)
        for name in ("query", "key", "value")
    )
    attended = np.zeros_like(value)
    for h in range(heads):
        for t in range(len(x)):
            weights = softmax(np.array([query[t, h] @ k for k in key[:, h]]) / scale)
            attended[t, h] = sum(p * v for p, v in zip(weights, value[:, h]))  # noqa: B905
    return linear(parameters["linear"], attended.reshape(len(x), hidden))


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


def layer_norm(x, parameters, epsilon=1e-5):
    """Returns features with mean 0 and variance 1, scaled and shifted."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normal = (x - mean) / np.sqrt(variance + epsilon)
    return normal * parameters["scale"] + parameters["offset"]


def rms_norm(x, parameters, epsilon=1e-5):
    """Returns features with mean square 1, scaled."""
    norm = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x / norm * parameters["scale"]


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

"""Scores and outputs of heads as sums over components, against NumPy in float64.

B = 1 example, T positions, D width, H heads, K their size, M components.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, tasks
from mha_haiku.lab.heads import running, why
from tests import oracles, tiny_models

T, D, H, K, L = 5, 10, 4, 6, 3

PLAIN = {}
LLAMA = {
    "norm__kind": "rms_norm",
    "embedding__positions": "rotary",
    "attention__num_key_value_heads": 2,
    "attention__with_bias": False,
    "attention__qk_norm": True,
    "attention__soft_cap": 2.0,
    "attention__sinks": "learned",
    "feed_forward__activation": "swiglu",
}
OTHERS = [
    {"embedding__positions": "alibi", "norm__position": "both"},
    {"norm__position": "post", "attention__sinks": "learned"},
    {
        "norm__position": "reordered",
        "norm__kind": "rms_norm",
        "attention__qk_norm": True,
        "attention__qk_norm_over": "layer",
    },
    {"feed_forward__parallel": True, "attention__gate": "head"},
    {"attention__score": "cosine", "norm__kind": "none"},
    {"attention__smear_keys": True, "attention__temperature": 1.5},
    {"embedding__norm": True, "embedding__scale": 3.0, "embedding__segments": 2},
    {"attention__residual": False},
]


@functools.cache
def subject(**fields):
    """Returns config, model, parameters and one example of a tiny causal model."""
    sizes = {"model_size": D, "attention__num_heads": H, "attention__key_size": K}
    of = tiny_models.config(family="causal", num_layers=L, **sizes | fields)
    model = tiny_models.build(of)
    given = tiny_models.inputs_of(of)
    params = tiny_models.random_parameters(model, given)
    if of.attention.score == "cosine":
        for name in params:
            if "cosine_scale" in params[name]:
                params[name]["cosine_scale"] += 3
    return of, model, params, tasks.Example(given["inputs"][:1], None, None)


def values_of(model, params, example):
    """Returns all values of the model's sites, float64, without the batch's axis."""
    f = functools.partial(running.run, model)
    names = [
        name
        for name in mh.sites(f, params, example)
        if not name.endswith(("/map", "/weights"))
    ]
    found = mh.look(f, [*names, "*/weights"])(params, example)[1]
    return {name: np.float64(x)[0] for name, x in found.items()}


def held(config, leaves, x, parts):
    """Returns parts `[M, ..., D]` through the norm of x, its factor a constant.

    The last part is that of the biases, which gets the norm's offset.
    """
    if config.norm.kind == "none":
        return parts
    if config.norm.kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
        parts = parts - parts.mean(-1, keepdims=True)
    factor = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm.epsilon)
    parts = parts * factor * leaves["scale"]
    parts[-1] += leaves.get("offset", 0)
    return parts


def linear(leaves, parts):
    """Returns parts through a linear map; the last one gets its bias."""
    parts = parts @ leaves["w"]
    parts[-1] += leaves.get("b", 0)
    return parts


def decomposed(config, params, tokens, values):
    """Returns for each layer queries, keys and values by component, `[M, T, H, K]`.

    Components are tokens, positions, and of each layer its heads and its feed-forward
    part, all of which are there from the start, as zeros; the last are the biases.
    """
    params, own = oracles.float64(params), config.attention
    count = 2 + L * (H + 1) + 1
    parts = np.zeros((count, T, D))
    parts[0] = params["embedding"]["embeddings"][tokens] * config.embedding.scale
    positions = np.zeros((T, D))
    if config.embedding.positions == "learned":
        positions += params["positions"]["positions"][:T]
    if config.embedding.segments:
        positions += params["segments"]["embeddings"][0]
    parts[1] = positions
    if config.embedding.norm:
        normed = held(config, params["embedding_norm"], parts.sum(0), parts)
        normed[1] += normed[-1]  # its offset counts as a part of positions
        normed[-1] = 0
        parts = normed
    np.testing.assert_allclose(parts.sum(0), values["embedding"], atol=1e-5)
    result = []
    is_before = config.norm.position in ("pre", "both")
    is_after = config.norm.position in ("both", "reordered")
    for i in range(L):
        name = f"encoder/layer_{i}"
        entered = parts

        def added(parts, written, number, has_residual, name=name):
            if is_after:
                leaves = params.get(f"{name}/norm_{number}_after", {})
                written = held(config, leaves, written.sum(0), written)
            parts = parts + written if has_residual else written
            if config.norm.position == "post":
                leaves = params[f"{name}/norm_{number}"]
                parts = held(config, leaves, parts.sum(0), parts)
            return parts

        read = entered.copy()
        if is_before:
            leaves = params.get(f"{name}/norm_1", {})
            read = held(config, leaves, read.sum(0), read)
        qkv = []
        for kind in ("query", "key", "value"):
            x = linear(params[f"{name}/attention/{kind}"], read)
            x = x.reshape(count, T, -1, K)
            if own.qk_norm and kind != "value":
                whole, scale = x.sum(0), params[f"{name}/attention/{kind}_norm"]["scale"]
                axes = (-2, -1) if own.qk_norm_over == "layer" else -1
                size = (whole**2).mean(axes, keepdims=True) + config.norm.epsilon
                scale = scale.reshape(-1, K) if own.qk_norm_over == "layer" else scale
                x = x / np.sqrt(size) * scale
            if own.smear_keys and kind == "key":
                share = 1 / (1 + np.exp(-params[f"{name}/attention"]["smear"]))[:, None]
                before = np.concatenate([x[:, :1], x[:, :-1]], axis=1)
                x = share * x + (1 - share) * before
            if config.embedding.positions == "rotary" and kind != "value":
                turns = config.embedding.rotary_period ** (-2 * np.arange(K // 2) / K)
                x = np.stack([oracles.turned(each[None], turns)[0] for each in x])
            qkv.append(np.repeat(x, H // x.shape[2], axis=2))
            site = values[f"{name}/attention/{kind}"]
            np.testing.assert_allclose(x.sum(0), site, atol=2e-5)
        result.append(qkv)
        w = params[f"{name}/attention/linear"]["w"].reshape(H, K, D)
        written = np.zeros_like(parts)
        first = 2 + i * (H + 1)
        own_heads = values[f"{name}/attention/heads"]
        for h in range(H):
            written[first + h] = own_heads[:, h] @ w[h]
        written[-1] += params[f"{name}/attention/linear"].get("b", 0)
        parts = added(parts, written, 1, own.residual)
        written = np.zeros_like(parts)
        leaves = params[f"{name}/feed_forward/output"]
        written[first + H] = values[f"{name}/feed_forward/output"]
        parts = added(parts, written, 2, True)
        del leaves
    return result, parts


def oracle(fields):
    """Returns what `decomposed` does of a subject, with components in our order."""
    config, model, params, example = subject(**fields)
    values = values_of(model, params, example)
    return decomposed(config, params, example.inputs[0], values), values


def terms_of(config, params, values, qkv, layer, head, t, s):
    """Returns the terms `[M, M]` of a cell, and what is added for its positions."""
    query, key = qkv[layer][0][:, t, head], qkv[layer][1][:, s, head]
    own = config.attention
    scale = 1 / np.sqrt(K)
    if own.score == "cosine":
        sizes = np.linalg.norm(query.sum(0)) * np.linalg.norm(key.sum(0))
        name = f"encoder/layer_{layer}/attention"
        scale = np.float64(params[name]["cosine_scale"])[head] / sizes
    position = 0.0
    if config.embedding.positions == "alibi":
        position = -(t - s) * 2.0 ** (-8 * (head + 1) / H)
    return query @ key.T * scale / own.temperature, position


def placed(found, part, h, r):
    """Returns the terms of a cell of `why.cells` as `[M, M]`."""
    count = len(found.components)
    terms = np.zeros((count, count))
    terms[tuple(found.pairs[part][h, r].T)] = found.terms[part][h, r]
    return terms


def check_cells(fields):
    config, model, params, example = subject(**fields)
    (qkv, _), values = oracle(fields)
    found = why.cells(model, params, example, count=10_000)
    labels = ["token", "position"]
    for i in range(L):
        labels += [f"head {i}.{h}" for h in range(H)] + [f"feed-forward {i}"]
    assert [str(each) for each in found.components] == [*labels, "biases"]
    for part in range(L):
        for h, t in np.ndindex(found.keys[part].shape):
            s = found.keys[part][h, t]
            assert s == values[f"encoder/layer_{part}/attention/weights"][h, t].argmax()
            given = (config, params, values, qkv, part, h, t, s)
            terms, position = terms_of(*given)
            bound = 1e-5 * max(np.abs(terms).max(), 0.1)
            np.testing.assert_allclose(placed(found, part, h, t), terms, atol=bound)
            np.testing.assert_allclose(found.positions[part][h, t], position, 1e-6)
            score = found.scores[part][h, t]
            np.testing.assert_allclose(terms.sum() + position, score, atol=bound)
            cap = config.attention.soft_cap
            score = score if cap is None else cap * np.tanh(score / cap)
            own = values[f"encoder/layer_{part}/attention/scores"][h, t, s]
            np.testing.assert_allclose(score, own, atol=2e-6)


@pytest.mark.parametrize("fields", [LLAMA], ids=str)
def test_every_pair_of_every_head_is_what_numpy_says(fields):
    check_cells(fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [PLAIN, *OTHERS], ids=str)
def test_pairs_are_exact_for_every_norm_position_and_score(fields):
    check_cells(fields)

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
from mha_haiku.lab.heads import components, model_runs, why
from tests import oracles, tiny_models

T, D, H, K, L = 5, 10, 4, 6, 3
EPSILON = tiny_models.config(family="causal").norm.epsilon

PLAIN = {}
LLAMA = {
    "norm__kind": "rms_norm",
    "embedding__positions": "rotary",
    "attention__num_key_value_heads": 2,
    "attention__with_bias": False,
    "attention__qk_norm": True,
    "attention__sinks": "learned",
    "feed_forward__activation": "swiglu",
}
OTHERS = [
    {"embedding__positions": "alibi"},
    {"norm__position": "post", "attention__sinks": "learned"},
    {"attention__gate": "head"},
    {"attention__smear_keys": True, "norm__kind": "none"},
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
    return of, model, params, tasks.Example(given["inputs"][:1], None, None)


def values_of(model, params, example):
    """Returns all values of the model's sites, float64, without the batch's axis."""
    f = functools.partial(model_runs.run, model)
    names = [
        name
        for name in mh.sites(f, params, example)
        if not name.endswith(("/map", "/weights"))
    ]
    found = mh.look(f, [*names, "*/weights"])(params, example)[1]
    return {name: np.float64(x)[0] for name, x in found.items()}


def held(config, leaves, x, parts):
    """Returns parts `[M, ..., D]` through the norm of x, its factor a constant.

    The last part is the biases, which get the norm's offset.
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


def decomposed(config, params, tokens, values, T=T):
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
    is_post = config.norm.position == "post"
    for i in range(L):
        name = f"encoder/layer_{i}"

        def added(parts, written, number, has_residual, name=name):
            parts = parts + written if has_residual else written
            if is_post:
                leaves = params[f"{name}/norm_{number}"]
                parts = held(config, leaves, parts.sum(0), parts)
            return parts

        read = parts.copy()
        if not is_post:
            leaves = params.get(f"{name}/norm_1", {})
            read = held(config, leaves, read.sum(0), read)
        qkv = []
        for kind in ("query", "key", "value"):
            x = linear(params[f"{name}/attention/{kind}"], read)
            x = x.reshape(count, T, -1, K)
            if own.qk_norm and kind != "value":
                whole, scale = (
                    x.sum(0),
                    params[f"{name}/attention/{kind}_norm"]["scale"],
                )
                size = (whole**2).mean(-1, keepdims=True) + config.norm.epsilon
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
    scale = 1 / np.sqrt(K)
    position = 0.0
    if config.embedding.positions == "alibi":
        position = -(t - s) * 2.0 ** (-8 * (head + 1) / H)
    return query @ key.T * scale, position


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
        labels += [f"layer {i}, head {h}" for h in range(H)] + [f"feed-forward {i}"]
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
            own = values[f"encoder/layer_{part}/attention/scores"][h, t, s]
            np.testing.assert_allclose(score, own, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LLAMA, PLAIN, *OTHERS], ids=str)
def test_every_pair_of_every_head_is_what_numpy_says(fields):
    check_cells(fields)


@pytest.mark.slow
def test_one_cell_splits_heads_by_source_and_adds_up_to_the_score():
    config, model, params, example = subject(**LLAMA)
    (qkv, _), values = oracle(LLAMA)
    found = why.pairs(model, params, example, 2, 3, -1, 2, sources=[(0, 1), (1, 2)])
    terms, _ = terms_of(config, params, values, qkv, 2, 3, T - 1, 2)
    bound = 1e-5 * np.abs(terms).max()
    for every, axis in (
        (found.labels[0], 0),
        (found.labels[1], 1),
    ):
        assert len(every) == 3 + L * (H + 1) + 2 * (T - 1)
        split = [m for m, each in enumerate(every) if each[:3] == ("head", 1, 2)]
        assert [every[m].source for m in split] == list(range(T))
        m = 2 + (H + 1) + 2  # head (1, 2) among all every
        own = found.terms.take(split, axis).sum()
        np.testing.assert_allclose(own, terms.take(m, axis).sum(), atol=bound)
        # By hand: the output of head (1, 2) for only one source position.
        written = values["encoder/layer_1/attention/weights"][2, [T - 1, 2][axis]]
        value = qkv[1][2].sum(0)[:, 2]
        z = written[:, None] * value
        whole = values["encoder/layer_1/attention/heads"][[T - 1, 2][axis], 2]
        np.testing.assert_allclose(z.sum(0), whole, atol=1e-5)
        w = np.float64(params["encoder/layer_1/attention/linear"]["w"])
        stream = z @ w.reshape(H, K, D)[2]
        x = values["encoder/layer_2/stream"][[T - 1, 2][axis]]
        norm = params["encoder/layer_2/norm_1"]["scale"]
        stream = stream / np.sqrt((x**2).mean() + config.norm.epsilon) * norm
        kind = ("query", "key")[axis]
        w = np.float64(params[f"encoder/layer_2/attention/{kind}"]["w"])
        parts = stream @ w.reshape(D, -1, K)[:, 3 if axis == 0 else 1]
        plain = np.float64(x / np.sqrt((x**2).mean() + config.norm.epsilon) * norm)
        plain = plain @ w.reshape(D, -1, K)[:, 3 if axis == 0 else 1]
        size = np.sqrt((plain**2).mean() + config.norm.epsilon)
        scale = params[f"encoder/layer_2/attention/{kind}_norm"]["scale"]
        parts = parts / size * scale
        turns = config.embedding.rotary_period ** (-2 * np.arange(K // 2) / K)
        at = [T - 1, 2][axis]
        turned = [
            oracles.turned(np.tile(row, (1, T, 1, 1)), turns)[0, at, 0] for row in parts
        ]
        own = found.parts[axis][split]
        scale = 1 / np.sqrt(K) if axis == 0 else 1
        np.testing.assert_allclose(own, np.stack(turned) * scale, atol=1e-5)
    np.testing.assert_allclose(found.terms.sum(), found.total, atol=bound)
    whole = why.pairs(model, params, example, 2, 3, -1, 2)
    np.testing.assert_allclose(whole.terms, terms, atol=bound)


@pytest.mark.slow
def test_what_a_head_writes_adds_up_by_source_and_component():
    config, model, params, example = subject(**LLAMA)
    (qkv, _), values = oracle(LLAMA)
    layer, head, t, c = 1, 2, 3, 6
    z = values[f"encoder/layer_{layer}/attention/heads"][t, head]
    weights = values[f"encoder/layer_{layer}/attention/weights"][head, t]
    by_source = weights[:, None, None] * qkv[layer][2][:, :, head].swapaxes(0, 1)
    np.testing.assert_allclose(by_source.sum((0, 1)), z, atol=1e-5)
    found = why.written(model, params, example, layer, head, t)
    along = by_source @ z / np.linalg.norm(z)
    np.testing.assert_allclose(found.terms, along, atol=1e-5)
    np.testing.assert_allclose(found.total, np.linalg.norm(z), rtol=1e-5)
    # Straight to a logit, through the last norm with its factor held.
    x = values["encoder/stream"][t]
    norm = params["encoder/norm"]["scale"] / np.sqrt(
        (x**2).mean() + config.norm.epsilon
    )
    w = np.float64(params[f"encoder/layer_{layer}/attention/linear"]["w"])
    to_logit = w.reshape(H, K, D)[head] @ (norm * params["logits"]["w"][:, c])
    found = why.written(model, params, example, layer, head, t, answer=c)
    np.testing.assert_allclose(found.terms, by_source @ to_logit, atol=1e-5)
    np.testing.assert_allclose(found.total, z @ to_logit, atol=1e-5)
    own = heads.logit_attribution(model, params, example)
    np.testing.assert_allclose(found.total, own.heads[layer][0, t, head, c], atol=1e-5)


@pytest.mark.slow
def test_what_heads_read_over_data_is_what_numpy_sums_up():
    of, model, params, _ = subject(**LLAMA)
    given = tiny_models.inputs_of(of)
    batch = tasks.Example(given["inputs"], None, None, given["lengths"])
    found = why.reads(model, params, [batch, batch])
    assert found.by["q"].shape == (4, L, H, 3 + L * (H + 1))
    for b, length in enumerate(given["lengths"]):
        one = tasks.Example(given["inputs"][b : b + 1, :length], None, None)
        values = values_of(model, params, one)
        qkv, _ = decomposed(of, params, one.inputs[0], values, length)
        for layer, (query, key, value) in enumerate(qkv):
            p = values[f"encoder/layer_{layer}/attention/weights"]
            sees = np.tri(length)
            u = p.sum(-1, keepdims=True) * sees / sees.sum(-1, keepdims=True)
            whole = query.sum(0), key.sum(0)
            scale = 1 / np.sqrt(K)
            by_query = np.einsum("hts,mthk,shk->hm", p - u, query, whole[1]) * scale
            by_key = np.einsum("hts,thk,mshk->hm", p - u, whole[0], key) * scale
            z = values[f"encoder/layer_{layer}/attention/heads"]
            by_value = np.einsum("hts,mshk,thk->hm", p, value, z)
            bound = {"atol": 2e-5}
            np.testing.assert_allclose(found.by["q"][b, layer], by_query, **bound)
            np.testing.assert_allclose(found.by["k"][b, layer], by_key, **bound)
            np.testing.assert_allclose(found.by["v"][b, layer], by_value, **bound)
            np.testing.assert_allclose(found.norms[b, layer], (z**2).sum((0, 2)), 1e-5)
    np.testing.assert_allclose(found.counts[:, 0], [*given["lengths"]] * 2)
    shares = found.mean("v").sum(-1)
    np.testing.assert_allclose(shares, np.ones((L, H)), atol=1e-5)
    graph = found.graph("k")
    assert np.isnan(graph[1, :, 1]).all() and np.isnan(graph[2, :, 1]).all()
    m = 2 + 2  # head (0, 2)
    np.testing.assert_allclose(graph[0, 2, 1], found.mean("k")[1, :, m])
    weights = heads.circuits.compositions(model, params, "k")
    rows = {(row["head"], row["by"], row["reads"]): row for row in found.rows()}
    row = rows["1.3", "k", "layer 0, head 2"]
    assert row["composition of weights"] == weights[0, 2, 1, 3]
    assert row["term"] == found.mean("k")[1, 3, m]


def plain(params, tokens, *, stack="loop"):
    """Computes what the model of `PLAIN` does, by hand: it has no site and no name."""

    def normed(x, leaves):
        x = x - x.mean(-1, keepdims=True)
        factor = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)
        return x * factor * leaves["scale"][None, None] + leaves["offset"][None, None]

    def mapped(x, leaves):
        return x @ leaves["w"] + leaves["b"][None, None]

    def layer(x, own):
        y = normed(x, own["norm_1"])
        q, k, v = (
            mapped(y, own[f"attention/{name}"]).reshape(*y.shape[:2], H, K)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthk,bshk->bhts", q / np.sqrt(K), k)
        seen = jnp.tril(jnp.ones((1, 1, *scores.shape[2:]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        z = jnp.einsum("bhts,bshk->bthk", weights, v).reshape(*y.shape[:2], -1)
        x = x + mapped(z, own["attention/linear"])
        y = mapped(normed(x, own["norm_2"]), own["feed_forward/hidden"])
        y = jax.nn.gelu(y, approximate=False)
        return x + mapped(y, own["feed_forward/output"])

    x = params["embedding"]["embeddings"][tokens]
    x = x + params["positions"]["positions"][None, : tokens.shape[1]]
    layers = [
        {
            name.removeprefix(path): leaves
            for name, leaves in params.items()
            if name.startswith(path)
        }
        for path in (f"encoder/layer_{i}/" for i in range(L))
    ]
    if stack == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), x, stacked)
    for own in layers if stack == "loop" else ():
        x = layer(x, own)
    return mapped(normed(x, params["encoder/norm"]), params["logits"])


def joined(found, axis):
    """Adds up tokens and positions, which a function has as its embedding."""
    whole = found.take([0, 1], axis).sum(axis, keepdims=True)
    return np.concatenate([whole, np.delete(found, [0, 1], axis)], axis)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["loop", "scan"])
def test_a_plain_function_has_the_numbers_of_our_model(stack):
    _, model, params, example = subject(**PLAIN)
    function = mh.models.of_function(functools.partial(plain, stack=stack))
    given, other = (model, params, example), (function, params, example)
    np.testing.assert_allclose(
        model_runs.run(*other).logits, model_runs.run(*given).logits, atol=1e-5
    )
    lens, own_lens = (heads.logit_lens(*each) for each in (other, given))
    np.testing.assert_allclose(lens, own_lens, atol=1e-4)
    found, own = (heads.logit_attribution(*each) for each in (other, given))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, own)
    found, own = (why.pairs(*each, 2, 3, 4, 1) for each in (other, given))
    expected = joined(joined(own.terms, 0), 1)
    np.testing.assert_allclose(found.terms, expected, atol=1e-4)
    np.testing.assert_allclose(found.terms.sum(), own.total, atol=1e-4)
    labels = [str(each) for each in own.labels[0][2:]]
    assert [str(each) for each in found.labels[0]] == ["embedding", *labels]
    for answer in (None, 3):
        found, own = (
            why.written(*each, 1, 2, 4, answer=answer) for each in (other, given)
        )
        np.testing.assert_allclose(found.terms, joined(own.terms, 1), atol=1e-4)
        np.testing.assert_allclose(found.terms.sum(), found.total, atol=1e-4)


def foreign(*, norm=None, named=False):
    """Returns a hand-written model of two layers, whose attention has no sites."""
    generator = np.random.default_rng(0)

    def weights(*shape):
        return np.float32(generator.standard_normal(shape) / np.sqrt(shape[0]))

    params = {"e": weights(7, D), "u": weights(D, 7)}
    for i in range(2):
        params |= {f"{n}{i}": weights(D, H * K) for n in "qkv"}
        params[f"o{i}"] = weights(H * K, D)

    def apply(params, rng, inputs, *, lengths=None, is_training):
        del rng, lengths, is_training
        x = params["e"][inputs]
        x = mh.site("embedding", x) if named else x
        for i in range(2):
            y = x
            if norm == "rms":
                factor = jax.lax.rsqrt((x**2).mean(-1, keepdims=True))
                y = x * (mh.site("factor", factor) if named else factor)
            elif norm == "tanh":
                y = jnp.tanh(x)
            q, k, v = (
                (y @ params[f"{n}{i}"]).reshape(*y.shape[:2], H, K) for n in "qkv"
            )
            scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
            weights = jax.nn.softmax(scores, -1)
            z = jnp.einsum("bhts,bshk->bthk", weights, v)
            x = x + z.reshape(*z.shape[:2], -1) @ params[f"o{i}"]
        return mh.models.Output(x @ params["u"], ())

    return mh.models.Model(None, apply), params


@pytest.mark.slow
def test_a_function_splits_as_far_as_its_program_shows():
    example = tasks.Example(np.arange(5)[None], None, None)
    model, params = foreign()
    found = why.pairs(model, params, example, 1, 2, 3, 1)
    labels = [f"layer {i}, head {h}" for i in range(2) for h in range(H)]
    assert list(map(str, found.labels[0])) == ["embedding", *labels, "biases"]
    x = params["e"][np.arange(5)]
    f = functools.partial(model_runs.run, model)
    z = mh.look(f, ["attention_0/heads"])(params, example)[1]["attention_0/heads"][0]
    z = np.float64(z)
    parts = [z[:, h] @ params["o0"].reshape(H, K, D)[h] for h in range(H)]
    parts = np.stack([x, *parts, *np.zeros((H + 1, 5, D))])
    query, key = (
        (parts @ params[f"{n}1"]).reshape(-1, 5, H, K)[:, t, 2]
        for n, t in (("q", 3), ("k", 1))
    )
    # The scale is not known: products are as they are.
    np.testing.assert_allclose(found.terms, query @ key.T, atol=1e-5)
    np.testing.assert_allclose(found.terms.sum(), found.total, rtol=1e-5)
    both = []
    for named in (True, False):
        model, params = foreign(norm="rms", named=named)
        both.append(why.pairs(model, params, example, 1, 2, 3, 1))
        assert list(map(str, both[-1].labels[0])) == ["embedding", *labels, "biases"]
        assert np.abs(both[-1].terms[-1]).max() < 1e-5 < np.abs(both[-1].terms[0]).max()
    np.testing.assert_allclose(both[0].terms, both[1].terms, atol=1e-5)


@pytest.mark.slow
def test_what_is_not_linear_is_refused_in_two_lines():
    example = tasks.Example(np.arange(5)[None], None, None)
    model, params = foreign(norm="tanh")
    for call in (why.pairs, why.written):
        with pytest.raises(ValueError, match="part has no site. Name it") as refusal:
            call(model, params, example, 1, 2, 3)
        assert len(str(refusal.value).splitlines()) == 2

    model, params = foreign()

    def of_tokens(params, x):
        return model_runs.run(model, params, example._replace(inputs=x))

    squared = mh.models.of_function(lambda *given: of_tokens(*given).logits ** 2)
    with pytest.raises(ValueError, match="be linear in what its heads"):
        heads.logit_attribution(squared, params, example)


@pytest.mark.slow
def test_cross_attention_reads_components_of_both_stacks():
    of = tiny_models.config(family="encoder_decoder", num_layers=2)
    model, given = tiny_models.build(of), None
    given = tiny_models.inputs_of(of)
    params = tiny_models.random_parameters(model, given)
    example = tasks.Example(
        given["inputs"][:1], None, None, None, given["decoder_inputs"][:1]
    )
    for layer, query, key in ((1, 5, 2), (3, 4, 1), (5, 4, 5)):
        found = why.pairs(model, params, example, layer, 1, query, key)
        total = found.terms.sum() + found.position
        np.testing.assert_allclose(total, found.total, atol=1e-6)
        read = {
            (side, str(each))
            for side, own, parts in (
                ("q", found.labels[0], found.parts[0]),
                ("k", found.labels[1], found.parts[1]),
            )
            for each, part in zip(own, parts, strict=True)
            if np.abs(part).max() > 1e-6
        }
        assert (("q", "token") in read) == (layer < 2)
        assert (("q", "decoder token") in read) == (layer >= 2)
        assert (("k", "token") in read) == (layer in (1, 5))
        assert (("k", "layer 1, head 0") in read) == (layer == 5)
        assert (("q", "layer 4, head 0") in read) == (layer in (3, 5))
    reads = why.reads(model, params, [example])
    np.testing.assert_allclose(reads.mean("v").sum(-1), np.ones((6, 3)), atol=1e-5)


@pytest.mark.slow
def test_deep_models_which_are_scanned_give_the_numbers_of_looped_ones():
    depth = 11  # names by number are no longer in the order of layers
    of = tiny_models.config(
        family="causal", num_layers=depth, norm__kind="rms_norm", model_size=D
    )
    model, given = tiny_models.build(of), tiny_models.inputs_of(of)
    params = tiny_models.random_parameters(model, given)
    example = tasks.Example(given["inputs"][:1], None, None)
    looped = model._replace(scanned=None)
    assert model_runs.compact(model, params)[0] is not model
    for layer in (2, 10):
        first, second = (
            why.pairs(each, params, example, layer, 2, 4, 1) for each in (model, looped)
        )
        assert first.labels[0] == second.labels[0]
        np.testing.assert_allclose(first.terms, second.terms, atol=1e-6)
        np.testing.assert_allclose(first.terms.sum(), first.total, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((9, 0, 1), "layer must be an integer from 0 to 2, got 9"),
        ((0, 9, 1), "head must be an integer from 0 to 3, got 9"),
        ((0, 0, 7), "query must be an integer from -5 to 4, got 7"),
        ((0, 0, 1, 3), "query 1 does not see key 3"),
    ],
)
def test_refusals_name_what_is_wanted(given, message):
    _, model, params, example = subject(**LLAMA)
    with pytest.raises(ValueError, match=message):
        why.pairs(model, params, example, *given)


@pytest.mark.slow
def test_scores_that_are_no_products_are_refused():
    query = jnp.ones((1, 3, 2, 4))
    _, whole = mh.attend(query, query, query, score=lambda q, k: q @ k.T)
    with pytest.raises(ValueError, match="scaled product of queries and keys"):
        components.scales(whole)

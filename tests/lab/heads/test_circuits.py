"""Weights of heads, their circuits, and what they add to logits, by brute force."""

import functools

import jax
import numpy as np
import pytest

from mha_haiku import heads, models
from mha_haiku.lab.heads import circuits
from tests import oracles, tiny_models
from tests.lab.heads import small_models, test_kinds
from tests.lab.heads.small_models import (
    C,
    H,
    build,
    config,
    example,
    random_params,
)

GROUPED = {"attention__num_key_value_heads": 2}


def expanded(params, num_heads, num_groups):
    """Returns parameters whose heads have keys and values of their own."""
    copies = num_heads // num_groups

    def of_leaf(x):
        groups = np.asarray(x).reshape(*x.shape[:-1], num_groups, -1)
        return groups.repeat(copies, axis=-2).reshape(*x.shape[:-1], -1)

    is_grouped = lambda name: name.endswith(("attention/key", "attention/value"))  # noqa: E731
    return {
        module: jax.tree.map(of_leaf, leaves) if is_grouped(module) else leaves
        for module, leaves in params.items()
    }


@functools.cache
def _encoder_decoder():
    model = models.build(
        test_kinds.CONFIG, num_tokens=13, feature_size=None, num_classes=7
    )
    given = test_kinds._example().model_inputs().values()
    shapes = jax.eval_shape(model.init, jax.random.key(0), *given)
    return model, tiny_models.normal(shapes, scale=0.5)


@pytest.mark.slow
def test_weights_are_the_columns_and_rows_of_a_head():
    model, params = _encoder_decoder()  # of grouped heads
    own = params["decoder/layer_1/cross_attention/key"]
    size, group = test_kinds.K, 1
    found = heads.weights(model, params, 4, 2)
    columns = slice(group * size, (group + 1) * size)
    np.testing.assert_array_equal(found.key, own["w"][:, columns])
    np.testing.assert_array_equal(found.key_bias, own["b"][columns])
    rows = params["decoder/layer_1/cross_attention/linear"]["w"]
    np.testing.assert_array_equal(found.output, rows[2 * size : 3 * size])
    own = params["decoder/layer_1/attention/query"]
    found = heads.weights(model, params, 2, 3)
    np.testing.assert_array_equal(found.query, own["w"][:, 3 * size :])
    with pytest.raises(ValueError, match="layer must be an integer from 0 to 4, got 5"):
        heads.weights(model, params, 5, 0)
    with pytest.raises(ValueError, match="head must be an integer from 0 to 3, got 4"):
        heads.weights(model, params, 0, 4)
    with pytest.raises(ValueError, match="without a config"):
        heads.weights(models.Model(None, None), params, 0, 0)


def test_circuits_are_their_definitions():
    of = config(**GROUPED)
    model, params = build(of), random_params(of)
    first, later = (heads.weights(model, params, i) for i in (0, 2))
    one = heads.HeadWeights(*(x[1] for x in later))
    before = heads.HeadWeights(*(x[2] for x in first))
    for kind in circuits.KINDS:
        found = circuits.compositions(model, params, kind)
        assert np.isnan(found[2]).all() and np.isnan(found[1, :, :2]).all()
        wanted = np.zeros((H, H))
        for i, j in np.ndindex(H, H):
            written = first.value[i] @ first.output[i]
            match = later.query[j] @ later.key[j].T
            read = {"q": match, "k": match.T, "v": later.value[j] @ later.output[j]}
            both = np.linalg.norm(written @ read[kind])
            sizes = np.linalg.norm(written) * np.linalg.norm(read[kind])
            wanted[i, j] = both / sizes
        np.testing.assert_allclose(found[0, :, 2], wanted, atol=1e-12)
        np.testing.assert_allclose(
            circuits.composition(kind, before, one), wanted[2, 1], atol=1e-12
        )
    with pytest.raises(ValueError, match="kind must be one of q, k, v"):
        circuits.composition("o", before, one)
    with pytest.raises(ValueError, match="kind must be one of q, k, v"):
        circuits.compositions(model, params, "o")


def _norm(x, leaves, of, other=None):
    """Returns `x` through a norm with the factor of `other`, without its offset."""
    other = x if other is None else other
    if of.norm.kind == "layer_norm":
        x, other = (y - y.mean(-1, keepdims=True) for y in (x, other))
    size = (other**2).mean(-1, keepdims=True) + of.norm.epsilon
    return x / np.sqrt(size) * np.float64(leaves["scale"])


def _attributed(params, of, seen, part, lengths, table):
    """Returns what each head of a part adds to the logits, `[B, (T), H, C]`."""
    name = models.heads_of_layers(of)[part].path
    stack = name.partition("/")[0]
    outputs = seen[f"{name}/heads"]
    linear = jax.tree.map(np.float64, params[f"{name}/linear"])
    rows = linear["w"].reshape(outputs.shape[2], -1, of.model_size)
    z = np.einsum("bthv,hvd->bthd", outputs, rows)
    stream = seen[f"{stack}/stream"][:, :, None]
    end = params[f"{stack}/norm"]
    z = _norm(z, end, of, np.broadcast_to(stream, z.shape))
    if of.output.pool == "mean":
        x = _norm(stream[:, :, 0], end, of) + np.float64(end.get("offset", 0))
        z, x = (
            np.stack([row[:n].mean(0) for row, n in zip(y, lengths, strict=True)])
            for y in (z, x)
        )
        if of.output.norm:
            other = np.broadcast_to(x[:, None], z.shape)
            z = _norm(z, params["output_norm"], of, other)
    return z @ table


CASES = {
    "grouped": ({**GROUPED, "attention__gate": "head"}, None),
    "rms": ({"norm__kind": "rms_norm"}, None),
    "pooled": (
        {
            "family": "encoder",
            "output__pool": "mean",
            "output__norm": True,
            "output__tied": True,
        },
        np.int32([5, 2, 4]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_contributions_of_heads_and_the_rest_are_the_logits(case):
    fields, lengths = CASES[case]
    of = config(num_layers=2, **fields)
    model, params, batch = build(of), random_params(of), example()
    batch = batch._replace(lengths=lengths)
    options = {"lengths": lengths, "num_classes": C}
    logits, seen = oracles.recorded(params, batch.inputs, of, **options)
    found = heads.logit_attribution(model, params, batch)
    if lengths is None:
        classes = batch.targets
        table = np.float64(params["logits"]["w"])
    else:
        classes = batch.targets[:, 0]
        table = np.float64(params["embedding"]["embeddings"][:C]).T
    for part, each in enumerate(found.heads):
        wanted = _attributed(params, of, seen, part, lengths, table)
        np.testing.assert_allclose(each, wanted, atol=2e-5)
    total = found.rest + sum(each.sum(-2) for each in found.heads)
    np.testing.assert_allclose(total, logits, atol=2e-5)
    chosen = heads.logit_attribution(model, params, batch, classes=classes)
    at = np.asarray(classes)[..., None, None]
    for part in range(2):
        wanted = np.take_along_axis(found.heads[part], at, -1)[..., 0]
        np.testing.assert_allclose(chosen.heads[part], wanted, atol=1e-5)
    wanted = np.take_along_axis(found.rest, at[..., 0], -1)[..., 0]
    np.testing.assert_allclose(chosen.rest, wanted, atol=1e-5)


@pytest.mark.slow
def test_contributions_in_an_encoder_decoder():
    of, batch = test_kinds.CONFIG, test_kinds._example()
    model, params = _encoder_decoder()
    logits, seen = small_models.oracle(of, params, batch)
    found = heads.logit_attribution(model, params, batch)
    assert not found.heads[0].any()
    table = np.float64(params["logits"]["w"])
    for part in range(1, test_kinds.PARTS):
        wanted = _attributed(params, of, seen, part, None, table)
        np.testing.assert_allclose(found.heads[part], wanted, atol=2e-5)
    total = found.rest + sum(each.sum(-2) for each in found.heads)
    valid = np.arange(test_kinds.T) < batch.decoder_lengths[:, None]
    np.testing.assert_allclose(total[valid], logits[valid], atol=2e-5)


def test_the_lens_reads_each_layer_as_if_it_were_the_last():
    of = config(num_layers=2, **GROUPED)
    model, params, batch = build(of), random_params(of), example()
    logits, seen = oracles.recorded(params, batch.inputs, of)
    wanted = []
    for i in (0, 1):  # as if what enters a layer were what leaves the last
        stream = seen[f"encoder/layer_{i}/stream"]
        last = {"encoder/stream": lambda _, stream=stream: stream}
        wanted.append(oracles.recorded(params, batch.inputs, of, changes=last)[0])
    wanted.append(logits)
    found = heads.logit_lens(model, params, batch)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_sums_that_are_none_are_refused():
    of = config(norm__position="post")
    model, params = build(of), random_params(of)
    with pytest.raises(ValueError, match="no norms of the sum .*got 'post'"):
        heads.logit_attribution(model, params, example())
    of = config(attention__residual=False)
    with pytest.raises(ValueError, match=r"attention\.residual = False"):
        heads.logit_attribution(build(of), params, example())
    of = config(output__hidden="gelu")
    with pytest.raises(ValueError, match=r"output\.hidden = 'gelu'"):
        heads.logit_attribution(build(of), random_params(of), example())
    with pytest.raises(ValueError, match="one stack of layers"):
        heads.logit_lens(*_encoder_decoder(), test_kinds._example())

"""The flight recorder of a train step: same results, two programs, numbers, alarms."""

import csv
import functools
import logging

import equinox
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mha_haiku as mh
from mha_haiku.records import Column, Heads, timelines
from mha_haiku.subjects import monitors, observers
from mha_haiku.subjects.entry_points import train_observed
from tests import everyday

B, T, H, C = 4, 7, 2, 11
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, C)
DEVICES = jax.devices()[:2]
optimizer = optax.adam(1e-2)
traces = []


def _loss(logits, tokens):
    traces.append(1)
    targets = jax.nn.one_hot(tokens[:, 1:], C)
    return optax.softmax_cross_entropy(logits[:, :-1], targets).mean()


def _stepped(loss, params, rate=1e-2, **options):  # of `loss(params, tokens)`
    optimizer = optax.adam(rate)

    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, **options), (params, optimizer.init(params))


def _by_hand(around=lambda layer: layer, over=None, dtype=jnp.float32, rate=1e-2):
    def layer(x, weights):
        shape = (*x.shape[:2], H, -1)
        query, key, value = ((x @ w).reshape(shape).astype(dtype) for w in weights[:3])
        scores = jnp.einsum("bthk,bshk->bhts", query, key)
        scores = jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf)
        heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)
        x = x + heads.reshape(x.shape).astype(x.dtype) @ weights[3]
        return x + jax.nn.gelu(x @ weights[4]) @ weights[5], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(around(layer), params["table"][tokens], params["layers"])
        return _loss(x @ params["table"].T, tokens)

    def over_devices(params, tokens):
        if over == "pmap":
            part = jax.pmap(loss, in_axes=(None, 0), devices=DEVICES)
            return part(params, tokens.reshape(2, B // 2, T)).mean()
        mesh, whole, parts = jax.sharding.Mesh(DEVICES, "x"), jax.P(), jax.P("x")
        options = {"mesh": mesh, "in_specs": (whole, parts), "out_specs": parts}
        part = jax.shard_map(lambda *x: loss(*x)[None], **options)
        return part(params, tokens).mean()

    shapes = {"table": (C, 16), "layers": (2, 6, 16, 16)}
    pairs = zip(jax.random.split(jax.random.key(0)), shapes.items(), strict=True)
    params = {name: 0.35 * jax.random.normal(key, x) for key, (name, x) in pairs}
    options = {"rate": rate, "donate_argnums": (0, 1)}
    return _stepped(over_devices if over else loss, params, **options)


def _of_attention(attend, attention):  # a loss, and its parameters
    def loss(params, tokens):
        table, attention = params
        return _loss(attend(attention, table[tokens]) @ table.T, tokens)

    return loss, (jax.random.normal(jax.random.key(0), (C, 8)), attention)


def _haiku():
    def attend(x):
        attention = mh.MultiHeadAttention(H, 4, model_size=8)
        return attention(x, x, x, mask=mh.masks.causal())[0]

    layer = hk.without_apply_rng(hk.transform(attend))
    params = layer.init(jax.random.key(0), jnp.ones((B, T, 8)))
    return _stepped(*_of_attention(layer.apply, params))


def _linen():
    layer = linen.MultiHeadDotProductAttention(H)
    attention = layer.init(jax.random.key(0), jnp.ones((B, T, 8)))
    apply = functools.partial(layer.apply, mask=linen.make_causal_mask(TOKENS))
    return _stepped(*_of_attention(apply, attention))


def _nnx():  # its step changes model and optimizer in place
    layer = nnx.MultiHeadAttention(H, 8, decode=False, rngs=nnx.Rngs(0))
    mask = nnx.make_causal_mask(TOKENS)
    loss, (table, _) = _of_attention(lambda layer, x: layer(x, mask=mask), None)

    @nnx.jit
    def step(model, state, tokens):
        of_model = nnx.value_and_grad(lambda model: loss((table, model), tokens))
        value, gradient = of_model(model)
        state.update(model, gradient)
        return (value,)

    return step, (layer, nnx.Optimizer(layer, optimizer, wrt=nnx.Param))


def _equinox():
    mask = np.tri(T, dtype=bool)
    attend = lambda layer, x: jax.vmap(lambda x: layer(x, x, x, mask=mask))(x)  # noqa: E731
    layer = equinox.nn.MultiheadAttention(H, 8, key=jax.random.key(0))
    loss, model = _of_attention(attend, layer)

    @equinox.filter_jit(donate="all-except-first")
    def step(tokens, model):
        value, gradient = equinox.filter_value_and_grad(loss)(model, tokens)
        return equinox.apply_updates(model, gradient), value

    return lambda model, tokens: step(tokens, model), (model,)


def _torch():  # by the function that its subject has
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": C, "n_positions": T, "n_embd": 8, "n_layer": 2, "n_head": H}
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    subject = mh.wrap(module, check=False)
    apply = functools.partial(subject.model.apply, is_training=False)
    loss = lambda params, x: _loss(apply(params, None, x).logits, x)  # noqa: E731
    return _stepped(loss, subject.params)


STEPS = {
    "plain JAX": (_by_hand, 2),
    "remat": (lambda: _by_hand(jax.checkpoint), 2),
    "pmap": (lambda: _by_hand(over="pmap"), 2),
    "shard_map": (lambda: _by_hand(over="shard_map"), 2),
    "Haiku": (_haiku, 1),
    "Flax Linen": (_linen, 1),
    "Flax NNX": (_nnx, 1),
    "Equinox": (_equinox, 1),
    "torch": (_torch, 2),
}
DONATED = "plain JAX", "remat", "pmap", "shard_map", "Equinox"


MESHES = "pmap", "shard_map"


@pytest.mark.parametrize("name", everyday.those(STEPS, "plain JAX"))
def test_a_monitored_step_is_the_same_step_in_two_programs(name, tmp_path):
    make, num_layers = STEPS[name]
    step, state = make()
    plain, expected = (step, state) if name == "torch" else make()
    logged, table = {}, tmp_path / "heads" / "timeline.csv"
    log = lambda numbers, step: logged.update({step: numbers})  # noqa: E731
    options = {"log": log, "padding": lambda *x: traces.append(1) or x[-1] == 0}
    watched = mh.monitor(step, every=2, out=table.parent, **options)
    for i in range(5):
        donated, before = jax.tree.leaves(state)[0], len(traces)
        *new, value = watched(*state, TOKENS)
        # Two programs; the first step puts its state on a mesh, if it has one.
        assert len(traces) == before or i < (4 if name in MESHES else 2)
        assert donated.is_deleted() == (name in DONATED)
        *other, wanted = plain(*expected, TOKENS)
        state, expected = new or state, other or expected
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    columns = {*monitors.STATISTICS} - ({"padding"} if "map" in name else set())
    assert [*logged] == [0, 2, 4] and set(watched.heads) == columns
    i = num_layers - 1
    for x, column in watched.heads.columns.items():
        assert column.mean.shape == (num_layers, H) and np.isfinite(column.mean).all()
        assert column.mean[i, 1] == pytest.approx(logged[4][f"{x}/{i}.1"])
    *_, row = rows = [*csv.DictReader(table.read_text().splitlines())]
    assert len(rows) == 3 * num_layers * H
    assert float(row["entropy"]) == pytest.approx(logged[4][f"entropy/{i}.1"], 1e-4)


@pytest.mark.slow
def test_numbers_do_not_depend_on_what_is_around_the_model():
    numbers = []
    for name in ("plain JAX", "remat", "pmap", "shard_map"):
        step, state = STEPS[name][0]()
        watched = mh.monitor(step, statistics=["max_score", "entropy"])
        watched(*state, TOKENS)
        numbers.append([x.mean for x in watched.heads.columns.values()])
    for other in numbers[1:]:
        np.testing.assert_allclose(other, numbers[0], rtol=1e-5)


def test_numbers_are_those_of_the_maps(tmp_path):
    def spread(map_):
        return map_.weights().std((-2, -1))

    def attend(x, is_causal):
        heads, mask = x.reshape(B, T, H, 4), mh.masks.causal() if is_causal else None
        return mh.attend(heads, 2 * heads, heads, mask=mask)

    x = jax.random.normal(jax.random.key(2), (B, T, 8))
    watched = mh.monitor(lambda *x: attend(*x)[0], statistics=["max_score", spread])
    watched(x, True)  # a number that the function needs
    map_ = attend(x, True)[1]
    largest, spreads = map_.scores().max((0, 2, 3)), spread(map_).mean(0)
    for name, values in (("max_score", largest), ("spread", spreads)):
        np.testing.assert_allclose(watched.heads[name].mean[0], values, rtol=1e-5)
    with pytest.raises(ValueError, match="max_score"):
        mh.monitor(attend, statistics=["max_scores"])
    (tmp_path / "timeline.csv").write_text("step,loss\n")
    with pytest.raises(ValueError, match="must begin with step,layer,head,site"):
        mh.monitor(attend, out=tmp_path, first_step=1)


ALARMS = [
    ({"entropy": [1, 0.2, 0.04, 1, 0.01]}, "entropy fell below 0.05 nats at step 100"),
    ({"entropy": [0.04, 0.03]}, None),
    ({"first_token": [0.5, 0.95]}, "layer 0, head 1: over 0.9 on the first token"),
    ({"padding": [0, 0, 0.02]}, "layer 0, head 1: over 0.01 on padding at step 100"),
    ({"max_score": [10, 20, 99, 212]}, "212 in layer 0 at step 150, doubling every 50"),
    ({"max_score": [150, 151, 150]}, None),
    ({"entropy": [1, 2, np.nan]}, "layer 0: entropy is not finite at step 100"),
]


@pytest.mark.parametrize(("columns", "words"), ALARMS)
def test_alarms_come_once_and_in_words(columns, words):
    ((name, series),) = columns.items()
    records, raised, alarms = [], set(), []
    for n, number in enumerate(series):
        column = {name: Column(np.array([[series[0], number]], float), "", "")}
        records.append(Heads.of("", column, step=50 * n))
        alarms += timelines.alarms(records, raised)
    assert len(alarms) == (words is not None) and (not words or words in alarms[0])


@pytest.mark.slow
def test_it_warns_fifty_steps_before_the_loss_of_an_exploding_run_is_nan(caplog):
    """Attention in float16, at a learning rate of 30 times 2e-3."""

    def first_nan(rate):
        step, state = _by_hand(dtype=jnp.float16, rate=rate)
        watched, first = mh.monitor(step, every=5), None
        for i in range(200):
            start = jax.random.randint(jax.random.key(i), (B, 1), 0, C)
            *state, value = watched(*state, (start + np.arange(T)[None]) % C)
            first = first or (i if watched.alarms else None)
            if not np.isfinite(value):
                return i, first, watched.alarms
        return None, first, watched.alarms

    with caplog.at_level(logging.WARNING, "mha_haiku"):
        step, first, alarms = first_nan(30 * 2e-3)
    assert step is not None and "largest score" in alarms[0] and first <= step - 50
    assert alarms == caplog.messages
    assert first_nan(2e-3) == (None, None, [])


@pytest.mark.slow
def test_a_run_that_resumes_continues_the_table_of_its_heads(make_config, tmp_path):
    def stop(step, params):
        if step == 25:
            raise RuntimeError("at 25")

    config, tables = make_config(attention__record_every=10), []
    watching = [observers.Recorder(10), mh.runs.Observer(25, stop)]
    with pytest.raises(RuntimeError, match="at 25"):
        mh.runs.train(config, tmp_path / "0", observers=watching, devices=DEVICES[:1])
    for name in "01":
        train_observed(config, tmp_path / name, devices=DEVICES[:1])
        tables.append((tmp_path / name / "heads" / "timeline.csv").read_text())
    assert tables[0] == tables[1]
    steps = [row.partition(",")[0] for row in tables[0].splitlines()]
    assert [*dict.fromkeys(steps)] == ["step", "0", "10", "20", "30"]

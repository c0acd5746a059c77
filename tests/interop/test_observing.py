"""A Haiku model of an outsider is observed as it is."""

import functools
import threading

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, modules
from tests.heads import conftest as own
from tests.heads.conftest import NUM_TOKENS, B, C, D, F, H, K, L, T

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
W_INIT = hk.initializers.VarianceScaling(1.0)
TRIANGLE = np.tri(T)[None, None]  # floats, which hk.MultiHeadAttention takes too

# An outsider's model: as people write it, with names of its own.


class Block(hk.Module):
    def __call__(self, x, mask=None):
        normed = hk.LayerNorm(-1, True, True, name="before_mha")(x)
        mha = hk.MultiHeadAttention(H, K, w_init=W_INIT, model_size=D, name="mha")
        x = x + mha(query=normed, key=normed, value=normed, mask=mask)
        normed = hk.LayerNorm(-1, True, True, name="before_mlp")(x)
        wide = jax.nn.gelu(hk.Linear(F, name="wide")(normed), approximate=False)
        return x + hk.Linear(D, name="narrow")(wide)


def looped(x, mask):
    for _ in range(L):
        x = Block()(x, mask)
    return x


def stacked(x, mask):
    return hk.layer_stack(L, name="stack")(lambda x: Block()(x, mask))(x)


def wrapped(x, mask):
    """Scanned layers inside of vmap, with remat inside of both."""

    def one(x):
        layer = hk.remat(lambda x: Block()(x, mask[0]))
        return hk.layer_stack(L, name="stack")(layer)(x)

    return hk.vmap(one, split_rng=False)(x)


def transformer(layers=looped):
    def forward(tokens):
        x = hk.Embed(NUM_TOKENS, D, name="words")(tokens)
        places = hk.get_parameter("places", (8, D), init=jnp.ones)
        x = layers(x + places[None, :T], jnp.asarray(TRIANGLE))
        x = hk.LayerNorm(-1, True, True, name="last")(x)
        return hk.Linear(C, name="unembed")(x)

    return hk.transform(forward)


_OURS = {
    "words": "embedding",
    "last": "encoder/norm",
    "unembed": "logits",
    "before_mha": "norm_1",
    "before_mlp": "norm_2",
    "wide": "feed_forward/hidden",
    "narrow": "feed_forward/output",
    **{f"mha/{part}": f"attention/{part}" for part in "query key value linear".split()},
}


def params_of_theirs(params, scan=False):
    """Returns the parameters of our model under the names of theirs."""
    theirs = {"~": {"places": params["positions"]["positions"]}}
    for name, place in _OURS.items():
        if place in params:
            theirs[name] = params[place]
            continue
        layers = [params[f"encoder/layer_{i}/{place}"] for i in range(L)]
        if scan:
            stack = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
            theirs[f"stack/block/{name}"] = stack
        else:
            for i, leaves in enumerate(layers):
                theirs[f"block_{i}/{name}" if i else f"block/{name}"] = leaves
    return theirs


PATHS = ["block/mha", "block_1/mha", "block_2/mha"]


@pytest.fixture(scope="module")
def our_params():
    return own.random_params(own.config())


@pytest.fixture(scope="module")
def our_output(our_params):
    model = own.build(own.config())
    run = jax.jit(functools.partial(model.apply, is_training=False))
    return run(our_params, None, own.example().inputs)


def test_output_and_maps_are_those_of_the_model_written_with_our_modules(
    our_params, our_output
):
    theirs, params = transformer(), params_of_theirs(our_params)
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), own.example().inputs)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    output, maps = observed(theirs, params, None, own.example().inputs)
    assert_close(output, our_output.logits)
    assert list(maps) == PATHS
    for each, wanted in zip(maps.values(), our_output.maps, strict=True):
        assert each.shape == (B, H, T, T)
        assert_close(each, wanted)
        assert_close(each.value, wanted.value)


@pytest.mark.parametrize("layers", [stacked, wrapped])
def test_maps_of_scanned_layers_come_stacked(layers, our_params, our_output):
    params = params_of_theirs(our_params, scan=True)
    run = mh.observe(transformer(layers))
    gates = np.random.default_rng(2).uniform(size=(L, B, H)).astype(np.float32)
    own_gates = {"stack/block/mha": modules.Interventions(gates)}

    @jax.jit
    def both(*args):
        return run(*args), run(*args, interventions=own_gates)

    (output, maps), closed = both(params, None, own.example().inputs)
    assert_close(output, our_output.logits)
    assert list(maps) == ["stack/block/mha"]
    assert maps["stack/block/mha"].shape == (L, B, H, T, T)
    wanted = np.stack([each.weights() for each in our_output.maps])
    assert_close(maps["stack/block/mha"], wanted)
    ours = functools.partial(own.build(own.config()).apply, is_training=False)
    wanted = jax.jit(ours)(
        our_params,
        None,
        own.example().inputs,
        interventions=modules.Interventions(gates),
    )
    assert_close(closed.output, wanted.logits)


def test_what_is_not_asked_for_costs_nothing(our_params):
    theirs, params = transformer(), params_of_theirs(our_params)
    tokens = own.example().inputs

    def operations(function):
        compiled = jax.jit(function).lower(params, None, tokens).compile()
        text = compiled.as_text()
        return sorted(
            line.split(" = ")[1].partition(", metadata")[0].split("(")[0]
            for line in text.splitlines()
            if " = " in line
        ), compiled.cost_analysis()["flops"]

    run = mh.observe(theirs)
    plain = operations(theirs.apply)
    assert operations(lambda *args: run(*args).output) == plain
    read = operations(lambda *args: run(*args).maps["block/mha"].logsumexp)
    assert read != plain


def subject_of(model, params):
    return heads.Subject(model, own.loss, params, [own.example(0), own.example(1)])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layers", "measure"),
    [
        (stacked, heads.ablation),
        pytest.param(looped, heads.ablation, marks=SLOW),
        pytest.param(stacked, heads.attribution, marks=SLOW),
        pytest.param(looped, heads.gradient, marks=SLOW),
        pytest.param(stacked, heads.confidence, marks=SLOW),
    ],
)
def test_heads_measures_it_as_it_measures_ours(layers, measure, our_params):
    ours = subject_of(own.build(own.config()), our_params)
    model = mh.interop.observed_model(transformer(layers))
    theirs = subject_of(model, params_of_theirs(our_params, scan=layers is stacked))
    wanted = measure(ours).per_example
    assert wanted.shape == (2 * B, L, H)
    found = measure(theirs).per_example
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_closings_roles_and_rollouts_of_it_are_those_of_ours(our_params):
    ours = subject_of(own.build(own.config()), our_params)
    model = mh.interop.observed_model(transformer())
    theirs = subject_of(model, params_of_theirs(our_params))
    gates = np.random.default_rng(0).integers(0, 2, (4, L, H))
    found, wanted = (
        heads.closed(
            each,
            gates,
            closing=heads.closing.mean(each.model, each.params, each.batches),
        )
        for each in (theirs, ours)
    )
    assert_close(found, wanted, rtol=1e-4)
    found, wanted = (
        heads.roles(each.model, each.params, each.batches) for each in (theirs, ours)
    )
    np.testing.assert_array_equal(found.names, wanted.names)
    chex.assert_trees_all_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-5)

    def gradients(each):
        answer = lambda logits, example: logits[:, -1, 0]  # noqa: E731
        run = functools.partial(heads.output_gradients, each.model)
        return jax.jit(lambda params, x: run(params, x, answer)[1])(
            each.params, each.batches[0]
        )

    chex.assert_trees_all_close(
        gradients(theirs), gradients(ours), rtol=1e-4, atol=1e-5
    )


def test_an_observed_model_runs_as_a_whole_only(our_params):
    model = mh.interop.observed_model(transformer(), paths=PATHS[::-1])
    params, tokens = params_of_theirs(our_params), own.example().inputs
    with pytest.raises(ValueError, match="start and is_training must be left out"):
        model.apply(params, None, tokens, is_training=True)
    run = functools.partial(model.apply, params, None, tokens)
    output = jax.eval_shape(run)
    assert output.hidden == ()
    assert len(output.maps) == L
    model = mh.interop.observed_model(transformer(), paths=["block/mah"])
    with pytest.raises(ValueError, match="paths must be one of.*mean 'block/mha'"):
        jax.eval_shape(functools.partial(model.apply, params, None, tokens))


# Single attentions.


def called(*inputs, name="mha", kind=hk.MultiHeadAttention, **kwargs):
    module = kind(H, K, w_init=W_INIT, model_size=D, name=name)
    return module(*inputs, **kwargs)


def params_and(forward, *args):
    """Returns what hk.transform returns, and random parameters."""
    transformed = hk.transform(forward)
    shapes = jax.eval_shape(transformed.init, jax.random.key(0), *args)
    generator = np.random.default_rng(3)
    return transformed, jax.tree.map(
        lambda leaf: generator.standard_normal(leaf.shape).astype(leaf.dtype) / 3,
        shapes,
    )


def observed(transformed, *args, example=None, **kwargs):
    """Returns what a function gives when it is observed under jit."""
    run = mh.observe(transformed, example=example)
    return jax.jit(lambda *args: run(*args, **kwargs))(*args)


def applied(forward, *args):
    return jax.jit(hk.transform(forward).apply)(*args)


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_masks_are_seen_wherever_they_stand(how, x):
    mask = np.random.default_rng(1).random((B, 1, T, T)) < 0.5
    mask[:, :, 1] = False  # hk.MultiHeadAttention attends uniformly there

    def forward(x):
        if how == "positional":
            return called(x, x, x, jnp.asarray(mask))
        return called(x, x, x, mask=jnp.asarray(mask, jnp.float32))

    transformed, params = params_and(forward, x)
    # With the example: rows that see nothing are no difference.
    example = params, None, x
    _, maps = observed(transformed, *example, example=example)
    weights = np.asarray(maps["mha"])
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(mask, weights.shape))


@pytest.mark.parametrize("axes", ["H", "BH", "BTH"])
def test_gates_and_what_passes_instead(axes, x):
    generator = np.random.default_rng(5)
    sizes = {"B": B, "T": T, "H": H}
    gates = generator.random([sizes[axis] for axis in axes]).astype(np.float32)
    replacement = generator.standard_normal((H, K)).astype(np.float32)
    given = modules.Interventions(gates, replacement)

    def ours(x):
        module = modules.MultiHeadAttention(H, K, model_size=D, name="mha")
        return module(x, x, x, interventions=given)[0]

    transformed, params = params_and(lambda x: called(x, x, x), x)
    output, _ = observed(transformed, params, None, x, interventions={"mha": given})
    assert_close(output, applied(ours, params, None, x), atol=1e-5)


def test_calls_that_share_weights_have_maps_and_gates_of_their_own(x):
    def forward(x, first=None, second=None):
        module = modules.MultiHeadAttention(H, K, model_size=D, name="mha")
        x = module(x, x, x, interventions=first)[0]
        return module(x, x, x, interventions=second)[0]

    def theirs(x):
        module = hk.MultiHeadAttention(H, K, w_init=W_INIT, model_size=D, name="mha")
        x = module(x, x, x)
        return module(x, x, x)

    transformed, params = params_and(theirs, x)
    _, maps = observed(transformed, params, None, x)
    assert list(maps) == ["mha#0", "mha#1"]
    assert np.abs(maps["mha#0"].weights() - maps["mha#1"].weights()).max() > 0.01
    given = modules.Interventions(jnp.ones(H).at[2].set(0))
    for name, calls in (("mha", (given, given)), ("mha#1", (None, given))):
        output, _ = observed(transformed, params, None, x, interventions={name: given})
        assert_close(output, applied(forward, params, None, x, *calls), atol=1e-5)


def test_a_module_that_runs_in_a_scan_has_gates_of_each_step(x):
    def theirs(x):
        module = hk.MultiHeadAttention(H, K, w_init=W_INIT, model_size=D, name="mha")
        return hk.scan(lambda x, _: (module(x, x, x), None), x, jnp.arange(2))[0]

    def ours(x, gates):
        module = modules.MultiHeadAttention(H, K, model_size=D, name="mha")
        for each in gates:
            x, _ = module(x, x, x, interventions=modules.Interventions(each))
        return x

    gates = np.random.default_rng(4).random((2, B, T, H)).astype(np.float32)
    transformed, params = params_and(theirs, x)
    given = {"mha": modules.Interventions(gates)}
    output, maps = observed(transformed, params, None, x, interventions=given)
    assert maps["mha"].shape == (2, B, H, T, T)
    assert_close(output, applied(ours, params, None, x, gates), atol=1e-5)
    given = {"mha": modules.Interventions(gates[0])}
    with pytest.raises(ValueError, match=r"'mha'.*axes of the L scanned layers"):
        observed(transformed, params, None, x, interventions=given)


def test_gates_of_examples_pass_through_vmap_in_the_model(x):
    def theirs(x):
        return hk.vmap(lambda x: called(x, x, x), split_rng=False)(x)

    def ours(x, gates):
        module = modules.MultiHeadAttention(H, K, model_size=D, name="mha")
        return module(x, x, x, interventions=modules.Interventions(gates))[0]

    transformed, params = params_and(theirs, x)
    for shape in ((H,), (B, T, H)):
        gates = np.random.default_rng(4).random(shape).astype(np.float32)
        given = {"mha": modules.Interventions(gates)}
        output, _ = observed(transformed, params, None, x, interventions=given)
        assert_close(output, applied(ours, params, None, x, gates), atol=1e-5)


def test_gates_can_be_mapped_over_and_differentiated(x):
    transformed, params = params_and(lambda x: called(x, x, x), x)
    run = mh.observe(transformed)

    @jax.jit
    def total(gates):
        given = {"mha": modules.Interventions(gates)}
        return run(params, None, x, interventions=given).output.sum()

    slopes = jax.grad(total)(jnp.ones(H))
    one_closed = jax.vmap(total)(1 - jnp.eye(H))
    # The output is linear in the gates.
    assert_close(total(jnp.ones(H)) - one_closed, slopes, rtol=1e-3, atol=1e-3)


def test_our_modules_are_seen_with_their_own_maps(x):
    def forward(x):
        attend = modules.MultiHeadAttention(
            H, K, model_size=D, qk_norm=True, name="ours"
        )
        mask = mh.masks.causal()
        x, attention_map = attend(x, x, x, mask)
        return called(x, x, x, name="theirs"), attention_map

    transformed, params = params_and(lambda x: forward(x)[0], x)
    (_, own_map), maps = observed(hk.transform(forward), params, None, x)
    assert list(maps) == ["ours", "theirs"]
    np.testing.assert_array_equal(maps["ours"], own_map)
    given = {"ours": modules.Interventions(np.zeros(H, np.float32))}
    output, _ = observed(transformed, params, None, x, interventions=given)
    blank = np.broadcast_to(params["ours/linear"]["b"], x.shape)
    wanted = applied(lambda x: called(x, x, x, name="theirs"), params, None, blank)
    assert_close(output, wanted)


def test_functions_with_state_give_output_and_state(x):
    def forward(x):
        calls = hk.get_state("calls", (), init=jnp.zeros)
        hk.set_state("calls", calls + 1)
        return called(x, x, x)

    transformed = hk.transform_with_state(forward)
    params, state = transformed.init(jax.random.key(0), x)
    (output, after), maps = observed(transformed, params, state, None, x)
    assert_close(output, jax.jit(transformed.apply)(params, state, None, x)[0])
    assert after["~"]["calls"] == 1
    assert list(maps) == ["mha"]


# Subclasses.


class Rotary(hk.MultiHeadAttention):
    """Turns its queries: a map of what `query` projects would be wrong."""

    @hk.transparent
    def _linear_projection(self, x, head_size, name=None):
        y = super()._linear_projection(x, head_size, name)
        return y[..., ::-1] * 1.5 if name == "query" else y


class Selfish(hk.MultiHeadAttention):
    """Old examples of Haiku have this: what the parent gets is all that differs."""

    def __call__(self, x, mask=None):
        return 2.0 * super().__call__(x, x, x, mask)


class Copied(hk.MultiHeadAttention):
    """The parent's code, copied to get at the weights."""

    def __call__(self, query, key, value, mask=None):
        size = self.key_size
        query, key, value = (
            self._linear_projection(x, size, name)
            for x, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        logits = jnp.einsum("...thd,...Thd->...htT", query, key) / np.sqrt(size)
        weights = jax.nn.softmax(logits)
        attended = jnp.einsum("...htT,...Thd->...thd", weights, value)
        attended = attended.reshape(*attended.shape[:-2], -1)
        return hk.Linear(self.model_size)(attended), weights


class Otherwise(hk.MultiHeadAttention):
    """Has no linear maps of its own."""

    def __call__(self, query, key, value, mask=None):
        return query


def test_a_subclass_that_only_calls_its_parent_is_observed(x):
    transformed, params = params_and(lambda x: called(x, kind=Selfish), x)
    plain = hk.transform(lambda x: 2.0 * called(x, x, x))
    output, maps = observed(transformed, params, None, x)
    wanted, wanted_maps = observed(plain, params, None, x)
    assert_close(output, wanted)
    assert_close(maps["mha"], wanted_maps["mha"])


def test_a_subclass_with_a_call_of_its_own_is_observed_where_an_example_agrees(x):
    transformed, params = params_and(lambda x: called(x, x, x, kind=Copied), x)
    with pytest.raises(ValueError, match=r"'mha' is a Copied with __call__.*example="):
        observed(transformed, params, None, x)
    example = params, None, x
    (_, weights), maps = observed(transformed, *example, example=example)
    assert_close(maps["mha"], weights)


def test_a_map_that_is_not_what_the_module_does_is_refused_with_the_difference(x):
    transformed, params = params_and(lambda x: called(x, x, x, kind=Rotary), x)
    with pytest.raises(ValueError, match=r"'mha' is a Rotary with _linear_projection"):
        observed(transformed, params, None, x)
    with pytest.raises(ValueError, match=r"map of 'mha' .* differ .* by \d\.\d+ of"):
        mh.observe(transformed, example=(params, None, x))


def test_a_subclass_without_the_linear_maps_is_refused(x):
    transformed, params = params_and(lambda x: called(x, x, x, kind=Otherwise), x)
    with pytest.raises(ValueError, match="'mha' cannot be observed: Otherwise has no"):
        observed(transformed, params, None, x)


# What cannot be.


def _cond(x):
    attend = lambda x: called(x, x, x)  # noqa: E731
    return hk.cond(True, attend, attend, x)


def _while(x):
    module = hk.MultiHeadAttention(H, K, w_init=W_INIT, model_size=D, name="mha")
    is_small = lambda x: jnp.abs(x).max() < 1e3  # noqa: E731
    return hk.while_loop(is_small, lambda x: 2 * module(x, x, x), x)


def _jit(x):
    module = hk.MultiHeadAttention(H, K, w_init=W_INIT, model_size=D, name="mha")
    return jax.jit(lambda x: module(x, x, x))(x)


def _grad(x):
    return hk.grad(lambda x: called(x, x, x).sum())(x)


@pytest.mark.parametrize("forward", [_cond, _while, _jit, _grad])
def test_what_observe_cannot_see_into_is_refused_by_path(forward, x):
    transformed, params = params_and(lambda x: called(x, x, x), x)
    del transformed
    with pytest.raises(ValueError, match="'mha' is inside of a transformation of JAX"):
        observed(hk.transform(forward), params, None, x)


def test_mistakes_are_named(x):
    transformed, params = params_and(lambda x: called(x, x, x), x)
    gates = modules.Interventions(np.ones(H, np.float32))
    run = functools.partial(observed, transformed, params, None, x)
    with pytest.raises(ValueError, match="'mah', and there is no .* mean 'mha'"):
        run(interventions={"mah": gates})
    with pytest.raises(ValueError, match=r"'mha'.*heads must be \[H\]"):
        run(interventions={"mha": modules.Interventions(np.ones(H + 1, np.float32))})
    with pytest.raises(TypeError, match="'mha'.*must be modules.Interventions"):
        run(interventions={"mha": np.ones(H)})
    with pytest.raises(TypeError, match="dict of modules.Interventions by module path"):
        run(interventions=gates)
    with pytest.raises(ValueError, match="must call hk.MultiHeadAttention"):
        mh.observe(hk.transform(lambda x: x))({}, None, x)
    with pytest.raises(
        TypeError, match="transformed must be what hk.transform returns"
    ):
        mh.observe(3)


def test_jax_is_left_as_it_was(x):
    before = jax.lax.scan, jax.vmap, jax.checkpoint, jax.remat
    transformed, params = params_and(lambda x: called(x, x, x), x)
    observed(transformed, params, None, x)
    with pytest.raises(ValueError, match="'mha/query/w'"):
        observed(transformed, params, None, x[..., :3])
    assert (jax.lax.scan, jax.vmap, jax.checkpoint, jax.remat) == before


def test_functions_kept_from_inside_are_what_they_were(x):
    kept = []

    def forward(x):
        kept.append(jax.vmap(lambda x: x * 2))
        return called(x, x, x)

    _, params = params_and(lambda x: called(x, x, x), x)
    observed(hk.transform(forward), params, None, x)
    np.testing.assert_array_equal(kept[0](np.arange(3)), [0, 2, 4])


def test_what_another_thread_scans_meanwhile_is_its_own(x):
    inside, over, results = threading.Event(), threading.Event(), []

    def body(carry, x):
        inside.set()
        assert over.wait(60)
        return carry, x + 1

    def other():
        results.append(jax.lax.scan(body, 0.0, jnp.arange(3))[1])

    def forward(x):
        thread = threading.Thread(target=other)
        thread.start()
        try:
            assert inside.wait(60)
            return called(x, x, x)  # while the other thread is in its body
        finally:
            over.set()
            thread.join()

    _, params = params_and(lambda x: called(x, x, x), x)
    _, maps = observed(hk.transform(forward), params, None, x)
    assert list(maps) == ["mha"]
    np.testing.assert_array_equal(results[0], [1, 2, 3])


def test_half_precision_passes_the_comparison(x):
    x = x.astype(jnp.bfloat16)
    transformed, params = params_and(lambda x: called(x, x, x), x)
    mh.observe(transformed, example=(params, None, x))

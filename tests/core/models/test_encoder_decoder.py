"""Models of two stacks: their formula, and each half as a separate model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models
from mha_haiku.core import checks, sites
from tests import everyday, tiny_models

B, T, S, H, K = 3, 4, 6, 4, 2
D, SOURCES, TARGETS = 10, 13, 7
ENCODER_LAYERS, DECODER_LAYERS = 1, 2

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
assert_equal = np.testing.assert_array_equal


def _config(**fields):
    own = {
        "family": "encoder_decoder",
        "num_layers": ENCODER_LAYERS,
        "decoder__num_layers": DECODER_LAYERS,
        "attention__num_heads": H,
        "attention__key_size": K,
    }
    return tiny_models.config(**own | fields)


def _build(config):
    return models.build(
        config, num_tokens=SOURCES, feature_size=None, num_classes=TARGETS
    )


def _inputs():
    generator = np.random.default_rng(0)
    return {
        "inputs": generator.integers(0, SOURCES, (B, S)),
        "lengths": np.array([S, 3, 5]),
        "decoder_inputs": generator.integers(0, TARGETS, (B, T)),
        "decoder_lengths": np.array([2, T, 3]),
    }


def _run(model, params, given, edits=None):
    run = functools.partial(model.apply, is_training=False)
    return jax.jit(sites.edit(run, edits or {}))(params, None, **given)


def _counted(given):
    return np.arange(T) < given["decoder_lengths"][:, None]


@pytest.mark.slow
@pytest.mark.parametrize("positions", everyday.some(models.POSITIONS, 2))
def test_each_half_alone_is_a_model_of_one_stack(positions):
    """With the heads of cross-attention ablated the decoder is a causal model."""
    fields = {"embedding__positions": positions, "attention__window": 2}
    config, given = _config(**fields), _inputs()
    model = _build(config)
    params = tiny_models.random_parameters(model, given)
    for name in params:  # what ablated heads leave of cross-attention
        if name.endswith("cross_attention/linear"):
            params[name]["b"] = np.zeros_like(params[name]["b"])
    ablated = {"cross_attention/heads": jnp.zeros_like}
    both = _run(model, params, given, ablated)

    def alone(family, num_layers, num_tokens, prefix):
        own = _config(
            **fields, family=family, num_layers=num_layers, decoder__num_layers=None
        )
        single = models.build(
            own, num_tokens=num_tokens, feature_size=None, num_classes=TARGETS
        )
        names = jax.eval_shape(single.init, jax.random.key(0), given["inputs"])
        theirs = {"encoder": prefix.removesuffix("_")} if prefix else {}

        def renamed(name):
            stack, _, rest = name.partition("/")
            if rest:
                name = f"{theirs.get(stack, stack)}/{rest}"
                if prefix and "layer_" in name:
                    name = name.replace("norm_2", "norm_3")
                return name
            return name if name == "logits" else prefix + name

        return single, {name: params[renamed(name)] for name in names}

    encoder, own = alone("encoder", ENCODER_LAYERS, SOURCES, "")
    output = _run(encoder, own, dict(list(given.items())[:2]))
    for ours, wanted in zip(both.maps.encoder, output.maps, strict=True):
        assert_close(ours.weights(), wanted.weights())
    decoder, own = alone("causal", DECODER_LAYERS, TARGETS, "decoder_")
    read = {"inputs": given["decoder_inputs"], "lengths": given["decoder_lengths"]}
    output = _run(decoder, own, read)
    for ours, wanted in zip(both.maps.decoder, output.maps, strict=True):
        assert_close(ours.weights(), wanted.weights())
    assert_close(both.logits[_counted(given)], output.logits[_counted(given)])


@pytest.mark.slow
def test_pruned_heads_of_each_kind_are_gated_ones():
    config, given = _config(attention__num_key_value_heads=2), _inputs()
    model = _build(config)
    params = tiny_models.random_parameters(model, given)
    keep = [[0, 2], [1], [0, 1, 2, 3], [], [3]]
    parts = [f"{each.path}/heads" for each in models.heads_of_layers(config)]
    gates = heads.edits.on_parts(
        parts, heads.open_gates(config, keep), heads.edits.gated
    )
    gated = _run(model, params, given, gates)
    own, pruned_config = heads.prune(params, config, keep)
    pruned = _run(_build(pruned_config), own, given)
    assert_close(pruned.logits[_counted(given)], gated.logits[_counted(given)])
    assert [each.shape[1] for each in pruned.maps] == [len(row) for row in keep]
    assert own["decoder/layer_1/cross_attention/query"]["w"].shape == (D, K)
    assert "decoder/layer_0/cross_attention/query" not in own
    with pytest.raises(ValueError, match="entry for each of the 5 layers, got 1"):
        heads.prune(params, config, keep[:1])


@pytest.mark.slow
def test_what_a_padded_source_holds_changes_no_bit():
    """Also where nothing of it is valid, so that cross-attention sees nothing."""
    config, given = _config(), _inputs()
    given["lengths"] = np.array([0, 3, S])
    model = _build(config)
    params = tiny_models.random_parameters(model, given)

    @jax.jit
    def loss(params, **given):
        output = model.apply(params, None, **given, is_training=False)
        counted = _counted(_inputs())[..., None]
        logits = jnp.where(counted, output.logits, 0)
        return jnp.square(logits).sum(), (logits, [x.weights() for x in output.maps])

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found = grad(params, **given)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not found[0][1][1][-1][0].any()  # of the source without valid positions
    other = dict(given)
    is_padding = np.arange(S) >= given["lengths"][:, None]
    other["inputs"] = np.where(
        is_padding, (given["inputs"] + 1) % SOURCES, given["inputs"]
    )
    other["decoder_inputs"] = np.where(
        _counted(given),
        given["decoder_inputs"],
        (given["decoder_inputs"] + 1) % TARGETS,
    )
    jax.tree.map(assert_equal, grad(params, **other), found)


def test_heads_have_names_of_their_kind():
    config = _config()
    found = models.heads_of_layers(config)
    assert [each.label for each in found] == [
        "encoder 0",
        "decoder 0",
        "decoder 1",
        "cross 0",
        "cross 1",
    ]
    one = _config(family="causal", decoder__num_layers=None)
    assert [each.label for each in models.heads_of_layers(one)] == ["layer 0"]
    places = {
        "encoder/layer_0/attention/query": 0,
        "decoder/layer_1/attention/query": 2,
        "decoder/layer_0/cross_attention/linear": 3,
        "decoder/layers/layer_0/cross_attention/key": slice(3, 5),
        "logits": None,
    }
    for module, part in places.items():
        assert models.part_of(config, module) == part


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output__pool": "mean"}, "output.pool must be None for an encoder_decoder"),
        ({"output__logits": False}, "output.logits must be True for an encoder_dec"),
        ({"attention__num_heads": 0, "embedding__positions": "none"}, "at least 1"),
        ({"family": "causal"}, "decoder.num_layers must be None .* 'causal'"),
        ({"attention__kept_heads": [[0]]}, "each of the 5 attention parts .*, got 1"),
    ],
)
def test_what_does_not_fit_a_decoder_is_refused(fields, message):
    with pytest.raises(checks.ConfigError, match=message):
        models.check(_config(**fields))


@pytest.mark.slow
def test_inputs_that_do_not_fit_are_refused():
    given, model = _inputs(), _build(_config())
    params = tiny_models.random_parameters(model, given)
    apply = functools.partial(model.apply, params, None, is_training=False)
    source = {"inputs": given["inputs"]}
    with pytest.raises(ValueError, match="decoder_inputs must be the tokens .* None"):
        apply(**source)
    with pytest.raises(ValueError, match=r"decoder_inputs must be .* float32\[3,4\]"):
        apply(**source, decoder_inputs=np.zeros((B, T), np.float32))
    with pytest.raises(ValueError, match="decoder_inputs must be .* 0 to 6, got 7"):
        apply(**source, decoder_inputs=np.full((B, T), 7))
    encoder = models.build(
        _config(family="encoder", decoder__num_layers=None),
        num_tokens=SOURCES,
        feature_size=None,
        num_classes=TARGETS,
    )
    with pytest.raises(ValueError, match="decoder_inputs .* the model has no decoder"):
        encoder.init(jax.random.key(0), *given.values())


def test_maps_stay_maps_of_kinds_through_transformations():
    maps = models.Maps(range(5), (1, 2, 2))
    again = jax.tree.map(lambda x: 10 * x, maps)
    assert (again.encoder, again.decoder, again.cross) == ((0,), (10, 20), (30, 40))

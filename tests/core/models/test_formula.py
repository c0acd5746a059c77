"""Each value inside of a model is the formula's, looked at and changed at its site."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.core import sites
from tests import everyday, oracles
from tests.tiny_models import (
    B,
    C,
    D,
    T,
    build,
    config,
    counted,
    inputs_of,
    oracle_inputs,
    random_parameters,
)

CLOSE = {"rtol": 2e-4, "atol": 3e-5}

OPTIONS = {
    "defaults": {},
    "scale": {"attention__scale": 0.7},
    "window back": {"attention__window": 2, "family": "causal"},
    "window both ways": {"attention__window": 1, "attention__qk_norm": True},
    "window of itself": {"attention__window": 0, "positions": "none"},
    "learned sinks": {"attention__sinks": "learned", "num_key_value_heads": 1},
    "sigmoid attention, gates by head": {
        "attention__score": "sigmoid",
        "attention__normalizer": "none",
        "attention__offset": -1.3,
        "attention__gate": "head",
    },
    "one sink": {"attention__sinks": 0.5},
    "no norm": {"norm__kind": "none"},
    "no norm, post": {"norm__kind": "none", "norm__position": "post"},
    "attention alone": {"feed_forward__hidden_size": 0, "norm__kind": "rms_norm"},
    "feed-forward alone": {"attention__num_heads": 0, "attention__key_size": None},
    "attention without residual": {"attention__residual": False, "smear_keys": True},
    "feed-forward without residual": {
        "feed_forward__residual": False,
        "norm__position": "post",
    },
    "bias of the output alone": {
        "attention__with_bias": False,
        "feed_forward__with_bias": False,
    },
    "bias of queries, keys and values alone": {
        "attention__output_bias": False,
        "output__with_bias": False,
    },
    "like BERT": {
        "embedding__segments": 3,
        "embedding__norm": True,
        "norm__position": "post",
        "norm__epsilon": 0.03,
        "output__hidden": "gelu",
        "output__norm": True,
        "output__tied": True,
    },
    "like Gemma": {
        "family": "causal",
        "embedding__scale": 1.7,
        "embedding__positions": "rotary",
        "embedding__frequencies": [1.5, 0.0],
        "attention__num_key_value_heads": 1,
        "attention__qk_norm": True,
        "feed_forward__activation": "geglu_tanh",
        "norm__kind": "rms_norm",
        "norm__epsilon": 0.1,
        "output__tied": True,
        "output__with_bias": False,
    },
    "gelu by tanh": {"feed_forward__activation": "gelu_tanh"},
    "like Llama": {
        "family": "causal",
        "embedding__positions": "rotary",
        "embedding__rotary_period": 50.0,
        "feed_forward__activation": "swiglu",
    },
    "sentence classes": {
        "embedding__positions": "none",
        "feed_forward__activation": "geglu",
        "output__pool": "mean",
        "output__hidden": "tanh",
    },
    "first position": {"output__pool": "first", "output__hidden": "relu"},
    "set": {"family": "set_classifier", "norm__kind": "rms_norm"},
    "decoder": {"family": "encoder_decoder", "decoder__num_layers": 1},
    "decoder, post norm, tied": {
        "family": "encoder_decoder",
        "norm__position": "post",
        "output__tied": True,
    },
    "decoder, window": {
        "family": "encoder_decoder",
        "num_layers": 1,
        "decoder__num_layers": 2,
        "norm__kind": "rms_norm",
        "attention__window": 1,
    },
    "decoder, grouped heads, rotary": {
        "family": "encoder_decoder",
        "num_layers": 1,
        "decoder__num_layers": 2,
        "attention__num_key_value_heads": 1,
        "attention__qk_norm": True,
        "attention__with_bias": False,
        "embedding__positions": "rotary",
        "feed_forward__activation": "swiglu",
    },
    "decoder, sinks and gates": {
        "family": "encoder_decoder",
        "attention__sinks": "learned",
        "attention__gate": "head",
    },
    "decoder, smeared": {
        "family": "encoder_decoder",
        "attention__smear_keys": True,
        "embedding__positions": "none",
        "embedding__norm": True,
    },
}

# What is changed site by site, and scanned too: each family, each position of the norm,
# and weights that sum to no 1.
CHANGED = [
    "like Llama",
    "like BERT",
    "sigmoid attention, gates by head",
    "decoder, grouped heads, rotary",
]


def _of(name):
    """A config with options, inputs for its model, and parameters of looped layers."""
    of = config(**{"num_layers": 2} | OPTIONS[name])
    given = inputs_of(of)
    return of, given, random_parameters(build(of), given)


def _wanted(of, given, params, changes=()):
    """Logits, and all values by the names of their sites, some of them changed."""
    logits, values = oracles.recorded(
        params,
        config=of,
        num_classes=C,
        changes={each: functools.partial(_changed, each, xnp=np) for each in changes},
        **oracle_inputs(given),
    )
    return logits, {x: y for x, y in values.items() if not x.endswith("gates")}


def _changed(name, x, xnp):
    """Another value; no symmetry is left, but what is masked stays so."""
    wave = xnp.sin(xnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    is_of_pairs = name.endswith(("scores", "weights"))
    return x * (1 + wave / 2) if is_of_pairs else 6 * wave - x


def _valid(name, given):
    """Which positions of a value count, `[B, T or S]`."""
    is_of_decoder = name.startswith("decoder")
    if "cross_attention" in name and name.endswith(("key", "value", "key_norm/factor")):
        is_of_decoder = False
    prefix = "decoder_" if is_of_decoder else ""
    size = given[f"{prefix}inputs"].shape[1]
    return np.arange(size) < given[f"{prefix}lengths"][:, None]


def _assert_close(found, wanted, names, given):
    for each in names:
        own, other = found[each], wanted[each]
        if each.endswith(("scores", "weights")):  # hidden in padding
            np.testing.assert_allclose(own, other, **CLOSE, err_msg=each)
        elif each != "logits":
            valid = _valid(each, given)
            np.testing.assert_allclose(own[valid], other[valid], **CLOSE, err_msg=each)


@pytest.mark.parametrize("name", everyday.some(OPTIONS, 5))
def test_values_at_all_sites_are_the_formula(name):
    of, given, params = _of(name)
    run = functools.partial(build(of).apply, is_training=False)
    wanted_logits, wanted = _wanted(of, given, params)
    # Not compiled: the operations of all these models are nearly the same.
    output, found = sites.look(run, ["*"])(params, None, **given)
    maps = {each: x for each, x in found.items() if each.endswith("/map")}
    # A layer without attention has maps and heads of size 0.
    found = {
        each: x
        for each, x in found.items()
        if each not in maps and x.size and not each.endswith("/gates")
    }
    assert list(found) == list(wanted)
    _assert_close(found, wanted, wanted, given)
    valid = counted(of, given)
    assert output.logits.shape == wanted_logits.shape
    np.testing.assert_allclose(output.logits[valid], wanted_logits[valid], **CLOSE)
    assert output.output.shape == (B, T, D)
    # Maps are in the order of kinds; sites in the order of layers.
    names = sorted(maps, key=lambda each: (each.startswith("decoder"), "cross" in each))
    for each, own in zip(names, output.maps, strict=True):
        chex.assert_trees_all_equal(own, maps[each])


@pytest.mark.slow
@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_value_changes_what_follows_as_in_the_formula(name, is_scanned):
    of, given, params = _of(name)
    _, clean = _wanted(of, given, params)
    names, valid = list(clean), counted(of, given)
    fields = {"num_layers": 2, "scan_layers": is_scanned} | OPTIONS[name]
    model_run = functools.partial(build(config(**fields)).apply, is_training=False)
    params_of_model = models.stacked(params) if is_scanned else params

    @jax.jit
    def run(which):
        """Changes one of the sites: one program is compiled for all."""

        def edit(each, i):
            return lambda x: jnp.where(which == i, _changed(each, x, jnp), x)

        edits = {each: edit(each, i) for i, each in enumerate(names)}
        edited = sites.edit(model_run, edits)
        return sites.look(edited, names)(params_of_model, None, **given)

    for i, each in [(-1, ""), *enumerate(names)]:
        output, found = run(i)
        assert list(found) == names
        wanted_logits, wanted = _wanted(of, given, params, [each] if each else [])
        # The scores of edited weights are their logarithms.
        later = [x for x in names[max(i, 0) :] if not x.endswith("scores")]
        _assert_close(found, wanted, later, given)
        np.testing.assert_allclose(output.logits[valid], wanted_logits[valid], **CLOSE)
        effects = [
            np.abs(wanted[later] - clean[later]).max()
            for later in names[i + 1 :]
            if not later.endswith("scores")
        ]
        assert i in (-1, len(names) - 1) or max(effects) > 100 * CLOSE["atol"], each

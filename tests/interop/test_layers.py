"""Parameters of single modules give the same numbers here and in other libraries."""

import functools

import chex
import haiku as hk
import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import interop

B, T, S, H, K, V, D = 2, 3, 5, 3, 4, 2, 11
WIDTHS = 6, 7, 8  # of queries, keys and values
E = H * K  # torch's width
F = 9

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def normal(*shape):
    # Each array differs from every other of its shape.
    normal.seed += 1
    generator = np.random.default_rng(normal.seed)
    return generator.standard_normal(shape).astype(np.float32) / 2


normal.seed = 0


# Each library's layout, and its formula in float64, one head after the other.


def _attend(query, key, value):
    """Returns `[T, V]` of one head."""
    scores = query @ key.T / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def torch_state(*, widths=None, biases=True):
    state = {"in_proj_weight": normal(3 * E, E)}
    if widths is not None:
        state = {
            f"{letter}_proj_weight": normal(E, width)
            for letter, width in zip("qkv", widths, strict=True)
        }
    state["out_proj.weight"] = normal(E, E)
    if biases:
        state |= {"in_proj_bias": normal(3 * E), "out_proj.bias": normal(E)}
    return state


def torch_formula(state, *inputs):
    state = {name: array.astype(np.float64) for name, array in state.items()}
    if "in_proj_weight" in state:
        weights = np.split(state["in_proj_weight"], 3)
    else:
        weights = [state[f"{letter}_proj_weight"] for letter in "qkv"]
    biases = np.split(state.get("in_proj_bias", np.zeros(3 * E)), 3)
    heads = []
    for h in range(H):
        rows = slice(h * K, (h + 1) * K)
        parts = (
            x @ weight[rows].T + bias[rows]
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        heads.append(_attend(*parts))
    joined = np.concatenate(heads, -1)
    return joined @ state["out_proj.weight"].T + state.get("out_proj.bias", 0)


def flax_params():
    sizes = zip(("query", "key", "value"), WIDTHS, (K, K, V), strict=True)
    params = {
        name: {"kernel": normal(width, H, size), "bias": normal(H, size)}
        for name, width, size in sizes
    }
    return params | {"out": {"kernel": normal(H, V, D), "bias": normal(D)}}


def flax_formula(params, *inputs):
    params = jax.tree.map(np.float64, params)
    names = "query", "key", "value"
    output = params["out"]["bias"]
    for h in range(H):
        parts = (
            x @ params[name]["kernel"][:, h] + params[name]["bias"][h]
            for name, x in zip(names, inputs, strict=True)
        )
        output = output + _attend(*parts) @ params["out"]["kernel"][h]
    return output


def equinox_module(biases=True):
    def linear(rows, columns):
        bias = normal(rows) if biases else None
        return {"weight": normal(rows, columns), "bias": bias}

    return {
        "query_proj": linear(H * K, WIDTHS[0]),
        "key_proj": linear(H * K, WIDTHS[1]),
        "value_proj": linear(H * V, WIDTHS[2]),
        "output_proj": linear(D, H * V),
    }


def equinox_formula(module, *inputs):
    projected = [
        x @ linear["weight"].astype(np.float64).T
        + (0 if linear["bias"] is None else linear["bias"])
        for x, linear in zip(inputs, module.values(), strict=False)
    ]
    heads = [_attend(*(np.split(x, H, -1)[h] for x in projected)) for h in range(H)]
    last = module["output_proj"]
    bias = 0 if last["bias"] is None else last["bias"]
    return np.concatenate(heads, -1) @ last["weight"].T + bias


def ours(params, *inputs, size=D, value_size=V, with_bias=True):
    def forward(*inputs):
        module = mh.MultiHeadAttention(
            H, K, value_size=value_size, model_size=size, with_bias=with_bias
        )
        return module(*inputs)[0]

    return jax.jit(hk.transform(forward).apply)(params, None, *inputs)


def inputs_of(widths):
    return [normal(B, n, width) for n, width in zip((T, S, S), widths, strict=True)]


CASES = {
    "torch": (torch_state, torch_formula, "from_torch", (E, E, E)),
    "torch without biases": (
        functools.partial(torch_state, biases=False),
        torch_formula,
        "from_torch",
        (E, E, E),
    ),
    "torch of widths": (
        functools.partial(torch_state, widths=WIDTHS),
        torch_formula,
        "from_torch",
        WIDTHS,
    ),
    "flax": (flax_params, flax_formula, "from_flax", WIDTHS),
    "equinox": (equinox_module, equinox_formula, "from_equinox", WIDTHS),
    "equinox without biases": (
        functools.partial(equinox_module, biases=False),
        equinox_formula,
        "from_equinox",
        WIDTHS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_library(case):
    make, formula, name, widths = CASES[case]
    theirs, inputs = make(), inputs_of(widths)
    params = getattr(interop, name)(theirs)
    sizes = {"size": E, "value_size": K} if "torch" in case else {}
    found = ours(params, *inputs, with_bias="without" not in case, **sizes)
    for b in range(B):
        wanted = formula(theirs, *(x[b].astype(np.float64) for x in inputs))
        assert_close(found[b], wanted)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_the_same_bit_for_bit(case):
    make, _, name, _ = CASES[case]
    theirs = make()
    params = getattr(interop, name)(theirs)
    back = {
        "from_torch": interop.to_torch,
        "from_flax": functools.partial(interop.to_flax, num_heads=H),
        "from_equinox": functools.partial(
            interop.to_equinox, module=jax.tree.map(np.zeros_like, theirs)
        ),
    }[name](params)
    chex.assert_trees_all_equal(back, theirs)
    again = getattr(interop, name)(back)
    chex.assert_trees_all_equal(again, params)


def layer_state():
    state = {f"self_attn.{name}": array for name, array in torch_state().items()}
    state |= {"linear1.weight": normal(F, E), "linear1.bias": normal(F)}
    state |= {"linear2.weight": normal(E, F), "linear2.bias": normal(E)}
    for i in (1, 2):
        state |= {f"norm{i}.weight": normal(E), f"norm{i}.bias": normal(E)}
    return state


def layer_formula(state, x):
    """Returns `[T, D]` of torch's layer as it is by default: norms behind, ReLU."""
    state = {name: array.astype(np.float64) for name, array in state.items()}

    def normed(x, i):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * state[f"norm{i}.weight"] + state[f"norm{i}.bias"]

    own = {
        name.removeprefix("self_attn."): array
        for name, array in state.items()
        if name.startswith("self_attn.")
    }
    x = normed(x + torch_formula(own, x, x, x), 1)
    hidden = np.maximum(x @ state["linear1.weight"].T + state["linear1.bias"], 0)
    return normed(x + hidden @ state["linear2.weight"].T + state["linear2.bias"], 2)


def our_layer(params, x, norm_position="post"):
    def forward(x):
        layer = mh.EncoderLayer(
            num_heads=H,
            make_feed_forward=lambda: mh.FeedForward(
                F, activation=jax.nn.relu, name="feed_forward"
            ),
            norm_position=norm_position,
        )
        return layer(x, is_training=False)[0]

    return jax.jit(hk.transform(forward).apply)(params, None, x)


def test_an_encoder_layer_of_torch_is_one_of_ours():
    state, x = layer_state(), normal(B, T, E)
    found = our_layer(interop.from_torch(state), x)
    for b in range(B):
        assert_close(found[b], layer_formula(state, x[b].astype(np.float64)))
    prefixed = {f"encoder.layers.1.{name}": array for name, array in state.items()}
    other = {f"encoder.layers.0.{name}": array for name, array in layer_state().items()}
    params = interop.from_torch(other | prefixed, prefix="encoder.layers.1.", name="a")
    chex.assert_trees_all_equal(interop.to_torch(params, "a"), state)


def test_an_attention_of_haiku_is_taken_out_of_its_model():
    def forward(x):
        return hk.MultiHeadAttention(
            H,
            K,
            w_init=hk.initializers.RandomNormal(),
            value_size=V,
            model_size=D,
            name="theirs",
        )(x, x, x) + hk.Linear(D)(x)

    x = normal(B, T, D)
    shapes = jax.eval_shape(hk.transform(forward).init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: normal(*leaf.shape), shapes)
    own = interop.from_haiku(params, "theirs")
    parts = "query", "key", "value", "linear"
    assert set(own) == {f"multi_head_attention/{part}" for part in parts}
    back = interop.from_haiku(own, name="theirs")
    chex.assert_trees_all_equal(back, {name: params[name] for name in back})
    with pytest.raises(ValueError, match="must have a module 'thiers'.*mean 'theirs'"):
        interop.from_haiku(params, "thiers")


def test_values_are_copies():
    state = torch_state()
    params = interop.from_torch(state)
    before = jax.tree.map(np.copy, params)
    for array in state.values():
        array += 1
    chex.assert_trees_all_equal(params, before)


def test_an_attention_of_grouped_heads_goes_to_nnx_and_back():
    G = 2
    params = {
        "query": {"kernel": normal(D, 2 * G, K)},
        "key": {"kernel": normal(D, G, K)},
        "value": {"kernel": normal(D, G, K)},
        "out": {"kernel": normal(2 * G, K, D)},
    }
    own = interop.from_flax(params)
    back = interop.to_flax(own, 2 * G, num_key_value_heads=G)
    chex.assert_trees_all_equal(back, params)


def _changed(tree, **leaves):
    return {k: v for k, v in (tree | leaves).items() if v is not None}


def test_what_does_not_fit_is_refused_by_name():
    state = torch_state()
    for changes, message in (
        ({"out_proj.weight": None}, "must have out_proj.weight, and has not"),
        ({"in_proj_bias": None, "bias_k": normal(1, 1, E)}, "has not: bias_k"),
        ({"in_proj_bias": normal(3 * E - 3)}, r"in_proj_bias that makes shape \(12,\)"),
        ({"in_proj_weight": normal(3 * E - 1, E)}, "in_proj_weight of three equal"),
        ({"out_proj.weight": normal(E)}, "must have a matrix out_proj.weight"),
        ({"out_proj.weight": normal(E, E - 1)}, "out_proj.weight of the same heads"),
    ):
        with pytest.raises(ValueError, match=message):
            interop.from_torch(_changed(state, **changes))
    with pytest.raises(ValueError, match="must have x.in_proj_weight, x.out_proj"):
        interop.from_torch(state, prefix="x.")
    with pytest.raises(ValueError, match="state_dict must hold arrays"):
        interop.from_torch({})
    layer = _changed(layer_state(), **{"norm2.bias": None})
    with pytest.raises(ValueError, match="must have norm2.bias, and has not"):
        interop.from_torch(layer)
    layer = _changed(layer_state(), **{"linear2.weight": normal(E, F + 1)})
    with pytest.raises(ValueError, match=r"linear2.weight that makes shape \(9, 12\)"):
        interop.from_torch(layer)


def test_flax_and_equinox_that_do_not_fit_are_refused_by_name():
    params = flax_params()
    with pytest.raises(ValueError, match="has what the module has not: query_ln.scale"):
        interop.from_flax(params | {"query_ln": {"scale": normal(K)}})
    kernel = {"kernel": normal(WIDTHS[0], H * K), "bias": normal(H, K)}
    with pytest.raises(ValueError, match="query.kernel with an axis of heads, 3 axes"):
        interop.from_flax(params | {"query": kernel})
    own = interop.from_flax(params)
    with pytest.raises(
        ValueError, match="multi_head_attention/key/b of 5 key/value heads"
    ):
        interop.to_flax(own, 5)
    with pytest.raises(ValueError, match="for torch, heads whose sizes make up"):
        interop.to_torch(own)
    module = equinox_module()
    module["key_proj"]["bias"] = None
    with pytest.raises(ValueError, match=r"must have key_proj\.bias, and has not"):
        interop.from_equinox(module)
    with pytest.raises(ValueError, match=r"key_proj\.bias of shape \(12,\).*none"):
        interop.to_equinox(own, equinox_module(biases=False))
    for option in ({"sinks": normal(H)}, {"head_gate": normal(E, H)}):
        (name,) = option
        extra = {"multi_head_attention": option}
        if name == "head_gate":
            extra = {"multi_head_attention/head_gate": {"w": option[name]}}
        for write in (lambda x: interop.to_flax(x, H), interop.to_torch):
            with pytest.raises(ValueError, match=f"attention/{name}.* interop.save"):
                write(own | extra)
    normed = own | {"multi_head_attention/query_norm": {"scale": normal(K)}}
    with pytest.raises(ValueError, match="multi_head_attention/query_norm/scale"):
        interop.to_flax(normed, H)


# The libraries themselves, where they are installed.


def _torch():
    reason = "torch is not installed: nothing compared"
    return pytest.importorskip("torch", reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [None, WIDTHS], ids=["one", "three"])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_torch_itself(widths, bias):
    torch = _torch()
    kdim, vdim = (None, None) if widths is None else widths[1:]
    module = torch.nn.MultiheadAttention(
        E, H, bias=bias, kdim=kdim, vdim=vdim, batch_first=True
    )
    state = module.state_dict()
    filled = {name: torch.from_numpy(normal(*x.shape)) for name, x in state.items()}
    module.load_state_dict(filled)
    inputs = inputs_of((E, kdim or E, vdim or E))
    wanted, _ = module(*map(torch.from_numpy, inputs))
    params = interop.from_torch(module.state_dict())
    found = ours(params, *inputs, size=E, value_size=K, with_bias=bias)
    assert_close(found, wanted.detach().numpy())
    back = interop.to_torch(params)
    module.load_state_dict({k: torch.from_numpy(v) for k, v in back.items()})
    for name, array in back.items():
        np.testing.assert_array_equal(array, filled[name].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_of_torch_itself(norm_first):
    torch = _torch()
    module = torch.nn.TransformerEncoderLayer(
        E, H, F, batch_first=True, norm_first=norm_first
    ).eval()
    state = module.state_dict()
    filled = {name: torch.from_numpy(normal(*x.shape)) for name, x in state.items()}
    module.load_state_dict(filled)
    x = normal(B, T, E)
    with torch.no_grad():
        wanted = module(torch.from_numpy(x)).numpy()
    params = interop.from_torch(module.state_dict())
    found = our_layer(params, x, "pre" if norm_first else "post")
    assert_close(found, wanted)
    back = interop.to_torch(params)
    module.load_state_dict({k: torch.from_numpy(v) for k, v in back.items()})


@pytest.mark.slow
def test_attention_of_flax_linen_itself():
    linen = pytest.importorskip(
        "flax.linen", reason="flax is not installed: nothing compared"
    )
    module = linen.MultiHeadDotProductAttention(H, qkv_features=E, out_features=D)
    inputs = inputs_of(WIDTHS)
    variables = module.init(jax.random.key(0), *inputs)
    filled = jax.tree.map(lambda x: normal(*x.shape), variables["params"])
    with jax.numpy_rank_promotion("allow"):
        wanted = module.apply({"params": filled}, *inputs)
    params = interop.from_flax(filled)
    assert_close(ours(params, *inputs, value_size=K), wanted)
    chex.assert_trees_all_equal(interop.to_flax(params, H), filled)


@pytest.mark.slow
def test_attention_of_flax_nnx_itself():
    nnx = pytest.importorskip(
        "flax.nnx", reason="flax is not installed: nothing compared"
    )
    module = nnx.MultiHeadAttention(
        H, D, qkv_features=E, decode=False, rngs=nnx.Rngs(0)
    )
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    filled = jax.tree.map(lambda x: normal(*x.shape), state)
    x = normal(B, T, D)
    params = interop.from_flax(filled)
    back = interop.to_flax(params, H)
    chex.assert_trees_all_equal(back, filled)
    whole = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(whole, back)
    nnx.update(module, whole)
    with jax.numpy_rank_promotion("allow"):
        wanted = module(x)
    assert_close(ours(params, x, x, x, value_size=K), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_equinox_itself(bias):
    eqx = pytest.importorskip(
        "equinox", reason="equinox is not installed: nothing compared"
    )
    biases = {f"use_{part}_bias": bias for part in ("query", "key", "value", "output")}
    query, key, value = WIDTHS
    module = eqx.nn.MultiheadAttention(
        H, query, key, value, D, K, V, key=jax.random.key(0), **biases
    )
    filled = jax.tree.map(lambda x: normal(*x.shape) if eqx.is_array(x) else x, module)
    inputs = inputs_of(WIDTHS)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.vmap(filled)(*inputs)
    params = interop.from_equinox(filled)
    assert_close(ours(params, *inputs, with_bias=bias), wanted)
    assert eqx.tree_equal(interop.to_equinox(params, module), filled)

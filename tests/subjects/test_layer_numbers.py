"""Layers have the model's own numbers, and padding counts nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.lab.heads import model_runs

B, T, D, H = 2, 6, 8, 2
TOKENS = np.random.default_rng(0).integers(0, 13, (B, T))


@pytest.mark.parametrize(
    ("paths", "numbers"),
    [
        (["model/layers_3/self_attn"], [3]),
        (["h_1/attn", "h_9/attn", "h_10/attn"], [1, 9, 10]),
        (["3/attention", "5/attention"], [3, 5]),
        (["block_0/layer_1/a", "block_2/layer_1/a"], [0, 2]),
        (["attention_0", "attention_1"], [0, 1]),
        # Which are not counted by their paths.
        (["vision/layers_0/a", "vision/layers_1/a", "text/layers_0/a"], [0, 1, 2]),
        (["layers_0/blocks_0", "layers_0/blocks_1", "layers_1/blocks_0"], [0, 1, 2]),
        (["shared/attention", "shared#1/attention"], [0, 1]),
        (["first", "second"], [0, 1]),
        ([""], [0]),
        ([], []),
    ],
)
def test_layers_are_numbered_as_their_paths_are(paths, numbers):
    assert model_runs.layer_numbers(paths) == numbers


def hybrid(params, tokens):
    """Makes layers of which those with odd numbers attend."""
    x = params["embedding"][tokens]
    for i in range(4):
        with jax.named_scope(f"layer_{i}"):
            if i % 2:
                q = (x @ params["w"][i]).reshape(*x.shape[:2], H, -1)
                x = x + mh.attend(q, q, q, mask=mh.masks.causal())[0].reshape(x.shape)
            else:
                x = x + jnp.tanh(x @ params["w"][i])
    return x @ params["embedding"].T


@pytest.fixture(scope="module")
def subject():
    keys = jax.random.split(jax.random.key(0))
    params = {"embedding": jax.random.normal(keys[0], (13, D))}
    params["w"] = jax.random.normal(keys[1], (4, D, D)) / 2
    return mh.wrap(hybrid, params, examples=TOKENS)


@pytest.mark.slow
def test_every_verb_uses_the_numbers_of_the_model(subject):
    def layers(found):
        return sorted({row["layer"] for row in found.rows()})

    for found in (
        subject.importance("ablation"),
        subject.roles(),
        subject.statistics(),
        subject.patch(TOKENS[:1], TOKENS[1:], answers=(1, 2)),
    ):
        assert layers(found) == [1, 3]
    assert layers(subject.statistics(layers=[3])) == [3]
    assert [x.name for x in subject.roles().layers] == ["layer 1", "layer 3"]
    ends = subject.paths(
        TOKENS[:1], TOKENS[1:], answers=(1, 2), senders=[(1, 0)], receivers=[(3, 1)]
    ).rows()
    assert {(x["sender_layer"], x["receiver_layer"]) for x in ends} == {(1, 3), (1, -1)}
    circuit = subject.circuit(TOKENS[:1], TOKENS[1:], answers=(1, 2), edges=3)
    assert {x["sender"][0] for x in circuit.rows()} <= {"1", "3"}
    assert subject.strongest(3, 0).layer == 3
    assert "layer 3" in subject.rollout(TOKENS[0]).rows()[0]
    assert subject.lens(TOKENS[0]).names[1] == "before layer 3"
    for verb in (subject.why, subject.writes):
        assert verb(TOKENS[0], layer=3, head=0).title.startswith("Layer 3, head 0")


def test_a_layer_without_attention_is_refused_by_its_name(subject):
    ablated = subject.ablated((1, 0)).look(TOKENS, ["*/heads"])[1]
    assert (ablated["layer_1/heads"][..., 0, :] == 0).all()
    assert (ablated["layer_3/heads"] != 0).any((0, 1, 3)).all()
    for verb in (subject.ablated, subject.strongest):
        with pytest.raises(ValueError, match=r"layer 0 has no attention; .* 1, 3 have"):
            verb(0, 0)
    with pytest.raises(ValueError, match="layer must be an integer from 0 to 3"):
        subject.ablated((4, 0))


def masked(params, x, hidden=None, seen=None):
    """Attends to keys that are not hidden, by one of two masks."""
    kept = ~hidden if seen is None else seen
    q = (x @ params).reshape(*x.shape[:2], H, -1)
    scores = jnp.einsum("bthk,bshk->bhts", q, q)
    scores = jnp.where(kept[:, None, None], scores, -1e9)
    heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), q)
    return heads.reshape(x.shape)


def _same_as_cut(subject, given, cut):
    for verb in (subject.statistics, subject.roles):
        for name, column in verb(given).numbers.items():
            other = verb(cut).numbers[name].mean
            np.testing.assert_allclose(column.mean, other, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["hidden", "seen"])
def test_keys_that_no_query_sees_are_padding_whatever_hides_them(name):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1, T, D)).astype("f4")
    subject = mh.wrap(masked, jnp.float32(generator.normal(size=(D, D))))
    marks = np.arange(T)[None] < 4
    whole = np.ones((1, 4), bool)
    given, cut = (
        {"x": each, name: mask if name == "seen" else ~mask}
        for each, mask in ((x, marks), (x[:, :4], whole))
    )
    _same_as_cut(subject, given, cut)

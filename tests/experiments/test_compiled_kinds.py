"""Changes of a circuit by each kind of compiled models, and what stays the same."""

import jax
import numpy as np
import pytest

from experiments import compiled_kinds
from mha_haiku import rasp
from tests import everyday, oracles

LENGTH, HEADS = 4, 5


def _program(name="two_hops"):
    return rasp.PROGRAMS[name](length=LENGTH)


def _compiled(kind, name="two_hops", **options):
    return compiled_kinds.KINDS[kind](_program(name), num_heads=HEADS, **options)


def _recorded(compiled, inputs, *, without=(), patched=None):
    """Returns logits and what is recorded, with heads ablated, or patched by place."""
    patched = patched or {}
    num_layers, *_ = compiled.is_real.shape

    def of_layer(layer):
        def change(x):
            x = np.array(x)
            for place in without:
                if place[0] == layer:
                    x[..., place[1], :] = 0
            for place, values in patched.items():
                if place[0] == layer:
                    x[..., place[1], :] = values
            return x

        return change

    changes = {
        f"encoder/layer_{i}/attention/heads": of_layer(i) for i in range(num_layers)
    }
    return oracles.recorded(compiled.params, inputs, compiled.config, changes=changes)


def _right(compiled, example, **changes):
    logits, _ = _recorded(compiled, example.inputs, **changes)
    right = logits.argmax(-1) == example.targets
    return right[example.weights > 0].mean()


def _twins(compiled):
    """Returns places of doubled heads, by what they do; the first one is read first."""
    found = {}
    for place, name in compiled.heads.items():
        found.setdefault(name, []).append(place)
    return list(found.values())


@pytest.mark.parametrize("kind", ["plain", "redundant", "backup", "decoys", "noisy"])
@pytest.mark.parametrize(
    "name", everyday.those(["two_hops", "preceding_again"], "two_hops")
)
def test_answers_are_right_and_heads_are_where_they_are_said_to_be(kind, name):
    compiled = _compiled(kind, name, seed=1)
    assert _right(compiled, compiled.examples(24, seed=5)) == 1
    ends = {x for sender, receiver, _ in compiled.edges for x in (sender, receiver)}
    assert ends | compiled.senders == set(compiled.heads)
    if kind in ("redundant", "backup"):
        return
    example = compiled.examples(24, seed=5)
    for place in compiled.heads:
        assert _right(compiled, example, without=[place]) < 1


@pytest.mark.parametrize("kind", ["redundant", "backup"])
def test_edges_lead_from_both_heads_to_both(kind):
    compiled = _compiled(kind)
    (first, second), twins = _twins(compiled), list(compiled.heads)
    assert [compiled.heads[x] for x in twins] == ["hop 1", "hop 1", "hop 2", "hop 2"]
    assert compiled.edges == {(a, b, "q") for a in first for b in second}
    assert compiled.senders == set(second)
    for other in ("decoys", "noisy"):
        same, plain = _compiled(other), _compiled("plain")
        assert (same.heads, same.edges) == (plain.heads, plain.edges)


@pytest.mark.parametrize("is_backup", [False, True])
@pytest.mark.parametrize("name", ["two_hops", "is_ascending", "preceding_again"])
def test_doubled_programs_say_the_same(name, is_backup):
    program = _program(name)
    doubled = compiled_kinds.doubled(program, is_backup=is_backup)
    for row in program.sample(np.random.default_rng(0), 16).tolist():
        inputs = [program.vocabulary[i] for i in row]
        assert doubled(inputs) == program(inputs)
    with pytest.raises(ValueError, match="histogram has no head that copies"):
        compiled_kinds.doubled(_program("histogram"), is_backup=is_backup)


@pytest.mark.parametrize("kind", ["redundant", "backup"])
@pytest.mark.parametrize("name", ["previous_token", "two_hops"])
def test_ablating_one_of_two_heads_does_nothing_and_both_does(kind, name):
    compiled = _compiled(kind, name)
    example = compiled.examples(16)
    logits, _ = _recorded(compiled, example.inputs)
    for twins in _twins(compiled):
        assert len(twins) == 2
        for place in twins:
            changed, _ = _recorded(compiled, example.inputs, without=[place])
            np.testing.assert_allclose(changed, logits, atol=0.02)
        assert _right(compiled, example, without=twins) < 0.9


def test_decoys_attend_as_the_circuit_and_change_no_logit():
    compiled = _compiled("decoys")
    inputs = compiled.examples(8).inputs
    logits, found = _recorded(compiled, inputs)
    num_decoys = 0
    for layer, head in compiled.heads:
        path = f"encoder/layer_{layer}/attention"
        weights = found[f"{path}/weights"]
        alike = [
            other
            for other in range(HEADS)
            if other != head and np.array_equal(weights[:, other], weights[:, head])
        ]
        (decoy,) = alike
        assert (layer, decoy) not in compiled.heads
        heads = found[f"{path}/heads"]
        np.testing.assert_array_equal(heads[..., decoy, :], heads[..., head, :])
        changed, _ = _recorded(compiled, inputs, without=[(layer, decoy)])
        np.testing.assert_array_equal(changed, logits)
        num_decoys += 1
    assert num_decoys == len(compiled.heads)


def test_noise_is_in_all_weights_and_more_of_it_spoils_the_answers():
    plain, noisy = _compiled("plain", noise=1e-3), _compiled("noisy", noise=1e-3)
    pairs = zip(*map(jax.tree.leaves, (plain.params, noisy.params)), strict=True)
    shares = [np.std(y - x) for x, y in pairs if x.size > 200]
    assert len(shares) > 5 and max(shares) < 1.25 * min(shares)
    assert all((y != 0).all() for y in jax.tree.leaves(noisy.params))
    scale = np.mean([*shares])
    assert scale > 0.005
    steps = np.log(scale) / np.log(1.5)
    assert abs(steps - round(steps)) < 0.1
    # The next step of the noise, with the same draws.
    more = jax.tree.map(lambda x, y: x + 1.5 * (y - x), plain.params, noisy.params)
    example = noisy.examples(compiled_kinds.CHECKED, seed=0)
    assert compiled_kinds.right(noisy, example) == 1
    noisy.params.update(more)
    assert compiled_kinds.right(noisy, example) < 1


@pytest.mark.slow
def test_compressed_stream_is_narrower_than_what_it_holds_and_answers_are_right():
    compiled = _compiled("superposed")
    assert compiled.config.model_size == 13 < rasp.sizes(_program()).model_size == 17
    example = compiled.examples(compiled_kinds.CHECKED, seed=0)
    assert _right(compiled, example) == 1
    for place in compiled.heads:
        assert _right(compiled, example, without=[place]) < 0.9
    # Codes are no longer apart: what one position holds is seen in others' directions.
    embeddings = compiled.params["embedding"]["embeddings"]
    products = embeddings @ embeddings.T
    assert abs(products - np.diag(np.diag(products))).max() > 0.01


@pytest.mark.slow
def test_further_training_holds_the_circuit_and_its_function():
    compiled = _compiled("trained")
    plain = rasp.compile(_program(), num_heads=HEADS)
    assert compiled.heads == plain.heads
    size = compiled.config.attention.key_size
    for (layer, head), kind in [
        (place, kind)
        for place in np.ndindex(compiled.is_real.shape)
        for kind in ("query", "key", "value")
    ]:
        own = slice(head * size, (head + 1) * size)
        name = f"encoder/layer_{layer}/attention/{kind}"
        before, after = (x.params[name]["w"][:, own] for x in (plain, compiled))
        assert np.array_equal(before, after) == ((layer, head) in plain.heads)
    for name in ("embedding", "positions", "logits"):
        jax.tree.map(
            np.testing.assert_array_equal, plain.params[name], compiled.params[name]
        )
    example = compiled.examples(compiled_kinds.CHECKED, seed=0)
    assert _right(compiled, example) >= 0.99
    others = [tuple(place) for place in np.argwhere(~compiled.is_real)]
    assert _right(compiled, example, without=others) == 1
    for place in compiled.heads:
        assert _right(compiled, example, without=[place]) < 0.9


@pytest.mark.slow
def test_what_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match="two_hops was not learned in .* steps: "):
        _compiled("superposed", width=0.2)


def test_auroc_is_the_share_of_pairs_in_order():
    real = np.array([[True, False, False], [False, True, False]])
    found = np.array([[3.0, 2.0, np.nan], [2.0, 2.0, 1.0]])
    # Of 2 x 3 pairs five are in order or tied: 3 > 2, 2, 1; 2 = 2, 2 and 2 > 1.
    assert compiled_kinds.auroc(found, real) == pytest.approx((3 + 0.5 + 0.5 + 1) / 6)
    assert compiled_kinds.auroc(-found, real) == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="must have both True and False"):
        compiled_kinds.auroc(found, np.zeros_like(real))

"""Compiled models do their work by the heads and along the edges that are named."""

import itertools
import operator

import jax
import numpy as np
import pytest

from mha_haiku import rasp
from mha_haiku.lab.rasp import aggregate, indices, map, select, tokens
from tests import oracles

KINDS = {"q": "query", "k": "key", "v": "value"}


def _compiled(name, **options):
    return rasp.compile(rasp.PROGRAMS[name](length=6), **options)


def _logits(compiled, example, gates=None):
    gates = () if gates is None else gates
    changes = {
        f"encoder/layer_{i}/attention/heads": lambda x, gate=gate: x * gate[:, None]
        for i, gate in enumerate(gates)
    }
    logits, _ = oracles.recorded(
        compiled.params, example.inputs, compiled.config, changes=changes
    )
    return logits


@pytest.mark.parametrize("name", ["two_token_induction", "without_duplicates"])
def test_model_is_exact_in_float32_and_under_jit(name):
    compiled = _compiled(name, num_heads=3)
    example = compiled.examples(5)
    apply = jax.jit(compiled.model.apply, static_argnames="is_training")
    output = apply(compiled.params, None, example.inputs, is_training=False)
    np.testing.assert_allclose(output.logits, _logits(compiled, example), atol=0.02)
    np.testing.assert_array_equal(output.logits.argmax(-1), example.targets)


@pytest.mark.parametrize("name", ["by_frequency", "two_token_induction", "three_hops"])
def test_all_named_heads_and_no_others_are_needed(name):
    compiled = _compiled(name, num_heads=4, seed=2)
    example = compiled.examples(12)
    gates = compiled.is_real.astype(float)
    counted = example.weights > 0

    def is_right(gates):
        right = _logits(compiled, example, gates).argmax(-1) == example.targets
        return right[counted].all()

    assert is_right(gates)
    for place in compiled.heads:
        without = np.ones_like(gates)
        without[place] = 0
        assert not is_right(without)


@pytest.mark.parametrize("name", rasp.PROGRAMS)
def test_edges_are_those_along_which_weights_meet(name):
    compiled = _compiled(name, num_heads=3, noise=0.0)
    params, size = compiled.params, compiled.config.attention.key_size

    def part(place, kind):
        layer, head = place
        weights = params[f"encoder/layer_{layer}/attention/{kind}"]["w"]
        own = slice(head * size, (head + 1) * size)
        return weights[own] if kind == "linear" else weights[:, own]

    def written(place, stop):
        """The effect of a head's output below layer `stop`, also through units."""
        result = part(place, "linear").any(0)
        for layer in range(place[0], stop):
            scope = f"encoder/layer_{layer}/feed_forward"
            if f"{scope}/hidden" in params:
                units = params[f"{scope}/hidden"]["w"][result].any(0)
                result = result | params[f"{scope}/output"]["w"][units].any(0)
        return result

    edges = {
        (sender, receiver, kind)
        for sender, receiver in itertools.permutations(compiled.heads, 2)
        if sender[0] < receiver[0]
        for kind, name in KINDS.items()
        if part(receiver, name)[written(sender, receiver[0])].any()
    }
    assert compiled.edges == edges
    read = params["logits"]["w"].any(-1)
    num_layers = compiled.config.num_layers
    wanted = {each for each in compiled.heads if written(each, num_layers)[read].any()}
    assert compiled.senders == wanted


@pytest.mark.slow
def test_heads_stand_at_random_places_among_random_ones():
    compiled = [_compiled("reverse", seed=seed) for seed in range(6)]
    assert len({tuple(each.heads) for each in compiled}) > 2
    same, other = compiled[0], _compiled("reverse", seed=0)
    jax.tree.map(np.testing.assert_array_equal, same.params, other.params)
    maps = jax.jit(same.model.apply, static_argnames="is_training")(
        same.params, None, same.examples(8).inputs, is_training=False
    ).maps
    largest = maps[0].statistics().largest_weight.mean(0)
    others = np.delete(largest, [head for _, head in same.heads])
    assert others.min() < 0.5 and others.max() > 0.8


def test_programs_of_equal_sizes_share_a_model():
    programs = [rasp.PROGRAMS[name](length=6) for name in ("two_hops", "histogram")]
    sizes = rasp.sizes(programs[0]) | rasp.sizes(programs[1])
    assert sizes.num_layers == 2 and sizes.hidden_size > 0
    one, other = (rasp.compile(x, num_heads=3, sizes=sizes) for x in programs)
    assert one.model is other.model
    for each in (one, other):
        example = each.examples(7)
        predicted = _logits(each, example).argmax(-1)
        np.testing.assert_array_equal(predicted, example.targets)


def test_sequences_by_hand():
    """What nothing is selected for, and the better of two keys."""

    def computed(output, inputs):
        program = rasp.Program("own", output, (1, 2, 4), 3, False, None)
        expected = program(inputs)
        compiled = rasp.compile(program, num_heads=2)
        places = [[3, *(program.vocabulary.index(x) for x in inputs)]]
        logits = oracles.transformer(compiled.params, np.array(places), compiled.config)
        chosen = [compiled.answers[i] for i in logits[0].argmax(-1)]
        assert chosen == [None, *expected]
        return expected

    every = select(indices, indices, lambda key, query: True)
    small = select(tokens, tokens, lambda key, query: key < query)
    assert computed(aggregate(small.last(), tokens, name="x"), [2, 1, 4]) == [
        1,
        None,
        1,
    ]
    worst = map(operator.neg, tokens)
    least = aggregate(every.best(worst, indices), indices, name="x")
    assert computed(least, [2, 1, 1]) == [2, 2, 2]
    # None where one of two is None, or the function says so.
    small = aggregate(small.last(), tokens, name="x")
    both = map(lambda a, b: a + b if b < 4 else None, small, tokens)
    assert computed(both, [2, 1, 2]) == [3, None, 3]


def test_programs_are_refused_that_say_too_little_or_too_much():
    every = select(indices, indices, lambda key, query: True)
    with pytest.raises(ValueError, match="inputs must be one or two sequences, got 3"):
        map(max, tokens, tokens, tokens)
    with pytest.raises(ValueError, match="selector must have no order"):
        rasp.selector_width(every.last(), name="x")
    program = rasp.Program("own", map(operator.neg, tokens), (1, 2), 2, False, None)
    with pytest.raises(ValueError, match="computed by a head, got 'own'"):
        rasp.compile(program)
    output = aggregate(every, tokens, name="any")
    program = rasp.Program("own", output, ("a", "b"), 2, False, None)
    with pytest.raises(ValueError, match="'any' selects must agree .* got \\['a', 'b'"):
        program("ab")
    with pytest.raises(ValueError, match="inputs must be 2 tokens, got 3"):
        program("aba")
    with pytest.raises(ValueError, match="num_heads must be at least 2, .* got 1"):
        rasp.compile(rasp.PROGRAMS["two_token_induction"](), num_heads=1)
    with pytest.raises(ValueError, match="noise must be a finite number"):
        rasp.compile(rasp.PROGRAMS["reverse"](), noise=-1.0)

"""Generated texts against full passes, brute force, and each other."""

import functools
import itertools

import jax
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.core.models import decoding
from tests.tiny_runs import model_config

C, N, P, END = 6, 12, 8, 3
GENERATOR = np.random.default_rng(0)
PROMPTS = GENERATOR.integers(0, C, (100, P))
LENGTHS = GENERATOR.integers(1, P + 1, 100)

assert_equal = np.testing.assert_array_equal


@functools.cache
def _model(family="causal"):
    config = model_config(
        family=family,
        num_layers=2,
        model_size=8,
        embedding__max_length=N,
        attention__num_heads=2,
        feed_forward__hidden_size=9,
    )
    return models.build(config, num_tokens=C, feature_size=None, num_classes=C)


@functools.cache
def _parameters():
    """Of a model that is unsure, so that texts differ and some end early."""
    generator = np.random.default_rng(9)
    shapes = jax.eval_shape(_model().init, jax.random.key(0), PROMPTS)
    return jax.tree.map(
        lambda leaf: np.float32(generator.standard_normal(leaf.shape) / 2), shapes
    )


@functools.cache
def _translator():
    config = model_config(
        family="encoder_decoder",
        num_layers=1,
        decoder__num_layers=2,
        model_size=8,
        embedding__max_length=N,
        attention__num_heads=2,
        feed_forward__hidden_size=9,
    )
    return models.build(config, num_tokens=9, feature_size=None, num_classes=C)


def _generate(strategy, prompts=PROMPTS, lengths=LENGTHS, **options):
    options = {"max_length": N, "end_token": END, **options}
    return decoding.generate(
        _model(), _parameters(), prompts, lengths, strategy=strategy, **options
    )


@jax.jit
def _log_probabilities(tokens):
    output = _model().apply(_parameters(), None, tokens, is_training=False)
    return jax.nn.log_softmax(output.logits)


def _by_full_passes():
    """Greedy texts by a pass over the whole of them for each token."""
    tokens = np.where(
        np.arange(N) < LENGTHS[:, None], np.pad(PROMPTS, [(0, 0), (0, 4)]), END
    )
    lengths, total, rows = LENGTHS.copy(), np.zeros(100), np.arange(100)
    is_open = lengths < N
    while is_open.any():
        own = np.asarray(_log_probabilities(tokens))[rows, lengths - 1]
        new = own.argmax(-1)
        total += np.where(is_open, own.max(-1), 0)
        tokens[rows[is_open], lengths[is_open]] = new[is_open]
        lengths += is_open
        is_open &= (new != END) & (lengths < N)
    return tokens, lengths, total


@pytest.mark.slow
def test_greedy_texts_of_100_prompts_are_those_of_full_passes():
    tokens, lengths, total = _by_full_passes()
    found = _generate(decoding.Greedy())
    assert_equal(found.tokens, tokens)
    assert_equal(found.lengths, lengths)
    np.testing.assert_allclose(found.log_probability, total, atol=1e-4)
    assert 20 < (lengths < N).sum() < 80  # some end, some are cut off
    assert len({tuple(text) for text in tokens}) > 50


@pytest.mark.slow
def test_the_last_token_needs_no_position():
    found = _generate(decoding.Greedy(), max_length=N + 1)
    wanted = _generate(decoding.Greedy())
    assert found.tokens.shape == (100, N + 1)
    assert_equal(found.tokens[:, :N], wanted.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [decoding.Greedy(), decoding.Beam(3)])
def test_an_encoder_decoder_writes_what_full_passes_do(strategy):
    model, size = _translator(), 6
    generator = np.random.default_rng(5)
    source = generator.integers(0, 9, (size, 7))
    source_lengths = np.array([7, 3, 0, 5, 1, 6])
    starts = np.full((size, 1), 1)
    shapes = jax.eval_shape(
        functools.partial(model.init, decoder_inputs=starts), jax.random.key(0), source
    )
    params = jax.tree.map(
        lambda leaf: np.float32(generator.standard_normal(leaf.shape) / 2), shapes
    )
    padding = np.arange(7) >= source_lengths[:, None]
    found = decoding.generate(
        model,
        params,
        starts,
        strategy=strategy,
        max_length=N + 1,
        end_token=END,
        source=np.where(padding, 8, source),
        source_lengths=source_lengths,
    )
    output = model.apply(
        params,
        None,
        source,
        lengths=source_lengths,
        decoder_inputs=found.tokens[:, :N],
        is_training=False,
    )
    own = np.asarray(jax.nn.log_softmax(output.logits))
    new = np.asarray(found.tokens)[:, 1:]
    is_written = np.arange(1, N + 1) < np.asarray(found.lengths)[:, None]
    gains = np.take_along_axis(own, new[..., None], -1)[..., 0]
    total = np.where(is_written, gains, 0).sum(1)
    np.testing.assert_allclose(found.log_probability, total, atol=1e-4)
    if strategy == decoding.Greedy():
        assert_equal(new[is_written], own.argmax(-1)[is_written])
    assert np.ptp(own[:, 0], axis=0).max() > 0.1  # sources matter


@pytest.mark.slow
def test_a_beam_of_one_is_greedy():
    found, wanted = _generate(decoding.Beam(1)), _generate(decoding.Greedy())
    assert_equal(found.tokens, wanted.tokens)
    assert_equal(found.lengths, wanted.lengths)
    np.testing.assert_allclose(found.log_probability, wanted.log_probability, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.0, 6.0])
def test_a_beam_of_the_whole_space_finds_the_best_text(length_penalty):
    prompts, lengths, longest = PROMPTS[:4, :3], np.array([1, 2, 3, 2]), 5
    found = _generate(
        decoding.Beam(C**4, length_penalty), prompts, lengths, max_length=longest
    )
    sizes = set()
    for b, n in enumerate(lengths):
        endings = np.array(list(itertools.product(range(C), repeat=longest - n)))
        texts = np.concatenate([np.tile(prompts[b, :n], (len(endings), 1)), endings], 1)
        own = np.asarray(_log_probabilities(texts), np.float64)
        best, best_standing = None, -np.inf
        for text, log_probabilities in zip(texts, own, strict=True):
            ends = np.flatnonzero(text[n:] == END)
            size = n + ends[0] + 1 if len(ends) else longest
            total = sum(log_probabilities[t - 1, text[t]] for t in range(n, size))
            standing = total / ((5 + size - n) / 6) ** length_penalty
            if standing > best_standing + 1e-9:
                best, best_standing = (text[:size], total), standing
        text, total = best
        sizes.add(len(text) - n)
        assert_equal(found.tokens[b, : len(text)], text)
        assert found.lengths[b] == len(text)
        np.testing.assert_allclose(found.log_probability[b], total, atol=1e-4)
    # Without a penalty short texts are likelier.
    assert (sizes == {1}) == (length_penalty == 0)


@pytest.mark.slow
def test_a_wider_beam_is_no_less_likely_and_knows_how_likely_its_texts_are():
    # Without an end, else the likeliest texts are those that end at once.
    narrow, wide = (_generate(decoding.Beam(w), end_token=None) for w in (1, 6))
    assert wide.log_probability.mean() > narrow.log_probability.mean() + 0.05
    own = np.asarray(_log_probabilities(wide.tokens))[:, :-1]
    own = np.take_along_axis(own, np.asarray(wide.tokens)[:, 1:, None], -1)[..., 0]
    places = np.arange(1, N)
    is_new = (places >= LENGTHS[:, None]) & (places < np.asarray(wide.lengths)[:, None])
    total = np.where(is_new, own, 0).sum(1)
    np.testing.assert_allclose(wide.log_probability, total, atol=1e-4)


@pytest.mark.slow
def test_a_key_gives_one_text_whatever_else_is_in_the_batch():
    strategy, key = decoding.Sampled(0.9), jax.random.key(1)
    found = _generate(strategy, key=key)
    assert_equal(_generate(strategy, key=key).tokens, found.tokens)
    other = np.where(np.arange(100)[:, None] < 50, PROMPTS, (PROMPTS + 1) % C)
    together = _generate(strategy, other, key=key)
    assert_equal(together.tokens[:50], found.tokens[:50])
    changed = _generate(strategy, key=jax.random.key(2)).tokens != found.tokens
    assert changed.any(1).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [decoding.Greedy(), decoding.Sampled(0.7, top_k=4, top_p=0.9)]
)
def test_a_stream_gives_what_generate_gives(strategy):
    options = {"strategy": strategy, "max_length": N, "end_token": END}
    options["key"] = jax.random.key(3)
    given = _model(), _parameters(), PROMPTS, LENGTHS
    new = np.stack(list(decoding.stream(*given, **options, chunk=3)), axis=1)
    wanted = decoding.generate(*given, **options)
    for b, n in enumerate(LENGTHS):
        size = wanted.lengths[b] - n
        assert_equal(new[b, :size], wanted.tokens[b, n : wanted.lengths[b]])
        assert_equal(new[b, size:], END)


@pytest.mark.slow
def test_without_an_end_token_all_texts_are_full():
    found = _generate(decoding.Greedy(), end_token=None)
    assert_equal(found.lengths, N)
    assert (np.asarray(found.tokens)[:, P:] == END).any()
    options = {"strategy": decoding.Greedy(), "max_length": N}
    *_, last = decoding.stream(_model(), _parameters(), PROMPTS, LENGTHS, **options)
    assert (last == -1).any()


@pytest.mark.slow
def test_drawn_tokens_follow_the_probabilities():
    logits = np.tile(np.float32([1.0, 2.0, 0.0, -1.0, 1.5]), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(*fields):
        tokens = jax.jit(decoding.Sampled(*fields).choose)(logits, keys)
        return np.bincount(tokens, minlength=5) / 4000

    def wanted(temperature, kept):
        masses = np.where(np.isin(range(5), kept), np.exp(logits[0] / temperature), 0)
        return masses / masses.sum()

    everything = [0, 1, 2, 3, 4]
    for fields, expected in (
        ((1.0,), wanted(1, everything)),
        ((0.5,), wanted(0.5, everything)),
        ((2.0, 3), wanted(2, [0, 1, 4])),
        ((2.0, 99), wanted(2, everything)),
        # Shares at temperature 1: 0.45, 0.28, 0.17, 0.06, 0.02.
        ((1.0, None, 0.7), wanted(1, [1, 4])),
        ((1.0, None, 0.75), wanted(1, [1, 4, 0])),
        # Of only the two likeliest the first has 0.62.
        ((1.0, 2, 0.6), wanted(1, [1])),
        ((1.0, None, 1.0), wanted(1, everything)),
        ((0.0,), wanted(1, [1])),
    ):
        np.testing.assert_allclose(shares(*fields), expected, atol=0.03)
        assert_equal(shares(*fields)[expected == 0], 0)


def test_programs_are_compiled_once_for_a_size():
    _generate(decoding.Greedy(), end_token=END)
    programs = (decoding._begun, decoding._advanced)
    before = [program._cache_size() for program in programs]
    _generate(decoding.Greedy(), PROMPTS[::-1, :5], np.minimum(LENGTHS, 5))
    _generate(decoding.Greedy(), end_token=None)
    _generate(decoding.Greedy(), end_token=1)
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": PROMPTS[:, :0]}, "at least one token each"),
        ({"lengths": np.zeros(100, int)}, "integers .* from 1 to P = 8, got .0."),
        ({"lengths": LENGTHS[:5]}, r"integers \[B\] = \(100,\) from 1 to P = 8, got"),
        ({"lengths": LENGTHS + P}, "lengths must be integers .* to P = 8, got"),
        ({"max_length": 7}, "at most max_length = 7 tokens, got one of 8"),
        ({"max_length": N + 2}, "max_length must be an integer from 1 to 13, got 14"),
        ({"source": PROMPTS}, "source_lengths must be None: the model has no encoder"),
        ({"source_lengths": LENGTHS}, "must be None: the model has no encoder"),
        ({"model": _translator()}, "source must be given"),
        ({"model": _translator(), "source": PROMPTS[:3]}, "with B = 100, got shape"),
        (
            {
                "model": _translator(),
                "source": PROMPTS,
                "source_lengths": LENGTHS + 1,
            },
            "source_lengths must be integers .B. = .100,. from 0 to S = 8, got",
        ),
        ({"prompts": PROMPTS + 1}, "prompts must be integers from 0 to 5, got 6 at"),
        ({"prompts": PROMPTS[0]}, r"tokens \[B, P\], integers, got int64 of shape"),
        ({"prompts": PROMPTS * 1.0}, "integers, got float64"),
        ({"end_token": -1}, "end_token must be an integer from 0 to 5, got -1"),
        ({"strategy": decoding.Sampled()}, "key must be given"),
        ({"model": _model("encoder")}, "predict the next token of a text"),
    ],
)
def test_what_cannot_be_generated_is_refused(changed, message):
    given = {
        "model": _model(),
        "params": None,
        "prompts": PROMPTS,
        "lengths": LENGTHS,
        "strategy": decoding.Greedy(),
        "max_length": N,
    }
    with pytest.raises(ValueError, match=message):
        decoding.generate(**{**given, **changed})


def test_a_stream_refuses_before_its_first_token():
    given = _model(), None, PROMPTS
    for strategy, chunk, message in (
        (decoding.Beam(2), 8, "strategy must choose token by token"),
        (decoding.Greedy(), 0, "chunk must be an integer of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            decoding.stream(*given, strategy=strategy, max_length=N, chunk=chunk)
    with pytest.raises(TypeError, match="strategy must be Greedy"):
        decoding.stream(*given, strategy="greedy", max_length=N)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoding.Sampled(-0.1), "temperature must be .* at least 0, got -0.1"),
        (lambda: decoding.Sampled(float("nan")), "temperature must be"),
        (lambda: decoding.Sampled(top_k=0), "top_k must be .* at least 1, got 0"),
        (lambda: decoding.Sampled(top_p=0.0), "top_p must be .* got 0.0"),
        (lambda: decoding.Sampled(top_p=1.1), "top_p must be .* got 1.1"),
        (lambda: decoding.Beam(0), "width must be .* at least 1, got 0"),
        (lambda: decoding.Beam(2, -1.0), "length_penalty must be .* got -1.0"),
    ],
)
def test_strategies_refuse_what_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()

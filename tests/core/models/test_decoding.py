"""Generated texts against full passes, and each other."""

import functools

import jax
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.core.models import decoding
from tests import tiny_models
from tests.tiny_runs import model_config

C, N, P, END = 6, 12, 8, 3
GENERATOR = np.random.default_rng(0)
PROMPTS = GENERATOR.integers(0, C, (100, P))
LENGTHS = GENERATOR.integers(1, P + 1, 100)

assert_equal = np.testing.assert_array_equal


@functools.cache
def _model(family="causal", num_tokens=C, **fields):
    config = model_config(
        family=family,
        model_size=8,
        embedding__max_length=N,
        attention__num_heads=2,
        feed_forward__hidden_size=9,
        **{"num_layers": 2} | fields,
    )
    return models.build(config, num_tokens=num_tokens, feature_size=None, num_classes=C)


@functools.cache
def _parameters():
    """Of a model that is unsure, so that texts differ and some end early."""
    shapes = jax.eval_shape(_model().init, jax.random.key(0), PROMPTS)
    return tiny_models.normal(shapes, seed=9, scale=0.5)


def _translator():
    return _model("encoder_decoder", 9, num_layers=1, decoder__num_layers=2)


GREEDY = decoding.Sampled(0)


def _whole(steps, prompts, lengths, max_length, ends):
    """Texts `[B, N]` of a stream, filled up with the first end token, and lengths."""
    new = np.stack(list(steps), axis=1)
    tokens = np.full((len(prompts), max_length), (*ends, -1)[0])
    sizes = np.array(lengths)
    for b, n in enumerate(lengths):
        tokens[b, :n] = prompts[b, :n]
        for token in new[b, : max_length - n]:
            tokens[b, sizes[b]] = token
            sizes[b] += 1
            if token in ends:
                break
    return tokens, sizes


def _generate(strategy, prompts=PROMPTS, lengths=LENGTHS, **options):
    options = {"max_length": N, "end_tokens": (END,), **options}
    steps = decoding.stream(
        _model(), _parameters(), prompts, lengths, strategy=strategy, **options
    )
    ends = options["end_tokens"]
    return _whole(steps, prompts, lengths, options["max_length"], ends)


@jax.jit
def _log_probabilities(tokens):
    output = _model().apply(_parameters(), None, tokens, is_training=False)
    return jax.nn.log_softmax(output.logits)


def _by_full_passes(*ends):
    """Greedy texts by a pass over the whole of them for each token."""
    tokens = np.where(
        np.arange(N) < LENGTHS[:, None], np.pad(PROMPTS, [(0, 0), (0, 4)]), ends[0]
    )
    lengths, rows = LENGTHS.copy(), np.arange(100)
    is_open = lengths < N
    while is_open.any():
        new = np.asarray(_log_probabilities(tokens))[rows, lengths - 1].argmax(-1)
        tokens[rows[is_open], lengths[is_open]] = new[is_open]
        lengths += is_open
        is_open &= ~np.isin(new, ends) & (lengths < N)
    return tokens, lengths


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(END,), (END, 0), (0, 5, END)])
def test_greedy_texts_of_100_prompts_are_those_of_full_passes(ends):
    tokens, lengths = _by_full_passes(*ends)
    written, sizes = _generate(GREEDY, end_tokens=ends)
    assert_equal(written, tokens)
    assert_equal(sizes, lengths)
    assert 20 < (lengths < N).sum() < 99  # some end, some are cut off
    lasts = set(tokens[np.arange(100), lengths - 1][lengths < N])
    assert lasts <= set(ends) and len(lasts) == min(len(ends), 2)
    assert len({tuple(text) for text in tokens}) > 50


@pytest.mark.slow
def test_the_last_token_needs_no_position():
    tokens, _ = _generate(GREEDY, max_length=N + 1)
    assert_equal(tokens[:, :N], _generate(GREEDY)[0])


@pytest.mark.slow
def test_an_encoder_decoder_writes_what_full_passes_do():
    model, size = _translator(), 6
    generator = np.random.default_rng(5)
    source = generator.integers(0, 9, (size, 7))
    source_lengths = np.array([7, 3, 0, 5, 1, 6])
    starts = np.full((size, 1), 1)
    shapes = jax.eval_shape(
        functools.partial(model.init, decoder_inputs=starts), jax.random.key(0), source
    )
    params = tiny_models.normal(shapes, seed=generator, scale=0.5)
    padding = np.arange(7) >= source_lengths[:, None]
    steps = decoding.stream(
        model,
        params,
        starts,
        strategy=GREEDY,
        max_length=N + 1,
        end_tokens=(END,),
        source=np.where(padding, 8, source),
        source_lengths=source_lengths,
    )
    tokens, lengths = _whole(steps, starts, np.ones(size, int), N + 1, (END,))
    output = model.apply(
        params,
        None,
        source,
        lengths=source_lengths,
        decoder_inputs=tokens[:, :N],
        is_training=False,
    )
    is_written = np.arange(1, N + 1) < lengths[:, None]
    likeliest = np.asarray(output.logits).argmax(-1)
    assert_equal(tokens[:, 1:][is_written], likeliest[is_written])
    assert np.ptp(output.logits[:, 0], axis=0).max() > 0.1  # sources matter


@pytest.mark.slow
def test_a_key_gives_one_text_whatever_else_is_in_the_batch():
    strategy, key = decoding.Sampled(0.9), jax.random.key(1)
    tokens, _ = _generate(strategy, key=key)
    assert_equal(_generate(strategy, key=key)[0], tokens)
    other = np.where(np.arange(100)[:, None] < 50, PROMPTS, (PROMPTS + 1) % C)
    together, _ = _generate(strategy, other, key=key)
    assert_equal(together[:50], tokens[:50])
    changed = _generate(strategy, key=jax.random.key(2))[0] != tokens
    assert changed.any(1).mean() > 0.5


@pytest.mark.slow
def test_chunks_change_no_token():
    options = {"strategy": decoding.Sampled(0.7, top_k=4, top_p=0.9), "max_length": N}
    options |= {"key": jax.random.key(3), "end_tokens": (END,)}
    model = _model(), _parameters(), PROMPTS, LENGTHS
    one, other = (list(decoding.stream(*model, **options, chunk=x)) for x in (1, 5))
    assert_equal(one, other[: len(one)])
    assert (np.array(other[len(one) :]) == END).all()


@pytest.mark.slow
def test_without_an_end_token_all_texts_are_full():
    tokens, lengths = _generate(GREEDY, end_tokens=())
    assert_equal(lengths, N)
    assert (tokens[:, P:] == END).any()
    options = {"strategy": GREEDY, "max_length": N}
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
    _generate(GREEDY)
    programs = (decoding._begun, decoding._advanced)
    before = [program._cache_size() for program in programs]
    _generate(GREEDY, PROMPTS[::-1, :5], np.minimum(LENGTHS, 5))
    _generate(GREEDY, end_tokens=())
    _generate(GREEDY, end_tokens=(1,))
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"lengths": np.zeros(100, int)},
            "lengths must be integers .* from 1 to P = 8",
        ),
        ({"lengths": LENGTHS[:5]}, r"integers \[B\] = \(100,\) from 1 to P = 8"),
        ({"lengths": LENGTHS + P}, "lengths must be integers .* to P = 8"),
        ({"max_length": 7}, "to max_length = 7, got"),
        ({"max_length": N + 2}, "max_length must be an integer from 1 to 13, got 14"),
        ({"source": PROMPTS}, "source_lengths must be None: the model has no encoder"),
        ({"source_lengths": LENGTHS}, "must be None: the model has no encoder"),
        ({"model": _translator()}, "source must be given"),
        ({"prompts": PROMPTS + 1}, "prompts must be integers from 0 to 5, got 6 at"),
        ({"prompts": PROMPTS[0]}, r"tokens \[B, P\], integers, got int64 of shape"),
        ({"prompts": PROMPTS * 1.0}, "integers, got float64"),
        ({"end_tokens": (1, -1)}, "end_tokens must be an integer from 0 to 5, got -1"),
        ({"strategy": decoding.Sampled()}, "key must not be None"),
        ({"model": _model("encoder")}, "predict the next token of a text"),
        ({"chunk": 0}, "chunk must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_generated_is_refused(changed, message):
    arguments = {
        "model": _model(),
        "params": None,
        "prompts": PROMPTS,
        "lengths": LENGTHS,
        "strategy": GREEDY,
        "max_length": N,
    }
    with pytest.raises(ValueError, match=message):
        decoding.stream(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoding.Sampled(-0.1), "temperature must be .* at least 0, got -0.1"),
        (lambda: decoding.Sampled(float("nan")), "temperature must be"),
        (lambda: decoding.Sampled(top_k=0), "top_k must be .* at least 1, got 0"),
        (lambda: decoding.Sampled(top_p=0.0), "top_p must be .* got 0.0"),
        (lambda: decoding.Sampled(top_p=1.1), "top_p must be .* got 1.1"),
    ],
)
def test_strategies_refuse_what_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()

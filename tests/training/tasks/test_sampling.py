import itertools

import jax
import numpy as np
import pytest

from mha_haiku.training.tasks import sampling


def draw(function, size, num_words):
    keys = jax.random.split(jax.random.key(0), size)
    return np.asarray(
        jax.jit(jax.vmap(lambda key: function(sampling.words(key, num_words))))(keys)
    )


def test_integers_are_uniform_below_their_count():
    numbers = draw(lambda random: sampling.integers(random, 5), 4096, 3)
    frequencies = np.bincount(numbers.ravel()) / numbers.size
    np.testing.assert_allclose(frequencies, np.full(5, 1 / 5), atol=0.015)


@pytest.mark.parametrize("few_comparisons", [0, 2**12], ids=["sort", "ranks"])
@pytest.mark.parametrize("count", [None, 4])
def test_every_ordered_choice_is_equally_likely(few_comparisons, count, monkeypatch):
    monkeypatch.setattr(sampling, "_FEW_COMPARISONS", few_comparisons)
    num_words = 4 if count is None else 7
    numbers = draw(lambda r: sampling.distinct(r, 2, count), 8192, num_words)
    choices = list(itertools.permutations(range(4), 2))
    for choice in choices:
        frequency = np.mean(np.all(numbers == choice, axis=1))
        np.testing.assert_allclose(frequency, 1 / len(choices), atol=0.015)


@pytest.mark.parametrize("num_words", [1, 2, 5, 64, 300])
def test_all_of_them_are_a_permutation(num_words):
    numbers = draw(lambda r: sampling.distinct(r, num_words), 3, num_words)
    expected = np.tile(np.arange(num_words), (3, 1))
    np.testing.assert_array_equal(np.sort(numbers, axis=1), expected)

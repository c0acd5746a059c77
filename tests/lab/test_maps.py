"""Reading a map in a program: masked cells, against the whole mask in NumPy."""

import jax
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend
from mha_haiku.lab import maps, statistics, text_maps
from tests.showing.small_maps import make_map

B, T, S, H, G, K = 2, 83, 70, 4, 2, 3
LENGTHS = np.array([70, 41])
FIVE = masks.where(lambda t, s: (t == 5) | (s == 5))
MASK = masks.padding(LENGTHS) & ~FIVE | masks.window(9, 2)


@pytest.fixture(scope="module")
def attention_map():
    keys = jax.random.split(jax.random.key(0), 3)
    query = 3 * jax.random.normal(keys[0], (B, T, H, K))
    key = jax.random.normal(keys[1], (B, S, G, K))
    return jax.jit(lambda q, k: attend(q, k, k, mask=MASK)[1])(query, key)


@pytest.mark.slow
def test_masked_cells_of_a_whole_map_are_what_the_mask_forbids(attention_map):
    masked = np.asarray(maps.masked_cells(attention_map))
    assert masked.shape == (B, 1, T, S)
    t, s = np.arange(T)[:, None], np.arange(S)
    window = (s >= t - 9) & (s <= t + 2)
    for b in range(B):
        allowed = (s < LENGTHS[b]) & (s != 5) & (t != 5) | window
        np.testing.assert_array_equal(masked[b, 0], ~allowed)


@pytest.mark.slow
def test_masked_cells_of_a_pooled_map_hold_no_open_pair():
    query = np.zeros((B, T, H, K), np.float32)
    mask = masks.window(14, 0) & masks.padding(LENGTHS)
    _, attention_map = attend(query, query[:, :S], query[:, :S], mask=mask)
    masked = np.asarray(jax.jit(lambda x: maps.masked_cells(x, 4, 5))(attention_map))
    allowed = np.asarray(mask.array(T, S))
    edges = [np.append(np.arange(0, T, 21), T), np.append(np.arange(0, S, 14), S)]
    assert masked.shape == (B, 1, 4, 5)
    for b, p, q in np.ndindex(B, 4, 5):
        rows, columns = (
            slice(*e[i : i + 2]) for e, i in zip(edges, (p, q), strict=True)
        )
        assert masked[b, 0, p, q] == (not allowed[b, rows, columns].any())


def test_masks_that_differ_by_head_do_so_in_their_cells():
    allowed = np.random.default_rng(0).random((B, H, T, S)) < 0.5
    query = np.zeros((B, T, H, K), np.float32)
    mask = masks.dense(allowed)
    _, attention_map = attend(query, query[:, :S], query[:, :S], mask=mask)
    np.testing.assert_array_equal(maps.masked_cells(attention_map), ~allowed)


def test_the_number_of_separators_says_which_tokens_it_counts():
    shares = {"chosen_positions": np.array([[0.25, 0.5]])}
    found = statistics.summary([shares], [range(2)])
    assert list(found) == ["separator"]
    assert found["separator"].label == (
        "attention on special tokens after the first position, such as [SEP]"
    )
    # Of statistics whose positions the user chose, not known what they are.
    assert list(statistics.summary([shares], [range(2)], names={})) == [*shares]


@pytest.mark.parametrize("kind", ["full", "window", "padding"])
@pytest.mark.parametrize("bins", [None, 3])
def test_a_set_has_the_masked_cells_of_its_maps(kind, bins, monkeypatch):
    if bins is not None:
        monkeypatch.setattr(maps, "WHOLE", 4)
        monkeypatch.setattr(maps, "_BINS", bins)
    mask = {
        "full": masks.full(),
        "window": masks.window(2, 0),
        "padding": masks.padding(np.array([2, 4])),
    }[kind]
    attention_map = make_map(mask=mask)
    whole = maps.map_set(text_maps.TextMaps(attention_map), has_numbers=False)
    expected = maps.masked_cells(attention_map, *((bins, bins) if bins else ()))
    for example, cells in zip(whole.examples, np.asarray(expected), strict=True):
        cells = cells if len(cells) > 1 else cells[0]
        np.testing.assert_array_equal(example.masked[0], cells)

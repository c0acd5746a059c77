import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.showing import collecting, sets
from tests.showing.small_maps import make_map


@pytest.mark.parametrize("kind", ["full", "window", "padding"])
@pytest.mark.parametrize("bins", [None, 3])
def test_masked_cells_are_those_of_the_chosen_heads(kind, bins, monkeypatch):
    if bins is not None:
        monkeypatch.setattr(sets, "WHOLE", 4)
        monkeypatch.setattr(sets, "_BINS", bins)
    mask = {
        "full": masks.full(),
        "window": masks.window(2, 0),
        "padding": masks.padding(np.array([2, 4])),
    }[kind]
    attention_map = make_map(mask=mask)
    whole = sets.map_set(sets.TextMaps(attention_map), has_numbers=False)
    whole = whole.with_heads([[3, 1]])
    expected = collecting.masked_cells(attention_map, *((bins, bins) if bins else ()))
    for example, cells in zip(whole.examples, np.asarray(expected), strict=True):
        cells = cells[[3, 1]] if len(cells) > 1 else cells[0]
        np.testing.assert_array_equal(example.masked[0], cells)

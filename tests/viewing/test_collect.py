import numpy as np
import pytest

from mha_haiku import attention, masks
from mha_haiku.studies import zoom
from mha_haiku.viewing import collect
from tests.viewing.conftest import make_map


@pytest.mark.parametrize("kind", ["full", "window", "padding"])
@pytest.mark.parametrize("bins", [None, (2, 3)])
def test_masked_cells_on_the_host_are_those_of_a_program(kind, bins):
    queries, keys = (4, 6) if bins is None else (40, 600)
    mask = {
        "full": masks.full(),
        "window": masks.window(2, 0),
        # Texts that end where a bin does.
        "padding": masks.padding(np.array([keys // 3, keys * 2 // 3])),
    }[kind]
    attention_map = make_map(queries=queries, keys=keys, mask=mask)
    edges = [
        attention.bin_edges(size, size if bins is None else count)
        for size, count in zip((queries, keys), bins or (0, 0), strict=True)
    ]
    heads, examples = [3, 1], [1, 0]
    found = collect._masked(attention_map, heads, examples, edges, bins is None)
    expected = np.asarray(zoom.masked_cells(attention_map, *(bins or ())))[examples]
    expected = expected[:, heads] if expected.shape[1] > 1 else expected[:, 0]
    np.testing.assert_array_equal(found, expected)

import dataclasses

import numpy as np
import pytest

from tests.showing.saved_maps import make_maps_of_kinds


def test_a_page_of_nothing_is_refused(whole):
    first, second = whole.sets
    with pytest.raises(ValueError, match="sets must not be empty"):
        whole._replace(sets=()).check()
    with pytest.raises(ValueError, match="examples of 'one' must not be empty"):
        shown = dataclasses.replace(first, examples=())
        whole._replace(sets=(shown, second)).check()


def test_an_alignment_has_the_sizes_of_its_axes():
    maps = make_maps_of_kinds()
    example = maps.examples[0]
    cross = example.axes(maps.layers[2])
    wrong = cross._replace(alignment=np.ones((5, 4), bool))
    example = example._replace(kinds={**example.kinds, "cross": wrong})
    with pytest.raises(ValueError, match="alignment of 'example 1' must have shape"):
        dataclasses.replace(maps, examples=(example,)).check()

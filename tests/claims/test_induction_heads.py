"""The arithmetic of the claim on induction heads, by hand."""

import numpy as np
import pytest

from experiments.claims import induction_heads


def test_a_curve_that_rises_fastest_at_first_has_no_jump():
    early, late = np.linspace(0.2, 0.9, 4), np.linspace(0.9, 0.95, 36)
    assert induction_heads.jump([*early, *late]) <= 0


def test_a_late_step_is_a_jump():
    assert induction_heads.jump([0.1] * 20 + [0.9] * 20) == pytest.approx(0.8)


def test_one_layer_has_as_many_parameters_as_two():
    configs = induction_heads.InductionHeads().configs("claim")
    two, one = (configs[name].model for name in ("two layers", "one layer"))
    width = two.model_size
    layer = 4 * (width**2 + width) + 4 * width + width

    def size(model):
        hidden = model.feed_forward.hidden_size
        return model.num_layers * (layer + hidden * (2 * width + 1))

    assert size(one) == pytest.approx(size(two), rel=0.01)

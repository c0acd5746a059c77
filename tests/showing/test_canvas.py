"""Scales of color that hide nothing, and ink that can be read on them."""

import importlib.util

import numpy as np
import pytest

from mha_haiku.showing import canvas


def test_a_scale_starts_at_nothing_so_that_equal_numbers_look_equal():
    """A head that costs 0.56 nats next to ones that cost 0.57 is not drawn as none."""
    scale = canvas.Scale.of(np.array([0.56, 0.57, np.nan]))
    assert (scale.low, scale.high) == (0.0, pytest.approx(0.57))


@pytest.mark.parametrize("values", [[-0.2, 0.5], [-3.0, 0.001]])
def test_where_signs_differ_nothing_is_in_the_middle_and_white(values):
    import matplotlib

    scale = canvas.Scale.of(np.array(values))
    assert scale.low == -scale.high
    assert scale.high >= np.abs(values).max()
    middle = matplotlib.colormaps[scale.colors](0.5)
    assert min(middle) > 0.95


def test_shares_have_one_scale_and_what_is_no_share_its_own():
    small = np.array([0.01, 0.02])
    assert canvas.Scale.of(small, "share of attention").high == 1
    assert canvas.Scale.of(small, "nats").high == 0.02
    assert canvas.Scale.of(10 * small, "a unit that is new").high == 1
    assert canvas.Scale.of(1000 * small, "a unit that is new").high == 20


@pytest.mark.parametrize(
    "values", [np.zeros(3), np.full(2, np.nan), np.array([]), np.full(3, -2.0)]
)
def test_every_scale_has_a_width(values):
    scale = canvas.Scale.of(values)
    assert scale.low < scale.high
    assert scale.low <= 0 <= scale.high


@pytest.mark.parametrize("values", [[0.0, 1.0], [-1.0, 1.0], [-1.0, -0.1]])
def test_ink_has_a_contrast_of_at_least_4_5_on_every_color(values):
    import matplotlib

    scale = canvas.Scale.of(np.array(values))
    for value in np.linspace(scale.low, scale.high, 101):
        share = (value - scale.low) / (scale.high - scale.low)
        rgb = np.array(matplotlib.colormaps[scale.colors](share)[:3])
        linear = [
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb
        ]
        luminance = np.dot([0.2126, 0.7152, 0.0722], linear)
        contrast = {
            "black": (luminance + 0.05) / 0.05,
            "white": 1.05 / (luminance + 0.05),
        }
        assert contrast[scale.ink(value)] >= 4.5


def test_without_matplotlib_a_warning_says_what_installs_it(monkeypatch, caplog):
    assert canvas.is_possible()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not canvas.is_possible()
    assert "mha_haiku[plots]" in caplog.text

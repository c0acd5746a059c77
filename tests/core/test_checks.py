"""Checks of arguments: what passes, what does not, and what the message says."""

import numpy as np
import pytest

from mha_haiku.core import checks


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (checks.positive_integer, [1, 7, np.int64(3)]),
        (checks.non_negative_integer, [0, 1, np.uint8(3)]),
        (checks.positive_number, [1, 0.5, 1e-30, np.float32(2)]),
        (checks.non_negative_number, [0, 0.0, 3.5]),
        (checks.fraction, [0, 0.0, 0.999]),
        (checks.share, [0, 1, 0.5, np.float16(0.5)]),
        (lambda name, value: checks.integer_in(name, value, 2, 4), [2, 3, 4]),
        (lambda name, value: checks.choice(name, value, "ab"), ["a", "b"]),
    ],
)
def test_check_returns_what_is_right(check, values):
    for value in values:
        assert check("x", value) is value


@pytest.mark.parametrize(
    ("check", "wanted", "values"),
    [
        (checks.positive_integer, "an integer of at least 1", [0, -1, 1.0, True, None]),
        (checks.non_negative_integer, "an integer of at least 0", [-1, 0.0, "1"]),
        (checks.positive_number, "a finite number above 0", [0, -1, np.inf, np.nan]),
        (checks.positive_number, "a finite number above 0", ["1", None, True]),
        (checks.positive_number, r".* at most 3.4e\+38, as float32 holds", [10**400]),
        (checks.non_negative_number, "a finite number of at least 0", [-1e-9, np.nan]),
        (checks.share, r"a number in \[0, 1\]", [1.1, -0.1, np.nan, "0.1", True]),
        (checks.fraction, r"a number in \[0, 1\)", [1, 1.0, -0.1, np.nan, "0.1"]),
    ],
)
def test_check_refuses_the_rest_by_name(check, wanted, values):
    for value in values:
        with pytest.raises(ValueError, match=f"config.x must be {wanted}, got"):
            check("config.x", value)


@pytest.mark.parametrize("value", [1, 5, 2.0, False])
def test_integer_in_names_both_ends(value):
    with pytest.raises(ValueError, match="x must be an integer from 2 to 4"):
        checks.integer_in("x", value, 2, 4)


def test_choice_lists_the_choices_and_the_nearest():
    message = "x must be one of reverse, copy; got 'revrese'. Did you mean 'reverse'?"
    with pytest.raises(ValueError) as error:
        checks.choice("x", "revrese", ("reverse", "copy"))
    assert str(error.value) == message


def test_checks_shorten_what_they_repeat():
    for check in (checks.positive_integer, checks.fraction):
        with pytest.raises(ValueError) as error:
            check("x", list(range(999)))
        assert len(str(error.value)) < 150


def test_nearest_says_nothing_where_nothing_is_near():
    assert checks.nearest("zzz", ["reverse", "copy"]) == ""
    assert checks.nearest("copi", iter(["reverse", "copy"])) == " Did you mean 'copy'?"


def test_a_mistake_in_python_is_a_value_error_and_one_in_a_config_a_config_error():
    assert issubclass(checks.ConfigError, ValueError)
    with pytest.raises(ValueError) as error:
        checks.positive_integer("x", 0)
    assert type(error.value) is ValueError
    message = "config.x must be an integer of at least 1, got 0."
    with pytest.raises(checks.ConfigError) as error, checks.user_mistakes():
        checks.positive_integer("config.x", 0)
    assert str(error.value) == message
    for other in (KeyError("x"), UnicodeError("x")):
        with pytest.raises(type(other)), checks.user_mistakes():
            raise other


def test_numbers_are_as_large_as_float32_holds():
    largest = float(np.finfo(np.float32).max)
    assert checks.number("x", -largest) == -largest
    with pytest.raises(ValueError, match="as float32 holds"):
        checks.number("x", 10**39)

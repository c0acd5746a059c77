"""Scores and masks of the user: functions, and classes as the documentation shows."""

import dataclasses
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention, masks, runs
from mha_haiku.core.modules import anatomy, pattern
from tests import docstring

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 70, 4, 8))
IMPLEMENTATIONS = ["dense", attention.Blockwise(16, 32)]


def _distance(query, key):
    return -((query[:, None] - key[None]) ** 2).sum(-1)


def _expected(rate):
    apart = QUERY[:, :, None] - KEY[:, None]  # [B, T, S, H, K]
    return -rate[None, :, None, None] * jnp.moveaxis((apart**2).sum(-1), -1, 1)


def _from_documentation(documented, name):
    code = docstring.code_of(documented).split("\nattend(")[0]
    names = {"jax": jax, "jnp": jnp, "dataclasses": dataclasses}
    exec(code, names)
    return names[name]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_the_class_in_the_documentation_is_right_and_trains(implementation):
    distance = _from_documentation(attention.Score, "Distance")
    rate = jnp.arange(1.0, 5) / 4

    def loss(rate):
        values, found = mh.attend(
            QUERY, KEY, VALUE, score=distance(rate), implementation=implementation
        )
        return (values**2).sum(), found

    def expected(rate):
        weights = jax.nn.softmax(_expected(rate))
        return (jnp.einsum("bhts,bshv->bthv", weights, VALUE) ** 2).sum(), weights

    (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(rate)
    (wanted, weights), slope = jax.value_and_grad(expected, has_aux=True)(rate)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4)
    np.testing.assert_allclose(found.weights(), weights, atol=1e-6)
    assert found.statistics().entropy.shape == (2, 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_function_is_a_score_of_grouped_heads(implementation):
    key, value = KEY[:, :, :2], VALUE[:, :, :2]
    values, found = jax.jit(
        lambda query: mh.attend(
            query, key, value, score=_distance, implementation=implementation
        )
    )(QUERY)
    repeated = jnp.repeat(key, 2, axis=2)
    apart = QUERY[:, :, None] - repeated[:, None]
    expected = jax.nn.softmax(-jnp.moveaxis((apart**2).sum(-1), -1, 1))
    np.testing.assert_allclose(found.weights(), expected, atol=1e-6)
    assert values.shape == QUERY.shape


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_the_mask_in_the_documentation_is_right(implementation):
    same_color = _from_documentation(masks.Mask, "SameColor")
    colors = jnp.arange(140).reshape(2, 70) % 3
    mask = masks.causal() & same_color(colors)
    _, found = mh.attend(QUERY, KEY, VALUE, mask=mask, implementation=implementation)
    allowed = (colors[:, :, None] == colors[:, None, :]) & np.tri(70, dtype=bool)[None]
    np.testing.assert_array_equal(
        found.weights() > 0, jnp.repeat(allowed[:, None], 4, axis=1)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_function_of_positions_is_a_mask(implementation):
    def strided(rows, columns):
        return (rows - columns) % 3 == 0

    mask = masks.where(strided) & masks.causal()
    position = np.arange(70)
    expected = (position[:, None] - position) % 3 == 0
    np.testing.assert_array_equal(mask.array(70, 70), expected & np.tri(70, dtype=bool))
    values, _ = mh.attend(
        QUERY, KEY, VALUE, mask=strided, implementation=implementation
    )
    same, _ = mh.attend(QUERY, KEY, VALUE, mask=expected[None])
    np.testing.assert_allclose(values, same, atol=1e-6)
    assert str(mask) == "where(strided) & causal()"


@dataclasses.dataclass(frozen=True)
class _NoPytree(attention.Score):
    rate: float

    def __call__(self, query, key):
        return jnp.zeros(())


class _NoMask(masks.Mask):
    def aligned_tile(self, rows, columns):
        return jnp.ones((), bool)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"score": _NoPytree(1.0)}, TypeError, "_NoPytree is not registered"),
        ({"mask": _NoMask()}, TypeError, "_NoMask is not registered"),
        ({"score": _NoPytree}, TypeError, "must be None, a function .*or a Score"),
        ({"score": np.ones(3)}, TypeError, "must be None, a function .*or a Score"),
        (
            {"score": lambda query, key: query},
            ValueError,
            r"\[R, C\], here \(70, 70\), for queries \(70, 8\) .* got \(70, 8\)",
        ),
        ({"mask": lambda t, s: t + s}, ValueError, r"return booleans .* got int32"),
    ],
)
def test_what_is_no_score_or_mask_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        mh.attend(QUERY, KEY, VALUE, **given)


@pytest.mark.slow
def test_what_the_readme_of_the_core_registers_works_at_once(monkeypatch):
    added = (
        (pattern.SCORES, "distance"),
        (anatomy._AXES, "rate"),
        (attention.STATISTICS, "near"),
    )
    for registry, name in added:
        monkeypatch.setitem(registry, name, None)  # so that it is removed at the end
        del registry[name]
    _, found = mh.attend(QUERY, KEY, VALUE, mask=masks.causal())
    found.statistics()  # compiled before there is another one
    core = pathlib.Path(mh.__file__).with_name("core")
    readme = (core / "README.md").read_text("utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(snippet, {"Distance": _from_documentation(attention.Score, "Distance")})
    at = np.arange(QUERY.shape[1])
    is_near = np.isin(at[:, None] - at, (1, 2, 3))
    expected = (np.asarray(found.weights()) * is_near).sum(-1).mean(-1)
    np.testing.assert_allclose(found.statistics().near, expected, rtol=1e-5)

    config = runs.default_config("reverse")
    config = config.replace(model=dict(attention=dict(score="distance")))
    make = pattern.Pattern.of(config.model.attention).score

    @hk.transform
    def values(query, key, value):
        return mh.attend(query, key, value, score=make(4, 8))[0]

    params = values.init(None, QUERY, KEY, VALUE)
    assert params == {"~": {"rate": pytest.approx(np.ones(4))}}

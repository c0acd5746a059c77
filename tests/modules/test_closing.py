"""Gates close heads and units, and let pass what is given in their place."""

import jax
import numpy as np
import pytest

from mha_haiku.modules import closing

B, T, H, V, F = 2, 3, 5, 4, 7


@pytest.fixture
def values():
    return np.random.default_rng(0).standard_normal((B, T, H, V)).astype(np.float32)


def _oracle(values, gates, replacement):
    result = np.empty(values.shape)
    for b, t, h in np.ndindex(B, T, H):
        gate = gates[h] if np.ndim(gates) == 1 else gates[b, h]
        other = replacement[h] if np.ndim(replacement) == 2 else replacement[b, t, h]
        result[b, t, h] = gate * values[b, t, h] + (1 - gate) * other
    return result


@pytest.mark.parametrize("gate_shape", [(H,), (B, H)])
@pytest.mark.parametrize("replacement_shape", [(H, V), (B, T, H, V)])
def test_heads_pass_on_a_mix_of_output_and_replacement(
    values, gate_shape, replacement_shape
):
    generator = np.random.default_rng(1)
    gates = generator.uniform(size=gate_shape).astype(np.float32)
    replacement = generator.standard_normal(replacement_shape).astype(np.float32)
    found = jax.jit(closing.heads)(values, gates, replacement)
    np.testing.assert_allclose(found, _oracle(values, gates, replacement), rtol=1e-5)
    zero = np.zeros_like(replacement)
    wanted = _oracle(values, gates, zero)
    np.testing.assert_allclose(closing.heads(values, gates, None), wanted, rtol=1e-6)


def test_open_heads_pass_unchanged(values):
    replacement = np.ones((H, V), np.float32)
    found = closing.heads(values, np.ones(H, np.float32), replacement)
    np.testing.assert_array_equal(found, values)
    assert closing.heads(values, None, None) is values


@pytest.mark.parametrize("shape", [(F,), (B, F)])
def test_units_are_scaled_by_their_gates(shape):
    generator = np.random.default_rng(2)
    hidden = generator.standard_normal((B, T, F)).astype(np.float32)
    gates = generator.uniform(size=shape).astype(np.float32)
    wanted = hidden * np.broadcast_to(gates.reshape(-1, 1, F), (B, T, F))
    np.testing.assert_allclose(closing.units(hidden, gates), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("gates", "replacement", "message"),
    [
        (np.ones(H + 1), None, r"gates must be \[H\] .* H = 5, got shape \(6,\)"),
        (np.ones((T, H)), None, r"gates must be .* got shape \(3, 5\)"),
        (None, np.ones((H, V)), "replacement needs gates"),
        (np.ones(H), np.ones((T, H, V)), r"replacement .* got \(3, 5, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(values, gates, replacement, message):
    with pytest.raises(ValueError, match=message):
        closing.heads(values, gates, replacement)


def test_unit_gates_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"unit_gates must be \[F\] .* F = 7"):
        closing.units(np.ones((B, T, F), np.float32), np.ones(H))

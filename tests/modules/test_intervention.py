"""Interventions: gates close heads and units, and let pass what replaces them."""

import jax
import numpy as np
import pytest

from mha_haiku.modules import intervention

B, T, H, V, F, L = 2, 3, 5, 4, 7, 6
Interventions = intervention.Interventions


def _normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _oracle(values, gates, replacement):
    """The mix of values and replacement, one number of the gates after the other."""
    result = np.empty(values.shape)
    for b, t, h in np.ndindex(B, T, H):
        gate = gates[{1: (h,), 2: (b, h), 3: (b, t, h)}[np.ndim(gates)]]
        other = replacement[h] if np.ndim(replacement) == 2 else replacement[b, t, h]
        result[b, t, h] = gate * values[b, t, h] + (1 - gate) * other
    return result


@pytest.mark.parametrize("gate_shape", [(H,), (B, H), (B, T, H)])
@pytest.mark.parametrize("replacement_shape", [(H, V), (B, T, H, V)])
def test_heads_pass_on_a_mix_of_output_and_replacement(gate_shape, replacement_shape):
    values, replacement = _normal(B, T, H, V), 2 * _normal(*replacement_shape)
    gates = np.random.default_rng(1).uniform(size=gate_shape).astype(np.float32)
    run = jax.jit(intervention.gated_heads)
    mixed = run(values, Interventions(gates, replacement))
    wanted = _oracle(values, gates, replacement)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-6)
    wanted = _oracle(values, gates, np.zeros_like(replacement))
    np.testing.assert_allclose(run(values, Interventions(gates)), wanted, rtol=1e-6)


def test_open_heads_pass_unchanged():
    values, replacement = _normal(B, T, H, V), np.ones((H, V), np.float32)
    mixed = intervention.gated_heads(values, Interventions(np.ones(H), replacement))
    np.testing.assert_array_equal(mixed, values)
    assert intervention.gated_heads(values, None) is values
    assert intervention.gated_units(values, Interventions()) is values


def test_without_batch_axes_gates_are_per_head_or_per_position():
    values, gates = _normal(T, H, V), _normal(T, H)
    for each in (gates, gates[0]):
        scaled = intervention.gated_heads(values, Interventions(each))
        wanted = values * np.broadcast_to(each, (T, H))[..., None]
        np.testing.assert_array_equal(scaled, wanted)


@pytest.mark.parametrize("shape", [(F,), (B, F), (B, T, F)])
def test_units_are_scaled_by_their_gates(shape):
    hidden, gates = _normal(B, T, F), _normal(*shape)
    spread = gates[:, None] if len(shape) == 2 else gates
    scaled = intervention.gated_units(hidden, Interventions(units=gates))
    wanted = hidden * np.broadcast_to(spread, (B, T, F))
    np.testing.assert_array_equal(scaled, wanted)


def test_units_may_be_those_of_another_example():
    hidden, gates = _normal(B, T, F), _normal(F)
    given = Interventions(units=gates, units_of=np.array([1, 1]))
    found = intervention.gated_units(hidden, given)
    np.testing.assert_array_equal(found, hidden[[1, 1]] * gates)


def test_each_layer_gets_its_own():
    heads, units = _normal(L, H), [None, *range(1, L)]
    given = Interventions(heads=heads, units=units)
    decoder = intervention.DecoderInterventions(cross=given, units=units)
    for i, layer in enumerate(intervention.per_layer(given, L)):
        np.testing.assert_array_equal(layer.heads, heads[i])
        assert layer.replacement is None and layer.units == units[i]
    for i, layer in enumerate(intervention.per_layer(decoder, L)):
        np.testing.assert_array_equal(layer.cross.heads, heads[i])
        assert layer.own == Interventions() and layer.units == units[i]


def test_interventions_are_mapped_over_like_any_tree():
    values, gates = _normal(B, T, H, V), _normal(L, H)
    run = jax.vmap(intervention.gated_heads, in_axes=(None, 0))
    mapped = run(values, Interventions(gates))
    wanted = values * gates[:, None, None, :, None]
    np.testing.assert_array_equal(mapped, wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Interventions(np.ones(H + 1)),
            r"interventions\.heads must be \[H\], \[B..., H\] or \[B..., T, H\], of "
            r"shape \(5,\), \(2, 5\) or \(2, 3, 5\), got \(6,\)",
        ),
        (Interventions(np.ones((T, H))), r"\.heads must be .* got \(3, 5\)"),
        (Interventions(np.ones((B, 1, H))), r"\.heads must be .* got \(2, 1, 5\)"),
        (Interventions(None, np.ones((H, V))), r"\.replacement needs .*heads"),
        (Interventions(np.ones(H), np.ones((T, H, V))), r"\.replacement .*\(3, 5, 4\)"),
        (Interventions(units=np.ones(F)), r"\.units must be None for attention"),
    ],
)
def test_what_does_not_fit_heads_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        intervention.gated_heads(_normal(B, T, H, V), given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Interventions(units=np.ones(H)), r"\.units must be \[F\], .*\(7,\).*\(5,\)"),
        (Interventions(np.ones(H)), r"\.heads and \.replacement must be None"),
        (Interventions(units_of=np.ones(B)), r"\.units_of must be integers \[B\]"),
    ],
)
def test_what_does_not_fit_units_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        intervention.gated_units(_normal(B, T, F), given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Interventions(np.ones((2, H))), r"\.heads must .* L = 6 layers.* got 2"),
        (Interventions(units=[None] * 7), r"\.units must .* L = 6 .* got 7"),
        (Interventions(1.0), r"\.heads must .* got a single number"),
        (
            intervention.DecoderInterventions(own=Interventions(np.ones((2, H)))),
            r"interventions\.own\.heads must .* got 2",
        ),
    ],
)
def test_another_number_of_layers_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        intervention.per_layer(given, L)


@pytest.mark.parametrize("given", [np.ones(H), intervention.DecoderInterventions()])
def test_what_is_no_interventions_is_refused(given):
    with pytest.raises(
        TypeError, match=r"must be modules.Interventions\(heads=, .*got"
    ):
        intervention.checked(given)

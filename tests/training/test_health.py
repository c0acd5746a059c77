"""Spikes of the loss, by a window of the losses before, and steps that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku.training import stepping

INITIAL = stepping.state_of({}, optax.identity()).health


@jax.jit
def _observe(state, losses, finite):
    def observe(state, step):
        after, rise, deviations = stepping.observe(state, *step)
        return after, (rise, deviations)

    return jax.lax.scan(observe, state, (losses, finite))


def _deviations(losses, finite=None):
    """Returns what each loss is given, and the health after the last."""
    losses = np.asarray(losses, np.float32)
    finite = np.isfinite(losses) if finite is None else np.asarray(finite)
    after, (rise, deviations) = _observe(INITIAL, losses, finite)
    assert ((np.asarray(rise) > 0) == (np.asarray(deviations) > 0)).all()
    return np.asarray(deviations), jax.tree.map(np.asarray, after)


def _oracle(losses):
    """Returns the deviations of finite losses, in float64."""
    deviations = np.zeros(len(losses))
    for i in range(128, len(losses)):
        window = np.float64(losses[i - 128 : i])
        scale = max(window.std(), 1e-3 * abs(window.mean()))
        deviations[i] = (losses[i] - window.mean()) / scale
    return deviations


def test_deviations_are_those_of_the_window_before():
    generator = np.random.default_rng(0)
    losses = generator.normal(2.5, 0.3, size=300).astype(np.float32)
    losses[[200, 290]] = 12.0, 0.1  # up, and down
    found, _ = _deviations(losses)
    np.testing.assert_allclose(found, _oracle(losses), atol=1e-3)
    assert np.flatnonzero(found > stepping.SPIKE).tolist() == [200]


def test_rise_is_above_the_mean_of_the_window():
    losses = np.array([1.0, 3.0] * 64 + [2.5, 1.5], np.float32)
    _, (rise, _) = _observe(INITIAL, losses, np.ones(130, bool))
    np.testing.assert_allclose(rise[-2:], [0.5, 1.5 - 257.5 / 128])
    assert not np.any(rise[:128])


def test_nothing_is_out_of_a_window_that_is_not_full():
    losses = np.linspace(2, 1, 128).astype(np.float32)
    assert (_deviations([*losses[:127], 1e6])[0] == 0).all()
    found, _ = _deviations([*losses, 1e6])
    assert found[:-1].max() == 0 and found[-1] > stepping.SPIKE


def test_rounding_of_a_constant_loss_is_no_spike():
    constant = np.full(200, 2.3026, np.float32)
    constant[150] = np.nextafter(np.float32(2.3026), np.float32(3))
    assert _deviations(constant)[0].max() < 0.01
    constant[150] = 2.3026 * 1.007  # seven thousandths of the mean
    assert _deviations(constant)[0].max() > stepping.SPIKE
    assert np.isfinite(_deviations(np.zeros(200))[0]).all()


def test_steps_that_are_not_finite_are_counted_and_leave_the_window():
    losses = [*np.linspace(2, 1, 130), np.nan, np.inf, 1.0, np.nan, 1.5]
    finite = np.isfinite(losses)
    finite[-1] = False  # its gradient was not
    found, after = _deviations(losses, finite)
    assert np.isfinite(found).all()
    assert (found[~finite] == 0).all()
    assert (after.skipped, after.skipped_in_a_row) == (4, 2)
    wanted = np.asarray(losses, np.float32)[finite][-128:]
    np.testing.assert_array_equal(after.losses, wanted)


def test_window_has_as_many_losses_as_promised():
    assert INITIAL.losses.shape == (stepping.WINDOW,) == (128,)
    assert INITIAL.losses.dtype == jnp.float32

"""Attention flow, against a linear program of the flows in all pipes."""

import jax
import numpy as np
import pytest
from scipy import optimize

from mha_haiku import attention, masks
from mha_haiku.lab.heads.rollout import flow, rollout
from tests.lab.heads import test_rollout

B, T, K = 2, 4, 3
HEADS = (2, 2, 2)


def _layers(mask=None, heads=HEADS):
    rng = np.random.default_rng(0)
    arrays = [
        [2 * np.float32(rng.normal(size=(B, T, h, K))) for _ in range(3)] for h in heads
    ]

    @jax.jit
    def attend(arrays):
        options = {"mask": mask, "implementation": "formula"}
        return [attention.attend(*layer, **options)[1] for layer in arrays]

    return attend(arrays)


def _largest_flow(matrices, row, column):
    """Returns the largest flow, as a linear program over the pipes `[L, T, T]`."""
    num_layers, size, _ = matrices.shape
    out = np.zeros((num_layers + 1, size, *matrices.shape))  # [node, pipe]
    for layer, above, below in np.ndindex(matrices.shape):
        out[layer + 1, above, layer, above, below] += 1
        out[layer, below, layer, above, below] -= 1
    out = out.reshape(num_layers + 1, size, -1)
    inner = np.ones((num_layers + 1, size), bool)
    inner[num_layers, row] = inner[0, column] = False
    result = optimize.linprog(
        -out[num_layers, row],
        A_eq=out[inner],
        b_eq=np.zeros(inner.sum()),
        bounds=[(0, capacity) for capacity in matrices.ravel()],
    )
    assert result.status == 0
    return -result.fun


@pytest.mark.slow
def test_flow_is_the_largest_of_the_linear_program():
    maps, rows = _layers(), [3, 1]
    found = flow(maps, rows, residual=0.3)
    assert found.shape == (B, 2, T)
    layers = [rollout([layer], slice(None), residual=0.3) for layer in maps]
    matrices = np.float64(np.stack(layers))
    for b, r, s in np.ndindex(found.shape):
        expected = _largest_flow(matrices[:, b], rows[r], s)
        np.testing.assert_allclose(found[b, r, s], expected, atol=1e-7)


@pytest.mark.slow
def test_two_layers_by_hand():
    first = [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    second = [[0, 1, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    found = flow(test_rollout.of_weights(first, second), 2)[0, 0]
    # Pipes from 2: 0.125, 0.125 and 0.75. Below, input 0 takes all of the first two, as
    # 1 and 0.25 are wide enough; input 1 the second, and 0.25 of the third; input 2 is
    # only below the third, which takes 0.75 there.
    np.testing.assert_allclose(found, [0.25, 0.375, 0.75], atol=1e-6)


@pytest.mark.slow
def test_one_layer_flows_as_it_attends():
    (layer,) = _layers(heads=(2,))
    np.testing.assert_allclose(
        flow([layer], range(T)), rollout([layer], slice(None)), atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("mask", [masks.causal(), masks.padding([4, 2], [4, 2])])
def test_at_least_what_rolls_out_flows(mask):
    maps = _layers(mask)
    found = flow(maps, range(T))
    rolled = np.asarray(jax.jit(lambda maps: rollout(maps, slice(None)))(maps))
    assert (found >= rolled - 1e-6).all()
    assert found.max() <= 1 + 1e-6
    assert (rolled == 0).any()
    assert (found[rolled == 0] == 0).all()


@pytest.mark.slow
def test_what_sees_nothing_stays():
    found = flow(_layers(masks.padding([4, 2], [4, 2])), [2, 3])
    np.testing.assert_array_equal(found[1], np.eye(T)[2:])


def test_examples_may_have_rows_of_their_own():
    maps = _layers()
    every = flow(maps, range(T))
    found = flow(maps, np.array([[1], [-1]]))
    np.testing.assert_array_equal(found[:, 0], [every[0, 1], every[1, 3]])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [(4, {}, "in -4..3"), (0, {"residual": 1.5}, "residual must be")],
)
def test_what_does_not_fit_is_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        flow(_layers(), rows, **options)

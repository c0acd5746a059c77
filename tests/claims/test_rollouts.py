"""The sentences of the claim on roll-out have one subject, and ranks are compared."""

import jax
import numpy as np
import pytest
from scipy import optimize

from experiments.claims import rollouts
from mha_haiku.lab import heads
from tests.lab.heads import test_rollout


@pytest.mark.slow
def test_the_answer_is_the_number_of_the_first_noun():
    task = rollouts.Rollouts.Agreement(blanks=0.0)
    keys = jax.random.split(jax.random.key(0), 50)
    examples = jax.vmap(lambda key: task.example(key, None))(keys)
    np.testing.assert_array_equal(examples.inputs[:, 0], 0)
    np.testing.assert_array_equal(np.argwhere(examples.weights)[:, 1], 0)
    groups = np.asarray(examples.inputs[:, 1:]).reshape(50, 5, 3)
    subjects = (groups[..., 0] >= 9) & (groups[..., 0] < 13)
    assert (subjects.sum(-1) == 1).all()
    nouns = groups[subjects][:, -1]
    assert ((nouns >= 13) & (nouns < 33)).all()
    np.testing.assert_array_equal(examples.targets[:, 0], nouns >= 23)
    has_noun = groups[..., -1] >= 13
    np.testing.assert_array_equal(has_noun.argmax(-1), subjects.argmax(-1))
    others = groups[has_noun & ~subjects]
    assert len(others) and (others[:, 0] < 5).all()  # prepositions


def test_correlations_are_of_ranks_and_leave_out_the_answer():
    scores = np.array([[9.0, 1, 2, 4], [0, 3, 1, 2]])
    matters = np.array([[0.0, 1, 4, 9], [5, 3, 2, 1], [0, 0, 0, 1]])
    found = rollouts.correlation(scores, matters)  # 1 and 0.5
    np.testing.assert_allclose(found, 0.75)


@pytest.mark.slow
def test_flow_is_the_largest_of_the_linear_program():
    maps = test_rollout._made(heads=((2, 2),) * 3, size=4)
    found = rollouts.flow(maps)
    matrices = np.float64(np.stack([heads.rollout([x], slice(None)) for x in maps]))
    num_layers, count, size, _ = matrices.shape
    pipes = num_layers, size, size
    out = np.zeros((num_layers + 1, size, *pipes))  # by node and pipe
    for layer, above, below in np.ndindex(pipes):
        out[layer + 1, above, layer, above, below] += 1
        out[layer, below, layer, above, below] -= 1
    out = out.reshape(num_layers + 1, size, -1)
    for n, s in np.ndindex(count, size):
        inner = np.ones((num_layers + 1, size), bool)
        inner[num_layers, 0] = inner[0, s] = False
        bounds = [(0, capacity) for capacity in matrices[:, n].ravel()]
        largest = optimize.linprog(
            -out[num_layers, 0],
            A_eq=out[inner],
            b_eq=np.zeros(inner.sum()),
            bounds=bounds,
        )
        np.testing.assert_allclose(found[n, s], -largest.fun, atol=1e-7)

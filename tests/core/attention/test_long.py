"""A context of 65,536 tokens: what it takes, and that its numbers are right."""

import os
import resource
import subprocess
import sys

import pytest

LENGTH, HEADS, SIZE = 65_536, 2, 64

# In a separate process, so that its peak memory does not include other tests.
PROGRAM = f"""
import resource
import jax, jax.numpy as jnp, numpy as np
import mha_haiku as mh

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(8)))
baseline = peak()
keys = jax.random.split(jax.random.key(0), 3)
query, key, value = (
    jax.random.normal(k, (1, {LENGTH}, {HEADS}, {SIZE})) for k in keys
)
attend = jax.jit(lambda *x: mh.attend(*x, mask=mh.masks.causal()))
values, found = attend(query, key, value)
statistics = found.statistics(pooled=(128, 128))
jax.block_until_ready((values, statistics))
print("MiB above the baseline:", round(peak() - baseline))
assert peak() - baseline < 1024

rows = np.r_[0, 1, 777, 30_000:30_003, {LENGTH - 1}]
columns = np.r_[0:3, 776:779, 29_990:30_004, {LENGTH - 2}, {LENGTH - 1}]
tile = np.asarray(found.tile(rows, columns), np.float64)
q, k, v = (np.asarray(x[0], np.float64) for x in (query, key, value))
scores = np.einsum("thk,shk->hts", q[rows], k) / np.sqrt({SIZE})
scores[:, np.arange({LENGTH})[None, :] > rows[:, None]] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
np.testing.assert_allclose(tile[0], weights[..., columns], 2e-4, 1e-9)
expected = np.einsum("hts,shv->thv", weights, v)
np.testing.assert_allclose(values[0, rows], expected, 2e-4, 2e-5)
pooled = np.asarray(statistics.pooled)
np.testing.assert_allclose(pooled.sum(-1), 1, 1e-4)
assert (np.asarray(statistics.entropy) < np.log({LENGTH})).all()
"""


@pytest.mark.slow
def test_long_context_fits_and_equals_dense_rows():
    # Optimized, as users have it: this runs for long, and its memory is measured.
    as_users = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | as_users,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0

"""How every test runs: on four CPU devices, with ranks that never promote silently."""

import os

# Before jax is imported; processes that a test starts inherit these too. chex's pmap
# variants are skipped in silence on one device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Compiling a new shape takes longer than a deadline allows.
hypothesis.settings.register_profile(
    "mha_haiku",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("mha_haiku")


@pytest.fixture
def quick_compilation():
    """Halves the time of tests that mostly compile each shape anew.

    What has to hold to the bit also in optimised programs is tested of whole models.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

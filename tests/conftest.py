"""How every test runs: on four CPU devices, with ranks that never promote silently."""

import gc
import os
import pathlib

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

_MAPS = pathlib.Path("/proc/self/maps")
_tests_since_look = 0


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Drops compiled programs before they are too many.

    Each takes a few memory maps, of which Linux gives a process 65,530; XLA crashes
    where there is none left.
    """
    yield
    global _tests_since_look
    _tests_since_look += 1
    if _tests_since_look < 20 or not _MAPS.exists():
        return
    _tests_since_look = 0
    with _MAPS.open("rb") as maps:
        if sum(1 for _ in maps) > 40_000:
            jax.clear_caches()
            gc.collect()


@pytest.fixture
def quick_compilation():
    """Halves the time of tests that mostly compile each shape anew.

    What has to hold to the bit also in optimised programs is tested of whole models.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# Fixtures of tests of runs, in several folders.
from tests.tiny_runs import (  # noqa: E402, F401
    compilation_cache,
    make_config,
    make_model,
    task,
    trained,
)

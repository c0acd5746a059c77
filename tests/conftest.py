"""How every test runs: on four CPU devices, with ranks that never promote silently."""

import gc
import importlib.metadata
import os
import pathlib
import sys

# Before jax is imported; processes that a test starts inherit these too. chex's pmap
# variants are skipped in silence on one device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Nearly all the time of tests goes into compiling, of which this takes a quarter;
# tests/test_optimized_programs.py looks at programs as users run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if importlib.metadata.version("jaxlib").startswith("0.10."):  # others may not know it
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    )

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import (  # noqa: E402
    compilation_cache as compilation_cache_of_jax,
)

# Compiling a new shape takes longer than a deadline allows.
hypothesis.settings.register_profile(
    "mha_haiku",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("mha_haiku")

# Young objects are collected at times, all objects hardly ever: with a few
# thousand traced programs a collection takes seconds, and finds nothing to free.
gc.set_threshold(10_000, 20, 10_000)

_MAPS = pathlib.Path("/proc/self/maps")
_MOST_GROWTH = 6 * 2**30  # bytes since programs were dropped
_tests_since_look = 0
_resident_before = 0


def _resident() -> int:
    """Returns the memory that this process holds, in bytes."""
    pages = _MAPS.with_name("statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


_LONGEST = (
    "test_commands_do_what_they_say",
    "test_runs_survive",
    "test_properties_to_the_bit_hold",
    "test_language_model_goes",
    "test_notebook_runs",
    "test_a_mesh_over_two_processes",
    "test_long_context",
    "many_cases",
)


def pytest_collection_modifyitems(items):
    """Puts the longest first, so that no process has to run them at the end."""
    items.sort(key=lambda item: not any(name in item.name for name in _LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Turns JAX's persistent cache off for tests that do not ask for it.

    Programs that were read from it have crashed.
    """
    asks = "compilation_cache" in item.fixturenames
    if jax.config.jax_enable_compilation_cache != asks:
        jax.config.update("jax_enable_compilation_cache", asks)
        compilation_cache_of_jax.reset_cache()


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Drops compiled programs before they are too many.

    Each takes a few memory maps, of which Linux gives a process 65,530; XLA crashes
    where there is none left. Two processes with all their programs have taken 19 GiB.
    """
    yield
    global _tests_since_look, _resident_before
    _tests_since_look += 1
    if _tests_since_look < 20 or not _MAPS.exists():
        return
    _tests_since_look = 0
    with _MAPS.open("rb") as maps:
        too_many = sum(1 for _ in maps) > 40_000
    if too_many or _resident() > _resident_before + _MOST_GROWTH:
        jax.clear_caches()
        gc.collect()
        _resident_before = _resident()


@pytest.fixture(autouse=True)
def _without_certificates(request, monkeypatch):
    # To compare each wrapped module with torch would double the time of its tests.
    name = "mha_haiku.interop.torch_modules.certificate"
    is_of_it = request.path.stem in ("test_certificate", "test_atlas")
    if not is_of_it and name in sys.modules:
        monkeypatch.setattr(sys.modules[name], "MOST", 0)


@pytest.fixture
def optimized():
    """Compiles as users do: what a program takes of time and memory depends on it."""
    name = "jax_disable_most_optimizations"
    jax.config.update(name, False)
    yield
    jax.config.update(name, os.environ[name.upper()] == "1")


# Fixtures of tests of runs, in several folders.
from tests.tiny_runs import (  # noqa: E402, F401
    _traced_once,
    compilation_cache,
    make_config,
    make_model,
    task,
    trained,
)

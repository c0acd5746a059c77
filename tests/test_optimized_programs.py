"""Programs optimized like users' programs keep the properties that hold to the bit.

The other tests compile quickly, see conftest.py.
"""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        "core/attention/test_attend_properties.py "
        "core/attention/test_blockwise.py "
        "core/attention/test_kernel_attention_properties.py",
        "core/models/test_build.py training/runs/test_loop.py "
        "training/runs/test_durability.py",
    ],
)
def test_properties_to_the_bit_hold_in_optimized_programs(tests):
    files = [f"tests/{name}" for name in tests.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        + ["-k", "bit"],
        cwd=_ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""An exported program needs JAX alone."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from mha_haiku import interop
from tests.interop import small_models

pytest.importorskip("flatbuffers", reason="exported programs need mha_haiku[interop]")

# A process in which the package, Haiku and all that is not JAX's cannot be imported.
_PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mha_haiku", "haiku", "chex", "optax", "jmp"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import numpy as np
import jax
from jax import export

file, inputs, results = sys.argv[1:]
program = export.deserialize(bytearray(open(file, "rb").read()))
given = np.load(inputs)
found = program.call(given["tokens"], given["lengths"])
np.savez(results, **found)
assert "mha_haiku" not in sys.modules
"""


@pytest.fixture
def imported(tmp_path):
    return interop.load(small_models.write(tmp_path, "gpt2"))


@pytest.mark.slow
def test_the_program_runs_where_the_package_cannot_be_imported(imported, tmp_path):
    tokens = small_models.inputs("gpt2")
    lengths = small_models.LENGTHS.astype(np.int32)
    file = interop.export(
        tmp_path / "model.stablehlo",
        imported.model,
        imported.params,
        tokens,
        weights=True,
    )
    wanted = jax.jit(
        lambda: imported.model.apply(
            imported.params, None, tokens, lengths=lengths, is_training=False
        )
    )()
    np.savez(tmp_path / "given.npz", tokens=tokens, lengths=lengths)
    subprocess.run(
        [
            *(sys.executable, "-c", _PROGRAM),
            *(file, tmp_path / "given.npz", tmp_path / "found.npz"),
        ],
        check=True,
        cwd=tmp_path,
    )
    found = np.load(tmp_path / "found.npz")
    assert set(found) == {"logits", "output", "weights"}
    np.testing.assert_allclose(found["logits"], wanted.logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["output"], wanted.output, rtol=0, atol=1e-5)
    weights = np.stack([each.weights() for each in wanted.maps])
    np.testing.assert_allclose(found["weights"], weights, rtol=0, atol=1e-6)

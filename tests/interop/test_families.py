"""Each family gives the numbers that `transformers` gives, forwards and back."""

import jax
import numpy as np
import pytest

from mha_haiku import interop
from tests.interop import small_models

CASES = list(small_models.CASES)
# One of each family every day, variants in slow tests.
FIRST = [case for case in CASES if "_" not in case or case == "gpt_neox"]
EVERYDAY = [
    case if case in FIRST else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
]


def outputs(case, imported):
    """Returns what `small_models` stores: attention, output, logits."""
    given, lengths = small_models.inputs(case), small_models.LENGTHS
    if case.startswith("vit"):
        given, lengths = interop.patches(given, 4), None

    def run(params):
        output = imported.model.apply(
            params, None, given, lengths=lengths, is_training=False
        )
        attention = [each.weights() for each in output.maps]
        return {
            "attention": attention,
            "output": output.output,
            **({} if output.logits is None else {"logits": output.logits}),
        }

    found = jax.jit(run)(imported.params)
    found["attention"] = [
        small_models.valid(np.asarray(each), 2) for each in found["attention"]
    ]
    return {
        name: x if name == "attention" else small_models.valid(np.asarray(x), 1)
        for name, x in found.items()
    }


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("case", EVERYDAY)
def test_numbers_are_those_of_transformers(case, tmp_path):
    stored = small_models.expected()[case]
    imported = interop.load(small_models.write(tmp_path, case))
    found = outputs(case, imported)
    for each, wanted in zip(found["attention"], stored["attention"], strict=True):
        assert_close(small_models.sample(each), wanted)
    if "vit" not in case:
        assert_close(small_models.sample(found["output"]), stored["output"])
    if "logits" in stored:
        assert_close(small_models.sample(found["logits"]), stored["logits"])
    else:
        assert "logits" not in found

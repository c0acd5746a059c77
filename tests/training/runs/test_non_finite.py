"""A step that is not finite ends a run, and the checkpoint before it stays."""

import numpy as np
import pytest

from mha_haiku import runs
from tests.training.runs import faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "factors"),
    [("gradient", {"gradient": np.nan}), ("loss", {"loss": np.inf})],
)
def test_a_step_that_is_not_finite_ends_the_run(
    make_config, tmp_path, monkeypatch, what, factors
):
    config = make_config(model__num_layers=1, model__dropout_rate=0.0)
    faults.break_step(monkeypatch, 13, **factors)
    message = f"{what} is not finite at step 13; the last checkpoint is of step 10"
    with pytest.raises(runs.NonFiniteLossError, match=message):
        faults.train(config, tmp_path)
    assert faults.state(tmp_path, config).step == 10

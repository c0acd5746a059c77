"""What the measures say of compiled models, whose heads are known."""

import numpy as np
import pytest

from mha_haiku import heads, rasp


def _made(name, seed=0):
    known = rasp.compile(rasp.PROGRAMS[name](), num_heads=5, noise=1e-3, seed=seed)
    metric, batches = heads.metrics.loss, [known.examples(12, seed=seed)]
    return known, heads.Measured(known.model, metric, known.params, batches)


def _score(measure, name, seed=0):
    known, subject = _made(name, seed)
    return rasp.auroc(measure(subject).mean, known.is_real)


@pytest.mark.parametrize("name", ["previous_token", "reverse", "induction"])
def test_ablation_and_attribution_find_all_real_heads(name):
    for seed in (0, 1):
        assert _score(heads.ablation, name, seed) == 1
        assert _score(heads.attribution, name, seed) == 1


def test_slopes_do_not_see_what_is_read_by_steps():
    # A count goes through hidden units that are flat between two counts.
    assert _score(heads.gradient, "histogram") < 0.5
    assert _score(heads.ablation, "histogram") == 1


@pytest.mark.slow
def test_confidence_takes_heads_that_are_sure_of_nothing_for_real_ones():
    scores = [_score(heads.statistic, name) for name in ("induction", "histogram")]
    assert min(scores) < 0.9


@pytest.mark.slow
def test_roles_of_real_heads_are_known():
    known, subject = _made("induction")
    found = heads.roles(subject.model, subject.params, subject.batches)
    for place, role in known.heads.items():
        assert found.names[place] == role
    others = found.names[~known.is_real]
    assert not set(others) & set(known.heads.values())
    assert np.isin(["previous_token", "induction"], list(known.heads.values())).all()

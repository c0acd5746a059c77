"""Hand-built models do their task by their known heads, which the measures find."""

import jax
import numpy as np
import pytest

from mha_haiku import heads, modules
from scripts import known_heads

MEASURES = {name: entry.measure for name, entry in heads.MEASURES.items()}


def _made(name, **sizes):
    return known_heads.ALL[name](num_heads=5, examples=12, **sizes)


@pytest.mark.parametrize("name", known_heads.ALL)
def test_models_do_their_task_by_their_real_heads_alone(name):
    known = _made(name, seed=3)
    subject, (example,) = known.subject, known.subject.batches
    # With the others closed for good, answers are right without exception.
    gates = known.real.astype(np.float32)
    output = jax.jit(subject.model.apply, static_argnames="is_training")(
        subject.params,
        None,
        example.inputs,
        interventions=modules.Interventions(heads=gates),
        is_training=False,
    )
    right = output.logits.argmax(-1) == example.targets
    assert (right | (example.weights == 0)).all()
    closed = heads.closed(subject, np.stack([gates, 1 - gates, np.ones_like(gates)]))
    alone, without, whole = closed.mean(0)
    assert alone < 0.05 and without > 2 and whole < 0.5


@pytest.mark.parametrize("name", known_heads.ALL)
def test_ablation_and_attribution_find_all_real_heads(name):
    for seed in (0, 1):
        known = _made(name, seed=seed)
        found = known_heads.scores(known, MEASURES)
        assert found["ablation"] == found["attribution"] == 1


def test_confidence_takes_heads_that_are_sure_of_nothing_for_real_ones():
    found = [
        known_heads.scores(_made(name), {"confidence": heads.statistic})
        for name in known_heads.ALL
    ]
    assert min(each["confidence"] for each in found) < 0.9


def test_roles_of_real_heads_are_known():
    for name in ("previous_token", "induction"):
        known = _made(name)
        subject = known.subject
        found = heads.roles(subject.model, subject.params, subject.batches)
        for place, role in known.roles.items():
            assert found.names[place] == role
        others = found.names[~known.real]
        assert not set(others) & set(known.roles.values())


def test_real_heads_stand_at_random_places():
    places = {next(iter(_made("reverse", seed=seed).roles)) for seed in range(6)}
    assert len(places) > 2


def test_auroc_is_the_share_of_pairs_in_order():
    real = np.array([[True, False, False], [False, True, False]])
    found = np.array([[3.0, 2.0, np.nan], [2.0, 2.0, 1.0]])
    # Of 2 x 3 pairs five are in order or tied: 3 > 2, 2, 1; 2 = 2, 2 and 2 > 1.
    assert known_heads.auroc(found, real) == pytest.approx((3 + 0.5 + 0.5 + 1) / 6)
    assert known_heads.auroc(-found, real) == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="real heads and others"):
        known_heads.auroc(found, np.zeros_like(real))

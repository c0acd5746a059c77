"""Models of many layers: what compiles one layer for all gives the same numbers."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads
from mha_haiku.lab.heads import model_runs
from tests.lab.heads.small_models import H, L, config, fresh, loss, random_params


@pytest.fixture
def deep(monkeypatch):
    """Two layers are many, for the time of a test."""
    monkeypatch.setattr(model_runs, "FEW_LAYERS", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("resample", {"attention__num_key_value_heads": 2}),
        ("zero", {"attention__window": 2}),
    ],
)
def test_ablation_of_many_layers_at_once_is_that_layer_by_layer(
    name, fields, subject, request
):
    ablation_value, of = getattr(heads.ablation_values, name), config(**fields)
    subject = subject._replace(model=fresh(of), params=random_params(of))
    wanted = heads.ablation(
        subject._replace(model=fresh(of)), ablation_value=ablation_value
    )
    request.getfixturevalue("deep")
    calls = []

    def metric(logits, batch):
        calls.append(logits.shape)
        return loss(logits, batch)

    found = heads.ablation(
        subject._replace(metric=metric), ablation_value=ablation_value
    )
    np.testing.assert_allclose(found.per_example, wanted.per_example, atol=1e-5)
    assert len(np.unique(found.per_example)) > L * H
    # Traced clean and ablated, not once per layer; each twice in a loop.
    assert len(calls) <= 4


@pytest.mark.slow
@pytest.mark.usefixtures("deep")
def test_slopes_of_many_layers_at_once_are_those_layer_by_layer(subject):
    options = {"ablation_value": heads.ablation_values.resample}
    one_by_one = fresh(config())._replace(scanned=None)
    wanted = heads.gradient(subject._replace(model=one_by_one), **options).per_example
    calls = []
    model = fresh(config())

    def count(*args, scanned=model.scanned, **kwargs):
        calls.append(kwargs)
        return scanned.apply(*args, **kwargs)

    model = model._replace(apply=None, scanned=model.scanned._replace(apply=count))
    found = heads.gradient(subject._replace(model=model), **options).per_example
    assert calls and len(np.unique(wanted)) == wanted.size
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_greedy_order_stops_where_asked(subject):
    subject = subject._replace(batches=subject.batches[:1])
    whole = heads.greedy_order(subject)
    assert [step.head for step in whole[:1]] == [
        step.head for step in heads.greedy_order(subject, steps=1)
    ]
    bound = sorted(step.metric for step in whole)[L * H // 2]
    until = heads.greedy_order(subject, worst=bound)
    count = next(i for i, step in enumerate(whole) if step.metric > bound)
    assert until == whole[:count]
    # Heads that harmed more when last tried need no other try.
    few = heads.greedy_order(subject, steps=3, tries=2)
    assert [step.head for step in few] == [step.head for step in whole[:3]]
    with pytest.raises(ValueError, match="tries must be an integer of at least 1"):
        heads.greedy_order(subject, tries=0)


@pytest.mark.slow
def test_slopes_that_are_zero_by_construction_are_warned_about(subject, caplog):
    batch = subject.batches[0]
    whole = heads.model_runs.run(subject.model, subject.params, batch).logits

    def drift(logits, batch):
        return jnp.square(logits - whole).sum((1, 2))

    own = subject._replace(batches=[batch])
    with caplog.at_level(logging.WARNING, "mha_haiku"):
        heads.gradient(own)
        assert not caplog.records
        heads.gradient(own._replace(metric=drift))
    assert "is at its best with all heads open" in caplog.text

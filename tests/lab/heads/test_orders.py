"""Orders of heads, their certainty, and greedy ablation."""

import numpy as np
import pytest
import scipy.stats

from experiments import compiled_kinds
from mha_haiku import heads, rasp
from tests.lab.heads.small_models import H, L, build, config


def _importance(mean, spread, count=200, seed=0):
    noise = np.random.default_rng(seed).standard_normal((count, *np.shape(mean)))
    return heads.Heads.of_examples(np.asarray(mean) + spread * noise)


def test_rank_intervals_hold_true_ranks_and_narrow_with_certainty():
    mean = np.array([[5.0, 1.0, 3.0], [2.0, np.nan, 4.0]])
    ranks = np.array([[1, 5, 3], [4, np.nan, 2]])
    sure = heads.rank_intervals(_importance(mean, 0.1))
    np.testing.assert_array_equal(sure[..., 0], ranks)
    np.testing.assert_array_equal(sure[..., 1], ranks)
    unsure = heads.rank_intervals(_importance(mean, 30.0))
    there = ~np.isnan(ranks)
    assert (unsure[..., 0] <= unsure[..., 1])[there].all()
    width = (unsure[..., 1] - unsure[..., 0])[there]
    assert width.max() >= 2 and np.isnan(unsure[1, 1]).all()


def test_rank_intervals_hold_nineteen_resamples_in_twenty():
    # The second head leads where only the first example is drawn: in 1 of n**n.
    for count, wanted in [(2, [[1, 2], [1, 2]]), (4, [[1, 1], [2, 2]])]:
        values = np.tile([[[1.0, 0.0]]], (count, 1, 1))
        values[0] = 0, 0.3
        ends = heads.rank_intervals(heads.Heads.of_examples(values))
        np.testing.assert_array_equal(ends[0], wanted)


def test_ranks_are_of_means_over_the_examples_that_have_numbers():
    nan = np.nan
    mean = np.array([[5.0, 1.0, 3.0], [2.0, nan, 4.0]])
    values = np.array(_importance(mean, 0.1).per_example)
    values[0], values[7, 0, 0], values[20:, 0, 2] = nan, nan, nan
    found = heads.rank_intervals(heads.Heads.of_examples(values))
    ranks = np.array([[1, 5, 3], [4, nan, 2]])
    np.testing.assert_array_equal(found, np.stack([ranks, ranks], -1))
    alone = np.full((4, 1, 2), nan)
    alone[1, 0] = 9, 8
    ends = heads.rank_intervals(heads.Heads.of_examples(alone))
    assert np.isnan(ends).all()  # one number has no spread


def test_rank_correlation_is_spearmans_and_leaves_out_what_is_not_there():
    generator = np.random.default_rng(1)
    one, other = generator.standard_normal((2, 3, 4))
    one[1, 3] = other[1, 3] = np.nan
    found = heads.rank_correlation(_importance(one, 0), _importance(other, 0))
    there = ~np.isnan(one)
    wanted = scipy.stats.spearmanr(one[there], other[there]).statistic
    assert found == pytest.approx(wanted)
    monotonous = _importance(np.exp(one), 0)
    assert heads.rank_correlation(_importance(one, 0), monotonous) == pytest.approx(1)
    same = _importance(0 * one, 0)
    assert np.isnan(heads.rank_correlation(_importance(one, 0), same))
    assert np.isnan(heads.rank_correlation(same, _importance(one, 0)))
    with pytest.raises(ValueError, match="same layers and heads"):
        heads.rank_correlation(_importance(one, 0), _importance(one[:2], 0))
    with pytest.raises(ValueError, match="same layers and heads"):
        heads.rank_correlation(_importance(one, 0), _importance(one[:, ::-1], 0))


def test_order_goes_from_the_least_important_on():
    values = np.array([[0.3, -0.1], [np.nan, 0.2]])
    assert heads.order(values) == [(0, 1), (1, 1), (0, 0)]


@pytest.mark.slow
def test_layers_with_fewer_heads_have_fewer_steps(subject):
    params, of = heads.prune(subject.params, config(), [[3], [], [1, 2]])
    subject = subject._replace(
        model=build(of), params=params, batches=subject.batches[:1]
    )
    steps = heads.greedy_order(subject)
    assert sorted(step.head for step in steps) == [(0, 0), (2, 0), (2, 1)]


@pytest.mark.slow
def test_each_greedy_step_is_the_best_one(subject):
    ablation_value = heads.ablation_values.resample
    steps = heads.greedy_order(subject, ablation_value=ablation_value)
    assert sorted(step.head for step in steps) == list(np.ndindex(L, H))
    gates = np.ones((L, H))
    for i, step in enumerate(steps):
        open_heads = np.argwhere(gates)
        if i in (0, 1, 6):
            patterns = np.repeat(gates[None], len(open_heads), 0)
            patterns[(np.arange(len(open_heads)), *open_heads.T)] = 0
            metrics = heads.gated_metric(
                subject, patterns, ablation_value=ablation_value
            ).mean(0)
            assert step.metric == pytest.approx(metrics.min(), abs=1e-5)
        gates[step.head] = 0


@pytest.mark.slow
def test_greedy_order_keeps_one_of_two_heads_that_do_the_same():
    program = rasp.PROGRAMS["previous_token"](length=3)
    known = compiled_kinds.KINDS["redundant"](program, num_heads=4)
    batches = [known.examples(8)]
    twice = heads.Measured(known.model, heads.metrics.loss, known.params, batches)
    order = [step.head for step in heads.greedy_order(twice)]
    assert order[-1] in known.heads
    # By themselves, both look as if the model could do without.
    single = heads.ablation(twice).mean
    assert max(single[place] for place in known.heads) < 0.01

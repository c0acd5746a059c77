"""The desk measures what is missing, once, and tells it."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import claims, reproduce
from experiments.claims import base, claim_pages, measurements, records, verdicts
from mha_haiku import runs
from mha_haiku.core import models
from mha_haiku.core.checks import ConfigError
from tests.training.runs import faults

SEEDS = (100, 101, 102)
PLANTED = ("planted", 100)
ALL = [(arm, seed) for seed in SEEDS for arm in ("claim", "control")]


def _all(claim, folder, **options):
    return list(claims.reproduce([claim], folder, **options))


def test_what_is_stored_is_not_measured_again(halves, tmp_path):
    _all(halves, tmp_path, seeds=SEEDS[:1], formats=())
    assert halves.asked == ALL[:2]
    (outcome,) = _all(halves, tmp_path, formats=())
    assert halves.asked == [*ALL, PLANTED]
    assert {arm: x.word for arm, x in outcome.verdicts.items()} == {
        "claim": "reproduced",
        "control": "not reproduced",
    }
    halves.version = 2
    _all(halves, tmp_path, seeds=SEEDS[:1], formats=())
    assert halves.asked == [*ALL, PLANTED, *ALL[:2]]


def test_a_pilot_measures_the_claim_alone_and_counts_for_no_verdict(halves, tmp_path):
    (outcome,) = _all(halves, tmp_path, is_pilot=True)
    assert halves.asked == [("claim", seed) for seed in (0, 1, 2)]
    assert not list(tmp_path.glob("*.png")) and not list(tmp_path.glob("*.md"))
    assert outcome.pilot.seeds_needed == 3
    assert "seeds 0 to 2" in str(outcome.pilot)
    assert "0.51 ± 0.01; 0.49 ± 0.01" in str(outcome.pilot)
    assert claim_pages.Outcome.read(halves, tmp_path).missing() == [*ALL, PLANTED]


def test_a_second_set_of_seeds_must_agree(halves, tmp_path):
    (outcome,) = _all(halves, tmp_path, formats=())
    assert (outcome.word, outcome.second) == ("reproduced", None)
    _all(halves, tmp_path, seeds=range(200, 203), formats=())
    outcome = claim_pages.Outcome.read(halves, tmp_path)
    assert (outcome.word, outcome.second.seeds) == ("reproduced", (200, 201, 202))
    assert "Seeds 200 to 202: **reproduced**" in outcome.page()
    by_seed = outcome.measured["claim"]
    for seed in outcome.second.seeds:
        by_seed[seed] = by_seed[seed]._replace(numbers={"size": 0.1})
    assert outcome.word == "inconclusive"


def test_a_verdict_close_to_a_bound_is_of_six_seeds(halves, tmp_path):
    measure = halves.measure

    def spread(desk, seed, arm):
        sizes = measure(desk, seed, arm)
        size = sizes["size"] + 0.06 * (seed % 100 - 1) if arm == "claim" else 0.0
        return sizes | {"size": size}

    halves.measure = spread
    (outcome,) = _all(halves, tmp_path, formats=())
    assert outcome.seeds == tuple(range(100, 106))
    assert outcome.missing() == []
    assert halves.asked.count(PLANTED) == 1
    (_,) = _all(halves, tmp_path, seeds=range(200, 203), formats=())
    assert (
        claim_pages.Outcome.read(halves, tmp_path).second is None
    )  # it takes six, too
    (_,) = _all(halves, tmp_path, seeds=range(200, 206), formats=())
    assert len(claim_pages.Outcome.read(halves, tmp_path).second.seeds) == 6


def test_a_config_that_changes_is_measured_again(halves, tmp_path, make_config):
    config = make_config()
    halves.configs = lambda arm: {"one": config}
    _all(halves, tmp_path, formats=())
    config = config.replace(seed=8)
    assert claim_pages.Outcome.read(halves, tmp_path).missing() == []
    config = config.replace(training=dict(steps=config.training.steps + 1))
    assert claim_pages.Outcome.read(halves, tmp_path).missing() == [*ALL, PLANTED]


def test_a_field_that_comes_later_changes_no_key(halves, make_config, monkeypatch):
    config = make_config()
    halves.configs = lambda arm: {"one": config}
    before = records.key_of(halves, "claim")
    to_json, later = models.ModelConfig.to_json, {config.model: 0}

    def with_later(self):
        return to_json(self) | {"later": later.get(self, 0)}

    monkeypatch.setattr(models.ModelConfig, "to_json", with_later)
    assert records.key_of(halves, "claim") == before
    later[config.model] = 1
    assert records.key_of(halves, "claim") != before


def test_a_fault_leaves_what_was_measured(halves, tmp_path):
    measure = halves.measure

    def fails(desk, seed, arm):
        if (arm, seed) == ("claim", 101):
            raise ArithmeticError("broken")
        return measure(desk, seed, arm)

    halves.measure = fails
    with pytest.raises(ArithmeticError):
        _all(halves, tmp_path)
    with pytest.raises(RuntimeError, match=r"conftest could not be measured"):
        _all(halves, tmp_path, goes_on=True)
    halves.measure = measure
    _all(halves, tmp_path, formats=())
    assert halves.asked == [*ALL, PLANTED]


def test_a_missing_package_is_named(halves, tmp_path, caplog):
    halves.needs = ("no_such_package",)
    with pytest.raises(ConfigError, match="no_such_package"):
        _all(halves, tmp_path)
    assert _all(halves, tmp_path, goes_on=True) == []
    assert "no_such_package" in caplog.text


def test_a_name_that_a_criterion_asks_for_must_be_measured(halves, tmp_path):
    halves.measure = lambda desk, seed, arm: {"width": 1.0}
    with pytest.raises(KeyError, match="size"):
        _all(halves, tmp_path)


@pytest.mark.slow
def test_what_is_stored_is_kept_with_what_is_new(halves, tmp_path):
    pytest.importorskip("matplotlib")
    work, stored = tmp_path / "work", tmp_path / "stored"
    _all(halves, tmp_path / "pilot", is_pilot=True, formats=())
    measurements.store(halves, tmp_path / "pilot", stored)
    assert [path.name for path in stored.iterdir()] == ["conftest.jsonl"]
    (outcome,) = _all(halves, work, formats=())
    measurements.store(halves, work, stored)
    again = claim_pages.Outcome.read(halves, stored)
    assert again.row() == outcome.row()
    assert list(again.pilot.numbers) == [0, 1, 2]
    assert (stored / "conftest.md").read_text() == again.page()


def test_figures_have_a_line_for_what_is_published_and_both_arms(halves, tmp_path):
    pytest.importorskip("matplotlib")
    (outcome,) = _all(halves, tmp_path, formats=())
    sheet = outcome.picture()
    curve, size, lack = (axes for axes in sheet.axes if axes.axison)
    labels = [line.get_label() for line in curve.lines]
    assert labels[:2] == ["one", "one, control"]
    np.testing.assert_allclose(curve.lines[0].get_ydata(), [0.1, 0.51])
    labels = [x.get_text() for x in size.get_legend().get_texts()]
    published = ["published: book I", "published: book II"]
    assert labels == [*published, "wanted: at least 0.25"]
    wanted = [
        axes.patches[0].get_window_extent().transformed(axes.transData.inverted())
        for axes in (size, lack)
    ]
    np.testing.assert_allclose([wanted[0].y0, wanted[1].y1], [0.25, 0.7])
    assert [x.get_text() for x in lack.get_xticklabels()] == [
        "claim:\nholds",
        "control:\nfails",
    ]


CLAIMS = [claims.load(name) for name in claims.names()]
CRITERIA = [criterion for claim in CLAIMS for criterion in claim.criteria]


def _each(claim):
    return claim.name


@pytest.mark.parametrize("claim", CLAIMS, ids=_each)
def test_a_claim_says_what_it_must(claim):
    assert claim.sentence and claim.control and claim.source.published
    assert claim.planted and claim.would_change and type(claim).__doc__
    assert claim.effect.format(*["1.5"] * len(claim.criteria)) != claim.effect
    assert all((c.at_least is None) != (c.at_most is None) for c in claim.criteria)
    assert claim.before is None or claim.before.verdict in verdicts.WORDS
    for arm in (*claims.ARMS, base.PLANTED):
        claim.configs(arm)  # each is checked where it is made
        assert records.key_of(claim, arm) == records.key_of(claim, arm)


@pytest.mark.parametrize("claim", CLAIMS, ids=_each)
def test_the_papers_own_numbers_meet_the_criteria(claim):
    for criterion in claim.criteria:
        for place, number in criterion.published.items():
            assert criterion.holds(number), (criterion.name, place)


@pytest.mark.parametrize("claim", CLAIMS, ids=_each)
def test_a_bound_is_from_where_it_says(claim):
    for criterion in claim.criteria:
        published = list(criterion.published.values())
        effects = [abs(x - criterion.null) for x in published]
        size = abs(criterion.bound - criterion.null)
        assert criterion.bound_from in base.BOUNDS
        if criterion.bound_from == base.HALF:
            assert size == pytest.approx(min(effects) / 2, rel=0.05), criterion.name
        elif criterion.bound_from == base.PAPER and not published:
            assert size == 0, criterion.name  # the paper says which side it is on


def test_at_most_a_third_of_the_bounds_are_ours():
    ours = [x.name for x in CRITERIA if x.bound_from == base.OURS]
    assert len(ours) <= len(CRITERIA) / 3, ours


@pytest.mark.parametrize("claim", CLAIMS, ids=_each)
def test_verdicts_of_two_sets_of_seeds_and_a_pilot_are_stored(claim):
    outcome = claim_pages.Outcome.read(claim, reproduce.STORED)
    # Not of the claim as it is now: python -m experiments.reproduce --claim=... --store
    assert not outcome.missing()
    assert outcome.second is not None
    assert claim.seeds == outcome.pilot.seeds_needed <= len(outcome.seeds)
    found, control = outcome.verdicts["claim"], outcome.verdicts["control"]
    if control.holding:  # what holds in it is void
        assert "void" in [each.word for each in found.judged] or not found.holding
    for suffix in ("png", "md"):
        assert (reproduce.STORED / f"{claim.name}.{suffix}").exists()


@pytest.mark.parametrize("claim", CLAIMS, ids=_each)
def test_a_control_can_fail(claim):
    outcome = claim_pages.Outcome.read(claim, reproduce.STORED)
    (planted,) = outcome.measured[base.PLANTED].values()
    for criterion in claim.criteria:
        assert criterion.holds(criterion.value(planted.numbers)), criterion.name


@pytest.mark.slow
def test_the_readme_of_claims_tells_the_stored_results():
    outcomes = [
        claim_pages.Outcome.read(claims.load(name), reproduce.STORED)
        for name in claims.names()
    ]
    # If it is not: python -m experiments.reproduce --table
    gallery = (reproduce.STORED / "README.md").read_text(encoding="utf-8")
    assert claim_pages.gallery(outcomes) == gallery
    for outcome in outcomes:
        page = reproduce.STORED / f"{outcome.claim.name}.md"
        assert outcome.page() == page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_desk_trains_all_its_seeds_as_runs_train(make_config, tmp_path):
    devices = jax.local_devices()[:1]
    desk = claims.Desk(tmp_path, seeds=(7, 8), devices=devices)
    config = make_config(training__steps=10)
    trained = desk.train(config, 8)
    assert (trained.config.seed, config.seed) == (8, 3)
    # A run of that seed has the same reports.
    runs.train(config.replace(seed=8), tmp_path / "run", devices=devices)
    reports = faults.reports(tmp_path / "run")
    assert [x["step"] for x in trained.history] == [5, 10]
    for line, report in zip(trained.history, reports, strict=True):
        for name in report.keys() - {"learning_rate"}:
            assert line[name] == pytest.approx(report[name], rel=1e-5), name
    assert trained.subject().statistics(examples=2).numbers
    found = desk.evaluate(trained, examples=12)
    assert found["loss"] == pytest.approx(trained.held_out["loss"], rel=1e-5)
    other = desk.changed(trained, model__attention__scale=3.0, task__sequence_length=4)
    assert other.params is trained.params
    assert desk.examples(other, 2).inputs.shape == (2, 4)
    assert other.config.model.attention.scale == 3.0
    # The other seed has been trained with it.
    first = desk.train(config.replace(seed=5), 7)
    assert first.model is trained.model and first.config.seed == 7
    assert desk.apply(first, _summed) != desk.apply(trained, _summed)
    assert (desk.examples(first, 2).inputs != desk.examples(trained, 2).inputs).any()
    model = trained.model
    other = dataclasses.replace(trained, model=model._replace(num_classes=2))
    assert [desk.apply(x, _classes) for x in (trained, other)] == [5, 2]
    lines = [{"held_out_loss": 2.0}, {"held_out_loss": 1.0}, {"loss": 0.5}]
    assert dataclasses.replace(trained, history=lines).held_out == {"loss": 1.0}


def _classes(model, params):
    return model.num_classes


def _summed(model, params):
    return sum(x.sum() for x in jax.tree.leaves(params))

"""Gates close heads of a run, and what is left is trained on."""

import functools

import numpy as np
import pytest

from mha_haiku import heads, models, modules
from mha_haiku.checks import ConfigError
from mha_haiku.runs import folders, loop
from mha_haiku.studies import gate_learning, pruned_runs

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_pruned_by_gates_is_gated_and_learning_follows_on_the_run(
    trained, make_config, tmp_path, monkeypatch
):
    """Of a run that has been pruned before, whose heads keep their names."""
    first = folders.load_run(trained(make_config))
    folder = pruned_runs.save(
        pruned_runs.prune(first, [[1], [0, 1]]), tmp_path / "run", steps=1
    )
    asked, log_alpha = {}, [np.zeros(1), np.float32([-9, 1])]

    def learned(model, metric, params, sample, **options):
        asked.update(options, sample=sample)
        return heads.Learned(params, log_alpha, None, None)

    monkeypatch.setattr(heads, "learn_gates", learned)
    monkeypatch.setattr(loop, "train", lambda config, folder: None)
    lines = gate_learning.learn(
        folder,
        tmp_path / "gates",
        penalty=0.1,
        steps=1,
        tuning_steps=1,
        from_scratch=False,
    )
    run = folders.load_run(folder)
    pruned = folders.load_run(tmp_path / "gates" / "pruned")
    names = [list(x.names) for x in models.heads_of_layers(pruned.config.model)]
    assert names == [[1], [1]]
    gates = heads.Learned(None, log_alpha, None, None).gates
    apply = functools.partial(
        run.model.apply, interventions=modules.Interventions(heads=gates)
    )
    gated = run._replace(model=run.model._replace(apply=apply))
    for name, wanted in pruned_runs.held_out(gated).items():
        assert getattr(lines[1], name) == pytest.approx(wanted, rel=1e-5)
    # Batches go on after those of the run, at a tenth of its learning rate.
    later = gate_learning._sampler(run._replace(step=2))(1)
    np.testing.assert_array_equal(asked["sample"](3).inputs, later.inputs)
    optimizer, slope = asked["optimizer"], {"x": np.float32(0.5)}
    moved, _ = optimizer.update(slope, optimizer.init(slope), slope)
    assert moved["x"] == pytest.approx(-run.config.optimizer.learning_rate / 10)


@pytest.mark.slow
def test_gates_close_heads_of_a_run(trained, make_config, tmp_path):
    folder = trained(make_config)
    lines = gate_learning.learn(
        folder, tmp_path / "gates", penalty=0.15, steps=70, tuning_steps=4
    )
    whole, before, tuned, scratch = lines
    assert whole.kept == 4 > before.kept == tuned.kept == scratch.kept > 0
    pruned = folders.load_run(tmp_path / "gates" / "pruned")
    other = folders.load_run(tmp_path / "gates" / "scratch")
    assert (pruned.step, other.step) == (4, 30 + 70 + 4)
    warmups = [each.config.optimizer.warmup_steps for each in (pruned, other)]
    assert warmups == [4, 5]
    assert pruned.config.model == other.config.model
    assert "pruned and tuned" in gate_learning.table(lines)
    with pytest.raises(ConfigError, match="give a folder without it"):
        gate_learning.learn(
            folder, tmp_path / "gates", penalty=0.3, steps=1, tuning_steps=1
        )
    with pytest.raises(ConfigError, match="closes every head; give a smaller one"):
        gate_learning.learn(
            folder, tmp_path / "none", penalty=1e3, steps=40, tuning_steps=1
        )

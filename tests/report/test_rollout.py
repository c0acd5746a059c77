"""The table and the picture of correlations."""

import importlib.util

import numpy as np
import pytest

from mha_haiku.report import rollout

CHANGES = {
    "raw": np.array([[0.5, 0.02], [-0.25, 0.1]]),
    "value-weighted": np.ones((2, 2)),
}
DROPS = {"raw": np.array([[0.125, 0.03], [0.0, 0.04]])}
PUBLISHED = {"raw": (0.69, 0.1, -0.11)}


def test_the_table_has_published_means_beside_ours():
    lines = rollout.table(CHANGES, DROPS, PUBLISHED).splitlines()
    assert lines[0].split() == ["layer", "1", "layer", "2", "layer", "3"]
    assert lines[2].split() == ["raw", "0.69", "0.10", "-0.11"]
    assert lines[4].split() == "raw 0.50 ± 0.02 -0.25 ± 0.10".split()
    assert lines[-1].split() == "raw 0.12 ± 0.03 0.00 ± 0.04".split()
    assert len({len(line) for line in (lines[4], lines[5])}) == 1


def test_the_picture_is_written_whole(tmp_path):
    pytest.importorskip("matplotlib")
    path = rollout.write(tmp_path, CHANGES, PUBLISHED, title="a $title")
    assert path.name == "rollout.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [x.name for x in tmp_path.iterdir()] == ["rollout.png"]
    again = rollout.picture(CHANGES, PUBLISHED, title="a $title")
    assert path.read_bytes() == again


def test_without_matplotlib_there_is_a_warning_and_no_picture(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rollout.write(tmp_path, CHANGES, PUBLISHED, title="") is None
    assert "matplotlib is missing" in caplog.text
    assert not list(tmp_path.iterdir())

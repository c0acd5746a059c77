import ast
import importlib.util
import pathlib

import pytest

from mha_haiku import checks, report


def test_writes_a_picture_per_layer_and_the_page(make):
    folder = make()
    written = report.write(folder)
    assert [path.name for path in written] == [
        "layer_00.png",
        "layer_01.png",
        "index.html",
    ]
    assert {p.name for p in folder.iterdir()} == {p.name for p in written} | {
        "maps.npz"
    }
    assert all(path.stat().st_size > 1000 for path in written)


def test_pictures_of_layers_that_are_gone_are_removed(make):
    folder = make()
    for name in ("layer_07.png", "layer_notes.png"):
        (folder / name).touch()
    report.write(str(folder))
    assert not (folder / "layer_07.png").exists()
    assert (folder / "layer_notes.png").exists()


def test_bad_maps_leave_the_report_as_it_was(make):
    folder = make(tokens=None)
    (folder / "index.html").write_text("before")
    with pytest.raises(checks.ConfigError):
        report.write(folder)
    assert (folder / "index.html").read_text() == "before"


def test_a_failed_write_leaves_nothing_half_done(make, monkeypatch):
    folder = make()
    (folder / "index.html").write_text("before")

    def full(path, content):
        pathlib.Path.touch(path)
        raise OSError("disk full")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        report.write(folder)
    assert {p.name for p in folder.iterdir()} == {"maps.npz", "index.html"}
    assert (folder / "index.html").read_text() == "before"


def test_without_matplotlib_the_page_alone_is_written(make, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    written = report.write(make())
    assert [path.name for path in written] == ["index.html"]
    assert "mha_haiku[plots]" in caplog.text


def test_reports_need_no_model_and_no_accelerator():
    allowed = {"checks", "report"}
    for path in pathlib.Path(report.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                root, *rest = name.split(".")
                assert root not in {"jax", "jaxlib", "haiku", "optax", "chex"}, name
                assert root != "mha_haiku" or rest[0] in allowed, name
        # Slow to import, and needed only where something is drawn.
        top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not any("matplotlib" in ast.unparse(node) for node in top), path

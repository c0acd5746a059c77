"""The gallery: pages of models of many kinds, in one list."""

import pytest

from experiments import gallery


@pytest.mark.slow
def test_pages_are_listed_with_a_sentence_and_others_are_left_out(tmp_path, capsys):
    gallery.PAGES["gone"] = lambda: __import__("no_such_module"), "Never seen."
    try:
        text = gallery.write(tmp_path, ["circuit", "long", "gone"])
    finally:
        del gallery.PAGES["gone"]
    assert "- [long](long.html): A map of 8,192 tokens" in text and "gone" not in text
    assert "gone is left out: No module named" in capsys.readouterr().err
    assert "Pooled: a cell" in (tmp_path / "long.html").read_text()
    assert "edges" in (tmp_path / "circuit.html").read_text()

"""Numbers of heads: found by name, said in a line, written and read again."""

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.records import Column, Heads, Layer

N, L, H = 5, 2, 3


def _heads(**more):
    per_example = np.random.default_rng(0).normal(size=(N, L, H))
    per_example[:, 1, 2] = np.nan
    names = np.array(
        [
            ["induction", "no_clear_role", "no_clear_role"],
            ["no_clear_role", "induction", ""],
        ]
    )
    columns = {
        "ablation": Column.of_examples(per_example, "nats", "rise of the loss"),
        "role": Column(np.full((L, H), 0.5), "score", "what decides", names=names),
        "entropy": Column(
            np.where(np.isnan(per_example[0]), np.nan, 1.0),
            "nats",
            "entropy",
            ranks=np.ones((L, H, 2)),
        ),
        "other": Column(np.full((L, H), np.nan), "", "nothing is known"),
    }
    layers = (
        Layer.of_model("", 0, 0, range(3)),
        Layer.of_model("", 4, 1, (1, 5)),
    )
    return Heads("of a model", layers, columns, 30, ("a note",), **more)


def test_columns_go_by_their_names():
    found = _heads()
    assert list(found) == ["ablation", "role", "entropy", "other"]
    assert "role" in found and "gradient" not in found
    np.testing.assert_array_equal(found.mean, found["ablation"].mean)
    assert found.per_example.shape == (N, L, H)
    with pytest.raises(KeyError, match="no 'roles'; they have ablation, role, entropy"):
        found["roles"]


def test_a_line_says_what_there_is():
    found = _heads()
    place = np.unravel_index(np.nanargmax(found.mean), (L, H))
    said = repr(found)
    assert said.startswith("Heads('of a model': 2 layers; ablation from ")
    assert (
        f"nats, the largest of {found.name_of(*place)}; role: 3 no_clear_role, 2"
        in said
    )
    assert said.endswith("also other)")


def test_a_file_is_the_record(tmp_path):
    found = _heads(file_name="head_importance")
    path = found.write(tmp_path / "heads.npz")
    again = Heads.load(path, written_by="a command")
    assert repr(again) == repr(found)
    for name in ("title", "layers", "step", "notes", "file_name"):
        assert getattr(again, name) == getattr(found, name)
    for name, column in found.columns.items():
        for one, other in zip(again[name], column, strict=True):
            np.testing.assert_array_equal(one, other)
    assert again.text() == found.text()


def test_text_has_a_row_per_head_that_there_is():
    lines = _heads().text(by="layer").splitlines()
    assert lines[0].split()[:4] == ["layer", "head", "role", "ablation"]
    rows = [line.split()[:3] for line in lines if "±" in line]
    names = [
        "induction",
        "no_clear_role",
        "no_clear_role",
        "no_clear_role",
        "induction",
    ]
    places = ["0 0", "0 1", "0 2", "4 1", "4 5"]
    wanted = [[*x.split(), y] for x, y in zip(places, names, strict=True)]
    assert rows == wanted
    assert "ablation  rise of the loss, nats" in lines and "a note" in lines
    assert "agreement: Spearman's rank correlation" in lines


def test_ranked_heads_are_sorted_and_cut():
    found = _heads()
    mean = found["ablation"].mean
    order = sorted(mean[~np.isnan(mean)], reverse=True)
    assert [row["ablation"][0] for row in found.top(3)] == order[:3]
    lines = found.text(count=2).splitlines()
    assert lines[0].split()[:3] == ["rank", "layer", "head"]
    assert [line.split()[0] for line in lines if "±" in line] == ["1", "2"]
    assert f"... and {len(order) - 2} more rows; count=None shows all" in lines
    with pytest.raises(ValueError, match="by must be one of layer, .*'importance'"):
        found.text(by="importance")


def test_one_number_of_each_head_shows_itself():
    found = mh.heads.Heads.of_examples(np.ones((N, L, H)), ("encoder", "cross"))
    assert [layer.name for layer in found.layers] == ["encoder 0", "cross 0"]
    assert "Importance of heads, 5 examples" in found._repr_html_()
    assert "Importance of heads, 5 examples" in mh.show(found).html
    assert mh.plot(found).get_suptitle().startswith("Importance of heads")


def test_a_single_head_has_a_number_and_no_range_or_rank_correlation():
    number = Column(np.array([[5.09]]), "nats", "a number", ranks=np.ones((1, 1, 2)))
    found = Heads.of("One head", {"a": number, "b": number})
    assert repr(found) == "Heads('One head': 1 layer; a 5.09 nats; b 5.09 nats)"
    assert "agreement" not in found.text()
    equal = Heads.of_examples(np.full((1, 1, 3), 5.09), unit="nats")
    title = "Importance of heads, 1 example"
    assert repr(equal) == f"Heads('{title}': 1 layer; importance 5.09 nats)"

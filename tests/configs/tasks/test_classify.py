"""Expressions of Python's library by their outermost operation."""

import ast

import pytest

from configs.tasks import classify
from mha_haiku import tasks

SOURCE = """
total_of_all = first(argument) + other
if (total_of_all.names[0] < len(names)) or short:
    names_of_it = [a, "\u00e4\u00f6\u00fc", names.attribute]
function(first,
         of_two_lines + ones)
"""


def test_expressions_go_by_their_outermost_operation():
    assert classify.expressions(SOURCE) == [
        ("first(argument) + other", "arithmetic"),
        ("(total_of_all.names[0] < len(names)) or short", "logic"),
        ("total_of_all.names[0] < len(names)", "comparison"),
        ('[a, "\u00e4\u00f6\u00fc", names.attribute]', "collection"),
        ("of_two_lines + ones", "arithmetic"),
        ("total_of_all.names[0]", "subscript"),
        ("total_of_all.names", "attribute"),
    ]


@pytest.mark.slow
def test_without_a_path_it_is_pythons_library():
    task = tasks.make("classify", sequence_length=48)
    labels = tuple(task.class_label(c) for c in range(task.num_classes))
    assert labels == classify.KINDS
    train, held_out = task.texts
    assert len(train) > 10_000
    assert not set(train) & set(held_out)
    for text, label in train[:50]:
        (node,) = ast.parse(text).body
        assert classify.expressions(text)[0] == (text, labels[label])
        assert isinstance(node, ast.Expr)
    assert task.keep().text["name"].startswith("library of Python")
    assert 0.4 < task.baseline["accuracy"] < 0.8


def test_with_a_path_it_is_the_texts_and_labels_there(tmp_path):
    lines = [f"text {n},{'odd' if n % 2 else 'even'}" for n in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *lines]))
    task = tasks.make("classify", path=str(tmp_path / "mine.csv"))
    assert [task.class_label(c) for c in range(task.num_classes)] == ["even", "odd"]
    assert task.keep().text["name"] == str(tmp_path / "mine.csv")

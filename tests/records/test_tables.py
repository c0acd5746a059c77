"""Tables as text and as CSV, from the same rows."""

import csv
import io

from mha_haiku.records.tables import RANGE, WITH_ERROR, Column, Table

TABLE = Table(
    [
        Column("layer"),
        Column("name"),
        Column("loss", "nats", WITH_ERROR, ("loss", "loss_standard_error")),
        Column("rank", "", RANGE, ("low", "high")),
        Column("parameters", "", "{:,}"),
    ],
    [
        {"layer": 0, "name": "a", "loss": (0.123456789012, 0.015), "parameters": 1234},
        {
            "layer": 10,
            "name": "long; b",
            "loss": (-2.0, float("nan")),
            "rank": (1.0, 3.0),
        },
        {"layer": 11, "name": "c", "loss": (float("nan"), float("nan"))},
    ],
    num_keys=2,
)


def test_text_is_aligned_below_names_and_units():
    lines = TABLE.text().splitlines()
    assert lines[0].split() == ["layer", "name", "loss", "rank", "parameters"]
    assert lines[1].split() == ["nats"]
    assert lines[2].split() == ["0", "a", "0.1235", "±", "0.015", "1,234"]
    assert lines[3].split() == ["10", "long;", "b", "-2", "1-3"]
    assert lines[4].split() == ["11", "c"]
    ends = [
        line.index(cell) + len(cell)
        for line, cell in zip(
            (lines[0], lines[1], lines[2], lines[3]),
            ("loss", "nats", "0.015", "-2"),
            strict=True,
        )
    ]
    assert len(set(ends)) == 1


def test_csv_has_a_column_for_each_part_with_all_digits():
    rows = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert rows[0] == {
        "layer": "0",
        "name": "a",
        "loss": "0.123456789",
        "loss_standard_error": "0.015",
        "low": "",
        "high": "",
        "parameters": "1234",
    }
    assert (rows[1]["loss"], rows[1]["loss_standard_error"]) == ("-2", "")
    assert (rows[1]["low"], rows[1]["high"]) == ("1", "3")
    assert rows[2]["loss"] == ""


def test_columns_that_do_not_fit_stand_in_blocks_that_say_which_row():
    blocks = TABLE.text(width=40).split("\n\n")
    assert len(blocks) > 1
    for block in blocks:
        lines = block.splitlines()
        assert lines[0].split()[:2] == ["layer", "name"]
        assert [line.split()[0] for line in lines[-3:]] == ["0", "10", "11"]
        assert max(map(len, lines)) <= 40
    assert sum("parameters" in block for block in blocks) == 1


def test_without_units_there_is_no_line_for_them():
    table = Table([Column("heads")], [{"heads": 3}])
    assert table.text().split() == ["heads", "3"]

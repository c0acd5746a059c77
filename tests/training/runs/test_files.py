"""Files are whole or not there; what changed in a log is noticed."""

import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import files

RECORDS = [{"step": 10, "loss": 1.5}, {"step": 20, "names": ["ä", "b"]}, {"step": 30}]


def _log(tmp_path, records=RECORDS):
    path = tmp_path / "log.jsonl"
    with files.LineWriter(path) as log:
        for record in records:
            log.append(record)
    return path


@pytest.mark.parametrize(
    "content", ["text ä\n", b"text \xc3\xa4\n", lambda f: f.write(b"text \xc3\xa4\n")]
)
def test_text_bytes_and_functions_make_file_and_folder(tmp_path, content):
    path = files.write(tmp_path / "new" / "folder" / "file", content)
    assert path.read_bytes() == b"text \xc3\xa4\n"
    assert [x.name for x in path.parent.iterdir()] == ["file"]


def test_failure_half_way_leaves_the_file_of_before(tmp_path):
    path = files.write(tmp_path / "file", "before")

    def fail(file):
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        files.write(path, fail)
    assert [x.name for x in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


@pytest.mark.parametrize("name", ["folder", "file/below", "n" * 300])
def test_path_that_cannot_be_written_is_a_mistake(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: "):
        files.write(tmp_path / name, "text")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "folder"]


def test_log_is_readable_json_and_comes_back(tmp_path):
    path = _log(tmp_path)
    assert path.read_text().startswith('{"step": 10, "loss": 1.5}\n')
    assert files.read_lines(path) == RECORDS
    assert files.read_lines(tmp_path / "none.jsonl") == []


def test_every_cut_leaves_the_whole_lines_and_takes_new_ones(tmp_path):
    path = _log(tmp_path)
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content)):
        path.write_bytes(content[:size])
        kept = RECORDS[: sum(end <= size for end in ends)]
        assert files.read_lines(path) == kept
        with files.LineWriter(path) as log:
            log.append({"step": 99})
        assert files.read_lines(path) == [*kept, {"step": 99}]


@pytest.mark.parametrize("last, count", [(9, 0), (10, 1), (29, 2), (30, 3), (None, 3)])
def test_opening_a_log_cuts_off_what_is_after_a_step(tmp_path, last, count):
    path = _log(tmp_path)
    before = path.read_bytes()
    files.LineWriter(path, last_step=last).close()
    assert files.read_lines(path) == RECORDS[:count]
    assert before.startswith(path.read_bytes())  # nothing was written again


def test_log_that_cannot_be_opened_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        files.LineWriter(tmp_path)

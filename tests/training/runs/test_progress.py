"""A bar on a terminal, and elsewhere only of long work."""

import io
import sys

from mha_haiku.training.runs import progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_time_left_is_by_the_share_that_is_done():
    assert progress.times(3600, 0.25) == "1:00:00 elapsed, 3:00:00 left"


def test_terminal_gets_a_bar(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.over(range(3, 6), name="heads")) == [3, 4, 5]
    shown = terminal.getvalue()
    assert "heads: compiling ..." in shown and "3/3" not in shown.split("0/3")[0]


def test_a_short_work_writes_no_bar_into_a_pipe(capsys):
    assert list(progress.over(range(3), name="heads")) == [0, 1, 2]
    assert capsys.readouterr().err == "heads: compiling ...\n"

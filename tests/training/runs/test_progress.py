"""A bar on a terminal, lines elsewhere."""

import io
import sys

import pytest

from mha_haiku.training.runs import progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_pipe_gets_a_line_every_ten_seconds_with_the_time_left(clock, capsys):
    with progress.Bar(10, unit="batch", name="heads", doing="compiling") as bar:
        clock.now += 600
        for _ in range(10):
            bar.update()
            clock.now += 8
    assert capsys.readouterr().err.splitlines() == [
        "heads: compiling ...",
        "heads: 3/10, 00:16 elapsed, 00:56 left",
        "heads: 5/10, 00:32 elapsed, 00:40 left",
        "heads: 7/10, 00:48 elapsed, 00:24 left",
        "heads: 9/10, 01:04 elapsed, 00:08 left",
    ]


def test_time_left_is_by_the_share_that_is_done():
    assert progress.times(3600, 0.25) == "1:00:00 elapsed, 3:00:00 left"


def test_terminal_gets_a_bar(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.over(range(3, 6), name="heads")) == [3, 4, 5]
    shown = terminal.getvalue()
    assert "compiling" in shown and "heads" in shown and "0/3" in shown
    assert "compiling ..." not in shown

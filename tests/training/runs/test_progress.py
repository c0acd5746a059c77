"""A bar on a terminal, lines elsewhere."""

import io
import sys
import time

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


def test_what_takes_long_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_A_WORD", 0.05)
    with progress.during("compiling"):
        pass
    time.sleep(0.2)
    assert not capsys.readouterr().err
    with progress.during("compiling"):
        deadline = time.perf_counter() + 30
        while not (told := capsys.readouterr().err) and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert told == "compiling ...\n"


def test_compilation_is_in_no_rate_and_no_time_left(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", _Terminal())
    bar = progress.Bar(5, unit="batch", doing="compiling")
    clock.now += 600
    bar.update()
    assert bar.times() == "00:00 elapsed, ? left"
    clock.now += 4
    bar.update()
    assert bar.times() == "00:04 elapsed, 00:12 left"


def test_time_left_counts_from_where_it_began(clock, capsys):
    bar = progress.Bar(1000, unit="step", start=900, prints=False)
    clock.now += 3600
    bar.update(50)
    assert bar.times() == "1:00:00 elapsed, 1:00:00 left"
    bar.close()
    assert not capsys.readouterr().err


def test_terminal_gets_a_bar(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.over(range(3, 6), name="heads")) == [3, 4, 5]
    shown = terminal.getvalue()
    assert "compiling" in shown and "heads" in shown and "0/3" in shown
    assert "compiling ..." not in shown

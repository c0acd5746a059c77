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

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_pipe_gets_a_line_every_ten_seconds_with_the_time_left(clock, capsys):
    with progress.Bar(10, unit="batch", name="heads", doing="compiling") as bar:
        for _ in range(10):
            clock.now += 6
            bar.advance()
    assert capsys.readouterr().err.splitlines() == [
        "heads: compiling ...",
        "heads 2/10, 0:12 elapsed, 0:48 left",
        "heads 4/10, 0:24 elapsed, 0:36 left",
        "heads 6/10, 0:36 elapsed, 0:24 left",
        "heads 8/10, 0:48 elapsed, 0:12 left",
        "heads 10/10, 1:00 elapsed",
    ]


@pytest.mark.parametrize("form", ["bar", "during"])
def test_a_long_compilation_is_not_silent(form, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.01)
    bar = progress.Bar(1, unit="batch", name="heads", doing="compiling")
    with bar if form == "bar" else progress.during("heads: compiling"):
        deadline = time.perf_counter() + 30
        told = ""
        while told.count("elapsed") < 2 and time.perf_counter() < deadline:
            time.sleep(0.01)
            told += capsys.readouterr().err
    wanted = "compiling, 0:00 elapsed"
    assert all(wanted in line for line in told.splitlines()[-2:])
    time.sleep(0.2)
    assert not capsys.readouterr().err


def test_compilation_is_in_no_rate_and_no_time_left(clock, monkeypatch, capsys):
    bar = progress.Bar(5, unit="batch", doing="compiling")
    clock.now += 600
    bar.advance()
    assert bar.times() == "10:00 elapsed"
    clock.now += 3
    bar.advance()
    assert bar.times() == "10:03 elapsed, 0:09 left"
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress.Bar(5, unit="batch", doing="compiling")
    time.sleep(1)
    bar.advance()
    time.sleep(0.01)
    bar.advance()
    shown = bar._bar.format_dict
    assert shown["elapsed"] < 0.5 and (shown["n"], shown["initial"]) == (2, 1)


def test_time_left_counts_from_where_it_began(clock):
    bar = progress.Bar(1000, unit="step", start=900)
    assert bar.times() == "0:00 elapsed"
    clock.now += 3600
    bar.advance(50)
    assert bar.times() == "1:00:00 elapsed, 1:00:00 left"


def test_terminal_gets_a_bar(monkeypatch, capsys):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.over(range(3, 6), name="heads")) == [3, 4, 5]
    shown = terminal.getvalue()
    assert "compiling" in shown and "heads" in shown and "0/3" in shown
    assert "compiling ..." not in shown

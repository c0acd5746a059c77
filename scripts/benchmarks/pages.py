"""Measures the page of maps in a real browser: size, time to draw, time to respond.

Run: python scripts/benchmarks/pages.py

It needs a Chromium and `pip install -e '.[browser]'`. A response is timed from the
event to the end of the next frame; the promised limits are printed below.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from mha_haiku import commands, records
from mha_haiku.core import checks
from mha_haiku.records import Column, map_set
from mha_haiku.showing import fitting, page
from scripts.benchmarks import command, duel, results, worker

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LONG = 32_768


# Says in window.drawnAt when the map and all heads in sight were painted, in
# milliseconds since the page was asked for. The viewer notes at a head's button that it
# is drawn.
_WATCH = """
(() => {
  const inSight = (head) => {
    const { top, bottom } = head.getBoundingClientRect();
    return top >= 0 && bottom <= innerHeight;
  };
  const look = () => {
    const heads = [...document.querySelectorAll('#overview .head')].filter(inSight);
    const map = document.querySelector('#stage svg.map image');
    if (map && heads.length && heads.every(({ drawn }) => drawn)) {
      setTimeout(() => { window.drawnAt = performance.now(); });
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""
_ANSWER = """
async ([selector, key]) => {
  const target = document.querySelector(selector);
  await new Promise(requestAnimationFrame);
  const start = performance.now();
  if (key) target.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  else target.click();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}
"""
_LONGEST_FRAME = """
async () => {
  const box = document.getElementById('overview');
  box.scrollTop = 0;
  let longest = 0;
  let before = await new Promise(requestAnimationFrame);
  for (let i = 0; i < 60; i += 1) {
    box.scrollTop += 60;
    const now = await new Promise(requestAnimationFrame);
    longest = Math.max(longest, now - before);
    before = now;
  }
  return box.scrollTop ? longest : null;
}
"""


def main(*, rounds: int = 7) -> int:
    """Measures, and prints the table.

    Args:
      rounds: Samples of each.
    """
    with checks.user_mistakes():
        checks.positive_integer("--rounds", rounds)
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None or importlib.util.find_spec("playwright") is None:
        raise checks.ConfigError(
            "There is no Chromium on the PATH, or no package playwright.\n"
            "apt-get install chromium; pip install -e '.[browser]'"
        )
    print("\n".join(command.machine().values()), flush=True)
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as at:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )
        print(f"Chromium {browser.version}, window of 1,400 x 900")
        measured = [
            *_of_training(browser, pathlib.Path(at), rounds),
            *_of_many_heads(browser, pathlib.Path(at), rounds),
            *_of_long_map(browser, pathlib.Path(at), rounds),
            _of_import(rounds),
        ]
        browser.close()
    ended = [result for result, _ in measured]
    print("", *results.table(ended, "", "sample"), sep="\n")
    verdicts = [
        results.verdict(promise, [result])
        for result, promises in measured
        for promise in promises
    ]
    print("", *verdicts, sep="\n")
    return int(any("BROKEN" in line for line in verdicts))


def of_size(num_layers, num_heads, length, num_examples=1) -> map_set.Dossier:
    """Returns causal maps of heads that resemble trained ones.

    They look back at the previous position, the first one, near ones, or, by content,
    at a few others.
    """
    generator = np.random.default_rng(0)
    back = np.arange(length)[:, None] - np.arange(length)
    hidden = (back < 0,) * num_layers
    shape = num_layers, num_heads, 1, 1
    kind = generator.integers(0, 4, shape)
    near = np.exp(generator.uniform(0, 3, shape))
    axis = map_set.Axis.whole(f"word{i}" for i in range(length))
    examples = []
    for i in range(num_examples):
        query, key = generator.standard_normal((2, num_layers, num_heads, length, 8))
        content = query @ key.swapaxes(-1, -2)
        preferred = [6.0 * (back == 1), 6.0 * (np.arange(length) == 0), -back / near]
        scores = np.select([kind == k for k in range(3)], preferred, content)
        masses = np.where(back < 0, 0, np.exp(scores + 0.3 * content))
        weights = (masses / masses.sum(-1, keepdims=True)).astype(np.float32)
        examples.append(
            map_set.Example(f"example {i}", axis, axis, tuple(weights), hidden)
        )
    names = tuple(map(str, range(num_heads)))
    layers = tuple(records.Layer(f"layer {i}", names) for i in range(num_layers))
    numbers = generator.gamma(1.0, 0.1, (num_layers, num_heads))
    importance = Column(numbers, "nats", "importance", numbers / 10)
    maps = map_set.MapSet(
        "", layers, tuple(examples), columns={"importance": importance}
    )
    return map_set.Dossier("a trained model", (maps,))


def _of_training(browser, folder, rounds) -> Iterator:
    shown, text = fitting.fitted(of_size(6, 12, 128, 8), 2_000_000, page.render)
    print(*shown.notes, f"{len(shown.sets[0].examples)} examples", sep="\n")
    name = "page of 6 x 12 heads x 128 x 8"
    drawn = duel.Result(f"{name}: drawn", facts={"bytes": len(text)})
    for sample in _openings(browser, folder, text, rounds):
        drawn.samples.append(sample)
    yield (
        drawn,
        [
            results.Promise(drawn.name, 1.0),
            results.Promise(drawn.name, 2_000_000, quantity="bytes"),
        ],
    )
    events = {
        "a click on a head": (".head:not([aria-pressed=true])", None),
        "a key in the overview": (".head[aria-pressed=true]", "ArrowRight"),
        "a key on the map": ("svg.map", "ArrowUp"),
    }
    with _Window(browser, folder, text) as opened:
        for said, arguments in events.items():
            result = duel.Result(f"{name}: {said}")
            for _ in range(3 * rounds):
                foreign = _foreign_load()
                seconds = opened.evaluate(_ANSWER, list(arguments)) / 1e3
                result.samples.append(duel.Sample(seconds, foreign))
            yield result, [results.Promise(result.name, 0.05)]


def _of_many_heads(browser, folder, rounds) -> Iterator:
    text = page.render(of_size(32, 32, 16))
    result = duel.Result(
        "1,024 heads, scrolled: longest frame", facts={"bytes": len(text)}
    )
    address = "#order=importance"
    with _Window(browser, folder, text, address) as opened:
        opened.evaluate(_LONGEST_FRAME)
        for _ in range(rounds):
            foreign = _foreign_load()
            milliseconds = opened.evaluate(_LONGEST_FRAME)
            if milliseconds is None:
                result.fault = "the overview of 1,024 heads does not scroll"
                break
            result.samples.append(duel.Sample(milliseconds / 1e3, foreign))
    yield result, [results.Promise(result.name, 0.05)]  # three frames


def _of_long_map(browser, folder, rounds) -> Iterator:
    import jax

    import mha_haiku as mh

    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, _LONG, 1, 64))
    mask = mh.masks.causal()
    _, long_map = jax.block_until_ready(mh.attend(query, key, value, mask=mask))
    result = duel.Result(f"1 head over {_LONG:,}: attended to drawn")
    for first in [True, *[False] * min(rounds, 3)]:
        foreign, start = _foreign_load(), time.perf_counter()
        text = mh.show(long_map).html
        seconds = time.perf_counter() - start
        (opening,) = _openings(browser, folder, text, 1)
        sample = duel.Sample(seconds + opening.seconds, foreign)
        if first:
            result.facts["compiling too, s"] = sample.seconds
        else:
            result.samples.append(sample)
    inline = len(mh.show(long_map)._repr_html_().encode())
    result.facts["bytes"] = inline
    promises = [
        results.Promise(result.name, 3.0),
        results.Promise(result.name, 1_000_000, quantity="bytes"),
    ]
    yield result, promises


def _of_import(rounds) -> tuple:
    """Returns the seconds of the import, and its part for showing maps."""
    result = duel.Result("import mha_haiku")
    python = [sys.executable, "-X", "importtime", "-c", "import mha_haiku"]
    shown = []
    for _ in range(rounds + 1):
        foreign, start = _foreign_load(), time.perf_counter()
        lines = subprocess.run(python, capture_output=True, text=True).stderr
        seconds = time.perf_counter() - start
        result.samples.append(duel.Sample(seconds, foreign))
        own = re.findall(
            r"(\d+) \|\s+\d+ \|\s+mha_haiku\.(?:core\.display|showing)\b", lines
        )
        shown.append(sum(map(int, own)) / 1e3)
    del result.samples[0], shown[0]  # files were read from the disk
    result.facts["ms to show maps"] = statistics.median(shown)
    return result, [results.Promise(result.name, 10.0, quantity="ms to show maps")]


def _openings(browser, folder, text, count) -> Iterator[duel.Sample]:
    for _ in range(count):
        foreign = _foreign_load()
        with _Window(browser, folder, text) as opened:
            yield duel.Sample(opened.evaluate("window.drawnAt") / 1e3, foreign)


class _Window:
    """A page in a fresh window, drawn."""

    def __init__(self, browser, folder, text, address=""):
        self._context = browser.new_context(viewport={"width": 1400, "height": 900})
        self._file, self._address = folder / "page.html", address
        self._file.write_text(text, encoding="utf-8")

    def __enter__(self):
        opened = self._context.new_page()
        opened.add_init_script(_WATCH)
        opened.goto(f"{self._file.as_uri()}{self._address}")
        for _ in range(600):
            if opened.evaluate("Boolean(window.drawnAt)"):
                return opened
            time.sleep(0.05)
        raise checks.ConfigError("The page was not drawn within 30 s.")

    def __exit__(self, *error):
        self._context.close()


def _foreign_load(interval: float = 0.1) -> float | None:
    """Returns how many processors others keep busy, measured while idle."""
    busy, before = worker.busy_seconds(), time.perf_counter()
    time.sleep(interval)
    if busy is None:
        return None
    return (worker.busy_seconds() - busy) / (time.perf_counter() - before)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(commands.program(main, __doc__)(sys.argv))

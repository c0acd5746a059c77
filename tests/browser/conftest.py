"""One browser for the tests here, and pages that must neither ask nor complain."""

import io
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from mha_haiku.showing import page as report_page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="package")
def browser():
    """Chromium, as the system has it; tests are skipped where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="a page in a browser needs mha_haiku[browser]"
    )
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("a page in a browser needs one: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """A function that opens a dossier, or the text of a document, in a window.

    At the end of the test no page may have asked for anything but its own file, or
    have complained on the console.
    """
    contexts, requests, complaints = [], [], []

    def open_page(shown, *, address: str = "", **options):
        text = shown if isinstance(shown, str) else report_page.render(shown)
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(text, encoding="utf-8")
        options.setdefault("viewport", {"width": 1400, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        opened = context.new_page()
        opened.on("request", lambda request: requests.append(request.url))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("dialog", lambda dialog: complaints.append(dialog.message))
        opened.goto(f"{file.as_uri()}{address}")
        return opened

    yield open_page
    for context in contexts:
        context.close()
    own = ("file://", "data:", "blob:", "about:srcdoc")
    assert [url for url in requests if not url.startswith(own)] == []
    files = {url.partition("#")[0] for url in requests if url.startswith("file:")}
    assert len(files) <= len(contexts)
    assert complaints == []


@pytest.fixture
def drawn(open_page):
    """A function that opens a dossier and waits until a view of it is drawn."""

    def drawn(shown, **options):
        opened = open_page(shown, **options)
        opened.locator("#stage[aria-busy=false] figure").first.wait_for()
        return opened

    return drawn


@pytest.fixture
def colors() -> Callable:
    """A function from an element to its picture, `[height, width, 3]` in [0, 1]."""
    image = pytest.importorskip("matplotlib.image")

    def colors(element) -> np.ndarray:
        return image.imread(io.BytesIO(element.screenshot()))[..., :3]

    return colors


@pytest.fixture
def cells(colors) -> Callable:
    """A function from a drawn map to the colors of its cells' centers, `[P, Q, 3]`."""

    def cells(opened, shape, index: int = 0) -> np.ndarray:
        opened.mouse.move(0, 0)  # pointing would lighten a row and a column
        drawing = opened.locator("svg.map").nth(index)
        # The last image in place of the cells: hatching of masked ones may lie below.
        at = drawing.evaluate(
            """drawing => {
              const images = [...drawing.querySelectorAll('image')];
              const size = (image) => image.height.baseVal.value;
              const cells = images.sort((a, b) => size(a) - size(b)).at(-1);
              const [box, all] = [cells, drawing].map(x => x.getBoundingClientRect());
              return [box.x - all.x, box.y - all.y, box.width, box.height];
            }"""
        )
        left, top, width, height = at
        picture = colors(drawing)
        rows, columns = (
            (start + size * (np.arange(count) + 0.5) / count).astype(int)
            for start, size, count in ((top, height, shape[0]), (left, width, shape[1]))
        )
        return picture[rows[:, None], columns]

    return cells


@pytest.fixture(scope="session")
def viridis() -> Callable:
    """Matplotlib's colors of shares, `[..., 3]`."""
    matplotlib = pytest.importorskip("matplotlib")
    return lambda shares: matplotlib.colormaps["viridis"](shares)[..., :3]

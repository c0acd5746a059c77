"""Views in a document: several next to each other, and in stored notebooks."""

import html
import json
import re

import pytest

from mha_haiku.showing import views
from scripts import notebooks
from tests.browser import samples

WITH_PAGES = {
    path.stem: path
    for path in sorted(notebooks.FOLDER.glob("*.ipynb"))
    if "<iframe" in path.read_text(encoding="utf-8")
}


def _view(shown) -> str:
    return views.of_dossier(shown, budget=1_000_000)._repr_html_()


def _document(*parts: str) -> str:
    body = "\n".join(f"<div>{part}</div>" for part in parts)
    style = "img { max-width: 100% } pre { white-space: pre-wrap }"
    head = f'<meta charset="utf-8"><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head>{body}</html>"


def _of_notebook(path) -> str:
    """Returns what a notebook's outputs are in a page, as nbconvert would write it."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                parts.append("".join(data["text/html"]))
            elif "image/png" in data:
                image = "".join(data["image/png"]).strip()
                parts.append(f'<img src="data:image/png;base64,{image}">')
            else:
                text = output.get("text", data.get("text/plain", ""))
                parts.append(f"<pre>{html.escape(''.join(text))}</pre>")
    return _document(*parts)


def _frames(opened):
    """Returns the pages inside of a document, each after it has drawn a map."""
    count = opened.locator("iframe").count()
    frames = []
    for i in range(count):
        opened.locator("iframe").nth(i).scroll_into_view_if_needed()
        frame = opened.frame_locator("iframe").nth(i)
        frame.locator("#stage[aria-busy=false] figure").first.wait_for()
        frame.locator("#view-map").click()
        frames.append(frame)
    return frames


@pytest.mark.slow
def test_two_views_in_one_document_do_not_disturb_each_other(open_page):
    first = samples.show(title="first")
    second = samples.show(samples.maps(samples.example(seed=9)), title="second")
    opened = open_page(_document(_view(first), _view(second)))
    frames = _frames(opened)
    assert len(frames) == 2
    title = "#detail-title"
    before = frames[1].locator(title).inner_text(), frames[1].locator("#readout")
    said = before[1].inner_text()
    frames[0].locator(".head").nth(4).click()
    frames[0].locator("#scale").select_option("log")
    assert frames[0].locator(title).inner_text().startswith("layer 1, head 1")
    assert frames[1].locator(title).inner_text() == before[0]
    assert frames[1].locator("#readout").inner_text() == said
    assert frames[1].locator("#scale").input_value() != "log"


@pytest.mark.slow
def test_view_has_no_rights_of_the_document_around_it(open_page):
    opened = open_page(_document(_view(samples.hostile())) + "<title>own</title>")
    _frames(opened)
    sandbox = opened.locator("iframe").get_attribute("sandbox").split()
    assert set(sandbox) == {"allow-scripts"}
    assert opened.title() == "own"
    own = opened.frames[1].evaluate("window.origin")
    assert own == "null"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PAGES)
def test_pages_of_a_stored_notebook_are_alive(open_page, name):
    text = _of_notebook(WITH_PAGES[name])
    opened = open_page(text, viewport={"width": 1000, "height": 800})
    frames = _frames(opened)
    assert len(frames) == len(re.findall("<iframe", text)) > 0
    for frame in frames:
        frame.locator("svg.map").first.focus()
        frame.locator("svg.map").first.press("Home")
        readout = frame.locator("#readout").inner_text()
        assert re.search(r": (\d|below \d|masked)", readout)
        wide = frame.locator("html").evaluate("x => [x.scrollWidth, x.clientWidth]")
        assert wide[0] <= wide[1]
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1000

"""The site of the documentation: whole, without a network, and nothing undocumented."""

import html.parser
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class _Links(html.parser.HTMLParser):
    """Collects where the links and pictures of a page lead."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [y for x, y in attrs if x in ("href", "src", "srcset") and y]


@pytest.mark.slow
def test_the_site_has_every_public_name_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("pdoc")
    folder = tmp_path / "site"
    command = [sys.executable, ROOT / "scripts" / "docs.py", f"--out={folder}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    reference = (folder / "mha_haiku.html").read_text()
    for name in ("attend", "look", "MultiHeadAttention", "Subject.importance"):
        assert f'id="{name}"' in reference
    statistics = (folder / "mha_haiku" / "attention.html").read_text()
    assert "Returns" in statistics and "Raises" in statistics
    heads = (folder / "mha_haiku" / "heads.html").read_text()
    assert "mha_haiku.lab" not in re.sub(r"<[^>]+>", "", heads)
    assert heads.index('id="Heads.text"') < heads.index('id="Heads.columns"')
    listed = (folder / "pages.js").read_text()
    for page in folder.rglob("*.html"):
        address = page.relative_to(folder)
        assert f'"{address}"' in listed and f'data-path="{address}"' in page.read_text()
        for link in _Links(page.read_text()).found:
            target = link.partition("#")[0]
            if target and "://" not in target and not target.startswith("data:"):
                to = page.parent / target
                # Only the repository has code.
                is_code = target.endswith("/") or to.suffix not in (".html", ".png")
                assert is_code or to.exists(), f"{page} leads to {link}"


@pytest.mark.slow
def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    pytest.importorskip("pdoc")
    (tmp_path / "mine").write_text("")
    command = [sys.executable, ROOT / "scripts" / "docs.py", f"--out={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is there, and is no site" in ended.stderr
    assert (tmp_path / "mine").exists()

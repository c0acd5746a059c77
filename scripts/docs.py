"""Builds the site of the documentation: guide, API reference, READMEs, gallery.

Run: python scripts/docs.py --out=site --gallery

The reference is made of the docstrings, by pdoc: it needs no network and no other file.
Public names without a docstring are listed, and make the exit status 1.
"""

import functools
import html
import inspect
import itertools
import json
import os
import pathlib
import re
import shutil
import string
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import gallery as pictures  # noqa: E402
from mha_haiku import commands  # noqa: E402
from mha_haiku.core import checks  # noqa: E402

FILES = ROOT / "scripts" / "site"
_PLACES = "experiments/guide", "configs", "experiments", "mha_haiku", "scripts", "tests"
_LINK = re.compile(r"(\]\()([^):#\s]+)")


class Page(NamedTuple):
    """A page of the site, without its frame."""

    path: str  # in the folder of the site
    section: str  # of the menu; "" if it is not in the menu
    title: str
    content: str  # HTML: of a text, or a whole document of pdoc
    entries: list[tuple[str, str, str]]  # of the search: title, address, text


def main(*, out: str = "site", gallery: bool = False) -> int:
    """Writes the site.

    Args:
      out: Folder of the site; its content is replaced when all is written.
      gallery: Whether to make the gallery of pages of maps, which takes minutes.
    """
    folder = checks.as_path(out).resolve()
    if folder.exists() and not (folder / "mha_haiku.html").exists():
        raise checks.ConfigError(f"--out={out} is there, and is no site.")
    modules = [*reference()]
    shutil.rmtree(folder, ignore_errors=True)
    pages = [*texts(folder), *modules]
    if gallery:
        text = pictures.write(folder / "gallery")
        pages.insert(1, page_of("gallery/index.html", "Guide", text))
    write(folder, pages)
    print(f"{len(pages)} pages, {folder / 'index.html'} is the first")
    lacking = [name for page in pages for name, _, text in page.entries if not text]
    sys.stderr.writelines(f"{name} has no docstring\n" for name in lacking)
    return int(bool(lacking))


def reference_modules() -> dict[str, Any]:
    """Makes pdoc's modules: of public names alone, which have public places."""
    from pdoc import doc

    import mha_haiku

    public = {"mha_haiku": mha_haiku}
    names = ((x, getattr(mha_haiku, x)) for x in mha_haiku.__all__)
    public |= {f"mha_haiku.{x}": y for x, y in names if inspect.ismodule(y)}
    for module in [x for x in sys.modules.values() if x.__name__.startswith("mha_")]:
        for each in vars(module).values():  # named alone, unless it is public
            if inspect.isclass(each) and each.__module__.startswith("mha_haiku."):
                each.__module__ = "builtins"
    modules = {}
    for name, module in reversed(public.items()):  # the package's own names win
        modules[name] = types.ModuleType(name, module.__doc__)
        own = {x: getattr(module, x) for x in module.__all__}
        own = {x: y for x, y in own.items() if not inspect.ismodule(y)}
        vars(modules[name]).update(own, __all__=list(own))
        for each in own.values():
            if inspect.isclass(each) or inspect.isfunction(each):
                each.__module__ = name
    return {name: doc.Module(modules[name]) for name in public}


def reference() -> Iterator[Page]:
    """Makes a page per public module; classes begin with what users call."""
    from pdoc import render

    render.configure(docformat="google", show_source=False, search=False)
    modules = reference_modules()
    for name, module in modules.items():
        path, entries = f"{name.replace('.', '/')}.html", []
        for each in module.own_members:
            members = [each]
            if each.kind == "class":
                rank = lambda x: (x[0].startswith("_"), x[1].kind != "function")  # noqa: E731
                vars(each)["members"] = dict(sorted(each.members.items(), key=rank))
                members += [x for x in each.own_members if x.name[0] != "_"]
                fields = getattr(each.obj, "__annotations__", ())
                members = [x for x in members if x.docstring or x.name not in fields]
            members = [x for x in members if x.docstring or x.kind != "variable"]
            entries += [
                (x.fullname, f"{path}#{x.qualname}", x.docstring.partition("\n")[0])
                for x in members
            ]
        content = render.html_module(module, modules).replace("builtins.", "")
        yield Page(path, "Reference", name.replace("mha_haiku", "mh"), content, entries)


def texts(folder: pathlib.Path) -> Iterator[Page]:
    """Makes pages of the guide and READMEs, and copies their pictures and notebooks."""
    in_order = lambda path: re.sub(r"\d+", lambda x: x[0].zfill(3), str(path))  # noqa: E731
    inside = (sorted((ROOT / x).rglob("*"), key=in_order) for x in _PLACES)
    for path in dict.fromkeys(
        [ROOT / "README.md", *itertools.chain(*inside), *ROOT.glob("*.md")]
    ):
        name = path.relative_to(ROOT)
        if path.suffix in (".ipynb", ".png"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            text = _LINK.sub(functools.partial(_led, path), text)
            section = "Guide" if path.parent.name == "guide" else ""
            section = "Folders and results" if len(name.parts) == 2 else section
            yield page_of(_address(path), section, text)


def page_of(path: str, section: str, text: str) -> Page:
    """Makes a page of a text, whose first line is its title."""
    from pdoc import render_helpers

    content = str(render_helpers.to_html(text))
    title = text.partition("\n")[0].lstrip("# ")
    said = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", content)).split())
    return Page(path, section, title, content, [(title, path, said)])


def _led(path: pathlib.Path, link: re.Match) -> str:
    """Changes a link of a text to its page, or to a folder's README."""
    target = (path.parent / link[2]).resolve()
    target = target / "README.md" if (target / "README.md").exists() else target
    if target.suffix != ".md":
        return link[0]
    return link[1] + os.path.relpath(ROOT / _address(target), path.parent)


def _address(path: pathlib.Path) -> str:
    """Finds the place of a text in the site, where README is the first page."""
    name = str(path.relative_to(ROOT).with_suffix(".html"))
    return "index.html" if name == "README.html" else name


def write(folder: pathlib.Path, pages: list[Page]) -> None:
    """Writes pages in their order; site.js adds menu, search, and what is next."""
    for page in pages:
        up = "../" * page.path.count("/")
        bar = _filled("bar.html", up=up, path=page.path)
        if page.section == "Reference":  # pdoc has made the frame
            style = f'<link rel="stylesheet" href="{up}site.css"></head>'
            text = page.content.replace("</head>", style, 1)
            text = re.sub(r"<main[^>]*>", rf"\g<0>{bar}", text, count=1)
        else:
            parts = {"title": html.escape(page.title), "content": page.content}
            text = _filled("page.html", up=up, bar=bar, **parts)
        target = folder / page.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    listed = [(x.section, x.title, x.path, x.entries) for x in pages]
    text = f"const sitePages = {json.dumps(listed)};\n"
    (folder / "pages.js").write_text(text, encoding="utf-8")
    shutil.copy(FILES / "site.css", folder)
    shutil.copy(FILES / "site.js", folder)


def _filled(name: str, **parts: str) -> str:
    return string.Template((FILES / name).read_text("utf-8")).substitute(parts)


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))

"""Builds the site of the documentation: the API reference, the guide, the READMEs.

Run: python scripts/docs.py --out=site

The reference is made of the docstrings, by pdoc: it needs no network and no other file.
Public names without a docstring are listed, and make the exit status 1.
"""

import functools
import inspect
import pathlib
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mha_haiku import commands  # noqa: E402

# Folders with pages, pictures and notebooks that pages link to.
_PLACES = ("configs", "experiments", "mha_haiku", "scripts", "tests")
_LINK = re.compile(r"(\]\()([^):#\s]+)")
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; line-height: 1.5; margin: 2rem auto; max-width: 50rem;
       padding: 0 1rem }}
img {{ max-width: 100% }}
pre {{ overflow-x: auto; padding: 0.5rem; background: #8881 }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
td, th {{ border: 1px solid #8885; padding: 0.2rem 0.5rem; text-align: left }}
</style></head>
<body>
<nav><a href="{up}index.html">mha_haiku</a></nav>
{content}
</body>
</html>
"""


def main(*, out: str = "site") -> int:
    """Writes the site.

    Args:
      out: Folder of the site; its content is replaced when all is written.
    """
    from mha_haiku.core import checks

    folder = checks.as_path(out).resolve()
    if folder.exists() and not (folder / "mha_haiku.html").exists():
        raise checks.ConfigError(f"--out={out} is there, and is no site.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A site replaces the one before when it is whole.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".site") as beside:
        before, made = (pathlib.Path(beside, name) for name in ("before", "made"))
        made.mkdir()
        lacking = write_reference(made)
        write_texts(made)
        write_index(made)
        if folder.exists():
            folder.rename(before)
        made.rename(folder)
    count = len(list(folder.rglob("*.html")))
    print(f"{count} pages, {folder / 'index.html'} is the first")
    for name in lacking:
        print(f"{name} has no docstring", file=sys.stderr)
    return int(bool(lacking))


def public_modules() -> dict[str, types.ModuleType]:
    """Returns `mha_haiku` and its public modules, by their public names."""
    import mha_haiku

    found = {"mha_haiku": mha_haiku}
    names = ((x, getattr(mha_haiku, x)) for x in mha_haiku.__all__)
    found |= {f"mha_haiku.{x}": y for x, y in names if inspect.ismodule(y)}
    for module in found.values():
        # pdoc does not see what a module imports when it is first asked for.
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))
    return found


def write_reference(folder: pathlib.Path) -> list[str]:
    """Writes a page per public module, and returns names without a docstring."""
    from pdoc import doc, render

    render.configure(
        docformat="google", show_source=False, footer_text="mha_haiku", search=True
    )
    modules = {x.__name__: doc.Module(x) for x in public_modules().values()}
    for name, module in modules.items():
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render.html_module(module, modules), encoding="utf-8")
    search = render.search_index(modules)
    (folder / "search.js").write_text(search, encoding="utf-8")
    return sorted({name for x in modules.values() for name in _undocumented(x)})


def _undocumented(space) -> Iterator[str]:
    """Yields classes and functions that pdoc shows and that have no docstring."""
    for member in space.own_members:
        is_ours = member.modulename.startswith("mha_haiku")
        is_field = member.name in getattr(space.obj, "__annotations__", ())
        if member.name.startswith("_") or not is_ours or is_field:
            continue
        if member.kind in ("class", "function") and not member.docstring:
            yield member.fullname
        if member.kind == "class":
            yield from _undocumented(member)


def write_texts(folder: pathlib.Path) -> None:
    """Writes the guide and the READMEs, with the pictures and notebooks they show."""
    inside = [path for place in _PLACES for path in sorted((ROOT / place).rglob("*"))]
    for path in [*ROOT.glob("*.md"), *inside]:
        target = folder / "text" / path.relative_to(ROOT)
        if path.suffix in (".ipynb", ".png"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            text = _LINK.sub(functools.partial(_led, path), text)
            _write(folder, target.with_suffix(".html"), text)


def _led(path: pathlib.Path, found: re.Match) -> str:
    """Changes a link of a text to its page, or to a folder's README."""
    target = path.parent / found[2]
    if target.is_dir():
        has_text = (target / "README.md").exists()
        return f"{found[1]}{found[2].rstrip('/')}/README.html" if has_text else found[0]
    if target.suffix != ".md":
        return found[0]
    return f"{found[1]}{found[2].removesuffix('.md')}.html"


def write_index(folder: pathlib.Path) -> None:
    """Writes the first page, which leads to all."""
    guide = folder / "text" / "experiments" / "guide"
    pages = []
    for path in sorted(guide.glob("*.html")):
        title = path.stem[2:].replace("_", " ").capitalize()
        pages.append(f"- [{title}]({path.relative_to(folder)})")
    modules = [
        f"- [`{name}`]({module.__name__.replace('.', '/')}.html): "
        f"{(module.__doc__ or '').splitlines()[0]}"
        for name, module in public_modules().items()
    ]
    text = ["# mha_haiku", "[README](text/README.html)", "## Guide", "\n".join(pages)]
    text += ["## Reference", "\n".join(modules)]
    _write(folder, folder / "index.html", "\n\n".join(text))


def _write(folder: pathlib.Path, path: pathlib.Path, text: str) -> None:
    from pdoc import render_helpers

    page = _PAGE.format(
        title=text.splitlines()[0].lstrip("# "),
        up="../" * (len(path.relative_to(folder).parts) - 1),
        content=render_helpers.to_html(text),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))

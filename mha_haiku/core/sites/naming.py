"""Names of sites: paths of modules, in which a scan's turn is a layer's number.

While a program is surveyed, a path has a placeholder for the turn of a scan, which is
only known when the program runs.
"""

import fnmatch
import re
from collections.abc import Sequence

from jax import Array
from jax.extend import core

from mha_haiku.core.sites import jaxprs

# The placeholder of a scan's turn in a name.
TURN = "\0"
# Ends a path if the number of the next part is the turn.
_NUMBERED = "\1"

# The number of a layer: a part of a name, or the end of one.
_LAYER = re.compile(rf"(?:^|[/_.#])(\d+|{TURN})(?=$|[/_.#])")


def matches(pattern: str, name: str) -> bool:
    """Checks whether a pattern, in which `*` matches anything, names a site.

    It may begin at any part of the path; if it begins with `/`, only at the first. A
    site that is passed more than once has a number, `path#1/heads`, which a pattern may
    omit.
    """
    names = {f"/{name}", re.sub(r"#\d+", "", f"/{name}")}
    pattern = pattern if pattern.startswith("/") else f"*/{pattern}"
    return any(fnmatch.fnmatchcase(x, pattern) for x in names)


def numbered_by_layer(name: str) -> tuple[str, int | None]:
    """Replaces the number of the layer, the first in a name, by `*`; returns both."""
    found = _LAYER.search(name)
    if not found:
        return name, None
    number = None if found[1] == TURN else int(found[1])
    return f"{name[: found.start(1)]}*{name[found.end(1) :]}", number


def layer(name: str, turns: Sequence) -> int | Array | None:
    """Finds the layer of a site: a number in its name, or the turn of a scan."""
    found = _LAYER.search(name)
    if not found:
        return None
    return turns[0] if found[1] == TURN else int(found[1])


def at_turn(name: str, turn: Sequence[int]) -> str:
    """Puts the turns of the enclosing scans into a site's name."""
    for index in turn:
        name = name.replace(TURN, str(index), 1)
    return name


def of_call(name: str, count: int) -> str:
    """Makes the name of a site whose path is passed for the `count`-th time."""
    parent, _, last = name.rpartition("/")
    return f"{parent}#{count}/{last}"


def of_facet(path: str, name: str) -> str:
    """Makes the name of a facet of a site with this path."""
    return "/".join(filter(None, (path.partition(_NUMBERED)[0], name)))


def is_empty(path: str) -> bool:
    """Checks whether a path has nothing but the turns of scans."""
    return not path.strip(f"{TURN}{_NUMBERED}/")


def joined(path: str, local: str) -> str:
    """Joins two paths; the first may end as `inside_scan` describes."""
    path, is_inside_scan, head = path.partition(_NUMBERED)
    if is_inside_scan and local:
        _, _, rest = local.partition("/")
        local = "/".join(filter(None, (f"{head[:-1]}{TURN}", rest)))
    elif is_inside_scan:
        return f"{path}{_NUMBERED}{head}"
    return "/".join(filter(None, (path, local)))


def inside_scan(path: str, jaxpr: core.Jaxpr) -> str:
    """Makes the path for the inside of a scan, with a placeholder of the turn."""
    # If everything inside is in one module whose name ends in 0, the turn replaces the
    # 0 once that module is reached: layer 3 has the same name in a Python loop and in a
    # scan.
    paths = map(jaxprs.path, jaxprs.walk(jaxpr, lambda eqn: not jaxprs.path(eqn)))
    heads = {path.partition("/")[0] for path in paths if path}
    (head,) = heads if len(heads) == 1 else ("",)
    if head.endswith("_0"):
        return f"{path}{_NUMBERED}{head}"
    return "/".join(filter(None, (path, TURN)))

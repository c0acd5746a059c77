"""Finds and names the sites of a traced program, before anything runs.

A program is a tree of levels: a level is a jaxpr, with sites that are its equations or
are added by recognition, and the levels inside its loops, branches and calls. Names are
paths of modules, in which a scan's turn is a layer's number: a path has a placeholder
for the turn, which is only known when the program runs.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from mha_haiku.core.site_primitive import SEEN, site_p
from mha_haiku.core.sites import jaxprs, recognition, regions, residual
from mha_haiku.core.sites.jaxprs import Site, under_vmaps

# The placeholder of a scan's turn in a name.
TURN = "\0"
# Ends a path if the number of the next part is the turn.
_NUMBERED = "\1"

# The number of a layer: a part of a name, or the end of one.
_LAYER = re.compile(rf"(?:^|[/_.#])(\d+|{TURN})(?=$|[/_.#])")

# A pattern of names, or whole names.
Address = str | tuple[str, ...]

# Primitives that may contain a whole attention without visible equations.
_KERNEL = re.compile("pallas|cudnn|dot_product_attention|ffi_call|custom_call|triton")


class _Around(NamedTuple):
    path: str = ""  # the path of modules
    lengths: tuple[int, ...] = ()  # the lengths of the scans, from the outermost
    in_while: bool = False  # whether the level is inside a while loop
    # The equations that contain the level, with None for the turns of the scans.
    place: tuple[int | None, ...] = ()

    @property
    def is_marked(self) -> bool:
        """Whether the level is inside an attention that already has sites."""
        return SEEN in self.path.split("/")

    def inside(
        self, eqn: core.JaxprEqn, index: int, number: int, jaxpr: core.Jaxpr
    ) -> "_Around":
        """Returns the surroundings of a jaxpr inside an equation of the level."""
        path = joined(self.path, jaxprs.path(eqn))
        in_while = self.in_while or eqn.primitive.name == "while"
        if eqn.primitive.name != "scan":
            place = (*self.place, index, number)
            return _Around(path, self.lengths, in_while, place)
        return _Around(
            inside_scan(path, jaxpr),
            (*self.lengths, eqn.params["length"]),
            in_while,
            (*self.place, index, None),
        )


class Edit(NamedTuple):
    """An edit of a facet of a site."""

    facet: int  # its index
    change: Callable  # of the value and a number
    # By the turns of the enclosing scans: whether the site is edited, and the number,
    # which is None if there is none.
    chosen: np.ndarray
    numbers: np.ndarray | None


@dataclasses.dataclass
class Stop:
    """A site in a level, with its reads and edits."""

    site: Site
    scope: str  # the path of its equation within the level
    names: tuple[str, ...]  # the full names of its facets
    around: _Around
    # The recognized attention that it belongs to; None for a site that is an equation
    # of the program.
    group: int | None = None
    # Facets that are read: their index, the address, a function.
    reads: list[tuple[int, Address, Callable]] = dataclasses.field(default_factory=list)
    edits: list[Edit] = dataclasses.field(default_factory=list)
    is_kept: bool = False  # whether another site of the same attention is active

    @property
    def is_active(self) -> bool:
        return bool(self.reads or self.edits or self.is_kept)

    def views(self) -> list[Any]:
        """Finds the shapes and dtypes of the facets at one turn."""
        params = self.site.params

        def view(*leaves):
            value = jax.tree.unflatten(params["tree"], leaves)
            return [facet.read(value) for facet in params["facets"]]

        mapped = under_vmaps(view, params["batched"], own_axes=False)
        avals: list[Any] = [x.aval for x in self.site.inputs]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return jax.eval_shape(mapped, *shapes)

    def turns(self) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Yields the turns of the enclosing scans, and the facets' names there."""
        for turn in itertools.product(*map(range, self.around.lengths)):
            yield turn, tuple(at_turn(name, turn) for name in self.names)

    def edit(self, facet: int, address: Address, change: Callable) -> Edit:
        """Makes an edit of a facet, where the address names it."""
        chosen = np.zeros(self.around.lengths, bool)
        for turn, names in self.turns():
            chosen[turn] = matches(address, names[facet])
        if not isinstance(address, tuple):
            return Edit(facet, change, chosen, self.layers())
        numbers, number = np.zeros(self.around.lengths, int), -1
        for turn, names in self.turns():
            number = address.index(names[facet]) if chosen[turn] else number
            numbers[turn] = number
        return Edit(facet, change, chosen, numbers)

    def layers(self) -> np.ndarray | None:
        """Returns the layer by turns, the first number in the name; None without."""
        if not _LAYER.search(self.names[0]):
            return None
        layers = np.zeros(self.around.lengths, int)
        for turn, names in self.turns():
            number = _LAYER.search(names[0])
            layers[turn] = int(number[1]) if number else 0
        return layers


@dataclasses.dataclass
class Level:
    """A jaxpr, with its sites and the levels inside."""

    closed: core.ClosedJaxpr
    stops: list[Stop] = dataclasses.field(default_factory=list)  # its sites, in order
    # The levels inside of equations, by their index.
    inner: dict[int, list["Level"]] = dataclasses.field(default_factory=dict)
    begin: core.Var | None = None  # the input that is a residual stream

    def all_stops(self) -> Iterator[Stop]:
        yield from self.stops
        for level in itertools.chain.from_iterable(self.inner.values()):
            yield from level.all_stops()


class Survey:
    """The sites of a program; `shows_stream` adds the sites of `residual`, as edits.

    If the stream already has sites, none are added.
    """

    def __init__(self, closed: core.ClosedJaxpr, *, shows_stream: bool = False):
        self.kernels: set[str] = set()
        self._whole: dict[str, None] = {}  # values that `blockwise` leaves whole
        self._counts: dict[str, int] = {}
        self._group = itertools.count().__next__
        # An inner edit may already have made sites of some; the others keep their
        # numbers.
        equations = list(jaxprs.walk(closed.jaxpr))
        taken = {jaxprs.path(eqn) for eqn in equations if eqn.primitive is site_p}
        names = (f"attention_{i}" for i in itertools.count())
        self._pathless = (name for name in names if name not in taken)
        has_stream = any(
            facet.name == "stream"
            for eqn in equations
            if eqn.primitive is site_p
            for facet in eqn.params["facets"]
        )
        self._shows_stream = shows_stream and not has_stream
        self._heads: set[core.Var] = set()
        self._carries: dict[int, tuple[int, int]] = {}
        self._numbers = collections.defaultdict(itertools.count)
        self._assumed: list[str] = []  # attention whose axis of heads is assumed
        # The levels in which attention was searched for, and their constants.
        self._searched: list[tuple[core.Jaxpr, set[core.Var] | None]] = []
        self.top = self._level(closed, _Around(), None)
        several = {name for name, count in self._counts.items() if count > 1}
        for stop in self.top.all_stops():
            stop.names = tuple(
                of_call(name, 0) if name in several else name for name in stop.names
            )

    def advice(self) -> str:
        """Describes what may contain attention without sites, or returns ""."""
        parts = []
        if self.kernels:
            parts.append(
                f"It calls {', '.join(sorted(self.kernels))}, which may hold attention "
                'that cannot be seen: choose another implementation, such as "xla" or '
                '"dense".'
            )
        if any(itertools.starmap(recognition.has_others, self._searched)):
            parts.append(
                "It has a softmax that reaches a matrix product in a form that is not "
                "recognized as attention: name the values with mh.site. The forms are "
                "listed in help(mha_haiku.core.sites.recognition)."
            )
            if all(constants is None for _, constants in self._searched):
                parts.append(
                    "If queries, keys and values are projections of different inputs, "
                    "mh.wrap(f, params) can tell these from parameters."
                )
        return "\n".join(parts)

    def whole(self) -> str:
        """Lists the values of all queries and keys in calls of `blockwise`, or ""."""
        if not self._whole:
            return ""
        return f"Not computed in blocks: {', '.join(self._whole)}."

    def assumption(self) -> str:
        """Says which axes of recognized attention are only assumed; "" for none."""
        if not self._assumed:
            return ""
        return (
            f"Nothing tells the axis of heads of {', '.join(self._assumed)}: weights "
            "are assumed to be [B, H, T, S], or [B, T, S] of one head."
        )

    def names(self) -> list[tuple[Stop, tuple[str, ...]]]:
        """Returns the sites and the names of their facets, in the order of the run."""
        entries = []
        for stop in self.top.all_stops():
            for turn, names in stop.turns():
                turns, place = iter(turn), (*stop.around.place, stop.site.index)
                place = tuple(next(turns) if x is None else x for x in place)
                entries.append((place, stop, names))
        entries.sort(key=lambda entry: entry[0])
        return [(stop, names) for _, stop, names in entries]

    def _level(
        self,
        closed: core.ClosedJaxpr,
        around: _Around,
        constants: Iterable[core.Var] | None,
    ) -> Level:
        """Surveys a level; `constants` are those among its inputs, None if unknown."""
        jaxpr, level = closed.jaxpr, Level(closed)
        recognized, named = {}, {}
        known = jaxprs.constants(jaxpr, constants)
        if not around.is_marked:
            self._searched.append((jaxpr, known))
        found = [] if around.is_marked else recognition.attentions(jaxpr, known)
        for first, sites, is_assumed in found:
            for site in sites:
                entry = first, is_assumed, site
                recognized.setdefault(site.index, []).append(entry)
        # A site may come after the last equation.
        for index, eqn in enumerate((*jaxpr.eqns, None)):
            for first, is_assumed, site in recognized.get(index, ()):
                if id(first) not in named:
                    local = jaxprs.path(first)
                    if is_empty(joined(around.path, local)):
                        local = next(self._pathless)
                    named[id(first)] = local, self._group()
                    if is_assumed:
                        path = joined(around.path, local).partition(_NUMBERED)[0]
                        self._assumed.append(path.replace(TURN, "*"))
                local, group = named[id(first)]
                level.stops.append(self._stop(site, local, around, group))
            if eqn is None:
                break
            if eqn.primitive is site_p:
                if len(eqn.params["kept"]) == eqn.params["tree"].num_leaves:
                    leaves = list(eqn.invars), list(eqn.outvars)
                    site = Site(index, *leaves, eqn.params)
                    local = jaxprs.path(eqn)
                    level.stops.append(self._stop(site, local, around, None))
                continue
            if eqn.primitive.name == jaxprs.BLOCKWISE:
                whole = regions.whole(eqn.params["jaxpr"], eqn.params["limit"])
                self._whole.update(dict.fromkeys(whole))
            if _KERNEL.search(eqn.primitive.name):
                self.kernels.add(eqn.primitive.name)
                continue
            inner = [
                self._level(
                    nested,
                    around.inside(eqn, index, number, nested.jaxpr),
                    jaxprs.constants_inside(eqn, nested.jaxpr, known),
                )
                for number, nested in enumerate(jaxprs.inner(eqn))
            ]
            if any(nested.stops or nested.inner for nested in inner):
                level.inner[index] = inner
            if eqn.primitive.name == "scan" and inner[0].begin is not None:
                place = inner[0].closed.jaxpr.invars.index(inner[0].begin)
                num_consts, num_carry = jaxprs.carried(eqn)
                if num_consts <= place < num_consts + num_carry:
                    self._carries[id(eqn)] = place, place - num_consts
        if self._shows_stream:
            self._add_stream(level, around)
        return level

    def _add_stream(self, level: Level, around: _Around) -> None:
        for stop in level.stops:
            if stop.site.params["facets"][0].name == "heads":
                self._heads.update(stop.site.outputs)
        jaxpr, is_top = level.closed.jaxpr, not around.place
        sites, level.begin = residual.stream(
            jaxpr, self._heads, self._carries, is_top=is_top
        )
        for named in sites:
            if named.site is None:
                continue
            local = "" if named.eqn is None else jaxprs.path(named.eqn)
            if named.kind and is_empty(joined(around.path, local)):
                name = named.site.params["facets"][0].name
                local = f"{named.kind}_{next(self._numbers[name])}"
            stop = self._stop(named.site, local, around, self._group())
            chosen = np.ones(around.lengths, bool)
            stop.edits.append(Edit(0, lambda value, layer: value, chosen, None))
            level.stops.append(stop)

    def _stop(self, site: Site, local: str, around: _Around, group: int | None) -> Stop:
        path = joined(around.path, local)
        names = []
        for facet in site.params["facets"]:
            name = "/".join(filter(None, (path.partition(_NUMBERED)[0], facet.name)))
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            names.append(of_call(name, count) if count else name)
        return Stop(site, local, tuple(names), around, group)


# --- Names


def matches(address: Address, name: str) -> bool:
    """Checks whether an address names a site: a tuple of whole names, or a pattern.

    In a pattern `*` matches anything. It may begin at any part of the path, as it does
    with `*/`; if it begins with `/`, only at the first. A site that is passed more than
    once has a number, `path#1/heads`, which a pattern may omit.
    """
    if isinstance(address, tuple):
        return name in address
    pattern = address
    names = {f"/{name}", re.sub(r"#\d+", "", f"/{name}")}
    if not pattern.startswith("/"):
        pattern = f"*/{pattern.removeprefix('*/')}"
    return any(map(_expression(pattern).fullmatch, names))


@functools.lru_cache(2**14)
def _expression(pattern: str) -> re.Pattern:
    """Compiles a pattern, in which only `*` is special."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def number_at(numbers: np.ndarray | None, turns: Sequence) -> int | Array | None:
    """Looks up a number by the turns of scans; traced if it depends on them."""
    if numbers is None:
        return None
    first = numbers.flat[0]
    return int(first) if (numbers == first).all() else jnp.asarray(numbers)[turns]


def at_turn(name: str, turn: Sequence[int]) -> str:
    """Puts the turns of the enclosing scans into a site's name."""
    for index in turn:
        name = name.replace(TURN, str(index), 1)
    return name


def of_call(name: str, count: int) -> str:
    """Makes the name of a site whose path is passed for the `count`-th time."""
    parent, _, last = name.rpartition("/")
    return f"{parent}#{count}/{last}"


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

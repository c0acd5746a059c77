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
from mha_haiku.core.sites import jaxprs, levels, recognition, regions, residual
from mha_haiku.core.sites.jaxprs import Site

# The placeholder of a scan's turn in a name.
TURN = "\0"
# Follows it if the turn is the number of the next part.
_NUMBERED = "\1"

# The number of a layer: a part of a name, or the end of one.
_LAYER = re.compile(r"(?:^|[/_.#])(\d+)(?=$|[/_.#])")

# A pattern of names, or whole names.
Address = str | tuple[str, ...]

# Primitives that may contain a whole attention without visible equations.
_KERNEL = re.compile("pallas|cudnn|dot_product_attention|ffi_call|custom_call|triton")


class Edit(NamedTuple):
    """An edit of a facet of a site."""

    facet: int  # its index
    change: Callable  # of the value and a number
    # By the turns of the enclosing scans: whether the site is edited, and the number,
    # which is -1 if there is none.
    chosen: np.ndarray
    numbers: np.ndarray


@dataclasses.dataclass
class Stop:
    """A site in a level, with its reads and edits."""

    site: Site
    scope: str  # the path of its equation within the level
    names: tuple[str, ...]  # the full names of its facets
    level: "Level"
    # The recognized attention that it belongs to; None for a site that is an equation
    # of the program.
    group: object = None
    # Facets that are read: their index, the address, a function.
    reads: list[tuple[int, Address, Callable]] = dataclasses.field(default_factory=list)
    edits: list[Edit] = dataclasses.field(default_factory=list)
    is_kept: bool = False  # whether another site of the same attention is active

    @property
    def is_active(self) -> bool:
        return bool(self.reads or self.edits or self.is_kept)

    def views(self) -> list[Any]:
        """Finds the shapes and dtypes of the facets at one turn."""
        facets = self.site.params["facets"]
        views = self.site.function_of(lambda value: [x.read(value) for x in facets])
        avals: list[Any] = [x.aval for x in self.site.inputs]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return jax.eval_shape(views, *shapes)

    def names_of(self, facet: int) -> list[str]:
        """Lists the names of a facet at the turns of the enclosing scans."""
        turns = np.ndindex(*self.level.lengths)
        return [at_turn(self.names[facet], turn) for turn in turns]

    def by_turn(self, values: Iterable) -> np.ndarray:
        """Returns an array of values at the turns of the enclosing scans."""
        return np.reshape([*values], self.level.lengths)

    def layers(self) -> np.ndarray:
        """Returns the layers by turns, the first numbers in the names."""
        layer_names = map(_LAYER.search, self.names_of(0))
        return self.by_turn(int(x[1]) if x else -1 for x in layer_names)

    def edit(self, facet: int, address: Address, change: Callable) -> Edit | None:
        """Makes an edit of a facet where the address names it; None if nowhere."""
        names = self.names_of(facet)
        is_edited = self.by_turn(matches(address, x) for x in names)
        if not is_edited.any():
            return None
        if not isinstance(address, tuple):
            return Edit(facet, change, is_edited, self.layers())
        # At other turns the number before.
        places = (address.index(x) if x in address else -1 for x in names)
        numbers = itertools.accumulate(places, lambda x, y: x if y < 0 else y)
        return Edit(facet, change, is_edited, self.by_turn(numbers))


@dataclasses.dataclass
class Level:
    """A jaxpr, with its sites and the levels inside."""

    closed: core.ClosedJaxpr
    path: str = ""  # the path of modules
    lengths: tuple[int, ...] = ()  # the lengths of the scans, from the outermost
    in_while: bool = False  # whether the level is inside a while loop
    stops: list[Stop] = dataclasses.field(default_factory=list)  # its sites, in order
    # The levels inside of equations, by their index.
    inner: dict[int, list["Level"]] = dataclasses.field(default_factory=dict)
    begin: core.Var | None = None  # the input that is a residual stream

    def inside(self, eqn: core.JaxprEqn) -> list["Level"]:
        """Makes the levels inside of an equation, without sites."""
        path, lengths = joined(self.path, jaxprs.path(eqn)), self.lengths
        held, name = jaxprs.inner(eqn), eqn.primitive.name
        if name == "scan":
            path = inside_scan(path, held[0].jaxpr)
            lengths = *lengths, eqn.params["length"]
        in_while = self.in_while or name == "while"
        return [Level(closed, path, lengths, in_while) for closed in held]

    def all_stops(self) -> Iterator[Stop]:
        yield from self.stops
        for level in itertools.chain.from_iterable(self.inner.values()):
            yield from level.all_stops()

    def passes(self, turn: tuple = ()) -> Iterator[tuple[Stop, tuple[int, ...]]]:
        """Yields the sites and the turns of scans, in the order of the run."""
        for index in sorted({*self.inner, *(stop.site.index for stop in self.stops)}):
            yield from ((x, turn) for x in self.stops if x.site.index == index)
            for level in self.inner.get(index, ()):
                for turns in np.ndindex(*level.lengths[len(turn) :]):
                    yield from level.passes((*turn, *turns))


class Survey:
    """The sites of a program; `shows_stream` adds the sites of `residual`, as edits.

    If the stream already has sites, none are added.
    """

    def __init__(self, closed: core.ClosedJaxpr, *, shows_stream: bool = False):
        self.kernels: set[str] = set()
        self._whole: dict[str, None] = {}  # values that `blockwise` leaves whole
        self._counts: dict[str, int] = {}
        # An inner edit may already have made sites of some; the others keep their
        # numbers.
        equations = list(jaxprs.walk(closed.jaxpr))
        marked = [eqn for eqn in equations if eqn.primitive is site_p]
        paths = {jaxprs.path(eqn) for eqn in marked}
        names = (f"attention_{i}" for i in itertools.count())
        self._pathless = (name for name in names if name not in paths)
        facets = {x.name for eqn in marked for x in eqn.params["facets"]}
        self._shows_stream = shows_stream and "stream" not in facets
        self._heads: set[core.Var] = set()
        self._carries: dict[int, tuple[int, int]] = {}
        self._numbers = collections.defaultdict(itertools.count)
        self._assumed: list[str] = []  # attention whose axis of heads is assumed
        # The equations and attentions of the levels that were searched.
        self._searched: list[tuple[list, dict]] = []
        data = closed.jaxpr.invars if any(map(jaxprs.is_parameter, equations)) else ()
        self.top, self._has_data = Level(closed), bool(data)
        self._survey(self.top, data)
        for stop in self.top.all_stops():
            counts = [(name, self._counts.get(name, 0)) for name in stop.names]
            stop.names = tuple(of_call(x, 0) if n > 1 else x for x, n in counts)

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
            if not self._has_data:
                parts.append(
                    "If queries, keys and values are projections of different inputs, "
                    "mh.wrap(f, params) can tell these from parameters."
                )
        return "\n".join(parts)

    def remarks(self) -> str:
        """Describes what is assumed, what `blockwise` leaves whole, and the advice."""
        parts = [self.advice()]
        if self._assumed:
            parts.append(
                f"Nothing tells the axis of heads of {', '.join(self._assumed)}: "
                "weights are assumed to be [B, H, T, S], or [B, T, S] of one head."
            )
        if self._whole:
            parts.append(f"Not computed in blocks: {', '.join(self._whole)}.")
        return "\n".join(filter(None, parts))

    def names(self) -> list[tuple[Stop, tuple[str, ...]]]:
        """Returns the sites and the names of their facets, in the order of the run."""
        return [
            (stop, tuple(at_turn(name, turn) for name in stop.names))
            for stop, turn in self.top.passes()
        ]

    def _survey(self, level: Level, inputs: Iterable[core.Var]) -> None:
        """Finds the sites of a level; `inputs` are those that are known to be data."""
        jaxpr = level.closed.jaxpr
        recognized = collections.defaultdict(list)
        data = jaxprs.of_data(jaxpr, inputs)
        # Nothing is recognized inside an attention that already has sites.
        attentions = {}
        if SEEN not in level.path.split("/"):
            equations = recognition.equations_of(jaxpr, data)
            attentions = recognition.attentions(equations)
            self._searched.append((equations, attentions))
        for end, attention in attentions.items():
            for site in attention.sites:
                recognized[site.index].append((end, site))

        @functools.cache  # numbers are in the order in which first sites are reached
        def named(end: levels.Equation) -> tuple[str, object]:
            local = jaxprs.path(jaxpr.eqns[end.index])
            if is_empty(joined(level.path, local)):
                local = next(self._pathless)
            if attentions[end].is_assumed:
                name = _named(joined(level.path, local), "")
                self._assumed.append(name.replace(TURN, "*"))
            return local, object()

        # A site may come after the last equation.
        for index, eqn in enumerate((*jaxpr.eqns, None)):
            for end, site in recognized[index]:
                local, group = named(end)
                self._add(site, local, level, group)
            if eqn is None:
                break
            if eqn.primitive is site_p:
                if len(eqn.params["kept"]) == eqn.params["tree"].num_leaves:
                    leaves = list(eqn.invars), list(eqn.outvars)
                    site = Site(index, *leaves, eqn.params)
                    self._add(site, jaxprs.path(eqn), level, None)
                continue
            if eqn.primitive.name == jaxprs.BLOCKWISE:
                whole = regions.whole(eqn.params["jaxpr"], eqn.params["limit"])
                self._whole.update(dict.fromkeys(whole))
            if _KERNEL.search(eqn.primitive.name):
                self.kernels.add(eqn.primitive.name)
                continue
            inner = level.inside(eqn)
            for nested in inner:
                body = nested.closed.jaxpr
                self._survey(nested, jaxprs.data_inside(eqn, body, data))
            if any(nested.stops or nested.inner for nested in inner):
                level.inner[index] = inner
            if eqn.primitive.name == "scan" and inner[0].begin is not None:
                place = inner[0].closed.jaxpr.invars.index(inner[0].begin)
                num_consts, num_carry = jaxprs.carried(eqn)
                if num_consts <= place < num_consts + num_carry:
                    self._carries[id(eqn)] = place, place - num_consts
        if self._shows_stream:
            self._add_stream(level)

    def _add_stream(self, level: Level) -> None:
        for stop in level.stops:
            if stop.site.params["facets"][0].name == "heads":
                self._heads.update(stop.site.outputs)
        sites, level.begin = residual.stream(
            level.closed.jaxpr, self._heads, self._carries, is_top=level is self.top
        )
        for named in sites:
            local = "" if named.eqn is None else jaxprs.path(named.eqn)
            if named.kind and is_empty(joined(level.path, local)):
                name = named.site.params["facets"][0].name
                local = f"{named.kind}_{next(self._numbers[name])}"
            stop = self._add(named.site, local, level, object())
            every = np.ones(level.lengths, bool)
            stop.edits = [Edit(0, lambda value, layer: value, every, -1 * every)]

    def _add(self, site: Site, local: str, level: Level, group: object) -> Stop:
        path, names = joined(level.path, local), []
        for facet in site.params["facets"]:
            name = _named(path, facet.name)
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            names.append(of_call(name, count) if count else name)
        level.stops.append(Stop(site, local, tuple(names), level, group))
        return level.stops[-1]


# --- Names


def matches(address: Address, name: str) -> bool:
    """Checks whether an address names a site: a tuple of whole names, or a pattern.

    In a pattern `*` matches anything. It may begin at any part of the path, as it does
    with `*/`; if it begins with `/`, only at the first. A site that is passed more than
    once has a number, `path#1/heads`, which a pattern may omit.
    """
    if isinstance(address, tuple):
        return name in address
    names = {f"/{name}", re.sub(r"#\d+", "", f"/{name}")}
    if not address.startswith("/"):
        address = f"*/{address.removeprefix('*/')}"
    return any(map(_expression(address).fullmatch, names))


@functools.lru_cache(2**14)
def _expression(pattern: str) -> re.Pattern:
    """Compiles a pattern, in which only `*` is special."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def number_at(numbers: np.ndarray, turns: Sequence) -> int | Array | None:
    """Looks up a number by the turns of scans; traced if it depends on them."""
    first = numbers.flat[0]
    if (numbers == first).all():
        return None if first < 0 else int(first)
    return jnp.asarray(numbers)[turns]


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
    """Joins two paths."""
    return "/".join(filter(None, (path, local)))


def _named(path: str, last: str) -> str:
    """Makes a name of a path, in which turns may be numbers of modules."""
    numbered = re.sub(f"{TURN}{_NUMBERED}/([^/]*_)0(?=/|$)", rf"\1{TURN}", path)
    return joined(numbered.replace(_NUMBERED, ""), last)


def inside_scan(path: str, jaxpr: core.Jaxpr) -> str:
    """Makes the path for the inside of a scan, with a placeholder of the turn."""
    # If everything inside is in one module whose name ends in 0, the turn replaces the
    # 0 once that module is reached: layer 3 has the same name in a Python loop and in a
    # scan.
    paths = map(jaxprs.path, jaxprs.walk(jaxpr, lambda eqn: not jaxprs.path(eqn)))
    heads = {path.partition("/")[0] for path in paths if path}
    (head,) = heads if len(heads) == 1 else ("",)
    return joined(path, TURN + _NUMBERED * head.endswith("_0"))

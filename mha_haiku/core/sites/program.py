"""Traced programs with their sites: found, named, and run again with some changed.

A program is a tree of levels: a level is a jaxpr, with the sites that are equations of
it, and the levels inside its loops, branches and calls. Naming and matching happen
before anything runs. A level in which nothing is looked at or changed is run by JAX as
it is, custom gradients and all; in the others the equations between two sites are.
"""

import dataclasses
import fnmatch
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku import display
from mha_haiku.core.sites import recognition
from mha_haiku.core.sites.site import SEEN, site_p

Array = jax.Array

# Stands in a name for the turn of a scan, which only the run knows.
_TURN = "\0"
# Ends a path behind which the number of the next part is the turn.
_NUMBERED = "\1"

# The number of a layer: a part of a name, or what ends one.
_LAYER = re.compile(rf"(?:^|[/_.#])(\d+|{_TURN})(?=$|[/_.#])")

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_REMAT = ("checkpoint", "remat", "remat2")
# What may hold the whole of an attention where nothing can be seen.
_KERNEL = re.compile("pallas|cudnn|dot_product_attention|ffi_call|custom_call|triton")


@dataclasses.dataclass(frozen=True)
class Resume:
    """An edit of what enters a layer: from which layer on to run, and with what.

    Scanned layers before it are skipped; looped ones are dead code, which XLA drops.

    Attributes:
      layer: The first layer that runs; may be traced.
      value: What enters it, like the value of the site.
    """

    layer: int | Array
    value: Any

    def __call__(self, value: Any, layer: int | Array | None) -> Any:
        """Returns what enters a layer."""
        if isinstance(layer, int) and isinstance(self.layer, int):
            return self.value if layer == self.layer else value
        return jax.tree.map(
            lambda new, old: jnp.where(layer == self.layer, new, old), self.value, value
        )


@dataclasses.dataclass
class Stop:
    """A site in a level, and what happens there.

    Attributes:
      index: The equation that the site is, or in front of which it stands.
      inputs: The variables of its leaves.
      outputs: The variables that take what it returns.
      params: Those of the site's equation.
      scope: The path of its equation within the level.
      names: The full name of each facet.
      lengths: Those of the scans around, from the outermost.
      reads: Facets that are looked at: their index, the pattern's number, a function.
      edits: Facets that are changed: their index, a function, and at which turns of
        the scans around.
    """

    index: int
    inputs: list
    outputs: list
    params: dict[str, Any]
    scope: str
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    in_while: bool
    place: tuple  # in the program, with None for the turns of the scans around
    group: int | None = None  # the attention that was recognised, of which it is one

    @property
    def is_equation(self) -> bool:
        """Whether it stands in the program itself."""
        return self.group is None

    reads: list[tuple[int, int, Callable]] = dataclasses.field(default_factory=list)
    edits: list[tuple[int, Callable, np.ndarray]] = dataclasses.field(
        default_factory=list
    )
    is_kept: bool = False  # because another site of the same attention is active

    @property
    def is_active(self) -> bool:
        """Whether the run must stop here."""
        return bool(self.reads or self.edits or self.is_kept)

    def views(self) -> list[Any]:
        """Returns what each facet shows, as shapes and dtypes, at one turn."""

        def view(*leaves):
            value = jax.tree.unflatten(self.params["tree"], leaves)
            return [facet.read(value) for facet in self.params["facets"]]

        mapped = _mapped(view, self.params["batched"], own_axes=False)
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in self.inputs]
        return jax.eval_shape(mapped, *shapes)

    def place_at(self, turn: Sequence[int]) -> tuple[int, ...]:
        """Returns the order of the site among all, at a turn of the scans around."""
        turns = iter(turn)
        return tuple(next(turns) if x is None else x for x in self.place)

    def turns(self) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Yields the turns of the scans around, and the facets' names there."""
        for turn in itertools.product(*map(range, self.lengths)):
            yield turn, tuple(_numbered(name, turn) for name in self.names)


@dataclasses.dataclass
class Level:
    """A jaxpr and what is inside.

    Attributes:
      jaxpr: The jaxpr, without constants.
      stops: Its sites, in order.
      inner: The levels inside of equations, by their index.
    """

    jaxpr: core.Jaxpr
    stops: list[Stop]
    inner: dict[int, list["Level"]]

    def all_stops(self) -> Iterator[Stop]:
        """Yields the sites of the level and of those inside, in order."""
        own = [(stop.index, [stop]) for stop in self.stops]
        own += [
            (index, itertools.chain.from_iterable(each.all_stops() for each in levels))
            for index, levels in self.inner.items()
        ]
        for _, stops in sorted(own, key=lambda pair: pair[0]):
            yield from stops

    def is_active(self) -> bool:
        """Whether anything is looked at or changed here or inside."""
        return any(stop.is_active for stop in self.all_stops())

    def has_edits(self) -> bool:
        """Whether anything is changed here or inside."""
        return any(stop.edits for stop in self.all_stops())


class Survey:
    """Finds and names the sites of a program.

    Attributes:
      top: The level of the whole program.
      kernels: The names of kernels that cannot be seen into.
    """

    def __init__(self, jaxpr: core.Jaxpr):
        self.kernels: set[str] = set()
        self._counts: dict[str, int] = {}
        self._groups = itertools.count()
        # An edit inside has made sites of some of these; the others keep their numbers.
        taken = set(_paths_of_sites(jaxpr))
        numbered = (f"attention_{i}" for i in itertools.count())
        self._pathless = (name for name in numbered if name not in taken)
        self.top = self._level(jaxpr, "", (), False, ())
        several = {name for name, count in self._counts.items() if count > 1}
        for stop in self.top.all_stops():
            stop.names = tuple(
                _call(name, 0) if name in several else name for name in stop.names
            )

    def names(self) -> list[tuple[Stop, tuple[str, ...]]]:
        """Returns each site and its facets' names, in the order in which it is passed.

        A site of scanned layers is there once for each turn.
        """
        found = [
            (stop.place_at(turn), stop, names)
            for stop in self.top.all_stops()
            for turn, names in stop.turns()
        ]
        found.sort(key=lambda each: each[0])
        return [(stop, names) for _, stop, names in found]

    def _level(self, jaxpr, prefix, lengths, in_while, place) -> Level:
        is_seen = SEEN in prefix.split("/")
        attentions = [] if is_seen else recognition.attentions(jaxpr)
        found: dict[int, list] = {}
        for attention in attentions:
            for each in attention.sites:
                found.setdefault(each.index, []).append((attention, each))
        paths: dict[int, tuple[int, str]] = {}
        level = Level(jaxpr, [], {})
        # A site may stand behind the last equation.
        for index, eqn in enumerate((*jaxpr.eqns, None)):
            for attention, each in found.get(index, ()):
                if id(attention) not in paths:
                    local = _path(attention.eqn)
                    if not _joined(prefix, local).strip(f"{_TURN}{_NUMBERED}/"):
                        local = next(self._pathless)
                    paths[id(attention)] = next(self._groups), local
                group, local = paths[id(attention)]
                level.stops.append(
                    self._stop(each, local, prefix, lengths, in_while, place, group)
                )
            if eqn is None:
                break
            local = _path(eqn)
            if eqn.primitive is site_p:
                if len(eqn.params["kept"]) == eqn.params["tree"].num_leaves:
                    own = recognition.Site(
                        index, list(eqn.invars), list(eqn.outvars), eqn.params
                    )
                    level.stops.append(
                        self._stop(own, local, prefix, lengths, in_while, place)
                    )
                continue
            if _KERNEL.search(eqn.primitive.name):
                self.kernels.add(eqn.primitive.name)
                continue
            is_loop = eqn.primitive.name == "scan"
            path = _joined(prefix, local)
            inner = [
                self._level(
                    each,
                    _behind_scan(path, each) if is_loop else path,
                    (*lengths, eqn.params["length"]) if is_loop else lengths,
                    in_while or eqn.primitive.name == "while",
                    (*place, index, None) if is_loop else (*place, index, i),
                )
                for i, each in enumerate(_jaxprs(eqn))
            ]
            if any(True for each in inner for _ in each.all_stops()):
                level.inner[index] = inner
        return level

    def _stop(self, own, local, prefix, lengths, in_while, place, group=None) -> Stop:
        path = _joined(prefix, local)
        names = []
        for facet in own.params["facets"]:
            name = "/".join(filter(None, (path.partition(_NUMBERED)[0], facet.name)))
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            names.append(_call(name, count) if count else name)
        return Stop(
            own.index,
            own.inputs,
            own.outputs,
            own.params,
            local,
            tuple(names),
            lengths,
            in_while,
            (*place, own.index),
            group,
        )


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern, or its end, names a site.

    Args:
      pattern: In which `*` stands for anything; it may begin at any part of the path.
      name: A full name. A site that is passed more than once has a number there,
        `path#1/heads`, which a pattern may leave out.
    """
    names = {name, re.sub(r"#\d+", "", name)}
    return any(
        fnmatch.fnmatchcase(each, pattern) or fnmatch.fnmatchcase(each, f"*/{pattern}")
        for each in names
    )


def run(
    level: Level, consts: Sequence, args: Sequence, turns: tuple = ()
) -> tuple[list, dict[tuple[str, int], Any]]:
    """Returns the outputs of a level, and what was seen, by name and pattern.

    Args:
      level: Its stops say what is looked at and changed.
      consts: Of its jaxpr.
      args: Likewise.
      turns: Those of the scans around.
    """
    jaxpr, seen = level.jaxpr, {}
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    stops = [stop for stop in level.stops if stop.is_active]
    inner = {
        index: levels
        for index, levels in level.inner.items()
        if any(each.is_active() for each in levels)
    }
    last_use = _last_uses(jaxpr, stops)
    begin = 0
    for index in sorted({*inner, *(stop.index for stop in stops), len(jaxpr.eqns)}):
        _run_plain(jaxpr, begin, index, last_use, values)
        begin = index
        for stop in (stop for stop in stops if stop.index == index):
            # Also what an edit computes belongs to the layer, where one looks again.
            with jax.named_scope(stop.scope or "/"):
                leaves = _passed(stop, [read(x) for x in stop.inputs], turns, seen)
            values.update(zip(stop.outputs, leaves, strict=True))
            begin = index + stop.is_equation
        if index in inner:
            eqn = jaxpr.eqns[index]
            with jax.named_scope(_path(eqn) or "/"):
                outputs, inside = _run_nested(
                    eqn, inner[index], [read(x) for x in eqn.invars], turns
                )
            seen |= inside
            if eqn.primitive.name in _CUSTOM and not inner[index][0].has_edits():
                continue  # it runs as it is, and keeps the gradient that it was given
            values.update(zip(eqn.outvars, outputs, strict=True))
            begin = index + 1
    return [read(x) for x in jaxpr.outvars], seen


def _run_plain(jaxpr, begin, end, last_use, values) -> None:
    """Runs equations in which nothing happens, by JAX itself, which keeps their rules.

    To bind primitives one by one differs between versions of JAX.
    """
    eqns = jaxpr.eqns[begin:end]
    if not eqns:
        return
    made = dict.fromkeys(
        x for eqn in eqns for x in eqn.outvars if not isinstance(x, core.DropVar)
    )
    inputs = dict.fromkeys(
        x
        for eqn in eqns
        for x in eqn.invars
        if not isinstance(x, core.Literal) and x not in made
    )
    outputs = [x for x in made if last_use.get(x, -1) >= end]
    debug = jaxpr.debug_info
    if hasattr(debug, "with_unknown_names"):
        debug = debug.with_unknown_names()
    part = core.Jaxpr((), list(inputs), outputs, eqns, jaxpr.effects, debug_info=debug)
    results = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))(*map(values.get, inputs))
    values.update(zip(outputs, results, strict=True))


def _last_uses(jaxpr, stops) -> dict:
    """Returns the index of the last equation that reads each variable."""
    last = {}
    for stop in stops:
        for x in stop.inputs:
            if not isinstance(x, core.Literal):
                last[x] = max(last.get(x, 0), stop.index)
    for index, eqn in enumerate(jaxpr.eqns):
        for x in eqn.invars:
            if not isinstance(x, core.Literal):
                last[x] = max(last.get(x, 0), index)
    for x in jaxpr.outvars:
        if not isinstance(x, core.Literal):
            last[x] = len(jaxpr.eqns)
    return last


def _passed(stop, leaves, turns, seen) -> list:
    """Returns the leaves of a site after its edits, and enters what is looked at."""
    original, params = leaves, stop.params
    layer = _layer(stop.names[0], turns)
    for i, change, chosen in stop.edits:
        name = stop.names[i].replace(_TURN, "*")
        changed = functools.partial(_chosen, change, chosen, turns, layer, name)
        leaves, params = _edited(leaves, params, params["facets"][i], changed)
    for i, number, function in stop.reads:
        facet, tree = params["facets"][i], params["tree"]

        def read(*leaves, facet=facet, tree=tree, function=function):
            return function(facet.read(jax.tree.unflatten(tree, leaves)), layer)

        mapped = _mapped(read, params["batched"], own_axes=False)
        seen[stop.names[i], number] = mapped(*leaves)
    leaves = site_p.bind(*leaves, **params)
    if params["tree"] == stop.params["tree"]:
        return leaves

    # The program goes on with a value of the form that it knows.
    def fitted(original, *leaves):
        value = jax.tree.unflatten(stop.params["tree"], original)
        changed = jax.tree.unflatten(params["tree"], leaves)
        return jax.tree.leaves(params["fit"](value, changed))

    for old, new in zip(stop.params["batched"], params["batched"], strict=True):
        fitted = jax.vmap(fitted, (list(old), *new), list(old))
    return fitted(original, *leaves)


def _chosen(change, chosen, turns, layer, name, view):
    """Returns a changed view, at the turns of the scans that are meant."""
    if chosen.all():
        changed = change(view, layer)
        _check(name, view, changed)
        return _like(view, changed)
    _check(name, view, jax.eval_shape(lambda: change(view, layer)))
    return jax.lax.cond(
        jnp.asarray(chosen)[turns],
        lambda view: _like(view, change(view, layer)),
        lambda view: view,
        view,
    )


def _edited(leaves, params, facet, change) -> tuple[list, dict[str, Any]]:
    """Returns the leaves of a site with one facet changed, and their parameters."""
    trees = []

    def changed(*leaves):
        value = jax.tree.unflatten(params["tree"], leaves)
        value = facet.write(value, change(facet.read(value)))
        leaves, tree = jax.tree.flatten(value)
        trees.append(tree)
        return leaves

    batched = params["batched"]
    if batched:
        jax.eval_shape(_mapped(changed, batched, own_axes=False), *leaves)
        if trees[-1] == params["tree"]:
            return _mapped(changed, batched, own_axes=True)(*leaves), params
    leaves = _mapped(changed, batched, own_axes=False)(*leaves)
    count = len(leaves)
    return leaves, params | {
        "tree": trees[-1],
        "kept": tuple(range(count)),
        "batched": ((0,) * count,) * len(batched),
    }


def _mapped(function, batched, *, own_axes):
    """Returns a function of a site's leaves as under the vmaps around the site.

    Args:
      function: Of leaves without the axes of these vmaps.
      batched: Where each vmap has the axis of each leaf.
      own_axes: Whether results have the axes where leaves do; else they come first.
    """
    for axes in batched:
        function = jax.vmap(function, axes, list(axes) if own_axes else 0)
    return function


def _check(name, before, after) -> None:
    """Raises ValueError unless an edited view has the form that it had."""
    if _is_other_map(before, after):
        return
    forms = [
        (jax.tree.structure(x), [*map(jnp.shape, jax.tree.leaves(x))])
        for x in (before, after)
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            f"the edit of {name!r} must return what it is given, changed: "
            f"{display.value(before)}, got {display.value(after)}."
        )


def _is_other_map(before, after) -> bool:
    """Returns whether an edit gives a map of the same shape, of another form."""
    is_array = jax.tree_util.treedef_is_leaf(jax.tree.structure(before))
    return (
        not is_array
        and type(before) is type(after)
        and getattr(before, "shape", None) == getattr(after, "shape", ())
    )


def _like(before, after):
    """Returns an edited view with the dtypes that it had."""

    def cast(x, y):
        dtype = jnp.result_type(x)
        return y if jnp.result_type(y) == dtype else jnp.asarray(y, dtype)

    if jax.tree.structure(before) != jax.tree.structure(after):
        return after
    return jax.tree.map(cast, before, after)


def _run_nested(eqn, levels, inputs, turns) -> tuple[list, dict]:
    """Returns the outputs of an equation that holds levels, and what was seen."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        (level,), (consts,) = levels, _consts(eqn)
        body = lambda *inputs: run(level, consts, inputs, turns)  # noqa: E731
        if name in ("jit", "pjit"):
            shardings = {
                key: params[key]
                for key in ("in_shardings",)
                if all(isinstance(x, jax.sharding.Sharding) for x in params[key])
            }
            body = jax.jit(body, **shardings)
        return body(*inputs)
    if name in _CUSTOM:
        (level,), (consts,) = levels, _consts(eqn)
        return run(level, consts, inputs, turns)
    if name in _REMAT:
        (level,) = levels
        again = jax.checkpoint(
            lambda *inputs: run(level, (), inputs, turns),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return again(*inputs)
    if name == "scan":
        return _scanned(eqn, levels[0], inputs, turns)
    if name == "cond":
        return _branched(eqn, levels, inputs, turns)
    if name == "while":
        return _repeated(eqn, levels, inputs, turns), {}
    if name == "shard_map":
        return _sharded(eqn, levels[0], inputs, turns)
    names = [stop.names[0] for level in levels for stop in level.all_stops()]
    raise ValueError(
        f"the site {names[0]!r} is inside of {name}, which cannot be run again with "
        "changes; call look or edit on the function inside of it."
    )


def _scanned(eqn, level, inputs, turns):
    params, call = eqn.params, eqn.params["jaxpr"]
    length = params["length"]
    # By their ranks, since the parameters that tell constants, carry and scanned inputs
    # apart differ between versions: a scanned one has an axis more outside than inside.
    num_unscanned = sum(
        x.aval.ndim == y.aval.ndim
        for x, y in zip(eqn.invars, call.jaxpr.invars, strict=True)
    )
    num_carry = sum(
        x.aval.ndim == y.aval.ndim
        for x, y in zip(eqn.outvars, call.jaxpr.outvars, strict=True)
    )
    num_consts = num_unscanned - num_carry
    fixed, carry = inputs[:num_consts], inputs[num_consts:num_unscanned]
    resumed = [
        change.layer
        for stop in level.all_stops()
        for _, change, _ in stop.edits
        if isinstance(change, Resume)
    ]

    def step(carry, x):
        turn, x = x

        def whole(carry):
            own = (*turns, turn)
            outputs, seen = run(level, call.consts, [*fixed, *carry, *x], own)
            return outputs[:num_carry], (outputs[num_carry:], seen)

        if not resumed:
            return whole(carry)

        def skipped(carry):
            _, rest = jax.eval_shape(whole, carry)
            return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

        return jax.lax.cond(turn >= resumed[0], whole, skipped, carry)

    carry, (stacked, seen) = jax.lax.scan(
        step,
        carry,
        (jnp.arange(length), inputs[num_unscanned:]),
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    by_turn = {}
    for (name, number), value in seen.items():
        before, _, after = name.rpartition(_TURN)
        for i in range(length):
            by_turn[f"{before}{i}{after}", number] = jax.tree.map(
                lambda x, i=i: jax.lax.index_in_dim(x, i, keepdims=False), value
            )
    return [*carry, *stacked], by_turn


def _branched(eqn, levels, inputs, turns):
    index, *inputs = inputs
    calls = eqn.params["branches"]
    whole = [
        lambda *x, level=level, call=call: run(level, call.consts, x, turns)
        for level, call in zip(levels, calls, strict=True)
    ]
    seen = [jax.eval_shape(branch, *inputs)[1] for branch in whole]

    def branch(i):
        def taken(*x):
            outputs, own = whole[i](*x)
            others = [
                jax.tree.map(_unseen, each) for j, each in enumerate(seen) if j != i
            ]
            for other in others:
                own = own | other
            return outputs, own

        return taken

    return jax.lax.switch(index, [branch(i) for i in range(len(calls))], *inputs)


def _unseen(x):
    """Returns what stands for a value of a branch that was not taken: NaN, or 0."""
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.full(x.shape, jnp.nan if is_float else 0, x.dtype)


def _repeated(eqn, levels, inputs, turns):
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    for_test = params["cond_nconsts"]
    for_body = for_test + params["body_nconsts"]
    return jax.lax.while_loop(
        lambda x: run(levels[0], test.consts, [*inputs[:for_test], *x], turns)[0][0],
        lambda x: run(levels[1], body.consts, [*inputs[for_test:for_body], *x], turns)[
            0
        ],
        inputs[for_body:],
    )


def _sharded(eqn, level, inputs, turns):
    """Runs a shard_map; what is seen has an axis of the devices in front."""
    params = eqn.params
    mesh = params["mesh"]
    axes = tuple(params.get("newly_manual_axes") or params.get("manual_axes"))
    axes = tuple(name for name in mesh.axis_names if name in axes)

    def body(*inputs):
        outputs, seen = run(level, (), inputs, turns)
        return outputs, jax.tree.map(lambda x: jnp.asarray(x)[None], seen)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), jax.sharding.PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )
    return mapped(*inputs)


def _consts(eqn) -> list:
    return [call.consts for call in _closed(eqn)]


def _closed(eqn) -> list:
    return [
        each
        for value in eqn.params.values()
        for each in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(each, core.ClosedJaxpr)
    ]


def _jaxprs(eqn) -> list:
    """Returns the jaxprs inside of an equation, in the order of its parameters."""
    if eqn.primitive.name == "while":
        return [eqn.params[key].jaxpr for key in ("cond_jaxpr", "body_jaxpr")]
    if eqn.primitive.name in _CUSTOM:
        call = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
        return [getattr(call, "jaxpr", call)]
    return [
        getattr(each, "jaxpr", each)
        for value in eqn.params.values()
        for each in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(each, core.ClosedJaxpr | core.Jaxpr)
    ]


def _paths_of_sites(jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is site_p:
            yield _path(eqn)
        for inner in _jaxprs(eqn):
            yield from _paths_of_sites(inner)


def _path(eqn) -> str:
    """Returns the path of an equation within its level, from the stack of names.

    `transpose(jvp(encoder))/layer_0` is `encoder/layer_0`.
    """
    path, before = str(eqn.source_info.name_stack), None
    while path != before:
        path, before = re.sub(r"\w+\(([^()]*)\)", r"\1", path), path
    return "/".join(filter(None, path.split("/")))


def _joined(prefix: str, local: str) -> str:
    """Returns a path behind another; `_behind_scan` says what may end the first."""
    prefix, is_behind_scan, head = prefix.partition(_NUMBERED)
    if is_behind_scan and local:
        _, _, rest = local.partition("/")
        local = "/".join(filter(None, (f"{head[:-1]}{_TURN}", rest)))
    elif is_behind_scan:
        local = f"{_NUMBERED}{head}"
        return f"{prefix}{local}"
    return "/".join(filter(None, (prefix, local)))


def _behind_scan(path: str, jaxpr) -> str:
    """Returns the path of what is in a scan, with a place for the turn.

    Where all that is inside is in one module whose name ends in 0, the turn is to take
    the place of the 0, once that module is reached: layer 3 has the same name in a loop
    of Python and in a scan.
    """
    heads = _heads(jaxpr)
    (head,) = heads if len(heads) == 1 else ("",)
    if head.endswith("_0"):
        return f"{path}{_NUMBERED}{head}"
    return "/".join(filter(None, (path, _TURN)))


def _heads(jaxpr) -> set[str]:
    """Returns the first parts of all paths in a jaxpr."""
    heads = set()
    for eqn in jaxpr.eqns:
        path = _path(eqn)
        if path:
            heads.add(path.partition("/")[0])
        else:
            for inner in _jaxprs(eqn):
                heads |= _heads(inner)
    return heads


def _numbered(name: str, turn: Sequence[int]) -> str:
    for each in turn:
        name = name.replace(_TURN, str(each), 1)
    return name


def _call(name: str, count: int) -> str:
    """Returns the name of the site where its path is passed for the n-th time."""
    parent, _, last = name.rpartition("/")
    return f"{parent}#{count}/{last}"


def numbered_by_layer(name: str) -> tuple[str, int | None]:
    """Returns a name with `*` for the number of its layer, and the number.

    Args:
      name: `encoder/layer_3/attention/heads`, say: the first number counts.
    """
    found = _LAYER.search(name)
    if not found:
        return name, None
    number = None if found[1] == _TURN else int(found[1])
    return f"{name[: found.start(1)]}*{name[found.end(1) :]}", number


def _layer(name: str, turns: Sequence) -> int | Array | None:
    """Returns the layer of a site: a number of its name, or the turn of a scan."""
    found = _LAYER.search(name)
    if not found:
        return None
    return turns[0] if found[1] == _TURN else int(found[1])


def with_layer(change: Callable) -> Callable:
    """Returns a change that takes the value and the layer, of one that takes less."""
    if isinstance(change, Resume):
        return change
    try:
        given = inspect.signature(change).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return lambda value, layer: change(value)
    required = [
        each
        for each in given
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
    ]
    if len(required) > 1:
        return change
    return lambda value, layer: change(value)

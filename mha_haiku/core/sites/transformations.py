"""Functions that read and edit values inside a function, by the names of sites."""

import collections
import difflib
import functools
import gc
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax import core

from mha_haiku.core import arguments, display
from mha_haiku.core.sites import program, site_survey, traces
from mha_haiku.core.sites.site_survey import Address

# What an object refers to without holding its values.
_NO_HOLDERS = type, types.ModuleType, types.FunctionType, jax.Array


@arguments.checked
def look(
    function: Callable,
    at: str | Iterable[Address] | Mapping[Any, Callable],
    *,
    strict: bool = True,
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns a function that also returns the values at some of its sites.

    Args:
      function: Any JAX function; its array arguments are traced.
      at: Patterns of names, such as `"*/heads"` or `"layer_3/stream"`: a pattern may
        begin at any part of a path, and `*` matches anything, `/` included. A tuple of
        whole names, as `mh.sites` lists them, matches these alone. Or a dict from
        patterns or tuples to functions of the value, or of the value and the layer,
        whose results are returned instead of the values, so that nothing large outlives
        its layer. If several match a site, the first counts.
      strict: Whether a pattern, or a name of a tuple, that matches no site is an error.

    Returns:
      A function of the same arguments that returns `(output, found)`, with the values
      by full name. Values under `jax.vmap` have its axis in front, under `shard_map`
      and `jax.pmap` an axis of the devices; in a scan there is one value per turn. A
      value in the branch of a `cond` that was not taken is NaN, or 0.

    Raises:
      ValueError: From the returned function, if a pattern matches no site, or a site
        whose value cannot be returned.
      TypeError: From the returned function, if it returns arrays inside of a class that
        JAX does not know.

    Example:
      >>> def f(x):
      ...     return 2 * mh.site("half", x + 1)
      ...
      >>> output, found = mh.look(f, ["half"])(3.0)
      >>> float(output), float(found["half"])
      (8.0, 4.0)
    """
    if isinstance(at, str):
        at = [at]
    if not isinstance(at, Mapping):
        at = {pattern: lambda value: value for pattern in at}
    reads = {pattern: program.with_layer(function) for pattern, function in at.items()}
    return _walked(function, reads, {}, strict)


@arguments.checked
def edit(
    function: Callable, edits: Mapping[Any, Callable], *, strict: bool = True
) -> Callable:
    """Returns a function with changed values at some of its sites.

    Args:
      function: A JAX function, as for `look`.
      edits: Changes by pattern, or by a tuple of whole names, as for `look`: a change
        is a function of the value, or of the value and a number, and returns a value of
        the same shape. The number is the layer (the first number in the name), or the
        index of the name in the tuple; it is traced if it depends on the turn of a
        scan. All changes whose patterns match a site apply, in order.
      strict: Whether a pattern, or a name of a tuple, that matches no site is an error.

    Returns:
      A function of the same arguments that returns the changed output. To differentiate
      the changed function, use `jax.grad(edit(f, ...))`; `edit(jax.grad(f), ...)`
      changes values but not the derivatives.

    Raises:
      ValueError: From the returned function, if a pattern matches no site or a
        read-only site, or a change returns another shape.
      TypeError: From the returned function, if it returns arrays inside of a class that
        JAX does not know.

    Example:
      >>> def f(x):
      ...     return 2 * mh.site("half", x + 1)
      ...
      >>> float(mh.edit(f, {"half": lambda x: 10 * x})(3.0))  # 8 without the edit
      80.0
    """
    changes = {pattern: program.with_layer(change) for pattern, change in edits.items()}
    return _only_output(_walked(function, {}, changes, strict))


def show_stream(function: Callable) -> Callable:
    """Returns a function with sites of its residual stream, if it can be recognized.

    These are "embedding", "stream", "feed_forward/output" and, for norms, "factor"; see
    `help(mha_haiku.core.sites.residual)`. A function whose attention already has sites
    is unchanged.
    """
    return _only_output(_walked(function, {}, {}, strict=True, shows_stream=True))


class Sites(dict):
    """The sites of a function, by name; they print one per line."""

    advice: str = ""  # what is assumed, and what else may be attention

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [
            f"{name:{width}}  {display.value(value)}" for name, value in self.items()
        ]
        return "\n".join([*lines, *filter(None, [self.advice])])


def sites(function: Callable, *args, **kwargs) -> Sites:
    """Lists a function's sites, with shapes and dtypes; runs nothing.

    Example:
      >>> def f(x):
      ...     return 2 * mh.site("half", x + 1)
      ...
      >>> mh.sites(f, 3.0)
      half  float32[]
    """
    closed, *_ = traces.trace(function, args, kwargs)
    survey, result = site_survey.Survey(closed), Sites()
    for stop, names in survey.names():
        result.update(zip(names, stop.views(), strict=True))
    result.advice = survey.remarks()
    return result


def _walked(
    function: Callable,
    reads: dict[Address, Callable],
    edits: dict[Address, Callable],
    strict: bool,
    shows_stream: bool = False,
) -> Callable:
    """Wraps a function to return its edited output and the values read."""

    def walk(function: Callable, args: tuple, kwargs: dict) -> tuple[Any, dict]:
        closed, leaves, rest, outputs_of = traces.trace(function, args, kwargs)
        survey = site_survey.Survey(closed, shows_stream=shows_stream)
        _refuse_hidden(rest)
        _match(survey, reads, edits, strict)
        outputs, seen = program.run(survey.top, (), *leaves)
        # JAX keeps the order of no other dict.
        result = collections.OrderedDict()
        for name in (name for _, names in survey.names() for name in names):
            address = _first(reads, name)
            if address is not None:
                result[name] = seen[name, address]
        return outputs_of(outputs), result

    return traces.transformed(function, walk)


def _only_output(walked: Callable) -> Callable:
    @functools.wraps(walked)
    def run(*args, **kwargs):
        return walked(*args, **kwargs)[0]

    return run


def _refuse_hidden(leaves: list):
    """Raises TypeError if a leaf that is no array holds values of the trace."""
    for leaf in leaves:
        if _holds_tracer(leaf):
            name = type(leaf).__qualname__
            raise TypeError(
                f"function must return arrays in classes that JAX knows, got {name} "
                "with some inside: register the class, by "
                f"jax.tree_util.register_dataclass({name}) if it is a dataclass, else "
                "by jax.tree_util.register_pytree_node."
            )


def _holds_tracer(x: Any) -> bool:
    queue, seen = [x], set()
    for each in queue:
        if isinstance(each, core.Tracer):
            return True
        if id(each) not in seen and not isinstance(each, _NO_HOLDERS):
            seen.add(id(each))
            queue += gc.get_referents(each)  # attributes, slots, entries of containers
    return False


def _match(
    survey: site_survey.Survey,
    reads: dict[Address, Callable],
    edits: dict[Address, Callable],
    strict: bool,
) -> None:
    """Enters reads and edits in the stops; raises ValueError for impossible ones."""
    stops, groups = list(survey.top.all_stops()), set()
    all_names = [name for _, names in survey.names() for name in names]
    for stop in stops:
        for i, facet in enumerate(stop.site.params["facets"]):
            first_names = {_first(reads, name) for name in stop.names_of(i)}
            for address in [address for address in reads if address in first_names]:
                if stop.level.in_while:
                    raise ValueError(
                        f"{stop.names[i]!r} is inside a while loop, whose values at "
                        "each turn cannot be returned: use jax.lax.scan, or look at "
                        "the function that the loop calls."
                    )
                stop.reads.append((i, address, reads[address]))
            for address, change in edits.items():
                edit = stop.edit(i, address, change)
                if edit is None:
                    continue
                if facet.write is None:
                    raise ValueError(
                        f"{stop.names[i]!r} can be read, not edited: {facet.advice}."
                    )
                stop.edits.append(edit)
        if stop.is_active:
            groups.add(stop.group)
    edited = {stop.group for stop in stops if stop.edits}
    for stop in stops:
        if stop.group is not None:
            stop.is_kept = stop.group in groups
            stop.site = stop.site.after_edits() if stop.group in edited else stop.site
    for address in (*reads, *edits) if strict else ():
        if isinstance(address, tuple):
            absent = set(address).difference(all_names)
        else:
            is_there = any(site_survey.matches(address, x) for x in all_names)
            absent = set() if is_there else {address}
        if absent:
            _refuse(min(absent), all_names, survey)


def _first(addresses: Iterable[Address], name: str) -> Address | None:
    return next((x for x in addresses if site_survey.matches(x, name)), None)


def _refuse(pattern: str, names: list[str], survey: site_survey.Survey) -> None:
    names = list(dict.fromkeys(names))
    message = f"{pattern!r} names no site of the function, which has "
    if names:
        nearest = difflib.get_close_matches(pattern, names, n=5, cutoff=0.0)
        message += f"{len(names)}, such as {', '.join(nearest)}; mh.sites lists them."
    else:
        message += "none."
    raise ValueError(f"{message}\n{survey.advice()}".rstrip())

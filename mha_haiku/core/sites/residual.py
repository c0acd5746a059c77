"""Recognizes the residual stream and the factors of norms in programs without sites.

A term of the stream is added to what it was computed from: `x + f(x)`, with a product
in f, or `(x + f(x)) + g(x)`. The start of a chain of such sums is the site "embedding"
(in a second stack "decoder_embedding"), and a term without attention, including its
bias, is "feed_forward/output". In an unbroken chain the input of a layer, and the
output of the last one, is "stream"; a norm of the sum breaks the chain. The inverse
root of a sum of squares is the "factor" of a norm.

The stream may be the carry of a scan, and its layers may be calls. Not recognized are
sums with weights that depend on the data (highways), and a nonlinearity after attention
within one term: code that assumes that the sites add up must check it. Attention that
`recognition` does not find counts as a feed-forward part.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from mha_haiku.core.site_primitive import Facet
from mha_haiku.core.sites import levels
from mha_haiku.core.sites.jaxprs import Site

_ADDING = {"add", "add_any"}
_ROOTS = {"rsqrt", "sqrt", "pow"}
# Primitives between a sum of squares and its root.
_BEFORE_ROOTS = levels.NEUTRAL | {
    *("add", "sub", "mul", "div", "max", "min", "clamp", "select_n", "square"),
    "integer_pow",
}


class Named(NamedTuple):
    """A site, and the source of its name."""

    site: Site
    eqn: core.JaxprEqn | None = None  # one of its modules; None for the level itself
    kind: str = ""  # the name to number if there are no modules


class _Sum(NamedTuple):
    """A term, and the stream that it is added to; a scan has no term."""

    equation: levels.Equation
    before: levels.Value
    term: levels.Value | None
    after: levels.Value
    anchors: int  # the bits of earlier values of the stream


def stream(
    jaxpr: core.Jaxpr,
    heads: set[core.Var],
    carries: dict[int, tuple[int, int]],
    *,
    is_top: bool,
) -> tuple[list[Named], core.Var | None]:
    """Finds the sites of a level, and the input that its chain starts with.

    Args:
      jaxpr: The level.
      heads: The variables of the heads of attention, in the level and inside.
      carries: For scans whose carry is a stream, by the id of the equation, the indices
        of the carry among its inputs and outputs.
      is_top: Whether the level is the whole program.
    """
    equations = levels.graph(jaxpr, ()).equations
    attention = levels.union(
        x.bit
        for equation in equations
        if equation.is_marked or heads.intersection(equation.eqn.outvars)
        for x in equation.outputs
    )
    sums = _sums(equations, carries)
    behind = levels.union(x.after.bit for x in sums)
    starts = dict.fromkeys(x.before for x in sums if not x.before.behind & behind)
    sites = [*_factors(equations)]
    for name, x in zip(("embedding", "decoder_embedding"), starts, strict=False):
        if is_top or x.maker is not None:
            sites += _named(x, Facet(name))
    is_unbroken = all(y.before is x.after for x, y in itertools.pairwise(sums))
    is_one = len(starts) == 1
    sites += _layers(sums, attention, is_one and is_unbroken)
    after = sums[-1].after if is_one and is_unbroken else None
    if after and (is_top or not any(x.is_output for x in levels.forms(after))):
        sites += _named(after, Facet("stream"))
    begin = [x.variable for x in starts if x.maker is None and is_one]
    return sites, begin[0] if begin else None


def _layers(sums: list[_Sum], attention: int, has_stream: bool) -> Iterator[Named]:
    """Yields the sites of the inputs of layers, and of terms that no head writes."""
    entered = set()
    for sum_ in sums:
        before, source = sum_.before, (sum_.equation.eqn, "layer")
        # Terms in a call are found in the level inside.
        if sum_.term is None or sum_.equation.calls:
            continue
        between = sum_.term.behind & ~before.behind
        if has_stream and between & attention and before not in entered:
            entered.add(before)
            yield from _named(before, Facet("stream"), *source)
        for x in _terms(before, sum_.term):
            if not x.behind & ~before.behind & attention:
                yield from _named(x, Facet("feed_forward/output"), *source)


def _terms(before: levels.Value, term: levels.Value) -> list[levels.Value]:
    """Splits a sum of terms that all depend on the stream through products."""
    maker = levels.origin(term).maker
    if maker is not None and maker.name in _ADDING:
        if all(x.by_product & before.behind for x in maker.inputs):
            return [y for x in maker.inputs for y in _terms(before, x)]
    return [term]


def _sums(
    equations: list[levels.Equation], carries: dict[int, tuple[int, int]]
) -> list[_Sum]:
    """Finds the sums of a residual stream."""
    sums: dict[levels.Value, _Sum] = {}  # by what they return
    for equation in equations:
        if id(equation.eqn) in carries:
            place, number = carries[id(equation.eqn)]
            before, after = equation.inputs[place], equation.outputs[number]
            sums[after] = _Sum(equation, levels.origin(before), None, after, 0)
        elif equation.name in _ADDING:
            sum_ = _residual(equation, sums)
            sums |= {} if sum_ is None else {sum_.after: sum_}
    kept: list[_Sum] = []
    for sum_ in reversed(sums.values()):  # sums inside a term come before its sum
        part = sum_.before if sum_.term is None else sum_.term
        is_inside = any(
            x.term is not None
            and x.before.bit & part.behind
            and sum_.after.bit & x.term.behind
            for x in kept
        )
        kept = kept if is_inside else [sum_, *kept]
    return kept


def _residual(equation: levels.Equation, sums: dict[levels.Value, _Sum]) -> _Sum | None:
    """Finds the stream and the term of a sum, if it is one."""
    (after,) = equation.outputs
    if not after.is_data or len(after.shape) < 2:
        return None
    for before, term in (equation.inputs, equation.inputs[::-1]):
        if not before.shape == term.shape == after.shape:
            continue
        # The input of a layer may be scaled before the sum.
        for root in _roots(before):
            anchors = root.bit | (sums[root].anchors if root in sums else 0)
            if root.is_data and term.by_product & anchors:
                return _Sum(equation, root, term, after, anchors)
    return None


def _roots(value: levels.Value) -> Iterator[levels.Value]:
    """Yields the root of a value, and of the values that it is a multiple of."""
    while True:
        yield (root := levels.origin(value))
        if root.maker is None or root.maker.name not in ("mul", "div"):
            return
        factors = [x for x in root.maker.inputs if x.shape]
        if len(factors) != 1:
            return
        (value,) = factors


def _factors(equations: list[levels.Equation]) -> Iterator[Named]:
    """Yields the sites of inverse roots of sums, up to operations of norms."""
    sums: set[levels.Value] = set()
    for equation in equations:
        name, inputs = equation.name, equation.inputs
        is_square = name == "dot_general" and inputs[0].number == inputs[1].number
        if name == "reduce_sum" or is_square:
            sums.update(x for x in equation.outputs if inputs[0].is_data)
        elif sums.isdisjoint(inputs):
            continue
        elif name in _BEFORE_ROOTS:
            sums.update(equation.outputs)
        elif name in _ROOTS and not equation.calls:
            facet = Facet("factor")
            if name == "sqrt":
                inverse = lambda value, changed: 1 / changed  # noqa: E731
                facet = Facet("factor", jnp.reciprocal, inverse)
            yield from _named(equation.outputs[0], facet, equation.eqn, "norm")


def _named(value: levels.Value, facet: Facet, *source: Any) -> Iterator[Named]:
    """Yields the site of a value, if it has a variable and no such site yet."""
    users = [user for x in levels.forms(levels.origin(value)) for user in x.users]
    names = {x.name for user in users for x in user.params.get("facets", ())}
    if value.variable is not None and facet.name not in names:
        yield Named(Site.of(value.index, value.variable, facet), *source)

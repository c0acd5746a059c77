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

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from mha_haiku.core.site_primitive import Facet
from mha_haiku.core.sites import levels
from mha_haiku.core.sites.jaxprs import Site

_ROOTS = {"rsqrt", "sqrt", "pow"}
# Primitives between a sum of squares and its root.
_BEFORE_ROOTS = {
    *("add", "sub", "mul", "div", "max", "min", "clamp", "select_n", "square"),
    "integer_pow",
}
_MOST_BEFORE_ROOTS = 24


class Named(NamedTuple):
    """A site, and the source of its name."""

    site: Site | None  # None if no variable of the level holds the value
    eqn: core.JaxprEqn | None  # an equation of its modules; None for the level itself
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
    equations = levels.equations(jaxpr)
    sites, begin = _StreamSearch(equations, heads, carries, is_top).found()
    return [*_factors(equations), *sites], begin


class _Ancestry:
    """The values from which the values of a level are computed."""

    # Sets of values are bits of integers: a program has thousands of values, which
    # depend on nearly all earlier ones. A value has the bit of its equation, or its own
    # bit.

    def __init__(self, equations: list[levels.Equation]):
        self._of: dict[levels.Value, int] = {}
        self._by_product: dict[levels.Value, int] = {}
        self._bits: dict[Any, int] = {}
        for equation in equations:
            behind = _union(map(self.of, equation.inputs))
            products = _union(map(self.by_product, equation.inputs))
            for x in equation.outputs:
                self._of[x] = self.own(x) | behind
                self._by_product[x] = behind if equation.is_product else products

    def own(self, value: levels.Value) -> int:
        """Returns the set of only this value."""
        key = value if value.maker is None else value.maker
        return self._bits.setdefault(key, 1 << len(self._bits))

    def of(self, value: levels.Value) -> int:
        """Returns the set of a value and all values it depends on."""
        return self._of[value] if value in self._of else self.own(value)

    def by_product(self, value: levels.Value) -> int:
        """Returns the set of values that a value depends on through a product."""
        return self._by_product.get(value, 0)


class _StreamSearch:
    """The search for the sums of a residual stream in a level."""

    def __init__(
        self,
        equations: list[levels.Equation],
        heads: set[core.Var],
        carries: dict[int, tuple[int, int]],
        is_top: bool,
    ):
        self.equations, self.carries, self.is_top = equations, carries, is_top
        self.made = _Ancestry(equations)
        self.heads = _union(
            self.made.own(x)
            for equation in equations
            if equation.is_marked or heads.intersection(equation.eqn.outvars)
            for x in equation.outputs
        )

    def found(self) -> tuple[list[Named], core.Var | None]:
        sums = self._sums()
        starts = self._starts(sums)
        sites = [*self._written(sums)]
        names = "embedding", "decoder_embedding"
        for name, x in zip(names, starts, strict=False):
            if self.is_top or x.maker is not None:
                sites.append(Named(_site(x, Facet(name)), None))
        is_unbroken = all(y.before is x.after for x, y in itertools.pairwise(sums))
        if sums and len(starts) == 1 and is_unbroken:
            sites += self._streams(sums)
        is_given = len(starts) == 1 and starts[0].maker is None
        begin = starts[0].variable if is_given else None
        return sites, begin

    def _written(self, sums: list[_Sum]) -> Iterator[Named]:
        """Yields the sites of terms that no head writes."""
        for sum_ in sums:
            # Terms in a call are found in the level inside.
            is_here = not sum_.equation.calls
            for x in self._terms(sum_.before, sum_.term) if is_here else ():
                if not self._attends(sum_.before, x):
                    site = _site(x, Facet("feed_forward/output"))
                    yield Named(site, sum_.equation.eqn, "layer")

    def _streams(self, sums: list[_Sum]) -> Iterator[Named]:
        """Yields the sites of the inputs of layers, and of the output of the last."""
        entered = set()
        for sum_ in sums:
            if sum_.term is None or sum_.equation.calls or sum_.before in entered:
                continue
            if self._attends(sum_.before, sum_.term):
                entered.add(sum_.before)
                site = _site(sum_.before, Facet("stream"))
                yield Named(site, sum_.equation.eqn, "layer")
        last = sums[-1]
        if self.is_top or not any(x.is_output for x in levels.forms(last.after)):
            yield Named(_site(last.after, Facet("stream")), None)

    def _sums(self) -> list[_Sum]:
        sums: list[_Sum] = []
        by_after: dict[levels.Value, _Sum] = {}
        for equation in self.equations:
            sum_ = None
            if id(equation.eqn) in self.carries:
                place, number = self.carries[id(equation.eqn)]
                before, after = equation.inputs[place], equation.outputs[number]
                sum_ = _Sum(equation, levels.origin(before), None, after, 0)
            elif equation.name in ("add", "add_any"):
                sum_ = self._residual(equation, by_after)
            if sum_ is not None:
                by_after[sum_.after] = sum_
                sums.append(sum_)
        kept: list[_Sum] = []
        for sum_ in reversed(sums):  # sums inside a term come before its sum
            if not any(self._is_inside(sum_, x) for x in kept):
                kept.insert(0, sum_)
        return kept

    def _residual(
        self, equation: levels.Equation, by_after: dict[levels.Value, _Sum]
    ) -> _Sum | None:
        """Finds the stream and the term of a sum, if it is one."""
        (after,) = equation.outputs
        if not after.is_data or len(after.shape) < 2:
            return None
        for before, term in (equation.inputs, equation.inputs[::-1]):
            if not before.shape == term.shape == after.shape:
                continue
            # The input of a layer may be scaled before the sum.
            for root in _roots(before):
                known = by_after.get(root)
                anchors = self.made.own(root) | (known.anchors if known else 0)
                if root.is_data and self.made.by_product(term) & anchors:
                    return _Sum(equation, root, term, after, anchors)
        return None

    def _is_inside(self, inner: _Sum, outer: _Sum) -> bool:
        if outer.term is None or inner is outer:
            return False
        part = inner.before if inner.term is None else inner.term
        is_behind = self.made.own(outer.before) & self.made.of(part)
        return bool(is_behind and self.made.own(inner.after) & self.made.of(outer.term))

    def _starts(self, sums: list[_Sum]) -> list[levels.Value]:
        starts, behind = {}, _union(self.made.own(x.after) for x in sums)
        for sum_ in sums:
            if not self.made.of(sum_.before) & behind:
                starts[sum_.before] = None
        return list(starts)

    def _terms(
        self, before: levels.Value, term: levels.Value | None
    ) -> list[levels.Value]:
        """Splits a sum of terms that all depend on the stream through products."""
        if term is None:
            return []
        root = levels.origin(term)
        if root.maker is not None and root.maker.name in ("add", "add_any"):
            parts = root.maker.inputs
            of = self.made.of(before)
            if all(self.made.by_product(x) & of for x in parts):
                return [y for x in parts for y in self._terms(before, x)]
        return [term]

    def _attends(self, before: levels.Value, term: levels.Value) -> bool:
        """Checks whether there is attention between a stream and a term."""
        between = self.made.of(term) & ~self.made.of(before)
        return bool(between & self.heads)


def _factors(equations: list[levels.Equation]) -> Iterator[Named]:
    for equation in equations:
        is_here = equation.name in _ROOTS and not equation.calls
        if not is_here or not _is_of_sum(equation.inputs[0]):
            continue
        facet = Facet("factor")
        if equation.name == "sqrt":
            facet = Facet("factor", jnp.reciprocal, lambda value, changed: 1 / changed)
        yield Named(_site(equation.outputs[0], facet), equation.eqn, "norm")


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


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


def _is_of_sum(value: levels.Value) -> bool:
    """Checks whether a value is a sum of data, up to operations of norms."""
    # Constants, such as the bounds of a maximum, do not count.
    waiting = [value.maker]
    for _ in range(_MOST_BEFORE_ROOTS):
        waiting = [maker for maker in waiting if maker is not None]
        if not waiting:
            return False
        maker = waiting.pop(0)
        is_square = len({x.number for x in maker.inputs}) == 1
        if maker.name == "reduce_sum" or maker.name == "dot_general" and is_square:
            return maker.inputs[0].is_data
        if maker.name in _BEFORE_ROOTS | levels.NEUTRAL:
            waiting += [x.maker for x in maker.inputs]
    return False


def _site(value: levels.Value, facet: Facet) -> Site | None:
    """Makes the site of a value, if it has a variable and no such site yet."""
    if value.variable is None:
        return None
    users = [user for x in levels.forms(levels.origin(value)) for user in x.users]
    known = [y for user in users for y in user.params.get("facets", ())]
    if any(x.name == facet.name for x in known):
        return None
    return Site.of(value.index, value.variable, facet)

"""Recognizes attention in programs without sites.

Attention is a softmax over the products of queries and keys that reaches a product with
values. Recognized attention gets the sites of our attention, in canonical axes: "query"
`[B..., T, H, K]`, "key" `[B..., S, G, K]`, "value" `[B..., S, G, V]`, "weights"
`[B..., H, T, S]`, "map", and "heads" `[B..., T, H, V]`, the product of weights and
values. A site is omitted if no variable of the program holds it. The map's mask allows
the keys that have a weight, or a score whose weight is rounded to 0.

Recognized are

* exponentials over their sum, `exp(x - logsumexp(x))`, and sigmoids; values that two
  equations compute in the same way count as one;
* with any scale, bias, mask, `where=` or soft cap of the scores, and with anything
  added to the sum or to the scores as a column (attention sinks);
* weights that are cast, masked, renormalized, dropped out, mixed between heads, or
  scaled and shifted by parameters before they meet the values; the site "weights" is
  after all of these except dropout. Dropout is a choice by random bits, or zeros
  together with a scale, as in `where(kept, weights / 0.8, 0)`;
* one head, several, grouped heads, a key head for all, and all of these under `vmap`.
  The axis of heads is what the projection of the queries makes along with their size,
  or else the projection of keys or values; without projections weights are assumed to
  be `[B, H, T, S]`, or `[B, T, S]`, and `sites` says so. Heads may be stacked along
  the batch by `concatenate(split(x))`;
* attention at any level of a program: in the body of a scan, a jitted or a remat
  function.

Not recognized are

* scores that are not products of queries and keys (additive attention), a query without
  an axis (pooling), several axes of keys, and a softmax over queries;
* sums that are products with ones (`e / (e @ ones)`), cumulative sums, or computed in a
  `lax.map` or another loop;
* differences of two softmaxes (differential attention), and weights that are added to
  or multiplied by anything else computed from the data;
* weights with another function (a power, a threshold) between them and the values, and
  exponentials over a sum of others;
* values that are divided by the sum only after the product (as in tiled attention), and
  kernels.

If a function has a softmax of such a form, `sites` reports it, and so does the error of
`look` and `edit` for a pattern that matches nothing. A softmax over anything else is
not attention: keys and values must come from the same data, or queries, keys and values
must all be inputs of the level. This excludes routers, codebooks and soft labels, and
also keys and values that are projections of two inputs, or precomputed in a level that
computes its queries. In a function that is wrapped with its parameters these are told
from data, and queries, keys and values may come from any data.
"""

import collections
import functools
import math
from typing import Any, NamedTuple

from jax.extend import core

from mha_haiku.core.attention import map_sites, row_maps
from mha_haiku.core.site_primitive import Facet
from mha_haiku.core.sites import axes as all_axes
from mha_haiku.core.sites import axis_groups, levels, regions, softmaxes
from mha_haiku.core.sites.axes import AxisFactors, Reached
from mha_haiku.core.sites.axis_groups import Layout
from mha_haiku.core.sites.jaxprs import Site
from mha_haiku.core.sites.levels import Equation
from mha_haiku.core.sites.softmaxes import Softmax

_WEIGHING = {*levels.EXPONENTIALS, "logistic"}
_ENDING = {"dot_general", "reduce_sum", "log", "log1p", "site"}
_READ_ELSEWHERE = 'the program also reads it elsewhere; edit "weights" or "heads"'


Constants = set[core.Var] | None


def attentions(
    jaxpr: core.Jaxpr, constants: Constants
) -> list[tuple[core.JaxprEqn, list[Site], bool]]:
    """Finds the attentions of a level, without those inside of its calls.

    An attention is returned as the equation whose name stack names it, its sites, and
    whether the axis of heads is only assumed. `constants` are from `jaxprs.constants`.
    """
    found = _found(_equations(jaxpr, constants))
    return [(jaxpr.eqns[x.index], y.sites, y.is_assumed) for x, y in found.items()]


def has_others(jaxpr: core.Jaxpr, constants: Constants) -> bool:
    """Checks whether a level has exponentials over a sum outside recognized attention.

    They come from a product and reach another, as in other forms of attention.
    """
    equations = _equations(jaxpr, constants)
    known = {softmaxes.unshifted(x.inputs[0])[-1] for x in _found(equations)}
    # Exponentials, and their quotients. Exponentials that are multiplied by other data
    # before they are divided are no softmax but decays, as in Mamba-2 and xLSTM.
    masses, shares, read_by = set(), set(), set()
    for equation in equations:
        if equation.is_marked:
            continue
        name, inputs = equation.name, {x.number for x in equation.inputs}
        outputs = {x.number for x in equation.outputs}
        if inputs & (masses | shares):
            read_by.add(name)
        if name in levels.EXPONENTIALS and equation.inputs[0].is_made:
            is_known = not known.isdisjoint(softmaxes.unshifted(equation.inputs[0]))
            masses |= set() if is_known else outputs
        elif name in _ENDING:
            continue
        elif inputs & shares or name == "div" and equation.inputs[0].number in masses:
            shares |= outputs
        elif inputs & masses and name != "div":
            others = [x for x in equation.inputs if x.number not in masses]
            is_scaled = name == "mul" and any(x.is_made for x in others)
            masses |= set() if is_scaled else outputs
    return {"dot_general", "reduce_sum"} <= read_by


def _equations(jaxpr: core.Jaxpr, constants: Constants) -> list[Equation]:
    """Lists the equations of a level, if attention may be among them."""
    primitives = levels.primitives(jaxpr)
    if "dot_general" not in primitives or not primitives & _WEIGHING:
        return []
    return levels.equations(jaxpr, constants)


class _Attention(NamedTuple):
    softmax: Equation  # the last one
    scored: Equation  # the product of queries and keys
    sites: list[Site]
    is_assumed: bool  # whether only the order of axes tells which are heads


def _found(equations: list[Equation]) -> dict[Equation, _Attention]:
    """Finds attentions, by the last equation of the softmax."""
    found: dict[Equation, _Attention] = {}
    for product in equations:
        for side in (0, 1) if product.name == "dot_general" else ():
            attention = _AttentionSearch(product, side).attention()
            # The same weights in a second product belong to a derivative.
            if attention and attention.sites and attention.softmax not in found:
                found[attention.softmax] = attention
                break
    # Queries and keys of scores that several softmaxes read, or that are computed again
    # for the sum, are not of one attention.
    counts = collections.Counter(x.scored.outputs[0].number for x in found.values())
    products = {x.outputs[0] for x in equations if x.name == "dot_general"}
    again = collections.Counter(x.number for x in products if x.users)
    return {
        end: x
        if counts[number] * again[number] == 1
        else x._replace(sites=[*map(_with_shared_scores, x.sites)])
        for end, x in found.items()
        for number in [x.scored.outputs[0].number]
    }


def _with_shared_scores(site: Site) -> Site:
    """Makes queries and keys read-only."""
    facets = [
        x._replace(write=None) if x.name in ("query", "key") else x
        for x in site.params["facets"]
    ]
    return site._replace(params=site.params | {"facets": tuple(facets)})


class _Scores(NamedTuple):
    """The product of queries and keys, whose sizes are marked."""

    product: Equation
    query: Reached
    key: Reached
    steps: list[Reached]  # from the softmax to the product


class _AttentionSearch:
    """The search for an attention whose weights are one operand of a product."""

    def __init__(self, product: Equation, side: int):
        self.product, self.side = product, side
        self.axes = all_axes.Axes()
        self.of = self.axes.of

    def attention(self) -> _Attention | None:
        """Finds the attention and its sites, if the operand is its weights."""
        product, side = self.product, self.side
        weights, values = product.inputs[side], product.inputs[1 - side]
        has_queries = len(product.contracted(side)) == 1 and bool(product.free(side))
        is_computed = weights.maker is not None and not product.is_marked
        if not has_queries or not is_computed or 0 in weights.shape + values.shape:
            return None
        weights = self.axes.start(weights, *product.contracted(side))
        softmax = softmaxes.found(self.axes, weights)
        # Attention entirely inside a call is found when the call is searched.
        calls = product.calls
        if softmax is None or (calls and calls[:1] == softmax.end.calls[:1]):
            return None

        read, heads = self.mixed(weights)
        free = [weights.axes[i] for i in product.free(side)]
        goal = functools.partial(self.scores, values, softmax.is_sigmoid, free)
        walk = self.axes.walk(softmax.scores, Equation.made, goal)
        if walk is None:
            return None
        to_scores, scores = walk
        scores = scores._replace(steps=to_scores)
        sources = scores.query, scores.key, read
        made = (axis_groups.made_with_size(self.axes, x) for x in sources)
        # `weights @ values` drops batch axes of size 1 from the weights.
        whole = max(softmax.weights, key=lambda step: len(step.axes))
        of_heads = next(filter(None, made), ())
        groups = axis_groups.groups(self.axes, whole, free, of_heads)
        only = set(self.of(*scores.query.axes)) - set(self.of(*scores.key.axes))
        if not set(self.of(groups.queries)) <= only:
            return None
        sites = self.sites(softmax, scores, read, heads, groups)
        return _Attention(softmax.end, scores.product, sites, groups.is_assumed)

    def mixed(self, weights: Reached) -> tuple[Reached, Reached]:
        """Follows axes of weights to the values and to the result of the product."""
        product, side = self.product, self.side
        values = self.axes.start(product.inputs[1 - side], *product.free(1 - side))
        size = self.of(*values.marks)
        common = (
            [*product.shared(i), *product.contracted(i)] for i in (side, 1 - side)
        )
        for i, j in zip(*common, strict=True):
            values.axes[j] = weights.axes[i]
        values = values._replace(marks=(*weights.marks, size))
        heads = self.axes.ahead(product, side, weights)
        by_values = self.axes.ahead(product, 1 - side, values)
        assert heads is not None and by_values is not None  # links are known
        known = set(self.axes.with_ones(*values.axes))
        pairs = zip(heads.axes, by_values.axes, strict=True)
        axes = [y if set(y) <= known else x for x, y in pairs]
        return values, Reached(heads.value, axes, (size,))

    # --- Queries and keys

    def scores(
        self,
        value: levels.Value,
        is_sigmoid: bool,
        free: list[AxisFactors],
        equation: Equation,
        step: Reached,
    ) -> _Scores | None:
        """Finds queries and keys, if this is their product and belongs to values."""
        if equation.name != "dot_general" or equation.is_marked:
            return None
        (keys,) = step.marks
        for side in (0, 1) if equation.contracted(0) else ():
            query, key = (
                self.axes.back(equation, i, step._replace(marks=()))
                for i in (side, 1 - side)
            )
            assert query is not None and key is not None  # no marks to lose
            of_query, of_key = (set(self.of(*x.axes)) for x in (query, key))
            known = [set(self.of(x)) for x in free if self.of(x)]
            has_queries = not known or any(x <= of_query - of_key for x in known)
            if not has_queries or not set(self.of(keys)) <= of_key - of_query:
                continue
            sizes = [
                self.of(*(x.axes[i] for i in equation.contracted(j)))
                for x, j in ((query, side), (key, 1 - side))
            ]
            query = query._replace(marks=(sizes[0],))
            key = key._replace(marks=(keys, sizes[1]))
            if self.belong_together(query, key, value, is_sigmoid):
                return _Scores(equation, query, key, [])
        return None

    def belong_together(
        self, query: Reached, key: Reached, value: levels.Value, is_sigmoid: bool
    ) -> bool:
        """Checks whether keys and values come from the same data, as in attention."""
        if all(x.is_constant is False for x in (query.value, key.value, value)):
            return True
        are_made = [x.is_made for x in (query.value, key.value, value)]
        if any(are_made) or is_sigmoid:
            if all(are_made[1:]):
                return _have_common_source(key.value, value)
            if is_sigmoid or not any(are_made[1:]):
                return False
            return _have_common_source(query.value, key.value, value)
        # All are inputs. If keys are the values, they are a codebook, and keys [K, S],
        # as in a product of matrices, are the parameters of a layer.
        of_query, of_key, of_value = map(levels.origin, (query.value, key.value, value))
        if of_key is of_value and of_value is not of_query:
            return False
        axes, (_, size) = self.axes.origin(key).axes, key.marks
        return len(axes) != 2 or self.of(axes[-1]) == self.of(size)

    # --- The values shown

    def weights(
        self, steps: list[Reached], groups: axis_groups.Groups
    ) -> Reached | None:
        """Finds the weights to show."""
        best = softmaxes.undropped(steps)
        (keys,) = steps[0].marks
        whole = {*self.of(*groups.batch, groups.heads, groups.queries, keys)}
        for step in (*steps[best::-1], *steps[best + 1 :]):
            is_whole = {*self.of(*step.axes)} == whole
            if is_whole and step.value.is_readable(self.product.index):
                return step
        return None

    def held(self, step: Reached) -> Reached | None:
        """Finds the first variable of the level that has the numbers of a step."""
        while step.value.variable is None:
            users = step.value.users
            if len(users) != 1 or users[0].name not in levels.NEUTRAL:
                return None
            after = self.axes.ahead(users[0], 0, step)
            if after is None:
                return None
            step = after
        return step

    def sites(
        self,
        softmax: Softmax,
        scores: _Scores,
        values: Reached,
        heads: Reached,
        groups: axis_groups.Groups,
    ) -> list[Site]:
        """Lists the sites of an attention whose values are variables of the level."""
        weights = self.weights(softmax.weights, groups)
        held = self.held(heads)
        if weights is None or held is None:
            return []
        (query_size,), (scored, key_size) = scores.query.marks, scores.key.marks
        keys, size = values.marks
        # The equation that a site comes before, and the value's axes after the batch
        # axes; None is the axes of heads, which are the rest.
        wanted = {
            "query": (scores.product, scores.query, groups.queries, None, query_size),
            "key": (scores.product, scores.key, scored, None, key_size),
            "weights": (weights.value, weights, groups.heads, groups.queries, keys),
            "value": (self.product, values, keys, None, size),
            "heads": (held.value, held, groups.queries, groups.heads, size),
        }
        variables, shown, sites = {}, {}, []
        for name, (place, step, *axes) in wanted.items():
            forms = self.axes.forms(step)
            step = next((x for x in forms if x.value.is_readable(place.index)), None)
            axes = (*groups.batch, *axes)
            layout = step and Layout.of(self.axes, step, axes, groups.heads)
            if step is None or layout is None:
                continue
            variables[name], shown[name] = step.value.variable, layout
            # An edit of a variable affects everything that reads it from there on.
            readers = [x for x in step.value.users if x.index >= place.index]
            is_exclusive = len(readers) == 1 and not step.value.is_output
            is_result = name in ("weights", "heads")
            write = layout.hidden if is_result or is_exclusive else None
            facet = Facet(name, layout.shown, write, _READ_ELSEWHERE)
            sites.append(Site.of(place.index, variables[name], facet))
        if not {"weights", "heads"} <= shown.keys():
            return []
        masked = None
        if not softmax.is_sigmoid:
            masked = softmaxes.masked(self.axes, scores.steps, self.product.index)
        if masked is not None:
            axes = (*groups.batch, groups.heads, groups.queries, keys)
            layout = Layout.of(self.axes, masked, axes, groups.heads)
            if layout is not None:
                variables["scores"], shown["scores"] = masked.value.variable, layout
        known = axis_groups.fitting(shown)
        read = functools.partial(axis_groups.map_of, known, map_sites.map_of_recognized)
        leaves = {name: variables[name] for name in known}
        facet = Facet("map", read, None, 'edit "weights"')
        reached = {"weights": weights, "scores": masked}
        rows = self.rows(
            {name: x for name, x in reached.items() if name in known}, known
        )
        if rows is not None:
            leaves["rows"] = tuple(rows.rows.variables)
            sees = functools.partial(_map_of_rows, known, rows)
            facet = facet._replace(read=sees, read_edited=read)
        sites.insert(-1, Site.of(self.product.index, leaves, facet))
        return sites

    def rows(
        self, reached: dict[str, Reached], known: dict[str, Layout]
    ) -> axis_groups.RowsOfMap | None:
        """Finds how rows of large weights are computed; None if these are small."""
        if reached["weights"].value.size <= regions.LIMIT:
            return None
        layouts = {name: known[name] for name in reached}
        values = [
            (reached[name].value, x.rows[0]) for name, x in layouts.items() if x.rows
        ]
        if len(values) < len(layouts):
            return None
        area = math.prod(known["weights"].canonical[-2:])
        rows = regions.Rows(values, self.product.index, area)
        return axis_groups.RowsOfMap(layouts, rows) if rows.is_possible else None


def _map_of_rows(
    known: dict[str, Layout],
    rows: axis_groups.RowsOfMap,
    values: dict,
) -> Any:
    """Makes the map whose weights are computed row by row."""
    sides = axis_groups.sides(known, values)
    shape = known["weights"].canonical
    return row_maps.map_of_rows(values["rows"], rows, shape, **sides)


def _have_common_source(*values: levels.Value) -> bool:
    # Breadth first for all values: the common source in attention is near.
    seen = [{value} for value in values]
    fronts = list(seen)
    while any(fronts):
        if any(x.is_data for x in set.intersection(*seen)):
            return True
        for i, front in enumerate(fronts):
            makers = {value.maker for value in front if value.maker is not None}
            fronts[i] = {x for maker in makers for x in maker.inputs} - seen[i]
            seen[i] = seen[i] | fronts[i]
    return False

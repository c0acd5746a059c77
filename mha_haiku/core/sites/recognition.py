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

import jax.numpy as jnp
from jax import Array
from jax.extend import core

from mha_haiku.core.attention import map_sites, row_maps
from mha_haiku.core.attention.attention_map import AttentionMap
from mha_haiku.core.site_primitive import Facet
from mha_haiku.core.sites import axes as all_axes
from mha_haiku.core.sites import jaxprs, levels, regions, softmaxes
from mha_haiku.core.sites.axes import Layout, Reached
from mha_haiku.core.sites.jaxprs import Site
from mha_haiku.core.sites.levels import Equation

_ENDING = {"dot_general", "reduce_sum", "log", "log1p", "site"}
# Names of values that have all queries and all keys.
_WHOLE = ("weights", "scores")
_READ_ELSEWHERE = 'the program also reads it elsewhere; edit "weights" or "heads"'


def equations_of(jaxpr: core.Jaxpr, data: set[core.Var]) -> list[Equation]:
    """Lists the equations of a level, if attention may be among them.

    `data` are from `jaxprs.of_data`.
    """
    names = {
        eqn.primitive.name
        for eqn in jaxprs.walk(jaxpr, lambda eqn: not jaxprs.is_marked(eqn))
        if not jaxprs.is_marked(eqn)
    }
    is_possible = "dot_general" in names and names & softmaxes.EXPONENTIALS
    return levels.graph(jaxpr, (), data).equations if is_possible else []


class Attention(NamedTuple):
    """The sites of an attention."""

    softmax: Equation  # the last one, whose name stack names the attention
    scored: Equation  # the product of queries and keys
    sites: list[Site]
    is_assumed: bool  # whether only the order of axes tells which are heads


def attentions(equations: list[Equation]) -> dict[Equation, Attention]:
    """Finds the attentions of a level, by the last equation of the softmax.

    Those inside of its calls are found when these are searched.
    """
    result: dict[Equation, Attention] = {}
    sums = softmaxes.totals(equations)
    for product in equations:
        for side in (0, 1) if product.name == "dot_general" else ():
            attention = _AttentionSearch(product, side).attention(sums)
            # The same weights in a second product belong to a derivative.
            if attention and attention.sites and attention.softmax not in result:
                result[attention.softmax] = attention
                break
    # Queries and keys of scores that several softmaxes read, or that are computed again
    # for the sum, are not of one attention.
    scored = [x.scored.outputs[0] for x in result.values()]
    products = {x.outputs[0] for x in equations if x.name == "dot_general"}
    again = (x for x in products.difference(scored) if x.users)
    counts = collections.Counter(x.number for x in (*scored, *again))
    for attention in result.values():
        for site in attention.sites:
            (facet,) = site.params["facets"]
            is_shared = counts[attention.scored.outputs[0].number] > 1
            if is_shared and facet.name in ("query", "key"):
                site.params["facets"] = (facet._replace(write=None),)
    return result


def has_others(equations: list[Equation], ours: dict[Equation, Attention]) -> bool:
    """Checks whether a level has exponentials over a sum outside recognized attention.

    They come from a product and reach another, as in other forms of attention.
    """
    sources = {softmaxes.unshifted(x.inputs[0])[-1] for x in ours}
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
            is_known = not sources.isdisjoint(softmaxes.unshifted(equation.inputs[0]))
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


class _AttentionSearch:
    """The search for an attention whose weights are one operand of a product."""

    def __init__(self, product: Equation, side: int):
        self.product, self.side = product, side
        self.axes = all_axes.Axes()
        self.of = self.axes.of

    def attention(self, sums: dict[int, int]) -> Attention | None:
        """Finds the attention and its sites, if the operand is its weights."""
        product, side = self.product, self.side
        weights, values = product.inputs[side], product.inputs[1 - side]
        has_queries = len(product.contracted(side)) == 1 and bool(product.free(side))
        is_computed = weights.maker is not None and not product.is_marked
        if not has_queries or not is_computed or 0 in weights.shape + values.shape:
            return None
        weights = self.axes.start(weights, *product.contracted(side))
        softmax = softmaxes.found(self.axes, weights, sums)
        # Attention entirely inside a call is found when the call is searched.
        calls = product.calls
        if softmax is None or (calls and calls[:1] == softmax.end.calls[:1]):
            return None

        read, heads = self.mixed(weights)
        self.is_sigmoid = softmax.is_sigmoid
        walk = self.axes.walk(softmax.scores, Equation.made, self.scores)
        if walk is None:
            return None
        # `scores` found the product of queries and keys, whose sizes are marked.
        self.steps, (scored, query, key) = walk
        sources = query, key, read
        made = (all_axes.made_with_size(self.axes, x) for x in sources)
        # `weights @ values` drops batch axes of size 1 from the weights.
        whole = max(softmax.weights, key=lambda step: len(step.axes))
        of_heads = next(filter(None, made), ())
        groups = all_axes.groups(self.axes, whole, self.free, of_heads)
        only = set(self.of(*query.axes)) - set(self.of(*key.axes))
        if not set(self.of(groups.queries)) <= only:
            return None
        weights, held = self.weights(softmax.weights, groups), self.held(heads)
        if weights is None or held is None:
            return None
        (query_size,), (keys, key_size), (_, size) = query.marks, key.marks, read.marks
        # The equation that a site comes before, and the value's axes after the batch
        # axes; None is the axes of heads, which are the rest.
        whole = groups.heads, groups.queries, *weights.marks
        places = {
            "query": (scored, query, groups.queries, None, query_size),
            "key": (scored, key, keys, None, key_size),
            "weights": (weights.value, weights, *whole),
            "value": (product, read, weights.marks[0], None, size),
            "heads": (held.value, held, groups.queries, groups.heads, size),
        }
        masked = softmaxes.masked(self.axes, self.steps, product.index)
        if masked is not None and not softmax.is_sigmoid:
            places["scores"] = product, masked, *whole
        sites = self.sites(places, groups)
        return Attention(softmax.end, scored, sites, groups.is_assumed)

    def mixed(self, weights: Reached) -> tuple[Reached, Reached]:
        """Follows axes of weights to the values and to the result of the product."""
        product, side = self.product, self.side
        values = self.axes.start(product.inputs[1 - side])
        places = ([*product.shared(i), *product.contracted(i)] for i in (0, 1))
        for pair in zip(*places, strict=True):
            values.axes[pair[1 - side]] = weights.axes[pair[side]]
        operands = [weights, values][:: -1 if side else 1]
        free = [[x.axes[j] for j in product.free(i)] for i, x in enumerate(operands)]
        self.free, size = free[side], self.of(*free[1 - side])
        shared = [weights.axes[i] for i in product.shared(side)]
        heads = Reached(product.outputs[0], [*shared, *free[0], *free[1]], (size,))
        return values._replace(marks=(*weights.marks, size)), heads

    # --- Queries and keys

    def scores(
        self, equation: Equation, step: Reached
    ) -> tuple[Equation, Reached, Reached] | None:
        """Finds queries and keys, if this is their product and belongs to values."""
        if equation.name != "dot_general" or equation.is_marked:
            return None
        (keys,) = step.marks
        for side in (0, 1) if equation.contracted(0) else ():
            query, key = (
                self.axes.across(equation, i, step._replace(marks=()))
                for i in (side, 1 - side)
            )
            assert query is not None and key is not None  # no marks to lose
            of_query, of_key = (set(self.of(*x.axes)) for x in (query, key))
            every = [set(self.of(x)) for x in self.free if self.of(x)]
            has_queries = not every or any(x <= of_query - of_key for x in every)
            if not has_queries or not set(self.of(keys)) <= of_key - of_query:
                continue
            sizes = [
                self.of(*(x.axes[i] for i in equation.contracted(j)))
                for x, j in ((query, side), (key, 1 - side))
            ]
            query = query._replace(marks=(sizes[0],))
            key = key._replace(marks=(keys, sizes[1]))
            if self.belong_together(query, key):
                return equation, query, key
        return None

    def belong_together(self, query: Reached, key: Reached) -> bool:
        """Checks whether keys and values come from the same data, as in attention."""
        value = self.product.inputs[1 - self.side]
        values = query.value, key.value, value
        if all(x.is_of_data for x in values):
            return True
        are_made = [x.is_made for x in values]
        if any(are_made) or self.is_sigmoid:
            if all(are_made[1:]):
                return bool(key.value.behind & value.behind)
            if self.is_sigmoid or not any(are_made[1:]):
                return False
            return bool(query.value.behind & key.value.behind & value.behind)
        # All are inputs. If keys are the values, they are a codebook, and keys [K, S],
        # as in a product of matrices, are the parameters of a layer.
        of_query, of_key, of_value = map(levels.origin, values)
        if of_key is of_value and of_value is not of_query:
            return False
        axes, (_, size) = self.axes.origin(key).axes, key.marks
        return len(axes) != 2 or self.of(axes[-1]) == self.of(size)

    # --- The values shown

    def weights(self, steps: list[Reached], groups: all_axes.Groups) -> Reached | None:
        """Finds the weights to show."""
        best = softmaxes.undropped(steps)
        (keys,) = steps[0].marks
        whole = {*self.of(*groups.batch, groups.heads, groups.queries, keys)}
        for step in (*steps[best::-1], *steps[best + 1 :]):
            is_whole = {*self.of(*step.axes)} == whole
            if is_whole and step.value.is_readable(self.product.index):
                return step
        return None

    def held(self, step: Reached | None) -> Reached | None:
        """Finds the first variable of the level that has the numbers of a step."""
        while step and step.value.variable is None:
            user, *others = step.value.users or [None]
            if user is None or others or user.name not in levels.NEUTRAL:
                return None
            step = self.axes.across(user, 0, step)
        return step

    def sites(self, places: dict[str, tuple], groups: all_axes.Groups) -> list[Site]:
        """Lists the sites of an attention whose values are variables of the level."""
        held_by, layouts, sites = {}, {}, []
        for name, (place, step, *axes) in places.items():
            forms = self.axes.forms(step)
            step = next((x for x in forms if x.value.is_readable(place.index)), None)
            axes = (*groups.batch, *axes)
            layout = step and Layout.of(self.axes, step, axes, groups.heads)
            if step is None or layout is None:
                continue
            held_by[name], layouts[name] = step.value, layout
            # An edit of a variable affects everything that reads it from there on.
            readers = [x for x in step.value.users if x.index >= place.index]
            is_exclusive = len(readers) == 1 and not step.value.is_output
            is_result = name in ("weights", "heads")
            write = layout.hidden if is_result or is_exclusive else None
            facet = Facet(name, layout.shown, write, _READ_ELSEWHERE)
            sites.append(Site.of(place.index, step.value.variable, facet))
        if not {"weights", "heads"} <= layouts.keys():
            return []
        sites = sites[: len(layouts) - ("scores" in layouts)]
        whole = layouts["weights"].canonical
        fitting = {name: x for name, x in layouts.items() if _fits(name, x, whole)}
        read = functools.partial(_map_of, fitting)
        leaves: dict[str, Any] = {name: held_by[name].variable for name in fitting}
        facet = Facet("map", read, None, 'edit "weights"')
        rows = self.rows(held_by, fitting)
        if rows is not None:
            leaves["rows"], of_rows = rows
            sees = functools.partial(read, of_rows=of_rows)
            facet = facet._replace(read=sees, read_edited=read)
        sites.insert(-1, Site.of(self.product.index, leaves, facet))
        return sites

    def rows(
        self, held_by: dict[str, levels.Value], fitting: dict[str, Layout]
    ) -> tuple[list, row_maps.OfRows] | None:
        """Finds what rows of large weights are computed from, and how."""
        layouts = {name: fitting[name] for name in _WHOLE if name in fitting}
        values = [(held_by[name], x.rows[0]) for name, x in layouts.items() if x.rows]
        is_small = held_by["weights"].size <= regions.LIMIT
        if is_small or len(values) < len(layouts):
            return None
        area = math.prod(fitting["weights"].canonical[-2:])
        rows = regions.Rows(values, self.product.index, area)

        def of_rows(variables: Any, positions: Array) -> list[Array]:
            pairs = zip(layouts.values(), rows(variables, positions), strict=True)
            return [layout.shown(x) for layout, x in pairs]

        return (rows.variables, of_rows) if rows.is_possible else None


def _fits(name: str, layout: Layout, whole: tuple[int, ...]) -> bool:
    """Checks whether a value's canonical shape fits the whole weights, for a map."""
    if name in _WHOLE:
        return layout.canonical == whole
    *_, num_heads, num_queries, num_keys = whole
    *_, length, own_heads, _ = layout.canonical
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    is_grouped = name != "query" and layout.is_aligned
    has_heads = own_heads in (1, num_heads)
    has_heads = has_heads or is_grouped and num_heads % own_heads == 0
    return has_heads and length == lengths.get(name)


def _map_of(
    layouts: dict[str, Layout], values: dict, of_rows: row_maps.OfRows | None = None
) -> AttentionMap:
    """Makes the map from the values that are known, by name.

    With `of_rows`, it computes rows of weights, and of scores, from the value "rows".
    """
    *batch, num_heads, _, _ = shape = layouts["weights"].canonical
    sides = {}
    for name in values.keys() & {"query", "key", "value"}:
        x = layouts[name].shown(values[name])
        length, own_heads, size = x.shape[-3:]
        own_heads = num_heads if name == "query" else own_heads
        sides[name] = jnp.broadcast_to(x, (*batch, length, own_heads, size))
    if of_rows is not None:
        return row_maps.map_of_rows(values["rows"], of_rows, shape, **sides)
    names = [name for name in _WHOLE if name in values]
    whole = {name: layouts[name].shown(values[name]) for name in names}
    return map_sites.map_of_recognized(**whole, **sides)

"""Recognises attention in programs that were written without sites.

Attention is a softmax over the products of queries and keys that reaches a product with
values. What is found has the sites of our own attention, in canonical axes: "query"
`[B..., T, H, K]`, "key" `[B..., S, G, K]`, "value" `[B..., S, G, V]`, "weights"
`[B..., H, T, S]`, "map", and "heads" `[B..., T, H, V]`, the product of weights and
values. A site is left out where the program has no variable that shows it.

Recognised are

*   exponentials over their own sum, `exp(x - logsumexp(x))`, and sigmoids;
*   with any scale, bias, mask, `where=` or soft cap of the scores, and with anything
    added to the sum or to the scores as a column (attention sinks);
*   weights that are cast, masked, dropped out, or mixed between heads before they meet
    the values; those shown are mixed, but not dropped out;
*   one head, several, grouped heads, a key head for all, and all that under `vmap`. The
    axis of heads is what the program merges or contracts with the size of values, or
    sums; where nothing shows, the axes of weights are `[B, H, T, S]`, or `[B, T, S]`;
*   in each level of a program: the body of a scan, a jitted or a remat function.

Not recognised are scores that are no product of queries and keys (additive attention),
a query without an axis (pooling), several axes of keys, values that are divided by the
sum only after the product (and so tiles that carry it), and kernels. A softmax over
anything else is no attention: keys and values must come from the same data, or queries,
keys and values must all be inputs of the level. This leaves out routers, codebooks and
soft labels, and also keys and values that a level is given ready-made while it computes
its queries. Where it is given all three, nothing tells them from parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from mha_haiku.core.sites import graph
from mha_haiku.core.sites.site import Facet, parameters

Axis = graph.Axis
Step = graph.Step


class Site(NamedTuple):
    """A site that is no equation of the program."""

    index: int  # the equation in front of which it stands
    inputs: list[core.Var]  # the variables of its leaves
    outputs: list[core.Var]  # the variables that take what it returns
    params: dict[str, Any]  # of a site's equation


_make_map: Callable | None = None


def register(make_map: Callable) -> None:
    """Sets what makes the map: of weights, known operands by name, and `are_shares`."""
    global _make_map
    _make_map = make_map


def attentions(jaxpr: core.Jaxpr) -> list[tuple[core.JaxprEqn, list[Site]]]:
    """Finds the attentions of a level, without those inside of its calls.

    Each is the equation whose stack of names gives it a name, and its sites.
    """
    primitives = graph.primitives(jaxpr)
    if "dot_general" not in primitives or not primitives & {"exp", "exp2", "logistic"}:
        return []
    found = {}
    for product in graph.equations(jaxpr):
        for side in (0, 1) if product.name == "dot_general" else ():
            softmax, sites = _Search(product, side).attention()
            # The same weights in a second product belong to a derivative.
            if sites and softmax not in found:
                found[softmax] = jaxpr.eqns[softmax.maker.index], sites
                break
    return list(found.values())


# --- Which inputs of an equation a walk back may pass


_NEUTRAL = {
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient"),
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "sharding_constraint"),
    *("optimization_barrier", "name", "pvary", "site"),
}
_MIXING = {"slice", "dynamic_slice", "dot_general"}


def _neutral(equation, value) -> list[int]:
    """Finds the input that has the same numbers, in another form."""
    if equation.name not in _NEUTRAL:
        return []
    return [equation.outputs.index(value) if len(equation.outputs) > 1 else 0]


def _weighing(equation, value) -> list[int]:
    # What weights are multiplied by is a scalar, a parameter or random: backward passes
    # and gated layers multiply them by products.
    name, inputs = equation.name, equation.inputs
    if any(facet.name == "weights" for facet in equation.params.get("facets", ())):
        return []  # they are a site already
    if name in ("mul", "dot_general"):
        return [i for i in (0, 1) if not inputs[1 - i].is_made]
    if name in ("slice", "dynamic_slice") or name == "div" and not inputs[1].is_made:
        return [0]
    if name == "select_n":
        return list(range(1, len(inputs)))
    return _neutral(equation, value)


def _summing(equation, value) -> list[int]:
    """Lists the inputs that may be a sum of exponentials, if the output is one."""
    if equation.name in ("add", "max"):
        return [0, 1]
    if equation.name in ("log", "abs"):
        return [0]
    if equation.name == "select_n":
        return list(range(1, len(equation.inputs)))
    return _neutral(equation, value)


def _scoring(equation, value) -> list[int]:
    """Lists inputs made by products: they may be scores if the output is scores."""
    if len(equation.outputs) > 1:
        return _neutral(equation, value)
    return [i for i, x in enumerate(equation.inputs) if x.is_made]


def _exponential(equation, step) -> graph.Equation | None:
    del step
    return equation if equation.name in ("exp", "exp2") else None


# --- The search


class _Softmax(NamedTuple):
    """How weights are made of scores."""

    scores: Step
    are_shares: bool
    is_sigmoid: bool = False


class _Scores(NamedTuple):
    """The product of queries and keys, each with its positions and its size marked."""

    product: graph.Equation
    query: Step
    key: Step


class _Groups(NamedTuple):
    batch: list[Axis]
    heads: Axis
    queries: Axis


class _Search:
    """The search for an attention whose weights are one operand of a product."""

    def __init__(self, product: graph.Equation, side: int):
        self.product, self.side = product, side
        self.axes = graph.Axes()
        self.of = self.axes.of

    def attention(self) -> tuple[graph.Value | None, list[Site]]:
        """Finds the softmax's output, and the sites; none if it is no attention."""
        product, side, nothing = self.product, self.side, (None, [])
        contracted, shared = product.params["dimension_numbers"]
        weights, values = product.inputs[side], product.inputs[1 - side]
        if len(contracted[0]) != 1 or not graph.free(product, side):
            return nothing  # there is no axis of queries
        if weights.maker is None or 0 in weights.shape + values.shape:
            return nothing
        if graph.has_sites(product.eqn):
            return nothing
        weights = self.axes.start(weights, *contracted[side])
        walk = self.axes.walk(weights, _weighing, self.softmax)
        if walk is None:
            return nothing
        steps, softmax = walk
        # What is wholly inside of a call is found when the call is searched.
        output = steps[-1].value
        if product.calls and product.calls[:1] == output.maker.calls[:1]:
            return nothing

        values = self.axes.start(values, *graph.free(product, 1 - side))
        size = self.of(*values.marks)
        for i, j in zip(
            (*shared[side], *contracted[side]),
            (*shared[1 - side], *contracted[1 - side]),
            strict=True,
        ):
            values.axes[j] = weights.axes[i]
        values = values._replace(marks=(*weights.marks, size))
        heads = self.axes.ahead(product, side, weights)
        by_values = self.axes.ahead(product, 1 - side, values)
        known = set(self.of(*values.axes))
        axes = [
            y if set(y) <= known else x
            for x, y in zip(heads.axes, by_values.axes, strict=True)
        ]
        heads = Step(heads.value, axes, (size,))
        groups = self.groups(weights, heads)
        # `weights @ values` drops batch axes of size 1 from the weights, from the left.
        dropped = [
            tuple(step.value.maker.params["dimensions"])
            for step in steps
            if step.value.maker.name == "squeeze"
        ]
        count = sum(len(each) for each in dropped if each == tuple(range(len(each))))
        count -= count > 1 and not groups.heads  # the last is the axis of one head
        groups = groups._replace(batch=[()] * count + groups.batch)
        begin = softmax.scores
        begin = begin._replace(marks=(*begin.marks, groups.queries))
        goal = functools.partial(self.scores, values.value, softmax.is_sigmoid)
        walk = self.axes.walk(begin, _scoring, goal)
        if walk is None:
            return nothing
        return output, self.sites(steps, softmax, walk[1], values, heads, groups)

    def softmax(self, equation, step) -> _Softmax | None:
        """Finds how weights are made, if this equation is a softmax's last."""
        back, walk = self.axes.back, self.axes.walk
        if equation.name == "logistic":
            return _Softmax(back(equation, 0, step), False, is_sigmoid=True)
        if equation.name in ("exp", "exp2"):  # exp(x - logsumexp(x))
            scores = back(equation, 0, step)
            shifted = scores.value.maker
            if shifted is None or shifted.name != "sub":
                return None
            are_shares = self.sums_to_one(shifted, scores, None)
            return None if are_shares is None else _Softmax(scores, are_shares)
        if equation.name != "div":
            return None
        is_sigmoid = not equation.inputs[0].is_made  # 1 / (1 + exp(-x))
        if is_sigmoid:
            total = back(equation, 1, step)
            adding = total and total.value.maker
            if adding is None or adding.name != "add":
                return None
            begin = back(adding, int(adding.inputs[1].is_made), total)
        else:
            begin = back(equation, 0, step)
        found = walk(begin, _weighing, _exponential)
        if found is None:
            return None
        steps, exponential = found
        scores = back(exponential, 0, steps[-1])
        if is_sigmoid:
            return _Softmax(scores, False, is_sigmoid=True)
        are_shares = self.sums_to_one(equation, step, exponential)
        return None if are_shares is None else _Softmax(scores, are_shares)

    def sums_to_one(self, equation, step, exponential) -> bool | None:
        """Checks whether a row sums to 1; None if there is no sum over keys.

        The equation is a division by the sum, or a subtraction of its logarithm, and
        `step` its output; an exponential of None stands for any.
        """
        others = set(self.of(*step.axes)) - set(self.of(*step.marks))

        def summed(equation, step):
            is_sum = equation.name == "reduce_sum" and len(equation.params["axes"]) == 1
            if not is_sum or set(self.of(*step.axes)) != others:
                return None
            terms = self.axes.back(equation, 0, step)
            walk = self.axes.walk(terms, _weighing, _exponential)
            return walk and exponential in (None, walk[1]) or None

        total = self.axes.back(equation, 1, step._replace(marks=()))
        walk = self.axes.walk(total, _summing, summed)
        names = [each.value.maker.name for each in walk[0]] if walk else []
        if exponential is None:  # what logsumexp adds to the logarithm is the maximum
            names = names[names.index("log") :] if "log" in names else []
        return "add" not in names if names else None

    def groups(self, weights, heads) -> _Groups:
        """Finds which factors of weights are batches, heads and queries."""
        axes = [self.of(axis) for axis in weights.axes]
        shared = sorted(self.product.params["dimension_numbers"][1][self.side])
        free = graph.free(self.product, self.side)
        own, merged = self.heads_of(
            heads, {x for i in shared for x in axes[i]}, [axes[i] for i in free]
        )
        axes = [self.of(axis) for axis in weights.axes]
        is_shown, chosen = bool(own), None
        if not own and len(shared) > 1 and (own is None or not axes[shared[-1]]):
            chosen = shared[-1]  # [B, H, T, S], without more to tell
            own = axes[chosen]
        own = own or ()
        for each in merged:  # grouped heads, from [B, T, G, H / G, V] to [B, T, H, V]
            is_known = set(each) <= {*own, *self.of(*(axes[i] for i in free))}
            is_left = any(not axes[i] or set(axes[i]) - set(each) for i in free)
            if set(own) < set(each) and is_known and is_left:
                own = each
        rest = [i for i in free if not axes[i] or set(axes[i]) - set(own)]
        queries = ([i for i in rest if axes[i]] or rest)[-1]
        batch = {i: () for i in shared if not axes[i] and i != chosen}
        for i in (*shared, *rest):
            others = tuple(x for x in axes[i] if x not in own)
            if i == queries or not others:
                continue
            if i in free and not is_shown and shared and i > shared[0]:
                own = (*own, *others)  # [B, H, T, S] with values [B, S, V]
            else:
                batch[i] = others
        return _Groups([batch[i] for i in sorted(batch)], own, axes[queries])

    def heads_of(self, heads, shared, free) -> tuple[Axis | None, list[Axis]]:
        """Finds the factors of heads, and all merged axes.

        Heads are what the program merges or contracts with the size of values, or sums:
        () if it contracts the size alone, None if nothing shows. Weights share factors
        `shared` with values, and one of the `free` axes holds the queries.
        """
        own, merged, waiting, seen = None, [], [heads], set()
        while waiting and len(seen) < graph.FARTHEST:
            step = waiting.pop(0)
            if step.value in seen:
                continue
            seen.add(step.value)
            for equation in step.value.users:
                position = equation.inputs.index(step.value)
                after = self.axes.ahead(equation, position, step)
                if after is None:
                    continue
                size, params, gone = set(self.of(*step.marks)), equation.params, ()
                if equation.name == "dot_general":
                    gone = sorted(params["dimension_numbers"][0][position])
                elif equation.name == "reduce_sum":
                    gone = params["axes"]
                gone = self.of(*(step.axes[i] for i in gone))
                if equation.name == "reduce_sum" and gone:
                    has_queries = set(self.of(*free)) <= set(self.of(*after.axes))
                    if set(gone) <= set(self.of(shared)) and has_queries:
                        return gone, merged
                    if size & set(gone):
                        continue
                for factors in (gone, *map(self.of, after.axes)):
                    found = tuple(x for x in factors if x not in size)
                    is_left = any(not x or set(self.of(x)) - set(found) for x in free)
                    if found and found != factors and is_left:
                        return found, merged
                if size & set(gone):
                    own = ()
                merged += [self.of(axis) for axis in after.axes if len(axis) > 1]
                waiting.append(after)
        return own, merged

    def scores(self, value, is_sigmoid, equation, step) -> _Scores | None:
        """Finds queries and keys, if this is their product and belongs to values."""
        if equation.name != "dot_general" or graph.has_sites(equation.eqn):
            return None
        contracted, _ = equation.params["dimension_numbers"]
        keys, queries = step.marks
        for side in (0, 1) if contracted[0] else ():
            query, key = (
                self.axes.back(equation, i, step._replace(marks=()))
                for i in (side, 1 - side)
            )
            of_query, of_key = (set(self.of(*each.axes)) for each in (query, key))
            has_queries = set(self.of(queries)) <= of_query - of_key
            if not has_queries or not set(self.of(keys)) <= of_key - of_query:
                continue
            sizes = [
                self.of(*(each.axes[i] for i in contracted[j]))
                for each, j in ((query, side), (key, 1 - side))
            ]
            query = query._replace(marks=(queries, sizes[0]))
            key = key._replace(marks=(keys, sizes[1]))
            if self.belong_together(query, key, value, is_sigmoid):
                return _Scores(equation, query, key)
        return None

    def belong_together(self, query, key, value, is_sigmoid) -> bool:
        """Checks whether keys and values are of the same data, as in attention."""
        are_made = [x.is_made for x in (query.value, key.value, value)]
        if any(are_made) or is_sigmoid:
            if all(are_made[1:]):
                return _have_common_source(key.value, value)
            if is_sigmoid or not any(are_made[1:]):
                return False
            return _have_common_source(query.value, key.value, value)
        # All are inputs. Keys that are the values themselves are a codebook, and keys
        # [K, S], as a product of matrices has them, the parameters of a layer.
        key_origin = self.origin(key)
        query_origin, value_origin = (
            self.origin(self.axes.start(x)).value for x in (query.value, value)
        )
        if key_origin.value is value_origin and value_origin is not query_origin:
            return False
        _, size = key.marks
        axes = key_origin.axes
        return len(axes) != 2 or self.of(axes[-1]) == self.of(size)

    def origin(self, step, index: int | None = None) -> Step | None:
        """Returns the first value with the same numbers; the last before an index."""
        while index is None or not _is_readable(step.value, index):
            maker = step.value.maker
            positions = _neutral(maker, step.value) if maker else []
            before = positions and self.axes.back(maker, positions[0], step)
            if not before:
                return step if index is None else None
            step = before
        return step

    def weights(self, steps, groups) -> Step | None:
        """Finds the weights to show: mixed and masked, but not dropped out."""
        names = [step.value.maker.name for step in steps]
        mixed = [i for i, name in enumerate(names) if name in _MIXING]
        best = last = here = min(mixed, default=len(steps) - 1)
        while here and names[here - 1] not in ("mul", "div"):
            here -= 1
            best = here if names[here] == "select_n" else best
        (keys,) = steps[0].marks
        whole = self.of(*groups.batch, groups.heads, groups.queries, keys)
        for step in (*steps[best::-1], *steps[best + 1 : last + 1]):
            is_whole = set(self.of(*step.axes)) == set(whole)
            if is_whole and _is_readable(step.value, self.product.index):
                return step
        return None

    def sites(self, steps, softmax, scores, values, heads, groups) -> list[Site]:
        """Lists the sites of an attention that variables of the level show."""
        weights = self.weights(steps, groups)
        while heads is not None and heads.value.variable is None:
            users = heads.value.users
            is_kept = len(users) == 1 and users[0].name in _NEUTRAL
            heads = self.axes.ahead(users[0], 0, heads) if is_kept else None
        if weights is None or heads is None:
            return []
        (queries, query_size), (scored, key_size) = scores.query.marks, scores.key.marks
        keys, size = values.marks
        # In front of which equation a value stands, and its axes behind the batch
        # axes; None stands for the axes of heads: all that is left.
        wanted = {
            "query": (scores.product, scores.query, queries, None, query_size),
            "key": (scores.product, scores.key, scored, None, key_size),
            "weights": (weights.value, weights, groups.heads, groups.queries, keys),
            "value": (self.product, values, keys, None, size),
            "heads": (heads.value, heads, groups.queries, groups.heads, size),
        }
        variables, layouts, sites = {}, {}, []
        for name, (place, step, *axes) in wanted.items():
            step = self.origin(step, place.index)
            axes = (*groups.batch, *axes)
            layout = step and graph.Layout.of(self.axes, step, axes, groups.heads)
            if layout is None:
                continue
            variables[name], layouts[name] = step.value.variable, layout
            # An edit of a variable is an edit for all that read it from there on.
            readers = [x for x in step.value.users if x.index >= place.index]
            is_own = len(readers) == 1 and not step.value.is_output
            is_result = name in ("weights", "heads")
            write = layout.hidden if is_result or is_own else None
            facet = Facet(name, layout.shown, write, _READ_ELSEWHERE)
            sites.append(_site(place.index, variables[name], facet))
        if _make_map is not None:
            is_mixed = any(step.value.maker.name in _MIXING for step in steps)
            known = graph.fitting(layouts)
            are_shares = softmax.are_shares and not is_mixed
            make_map = functools.partial(_make_map, are_shares=are_shares)
            read = functools.partial(graph.map_of, known, make_map)
            facet = Facet("map", read, None, 'edit "weights"')
            leaves = {name: variables[name] for name in known}
            sites.insert(-1, _site(self.product.index, leaves, facet))
        return sites


_READ_ELSEWHERE = 'the program reads it elsewhere, too; edit "weights" or "heads"'


def _site(index, variables, facet) -> Site:
    leaves, tree = jax.tree.flatten(variables)
    return Site(index, leaves, leaves, parameters(tree, (facet,)))


def _is_readable(value, index) -> bool:
    return value.variable is not None and value.index <= index


def _have_common_source(*values: graph.Value) -> bool:
    # All go back at the same pace: attention's common source is near, and all is far.
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

"""Recognises attention in programs that were written without sites.

Attention is a softmax over the products of queries and keys that reaches a product with
values. What is found has the sites of our own attention, in canonical axes: "query"
`[B..., T, H, K]`, "key" `[B..., S, G, K]`, "value" `[B..., S, G, V]`, "weights"
`[B..., H, T, S]`, "map", and "heads" `[B..., T, H, V]`, the product of weights and
values. A site is left out where the program has no variable that shows it.

Recognised are

*   exponentials over their own sum, `exp(x - logsumexp(x))`, and sigmoids; what two
    equations compute alike counts as one number;
*   with any scale, bias, mask, `where=` or soft cap of the scores, and with anything
    added to the sum or to the scores as a column (attention sinks);
*   weights that are cast, masked, normalised anew, dropped out, mixed between heads, or
    scaled and shifted by parameters before they meet the values; those shown are all
    that, but not dropped out. Dropout is what random bits decide, or zeros next to a
    scale, as in `where(kept, weights / 0.8, 0)`;
*   one head, several, grouped heads, a key head for all, and all that under `vmap`. The
    axis of heads is what the projection of the queries makes along with their size. If
    queries have no projection, it is what the program merges or contracts with the size
    of values, or sums; where nothing shows, the axes of weights are `[B, H, T, S]`, or
    `[B, T, S]`. Heads may be stacked along the batch by `concatenate(split(x))`;
*   in each level of a program: the body of a scan, a jitted or a remat function.

Not recognised are

*   scores that are no product of queries and keys (additive attention), a query without
    an axis (pooling), several axes of keys, and a softmax over queries;
*   differences of two softmaxes (differential attention), and weights that anything
    else computed from the data is added to, or multiplies;
*   weights between which and the values stands another function (a power, a
    threshold), and exponentials over a sum of others;
*   values that are divided by the sum only after the product (and so tiles that carry
    it), and kernels.

Where a function has a softmax of such a form, `sites`, and a pattern of `look` and
`edit` that names nothing, say so. A softmax over anything else is no attention: keys
and values must come from the same data, or queries, keys and values must all be inputs
of the level. This leaves out routers, codebooks and soft labels, and also keys and
values that a level is given ready-made while it computes its queries. Where it is given
all three, nothing tells them from parameters.
"""

import functools
import itertools
import math
from typing import NamedTuple

from jax.extend import core

from mha_haiku.core.attention import sited
from mha_haiku.core.marking import Facet
from mha_haiku.core.sites import graph
from mha_haiku.core.sites.jaxprs import Site

Axis = graph.Axis
Step = graph.Step


def attentions(jaxpr: core.Jaxpr) -> list[tuple[core.JaxprEqn, list[Site]]]:
    """Finds the attentions of a level, without those inside of its calls.

    Each is the equation whose stack of names gives it a name, and its sites.
    """
    found = _found(_equations(jaxpr))
    return [(jaxpr.eqns[x.maker.index], sites) for x, sites in found.items()]


def has_others(jaxpr: core.Jaxpr) -> bool:
    """Checks whether a level has exponentials over a sum that are no attention's.

    They come from a product and reach another one, as in attention of other forms.
    """
    equations = _equations(jaxpr)
    found = [value.maker for value in _found(equations)]
    for equation in found:  # grows by what its entries are made of, up to products
        makers = dict.fromkeys(x.maker for x in equation.inputs if x.is_made)
        makers = [x for x in makers if x and x.name != "dot_general"]
        found += [x for x in makers if x not in found]
    known = {x.number for equation in found for x in equation.outputs}
    masses, read_by = set(), set()
    for equation in equations:
        if equation.has_sites:
            continue
        name = equation.name
        is_mass = _exponential(equation, None) and equation.inputs[0].is_made
        if masses & {x.number for x in equation.inputs}:
            read_by.add(name)
            is_mass = name not in ("dot_general", "reduce_sum", "log", "site")
        if is_mass:
            masses |= {x.number for x in equation.outputs} - known
    return {"dot_general", "reduce_sum"} <= read_by


def _equations(jaxpr) -> list[graph.Equation]:
    """Lists the equations of a level, if attention may be among them."""
    primitives = graph.primitives(jaxpr)
    if "dot_general" not in primitives or not primitives & {"exp", "exp2", "logistic"}:
        return []
    return graph.equations(jaxpr)


def _found(equations) -> dict[graph.Value, list[Site]]:
    """Finds the sites of attentions, by the output of the softmax."""
    found = {}
    for product in equations:
        for side in (0, 1) if product.name == "dot_general" else ():
            softmax, sites = _Search(product, side).attention()
            # The same weights in a second product belong to a derivative.
            if sites and softmax not in found:
                found[softmax] = sites
                break
    return found


# --- Which inputs of an equation a walk back may pass


_MIXING = {"slice", "dynamic_slice", "dot_general"}


def _neutral(equation, value) -> list[int]:
    """Finds the input that has the same numbers, in another form."""
    if equation.name not in graph.NEUTRAL:
        return []
    return [equation.outputs.index(value) if len(equation.outputs) > 1 else 0]


def _weighing(equation, value) -> list[int]:
    # What weights are multiplied by is a scalar, a parameter or random: backward passes
    # and gated layers multiply them by products.
    name, inputs = equation.name, equation.inputs
    if any(facet.name == "weights" for facet in equation.params.get("facets", ())):
        return []  # they are a site already
    if name in ("mul", "dot_general", "add", "sub"):
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


def _is_computed_alike(masses, equation, step) -> graph.Equation | None:
    del step
    is_same = equation.outputs[0].number == masses.outputs[0].number
    return equation if is_same else None


def _is_one(atom) -> bool:
    return isinstance(atom, core.Literal) and atom.val == 1


# --- The search


class _Softmax(NamedTuple):
    """How weights are made of scores."""

    scores: Step
    # What is divided, and what is summed up: all that changes exponentials on their
    # way. None for a sum if there is more in it, or no sum.
    divided: frozenset = frozenset()
    summed: frozenset | None = None
    is_sigmoid: bool = False
    argument: graph.Value | None = None  # of the exponential in the sum

    def are_shares(self, changes: frozenset, masks: set) -> bool:
        """Checks whether rows sum to 1, or to 0, after changes of the quotient."""
        # Where the scores are masked, a mask of the exponentials changes nothing more.
        if self.summed is None:
            return False
        changes = {
            x.key
            for x in self.divided | changes
            if not (x.name == "select_n" and x.is_of_rows)
        }
        return changes - masks == {x.key for x in self.summed} - masks


class _Scores(NamedTuple):
    """The product of queries and keys, each with its size marked."""

    product: graph.Equation
    query: Step
    key: Step
    masked: frozenset = frozenset()  # what changes the scores on their way


class _Change(NamedTuple):
    """What an equation on the way of weights does to them."""

    name: str  # of the primitive
    number: int | None  # of the other operand, of a selection the condition
    place: int  # of the weights among the operands
    size: int = 1  # of the other operand
    is_random: bool = False
    is_of_rows: bool = False  # whether the other operand is the same for all keys

    @property
    def key(self) -> tuple:
        return self.name, self.number, self.place


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
        if product.has_sites:
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
        free = [weights.axes[i] for i in graph.free(product, side)]
        goal = functools.partial(self.scores, values.value, softmax.is_sigmoid, free)
        walk = self.axes.walk(softmax.scores, _scoring, goal)
        if walk is None:
            return nothing
        scores = walk[1]._replace(masked=self.changes(walk[0]))
        groups = self.groups(weights, values, heads, self.of_query(scores))
        # `weights @ values` drops batch axes of size 1 from the weights, from the left.
        dropped = [
            tuple(step.value.maker.params["dimensions"])
            for step in steps
            if step.value.maker.name == "squeeze"
        ]
        count = sum(len(each) for each in dropped if each == tuple(range(len(each))))
        count -= count > 1 and not groups.heads  # the last is the axis of one head
        groups = groups._replace(batch=[()] * count + groups.batch)
        query_only = set(self.of(*scores.query.axes)) - set(self.of(*scores.key.axes))
        if not set(groups.queries) <= query_only:
            return nothing
        return output, self.sites(steps, softmax, scores, values, heads, groups)

    def softmax(self, equation, step) -> _Softmax | None:
        """Finds how weights are made, if this equation is a softmax's last."""
        back, walk = self.axes.back, self.axes.walk
        if equation.name == "logistic":
            return _Softmax(back(equation, 0, step), is_sigmoid=True)
        if equation.name in ("exp", "exp2"):  # exp(x - logsumexp(x))
            scores = back(equation, 0, step)
            shifted = scores.value.maker
            if shifted is None or shifted.name != "sub":
                return None
            total = back(shifted, 1, scores._replace(marks=()))
            goal = functools.partial(self.is_shifted, shifted.inputs[0].number)
            found = self.summed(scores, total, goal, is_log=True)
            return found and _Softmax(scores, summed=found[0], argument=found[1])
        if equation.name == "div" and not equation.inputs[0].is_made:
            total = back(equation, 1, step)  # 1 / (1 + exp(-x))
            adding = total and total.value.maker
            if adding is None or adding.name != "add":
                return None
            begin = back(adding, int(adding.inputs[1].is_made), total)
            found = walk(begin, _weighing, _exponential)
            if found is None:
                return None
            scores = back(found[1], 0, found[0][-1])
            return _Softmax(scores, is_sigmoid=True)
        parts = self.quotient(equation, step)
        found = parts and walk(parts[0], _weighing, self.masses)
        if not found:
            return None
        steps, (masses, scores, is_sigmoid) = found
        goal = functools.partial(_is_computed_alike, masses)
        summed = self.summed(steps[-1], parts[1], goal)
        divided = self.changes(steps)
        return summed and _Softmax(scores, divided, summed[0], is_sigmoid, summed[1])

    def quotient(self, equation, step) -> tuple[Step, Step] | None:
        """Finds what is divided, and by what; by a product, where it is a division."""
        back, whole = self.axes.back, step._replace(marks=())
        if equation.name == "div" and equation.inputs[1].is_made:
            return back(equation, 0, step), back(equation, 1, whole)
        for i in (0, 1) if equation.name == "mul" else ():
            if not equation.inputs[1 - i].is_made:
                continue
            inverse = self.origin(back(equation, 1 - i, whole))
            maker = inverse.value.maker
            if maker and maker.name == "integer_pow" and maker.params["y"] == -1:
                return back(equation, i, step), back(maker, 0, inverse)
            if maker and maker.name == "div" and _is_one(maker.eqn.invars[0]):
                return back(equation, i, step), back(maker, 1, inverse)
        return None

    def masses(self, equation, step) -> tuple[graph.Equation, Step, bool] | None:
        """Finds what may be divided by its sum: exponentials, or weights once more."""
        if _exponential(equation, step):
            return equation, self.axes.back(equation, 0, step), False
        softmax = self.softmax(equation, step)
        return softmax and (equation, softmax.scores, softmax.is_sigmoid)

    def is_shifted(self, number, equation, step) -> graph.Equation | None:
        """Finds an exponential of the value of a number, up to what is subtracted."""
        if not _exponential(equation, step):
            return None
        value = equation.inputs[0]
        while value.number != number:
            maker = value.maker
            is_passed = maker and (maker.name == "sub" or maker.name in graph.NEUTRAL)
            if not is_passed:
                return None
            value = maker.inputs[0]
        return equation

    def summed(self, step, total, goal, *, is_log=False) -> tuple | None:
        """Checks whether a total is the sum over keys of what is in a step.

        The goal finds it there, or its logarithm. Returns what changes it on its way,
        None if there is more in the sum, and the argument of the exponential there.
        """
        keys = set(self.of(*step.marks))
        others = set(self.of(*step.axes)) - keys

        def summed(equation, step):
            is_sum = equation.name == "reduce_sum" and len(equation.params["axes"]) == 1
            if not is_sum or set(self.of(*step.axes)) != others:
                return None
            terms = self.axes.back(equation, 0, step)
            walk = self.axes.walk(terms, _weighing, goal)
            return walk

        walk = self.axes.walk(total, _summing, summed)
        names = [each.value.maker.name for each in walk[0]] if walk else []
        if not walk or ("log" in names) != is_log:
            return None
        if is_log:  # what logsumexp adds to the logarithm is the maximum
            names = names[names.index("log") :]
        terms, exponential = walk[1]
        changes = None if "add" in names else self.changes(terms)
        return changes, exponential.inputs[0]

    def changes(self, steps) -> frozenset[_Change]:
        changes = [self.change(*pair) for pair in itertools.pairwise(steps)]
        return frozenset(filter(None, changes))

    def change(self, step: Step, before: Step) -> _Change | None:
        """Describes what the equation between two steps does; None for nothing."""
        maker = step.value.maker
        place = maker.inputs.index(before.value)
        if maker.name in graph.NEUTRAL:
            return None
        if maker.name not in ("select_n", "mul", "div", "add", "sub"):
            return _Change(maker.name, step.value.number, place)
        position = 0 if maker.name == "select_n" else 1 - place
        other = self.axes.back(maker, position, step._replace(marks=()))
        other = self.origin(other or self.axes.start(maker.inputs[position]))
        value, keys = other.value, set(self.of(*before.marks))
        return _Change(
            maker.name,
            value.number,
            place,
            math.prod(value.shape),
            value.is_random and not value.is_made,
            not keys & set(self.of(*other.axes)),
        )

    def of_query(self, scores: _Scores) -> Axis:
        """Finds what comes along with the size of queries, in their projection."""

        def projection(equation, step):
            return equation if equation.name == "dot_general" else None

        query = scores.query
        (size,) = query.marks
        walk = self.axes.walk(query, _scoring, projection)
        if walk is None:
            query = self.origin(query)
            sources = [[axis] for axis in query.axes]
        else:
            (*_, query), product = walk
            sources = [
                self.axes.back(product, i, query._replace(marks=())) for i in (0, 1)
            ]
            sources = [each.axes for each in sources if each is not None]
        factors = [self.of(*axes) for axes in sources]
        for own in factors:
            others = {x for each in factors if each is not own for x in each}
            if size and set(self.of(size)) <= set(own) - others:
                return tuple(x for x in own if x not in {*self.of(size), *others})
        return ()

    def groups(self, weights, values, heads, of_query) -> _Groups:
        """Finds which factors of weights are batches, heads and queries."""
        axes = [self.of(axis) for axis in weights.axes]
        numbers = self.product.params["dimension_numbers"][1]
        in_values = dict(zip(numbers[self.side], numbers[1 - self.side], strict=True))
        shared = sorted(in_values)
        length = self.product.params["dimension_numbers"][0][1 - self.side][0]
        free = graph.free(self.product, self.side)
        order = dict.fromkeys(
            (*of_query, *(x for i in (*shared, *free) for x in axes[i]))
        )
        own, merged = self.heads_of(
            heads,
            {x for i in shared for x in axes[i]},
            [axes[i] for i in free],
            tuple(order),
        )
        axes = [self.of(axis) for axis in weights.axes]
        known = {x for i in (*shared, *free) for x in axes[i]}
        of_query = tuple(x for x in self.of(of_query) if x in known)
        is_left = any(not axes[i] or set(axes[i]) - set(of_query) for i in free)
        if of_query and is_left and set(own or ()) != set(of_query):
            own = of_query
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
        batch = {
            i: ()
            for i in shared
            if not axes[i] and i != chosen
            if not (own and _is_of_head(values.value, in_values[i], length))
        }
        for i in (*shared, *rest):
            others = tuple(x for x in axes[i] if x not in own)
            if i == queries or not others:
                continue
            if i in free and not is_shown and shared and i > shared[0]:
                own = (*own, *others)  # [B, H, T, S] with values [B, S, V]
            else:
                batch[i] = others
        left = tuple(x for x in axes[queries] if x not in own)
        return _Groups([batch[i] for i in sorted(batch)], own, left)

    def heads_of(self, heads, shared, free, order) -> tuple[Axis | None, list[Axis]]:
        """Finds the factors of heads, and all merged axes.

        Heads are what the program merges or contracts with the size of values, or sums:
        () if it contracts the size alone, None if nothing shows. Weights share factors
        `shared` with values, and one of the `free` axes holds the queries. What is
        contracted has no order but the one given.
        """
        own, merged, waiting, seen = None, [], [heads], set()
        whole = [self.of([x]) for axis in free for x in axis]

        def is_cut(found):
            # Queries that are cut in two by what comes after the product are no heads.
            parts = [set(self.of(factors)) for factors in whole]
            return any(part & set(found) and part - set(found) for part in parts)

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
                gone = [self.of(step.axes[i]) for i in gone]
                gone.sort(
                    key=lambda x: [
                        self.of(order).index(y) for y in x if y in self.of(order)
                    ]
                )
                gone = self.of(*gone)
                if equation.name == "reduce_sum" and gone:
                    has_queries = set(self.of(*free)) <= set(self.of(*after.axes))
                    if set(gone) <= set(self.of(shared)) and has_queries:
                        return gone, merged
                    if size & set(gone):
                        continue
                for factors in (gone, *map(self.of, after.axes)):
                    found = tuple(x for x in factors if x not in size)
                    is_left = any(not x or set(self.of(x)) - set(found) for x in free)
                    if found and found != factors and is_left and not is_cut(found):
                        return found, merged
                if size & set(gone) and not set(gone) - size:
                    own = ()
                more = [self.of(axis) for axis in after.axes if len(axis) > 1]
                merged += [each for each in more if not is_cut(each)]
                waiting.append(after)
        return own, merged

    def scores(self, value, is_sigmoid, free, equation, step) -> _Scores | None:
        """Finds queries and keys, if this is their product and belongs to values."""
        if equation.name != "dot_general" or equation.has_sites:
            return None
        contracted, _ = equation.params["dimension_numbers"]
        (keys,) = step.marks
        for side in (0, 1) if contracted[0] else ():
            query, key = (
                self.axes.back(equation, i, step._replace(marks=()))
                for i in (side, 1 - side)
            )
            of_query, of_key = (set(self.of(*each.axes)) for each in (query, key))
            known = [set(self.of(x)) for x in free if self.of(x)]
            has_queries = not known or any(x <= of_query - of_key for x in known)
            if not has_queries or not set(self.of(keys)) <= of_key - of_query:
                continue
            sizes = [
                self.of(*(each.axes[i] for i in contracted[j]))
                for each, j in ((query, side), (key, 1 - side))
            ]
            query = query._replace(marks=(sizes[0],))
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

    def undropped(self, steps, masks) -> int:
        """Finds the step at which weights are mixed and masked, but not dropped out."""
        # Dropout is random, or zeros next to a scale: `where(kept, weights / 0.8, 0)`.
        changes = [self.change(*pair) for pair in itertools.pairwise(steps)]
        mixed = [i for i, x in enumerate(changes) if x and x.name in _MIXING]
        changes = changes[: min(mixed, default=len(changes))]
        at = {i: x for i, x in enumerate(changes) if x and x.key not in masks}
        scales = [i for i, x in at.items() if x.name in ("mul", "div") and x.size == 1]
        zeros = [i for i, x in at.items() if x.name in ("select_n", "mul")]
        random = [i for i, x in at.items() if x.is_random]
        dropped = random or (scales and [i for i in zeros if i not in scales])
        best = max(dropped, default=-1) + 1
        while changes[best : best + 1] == [None] or (dropped and best in scales):
            best += 1
        return best

    def weights(self, steps, masks, groups) -> tuple[Step, list[Step]] | None:
        """Finds the weights to show, and the steps to them from the softmax."""
        best = self.undropped(steps, masks)
        (keys,) = steps[0].marks
        whole = self.of(*groups.batch, groups.heads, groups.queries, keys)
        for i in (*range(best, -1, -1), *range(best + 1, len(steps))):
            is_whole = set(self.of(*steps[i].axes)) == set(whole)
            if is_whole and _is_readable(steps[i].value, self.product.index):
                return steps[i], steps[i:]
        return None

    def is_once(self, softmax, product) -> bool:
        """Checks whether the sum has the same product of queries and keys.

        An edit of queries would not reach a product that is computed once more.
        """
        if softmax.argument is None:
            return True
        begin = self.axes.start(softmax.argument)
        goal = functools.partial(_is_computed_alike, product)
        walk = self.axes.walk(begin, _scoring, goal)
        return walk is None or walk[1] is product

    def sites(self, steps, softmax, scores, values, heads, groups) -> list[Site]:
        """Lists the sites of an attention that variables of the level show."""
        masks = {x.key for x in scores.masked if x.name == "select_n"}
        weights, made = self.weights(steps, masks, groups) or (None, [])
        while heads is not None and heads.value.variable is None:
            users = heads.value.users
            is_kept = len(users) == 1 and users[0].name in graph.NEUTRAL
            heads = self.axes.ahead(users[0], 0, heads) if is_kept else None
        if weights is None or heads is None:
            return []
        (query_size,), (scored, key_size) = scores.query.marks, scores.key.marks
        keys, size = values.marks
        # In front of which equation a value stands, and its axes behind the batch
        # axes; None stands for the axes of heads: all that is left.
        wanted = {
            "query": (scores.product, scores.query, groups.queries, None, query_size),
            "key": (scores.product, scores.key, scored, None, key_size),
            "weights": (weights.value, weights, groups.heads, groups.queries, keys),
            "value": (self.product, values, keys, None, size),
            "heads": (heads.value, heads, groups.queries, groups.heads, size),
        }
        is_once = self.is_once(softmax, scores.product)
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
            is_own = is_own and (name == "value" or is_once)
            is_result = name in ("weights", "heads")
            write = layout.hidden if is_result or is_own else None
            facet = Facet(name, layout.shown, write, _READ_ELSEWHERE)
            sites.append(Site.of(place.index, variables[name], facet))
        if not {"weights", "heads"} <= layouts.keys():
            return []
        known = graph.fitting(layouts)
        are_shares = softmax.are_shares(self.changes(made), masks)
        make_map = functools.partial(sited.map_of_weights, are_shares=are_shares)
        read = functools.partial(graph.map_of, known, make_map)
        facet = Facet("map", read, None, 'edit "weights"')
        leaves = {name: variables[name] for name in known}
        sites.insert(-1, Site.of(self.product.index, leaves, facet))
        return sites


_READ_ELSEWHERE = 'the program reads it elsewhere, too; edit "weights" or "heads"'


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


def _is_of_head(value, axis, length) -> bool:
    """Checks whether an axis of size 1 is of heads: made with or after a projection."""
    # Such an axis has no factors to be followed by; `length` is the axis of positions,
    # which the data have, and parameters have not.
    while value.maker is not None:
        maker, both = value.maker, (axis, length)
        if maker.name == "reshape":
            positions, before = [0], [graph.before_reshape(maker, i) for i in both]
        else:
            positions = [i for i, x in enumerate(maker.inputs) if x.shape]
            links = {i: graph.links(maker, i, value) for i in positions}
            positions = [
                i for i in positions if links[i] and links[i][axis] is not None
            ]
            before = [links[positions[0]][i] for i in both] if positions else [None]
        if before[0] is None or maker.name == "dot_general":
            return None in before
        value, (axis, length) = maker.inputs[positions[0]], before
        if length is None:
            return False
    return axis > 0

"""Finds which axes of weights are batches, heads and queries, as `recognition` says."""

from typing import NamedTuple

from mha_haiku.core.sites import axes as all_axes
from mha_haiku.core.sites.axes import Axes, Axis, Step
from mha_haiku.core.sites.graph import Equation, Value


class Mixing(NamedTuple):
    """The product of weights and values."""

    product: Equation
    side: int  # of the weights among its operands
    weights: Step
    values: Step
    heads: Step  # what it returns

    @property
    def shared(self) -> dict[int, int]:
        """The axes of weights that values have too, with their places in values."""
        sides = map(self.product.shared, (self.side, 1 - self.side))
        return dict(zip(*sides, strict=True))

    @property
    def free(self) -> list[int]:
        """The axes of weights that values lack."""
        return self.product.free(self.side)

    @property
    def length(self) -> int:
        """The axis of positions of values."""
        return self.product.contracted(1 - self.side)[0]


class Groups(NamedTuple):
    """The batch, head and query axes of attention weights."""

    batch: list[Axis]
    heads: Axis
    queries: Axis


def made_with_size(axes: Axes, query: Step) -> Axis:
    """Finds what comes along with the size of queries, in their projection."""

    def projection(equation, step):
        del step
        return equation if equation.name == "dot_general" else None

    (size,) = query.marks
    walk = axes.walk(query, Equation.made, projection)
    if walk is None:
        sources = [[axis] for axis in axes.origin(query).axes]
    else:
        (*_, query), product = walk
        query = query._replace(marks=())
        operands = [axes.back(product, i, query) for i in (0, 1)]
        sources = [each.axes for each in operands if each is not None]
    factors = [axes.of(*source) for source in sources]
    size = set(axes.of(size))
    for own in factors:
        others = {x for each in factors if each is not own for x in each}
        if size and size <= set(own) - others:
            return tuple(x for x in own if x not in size | others)
    return ()


def groups(axes: Axes, mixing: Mixing, of_query: Axis) -> Groups:
    """Finds the groups of weights, from what queries are made with and all else."""
    shared, free = sorted(mixing.shared), mixing.free

    def split():
        return [axes.of(axis) for axis in mixing.weights.axes]

    def leaves_queries(heads):
        # Besides heads, one of the free axes must hold the queries.
        return any(not own[i] or set(own[i]) - set(heads) for i in free)

    own = split()
    order = dict.fromkeys((*of_query, *(x for i in (*shared, *free) for x in own[i])))
    heads, merged = _by_use(
        axes,
        mixing.heads,
        {x for i in shared for x in own[i]},
        [own[i] for i in free],
        tuple(order),
    )
    own = split()  # what was met on the way may have split factors
    known = {x for i in (*shared, *free) for x in own[i]}
    of_query = tuple(x for x in axes.of(of_query) if x in known)
    if of_query and leaves_queries(of_query) and set(heads or ()) != set(of_query):
        heads = of_query
    is_shown, chosen = bool(heads), None
    if not heads and len(shared) > 1 and (heads is None or not own[shared[-1]]):
        chosen = shared[-1]  # [B, H, T, S], without more to tell
        heads = own[chosen]
    heads = heads or ()
    for each in merged:  # grouped heads, from [B, T, G, H / G, V] to [B, T, H, V]
        is_known = set(each) <= {*heads, *axes.of(*(own[i] for i in free))}
        if set(heads) < set(each) and is_known and leaves_queries(each):
            heads = each
    rest = [i for i in free if not own[i] or set(own[i]) - set(heads)]
    queries = ([i for i in rest if own[i]] or rest)[-1]
    batch = {
        i: ()
        for i in shared
        if not own[i] and i != chosen
        if not (heads and _is_of_head(mixing, mixing.shared[i]))
    }
    for i in (*shared, *rest):
        others = tuple(x for x in own[i] if x not in heads)
        if i == queries or not others:
            continue
        if i in free and not is_shown and shared and i > shared[0]:
            heads = (*heads, *others)  # [B, H, T, S] with values [B, S, V]
        else:
            batch[i] = others
    left = tuple(x for x in own[queries] if x not in heads)
    return Groups([batch[i] for i in sorted(batch)], heads, left)


def _by_use(axes, heads, shared, free, order) -> tuple[Axis | None, list[Axis]]:
    """Finds the factors of heads by what becomes of them, and all merged axes.

    Heads are what the program merges or contracts with the size of values, or sums:
    () if it contracts the size alone, None if nothing shows. Weights share factors
    `shared` with values, and one of the `free` axes holds the queries. What is
    contracted has no order but the one given.
    """
    own, merged, waiting, seen = None, [], [heads], set()
    whole = [axes.of([x]) for axis in free for x in axis]

    def is_cut(factors):
        # Queries that are cut in two by what comes after the product are no heads.
        parts = [set(axes.of(each)) for each in whole]
        return any(part & set(factors) and part - set(factors) for part in parts)

    while waiting and len(seen) < all_axes.FARTHEST:
        step = waiting.pop(0)
        if step.value in seen:
            continue
        seen.add(step.value)
        for equation in step.value.users:
            position = equation.inputs.index(step.value)
            after = axes.ahead(equation, position, step)
            if after is None:
                continue
            size = set(axes.of(*step.marks))
            gone = _contracted(axes, equation, position, step, order)
            if equation.name == "reduce_sum" and gone:
                has_queries = set(axes.of(*free)) <= set(axes.of(*after.axes))
                if set(gone) <= set(axes.of(shared)) and has_queries:
                    return gone, merged
                if size & set(gone):
                    continue
            for factors in (gone, *map(axes.of, after.axes)):
                found = tuple(x for x in factors if x not in size)
                is_left = any(not x or set(axes.of(x)) - set(found) for x in free)
                if found and found != factors and is_left and not is_cut(found):
                    return found, merged
            if size & set(gone) and not set(gone) - size:
                own = ()
            more = [axes.of(axis) for axis in after.axes if len(axis) > 1]
            merged += [each for each in more if not is_cut(each)]
            waiting.append(after)
    return own, merged


def _contracted(axes, equation, position, step, order) -> Axis:
    """Returns the factors over which an equation sums, in an order."""
    summed = ()
    if equation.name == "dot_general":
        summed = sorted(equation.contracted(position))
    elif equation.name == "reduce_sum":
        summed = equation.params["axes"]
    order = axes.of(order)
    contracted = [axes.of(step.axes[i]) for i in summed]
    contracted.sort(key=lambda axis: [order.index(x) for x in axis if x in order])
    return axes.of(*contracted)


def _is_of_head(mixing: Mixing, axis: int) -> bool:
    """Checks whether an axis of values of size 1 is of heads: made by a projection."""
    # Such an axis has no factors to be followed by; `length` is the axis of positions,
    # which the data have, and parameters have not.
    value: Value = mixing.values.value
    length = mixing.length
    while value.maker is not None:
        maker, both = value.maker, (axis, length)
        if maker.name == "reshape":
            positions = [0]
            before = [all_axes.before_reshape(maker, i) for i in both]
        else:
            links = {
                i: all_axes.links(maker, i, value)
                for i, x in enumerate(maker.inputs)
                if x.shape
            }
            positions = [i for i, x in links.items() if x and x[axis] is not None]
            before = [links[positions[0]][i] for i in both] if positions else [None]
        if before[0] is None or maker.name == "dot_general":
            return None in before
        value, (axis, length) = maker.inputs[positions[0]], before
        if length is None:
            return False
    return axis > 0

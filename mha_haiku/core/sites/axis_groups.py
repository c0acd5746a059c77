"""Finds which axes of weights are batches, heads and queries; see `recognition`.

A `Layout` converts a value to canonical axes: batch axes, heads, positions, sizes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core.sites import axes as all_axes
from mha_haiku.core.sites.axes import Axes, AxisFactors, Reached
from mha_haiku.core.sites.levels import Equation, Value

WHOLE = ("weights", "scores")
"""Names of values that have all queries and all keys."""


class Mixing(NamedTuple):
    """The product of weights and values."""

    product: Equation
    side: int  # the index of the weights among its operands
    weights: Reached
    values: Reached
    heads: Reached  # the result

    @property
    def shared(self) -> dict[int, int]:
        """The axes that weights share with values, mapped to axes of values."""
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

    batch: list[AxisFactors]
    heads: AxisFactors
    queries: AxisFactors
    is_assumed: bool  # whether only the order of axes tells which are heads


def made_with_size(axes: Axes, query: Reached) -> AxisFactors:
    """Finds the factors that a projection of queries makes along with their size.

    They may also be keys; the last mark is their size.
    """
    *_, size = query.marks
    query = query._replace(marks=(size,))
    walk = axes.walk(
        query, Equation.made, lambda x, _: x if x.name == "dot_general" else None
    )
    if walk is None:
        sources = [[axis] for axis in axes.origin(query).axes]
    else:
        (*_, query), product = walk
        query = query._replace(marks=())
        operands = [axes.back(product, i, query) for i in (0, 1)]
        # A size that data bring is of positions, as in attention over channels.
        data = [x.value.is_constant is False for x in operands if x is not None]
        sources = [
            operand.axes if data != [i == 0, i == 1] else []
            for i, operand in enumerate(operands)
            if operand is not None
        ]
    factors = [axes.of(*source) for source in sources]
    size = set(axes.of(size))
    for operand in factors:
        others = {x for other in factors if other is not operand for x in other}
        if size and size <= set(operand) - others:
            return tuple(x for x in operand if x not in size | others)
    return ()


def groups(axes: Axes, mixing: Mixing, of_query: AxisFactors) -> Groups:
    """Finds the groups of the axes of weights; `of_query` is from `made_with_size`."""
    shared, free = sorted(mixing.shared), mixing.free

    def split():
        return [axes.of(axis) for axis in mixing.weights.axes]

    def leaves_queries(heads: AxisFactors):
        # Apart from heads, one of the free axes must hold the queries.
        return any(not factors[i] or set(factors[i]) - set(heads) for i in free)

    factors = split()
    both = (*shared, *free)
    order = dict.fromkeys((*of_query, *(x for i in both for x in factors[i])))
    heads, merged = _by_use(
        axes,
        mixing.heads,
        {x for i in shared for x in factors[i]},
        [factors[i] for i in free],
        tuple(order),
    )
    factors = split()  # the walk may have split factors
    known = {x for i in both for x in factors[i]}
    of_query = tuple(x for x in axes.of(of_query) if x in known)
    if of_query and leaves_queries(of_query) and set(heads or ()) != set(of_query):
        heads = of_query
    is_assumed = heads is None and any(
        factors[i] for i in (*shared, *(free if len(free) > 1 else ()))
    )
    is_shown, chosen = bool(heads), None
    if not heads and len(shared) > 1 and (heads is None or not factors[shared[-1]]):
        chosen = shared[-1]  # assumes [B, H, T, S]
        heads = factors[chosen]
    heads = heads or ()
    for axis in merged:  # grouped heads, from [B, T, G, H / G, V] to [B, T, H, V]
        is_known = set(axis) <= {*heads, *axes.of(*(factors[i] for i in free))}
        if set(heads) < set(axis) and is_known and leaves_queries(axis):
            heads = axis
    rest = [i for i in free if not factors[i] or set(factors[i]) - set(heads)]
    queries = ([i for i in rest if factors[i]] or rest)[-1]
    batch: dict[int, AxisFactors] = {
        i: ()
        for i in shared
        if not factors[i] and i != chosen
        if not (heads and _is_of_head(mixing, mixing.shared[i]))
    }
    for i in (*shared, *rest):
        others = tuple(x for x in factors[i] if x not in heads)
        if i == queries or not others:
            continue
        if i in free and not is_shown and shared and i > shared[0]:
            heads = (*heads, *others)  # [B, H, T, S] with values [B, S, V]
        else:
            batch[i] = others
    left = tuple(x for x in factors[queries] if x not in heads)
    return Groups([batch[i] for i in sorted(batch)], heads, left, is_assumed)


def _by_use(
    axes: Axes,
    heads: Reached,
    shared: set[int],
    free: list[AxisFactors],
    order: AxisFactors,
) -> tuple:
    """Finds the factors of heads by their later use, and all merged axes.

    Heads are what the program merges or contracts with the size of values, or sums: ()
    if it contracts only the size, None if neither is found. Weights share factors
    `shared` with values, and one of the `free` axes holds the queries. Contracted
    factors are returned in the given `order`.
    """
    result, merged, waiting, seen = None, [], [heads], set()
    whole = [axes.of([x]) for axis in free for x in axis]

    def is_cut(factors: AxisFactors):
        # Parts of queries that are split after the product are not heads.
        parts = [set(axes.of(factor)) for factor in whole]
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
                others = tuple(x for x in factors if x not in size)
                is_left = any(not x or set(axes.of(x)) - set(others) for x in free)
                if others and others != factors and is_left and not is_cut(others):
                    return others, merged
            if size & set(gone) and not set(gone) - size:
                result = ()
            more = [axes.of(axis) for axis in after.axes if len(axis) > 1]
            merged += [factors for factors in more if not is_cut(factors)]
            waiting.append(after)
    return result, merged


def _contracted(
    axes: Axes, equation: Equation, position: int, step: Reached, order: AxisFactors
) -> AxisFactors:
    """Returns the factors over which an equation sums, in the given order."""
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
    """Checks whether an axis of values of size 1 is of heads, from a projection."""
    # Such an axis has no factors to follow; `length` is the axis of positions, which
    # the data have and parameters lack.
    value: Value = mixing.values.value
    length = mixing.length
    while value.maker is not None:
        maker, both = value.maker, (axis, length)
        if maker.name == "reshape":
            positions = [0]
            before = [all_axes.before_reshape(maker, i) for i in both]
        else:
            links = {
                i: x
                for i, read in enumerate(maker.inputs)
                if read.shape and (x := all_axes.links(maker, i, value))
                if x[axis] is not None
            }
            positions = list(links)
            before = [links[positions[0]][i] for i in both] if positions else [None]
        if before[0] is None or maker.name == "dot_general":
            return None in before
        value, axis, length = maker.inputs[positions[0]], before[0], before[1]
        if length is None:
            return False
    return axis > 0


# --- Canonical axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """The conversion of a value's axes to canonical axes."""

    shape: tuple[int, ...]  # its shape in the program
    factors: tuple[int, ...]  # the sizes into which its axes are split
    order: tuple[int, ...]  # these factors in the order of canonical axes
    canonical: tuple[int, ...]  # the canonical shape
    is_aligned: bool  # whether consecutive query heads share a head of this value

    @classmethod
    def of(
        cls,
        axes: Axes,
        step: Reached,
        groups: tuple[AxisFactors | None, ...],
        heads: AxisFactors,
    ) -> "Layout | None":
        """Finds the layout of a value; None if it has axes other than these.

        `groups` are the canonical axes; None among them is the rest of the axes. A
        group that the value lacks becomes an axis of size 1.
        """
        factors, heads = axes.of(*step.axes), axes.of(heads)
        grouped = axes.of(*(group for group in groups if group is not None))
        rest = [x for x in dict.fromkeys((*heads, *factors)) if x not in grouped]
        rest = [x for x in rest if x in factors]
        shown = [
            rest if group is None else [x for x in axes.of(group) if x in factors]
            for group in groups
        ]
        order = [factors.index(x) for group in shown for x in group]
        if sorted(order) != list(range(len(factors))):
            return None
        return cls(
            step.value.shape,
            tuple(axes.size([x]) for x in factors),
            tuple(order),
            tuple(axes.size(group) for group in shown),
            tuple(rest) == heads[: len(rest)],
        )

    def shown(self, value: Array) -> Array:
        return _reordered(value, self.factors, self.order, self.canonical)

    def of_rows(self, rows: int) -> "tuple[int, Layout] | None":
        """Finds the axis of queries in the program, and the layout of some of them.

        For weights; None if queries share their axis.
        """
        start = np.cumprod([1, *self.canonical])[-3]
        sizes = [self.factors[i] for i in self.order]
        (place,) = np.flatnonzero(np.cumprod([1, *sizes])[:-1] == start)[:1] or [None]
        if place is None or sizes[place] != self.canonical[-2]:
            return None
        factor = self.order[place]
        before = np.prod(self.factors[:factor], dtype=int)
        starts = np.cumprod([1, *self.shape])[:-1]
        axes = [i for i in np.flatnonzero(starts == before) if self.shape[i] > 1]
        if not axes or self.shape[axes[0]] != self.factors[factor]:
            return None
        axis = int(axes[0])

        def cut(sizes: tuple[int, ...], i: int) -> tuple[int, ...]:
            return (*sizes[:i], rows, *sizes[i + 1 :])

        return axis, dataclasses.replace(
            self,
            shape=cut(self.shape, axis),
            factors=cut(self.factors, factor),
            canonical=cut(self.canonical, len(self.canonical) - 2),
        )

    def hidden(self, value: Array, changed: Array) -> Array:
        del value
        factors = tuple(self.factors[i] for i in self.order)
        back = tuple(np.argsort(self.order).tolist())
        return _reordered(changed, factors, back, self.shape)


def _reordered(
    value: Array,
    factors: tuple[int, ...],
    order: tuple[int, ...],
    shape: tuple[int, ...],
) -> Array:
    """Reorders the axes of a value; steps that change nothing are not traced."""
    if value.shape != factors:
        value = jax.lax.reshape(value, factors)
    if order != tuple(range(len(order))):
        value = jax.lax.transpose(value, order)
    return value if value.shape == shape else jax.lax.reshape(value, shape)


def fitting(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Picks the layouts of weights and of the other values whose shapes fit them."""
    *_, num_heads, num_queries, num_keys = whole = layouts["weights"].canonical
    result = {
        name: layouts[name]
        for name in WHOLE
        if name in layouts and layouts[name].canonical == whole
    }
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    for name in lengths.keys() & layouts.keys():
        *_, length, own_heads, _ = layouts[name].canonical
        is_grouped = name != "query" and num_heads % own_heads == 0
        has_heads = own_heads in (1, num_heads)
        has_heads = has_heads or (is_grouped and layouts[name].is_aligned)
        if has_heads and length == lengths[name]:
            result[name] = layouts[name]
    return result


def sides(layouts: dict[str, Layout], values: dict[str, Array]) -> dict[str, Array]:
    """Shows queries, keys and values in the canonical axes of the weights."""
    *batch, num_heads, _, _ = layouts["weights"].canonical
    shown = {}
    for name in values.keys() & {"query", "key", "value"}:
        x = layouts[name].shown(values[name])
        length, own_heads, size = x.shape[-3:]
        own_heads = num_heads if name == "query" else own_heads
        whole = (*batch, length, own_heads, size)
        shown[name] = x if x.shape == whole else jnp.broadcast_to(x, whole)
    return shown


def map_of(layouts: dict[str, Layout], make_map: Callable, values: dict) -> Any:
    """Makes the map from weights and from other values that are known, by name."""
    whole = {
        name: layouts[name].shown(values[name]) for name in WHOLE if name in values
    }
    return make_map(**whole, **sides(layouts, values))


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfMap:
    """Computes rows of weights, and of scores if they are known, as in a program."""

    layouts: dict[str, Layout]
    rows: Any  # a `regions.Rows` of these values

    def __call__(self, variables: Any, positions: Array) -> list[Array]:
        """Returns weights and scores, `[B..., H, R, S]`."""
        found = self.rows(variables, positions)
        parts = [x.of_rows(len(positions)) for x in self.layouts.values()]
        return [x[1].shown(y) for x, y in zip(parts, found, strict=True) if x]

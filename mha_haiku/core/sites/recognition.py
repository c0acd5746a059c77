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
*   heads as an axis (that is merged or contracted with the size of values, or summed),
    grouped heads, no heads, and all that under `vmap`;
*   in each level of the program: the body of a scan, a jitted or remat function.

Not recognised are scores that are no product of queries and keys (additive attention),
pooling by one query without an axis, several axes of keys, sums that are carried from
tile to tile, and kernels. Softmax over anything else is no attention: keys and values
must be computed from the same data, or queries, keys and values must all be inputs of
the level. This tells routers, codebooks and soft labels apart, and costs attention to
keys and values that a level is given ready-made, where it computes the queries itself.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku.core.sites import site

Array = jax.Array
Axes = list[tuple[int, ...]]  # the factors of each axis of a value

_READ_ELSEWHERE = 'the program reads it elsewhere, too; edit "weights" or "heads"'
# How many values a walk may pass; between a product and a softmax lie a few.
_FARTHEST = 200


class Site(NamedTuple):
    """A site that is no equation of the program.

    Attributes:
      index: The equation in front of which it stands.
      inputs: The variables of its leaves.
      outputs: The variables that take what it returns.
      params: Those of a site's equation.
    """

    index: int
    inputs: list[core.Var]
    outputs: list[core.Var]
    params: dict[str, Any]


class Attention(NamedTuple):
    """An attention that was recognised.

    Attributes:
      eqn: The equation whose stack of names gives it a name.
      sites: What can be looked at and changed.
    """

    eqn: core.JaxprEqn
    sites: list[Site]


_make_map: Callable | None = None


def register(make_map: Callable) -> None:
    """Sets what makes the map of an attention that was recognised.

    Args:
      make_map: From weights `[B..., H, T, S]`, and `query`, `key` and `value` by name,
        which are None where they are not known, to the map; `are_shares` says whether
        rows sum to 1.
    """
    global _make_map
    _make_map = make_map


def attentions(jaxpr: core.Jaxpr) -> list[Attention]:
    """Returns the attentions of a level, without those inside of its calls."""
    primitives = _primitives(jaxpr)
    if "dot_general" not in primitives or not primitives & _EXPONENTIALS:
        return []
    found = []
    softmaxes = set()
    program = _Program(jaxpr)
    for product in program.equations:
        if product.name != "dot_general":
            continue
        for position in (0, 1):
            softmax, sites = _Search().attention(product, position)
            # The same weights in a second product are those of a derivative.
            if sites and softmax not in softmaxes:
                softmaxes.add(softmax)
                found.append(Attention(jaxpr.eqns[softmax.maker.index], sites))
                break
    return found


# --- The program, with its calls spelled out


_EXPONENTIALS = {"exp", "exp2", "logistic"}
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


class _Value:
    """What a variable or a literal stands for.

    Attributes:
      shape: Its shape.
      is_float: Whether it is of a floating dtype.
      maker: The equation that computes it; None for inputs and literals.
      users: The equations that read it.
      variable: The variable of the level that holds it, if one does.
      index: The first equation of the level that may read the variable.
      is_made: Whether a product, or a loop, lies behind it: it is no parameter.
      is_output: Whether the level returns it.
    """

    __slots__ = (
        *("shape", "is_float", "maker", "users", "variable", "index", "is_made"),
        "is_output",
    )

    def __init__(self, aval, maker, is_made):
        self.shape = getattr(aval, "shape", ())
        self.is_float = jnp.issubdtype(getattr(aval, "dtype", np.int32), np.inexact)
        self.maker, self.is_made = maker, is_made
        self.users, self.variable, self.index = [], None, 0
        self.is_output = False


@dataclasses.dataclass(eq=False, slots=True)
class _Equation:
    """An equation of the level, or of a call in it: then it has the call's index."""

    eqn: core.JaxprEqn
    name: str
    index: int
    calls: tuple[int, ...]  # those around it, from the outermost
    inputs: list[_Value]
    outputs: list[_Value] = dataclasses.field(default_factory=list)


class _Program:
    """A level whose calls are spelled out: `jnp.where` is a call, a softmax may be."""

    def __init__(self, jaxpr):
        self.equations: list[_Equation] = []
        self._number_of_calls = itertools.count()
        values = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            values[variable] = value = _Value(variable.aval, None, False)
            value.variable = variable
        self._enter(jaxpr, values, None, ())
        for variable in jaxpr.outvars:
            self._value(variable, values).is_output = True

    def _value(self, atom, values):
        if isinstance(atom, core.Literal):
            return _Value(atom.aval, None, False)
        return values[atom]

    def _enter(self, jaxpr, values, index, calls) -> None:
        for number, eqn in enumerate(jaxpr.eqns):
            at = number if index is None else index
            inputs = [self._value(x, values) for x in eqn.invars]
            name = eqn.primitive.name
            inner = [
                getattr(x, "jaxpr", x)
                for x in eqn.params.values()
                if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
            ]
            if name in _CALLS and len(inner) == 1:
                (inner,) = inner
                within = dict(zip(inner.invars, inputs, strict=True))
                for variable in inner.constvars:
                    within[variable] = _Value(variable.aval, None, False)
                self._enter(inner, within, at, (*calls, next(self._number_of_calls)))
                outputs = [self._value(x, within) for x in inner.outvars]
            else:
                has_inner = inner or "branches" in eqn.params
                equation = _Equation(eqn, name, at, calls, inputs)
                self.equations.append(equation)
                is_made = (
                    name in ("dot_general", "conv_general_dilated")
                    or bool(has_inner)
                    or any(x.is_made for x in inputs)
                )
                outputs = [_Value(x.aval, equation, is_made) for x in eqn.outvars]
                equation.outputs = outputs
                for x in inputs:
                    x.users.append(equation)
            for variable, value in zip(eqn.outvars, outputs, strict=True):
                values[variable] = value
                is_seen = index is None and not isinstance(variable, core.DropVar)
                if is_seen and value.variable is None:
                    value.variable, value.index = variable, at + 1


def _primitives(jaxpr) -> set[str]:
    """Returns the names of the primitives of a level and of its calls."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if eqn.primitive.name in _CALLS:
            for x in eqn.params.values():
                if isinstance(x, core.ClosedJaxpr | core.Jaxpr):
                    names |= _primitives(getattr(x, "jaxpr", x))
    return names


# --- Which equations a walk may pass, and through which of their inputs


_NEUTRAL = {
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient"),
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "sharding_constraint"),
    *("optimization_barrier", "name", "pvary", "site"),
}
_MIXING = {"slice", "dynamic_slice", "dot_general"}
# Ranks are equal, but an axis of the output is no longer that of the input.
_RESIZING = {"slice", "dynamic_slice", "concatenate", "pad", "split"}
_REORDERING = {"sort", "rev", "gather", "scatter", "cumsum", "cumlogsumexp", "cumprod"}


def _neutral(equation, value) -> list[int]:
    """Returns the input that has the same numbers, in another form."""
    if equation.name not in _NEUTRAL:
        return []
    return [equation.outputs.index(value) if len(equation.outputs) > 1 else 0]


def _weighing(equation, value) -> list[int]:
    """Returns the inputs that may be weights, if the output is.

    What they are multiplied by is a scalar, a parameter or random: backward passes and
    gated layers multiply them by products.
    """
    name, inputs = equation.name, equation.inputs
    if any(facet.name == "weights" for facet in equation.eqn.params.get("facets", ())):
        return []  # they have a site already
    if name in ("mul", "dot_general"):
        return [i for i in (0, 1) if not inputs[1 - i].is_made]
    if name == "div" and not inputs[1].is_made or name in ("slice", "dynamic_slice"):
        return [0]
    if name == "select_n":
        return list(range(1, len(inputs)))
    return _neutral(equation, value)


def _summing(equation, value) -> list[int]:
    """Returns the inputs that may be a sum of exponentials, if the output is."""
    if equation.name in ("add", "max"):
        return [0, 1]
    if equation.name in ("log", "abs"):
        return [0]
    if equation.name == "select_n":
        return list(range(1, len(equation.inputs)))
    return _neutral(equation, value)


def _scoring(equation, value) -> list[int]:
    """Returns the inputs that may be scores, if the output is: any with its axes."""
    if len(equation.outputs) > 1:
        return _neutral(equation, value)
    return list(range(len(equation.inputs)))


# --- Axes, followed through reshapes as the factors of their sizes


class _Factors:
    """The factors of axes. A reshape splits a factor, and all who hold it know.

    Axes of size 1 have none: they may come and go.
    """

    def __init__(self):
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> tuple[int, ...]:
        """Returns the factors of a new axis: one."""
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def of(self, *axes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the factors of axes, in order, after all splits."""
        result = []
        for factor in itertools.chain.from_iterable(axes):
            parts = self._parts.get(factor)
            result += [factor] if parts is None else self.of(parts)
        return tuple(result)

    def size(self, axis: tuple[int, ...]) -> int:
        """Returns the size of an axis."""
        return math.prod(self._sizes[x] for x in axis)

    def regrouped(self, axes: Axes, shape: tuple[int, ...]) -> Axes | None:
        """Returns the axes after a reshape; None where sizes have no common factors."""
        rest, result = list(self.of(*axes)), []
        for size in shape:
            axis = []
            while size > 1:
                factor = rest.pop(0)
                own = self._sizes[factor]
                if own > size and own % size == 0:
                    self._parts[factor] = self.new(size) + self.new(own // size)
                    (factor, inner), own = self._parts[factor], size
                    rest.insert(0, inner)
                if size % own:
                    return None
                axis.append(factor)
                size //= own
            result.append(tuple(axis))
        return result


def _links(equation, position, output) -> list[int | None] | None:
    """Returns which axis of an input each axis of an output is, None for a new one.

    None for the whole: it cannot be said.
    """
    params, name = equation.eqn.params, equation.name
    shape = equation.inputs[position].shape
    if name == "dot_general":
        links = list(params["dimension_numbers"][1][position])
        for side in (0, 1):
            free = _free(equation, side)
            links += free if side == position else [None] * len(free)
        return links
    if name == "transpose":
        return list(params["permutation"])
    if name == "broadcast_in_dim":
        links = [None] * len(output.shape)
        for i, j in enumerate(params["broadcast_dimensions"]):
            links[j] = i
        return links
    if name in ("squeeze", "reduce_sum"):
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return [i for i in range(len(shape)) if i not in gone]
    if len(shape) != len(output.shape) or name in _REORDERING:
        return None
    sizes = zip(shape, output.shape, strict=True)
    if name in _RESIZING or all(own in (1, size) for own, size in sizes):
        return list(range(len(shape)))  # axes of size 1 are stretched
    return None


def _free(product, side) -> list[int]:
    """Returns the axes of an operand that are neither contracted nor shared."""
    contracted, shared = product.eqn.params["dimension_numbers"]
    taken = {*contracted[side], *shared[side]}
    return [i for i in range(len(product.inputs[side].shape)) if i not in taken]


class _Step(NamedTuple):
    """A value on a walk.

    Attributes:
      value: The value.
      axes: Its axes.
      marks: Axes that the walk must not lose.
    """

    value: _Value
    axes: Axes
    marks: tuple[tuple[int, ...], ...] = ()


class _Groups(NamedTuple):
    """Which factors are what."""

    batch: list[tuple[int, ...]]
    heads: tuple[int, ...]
    queries: tuple[int, ...]


class _Softmax(NamedTuple):
    """How weights were made of scores."""

    scores: _Step
    are_shares: bool
    is_sigmoid: bool = False


class _Scores(NamedTuple):
    """A product of queries and keys: `size` is the axis that they share, of each."""

    product: _Equation
    query: _Step
    key: _Step
    query_size: tuple[int, ...]
    key_size: tuple[int, ...]


# --- The search


class _Search:
    """The search for one attention, with the factors of all axes that it meets."""

    def __init__(self):
        self.factors = _Factors()

    def attention(self, product: _Equation, side: int) -> tuple[_Value, list[Site]]:
        """Returns softmax and sites of the attention whose weights an operand is."""
        nothing = None, []
        contracted, shared = product.eqn.params["dimension_numbers"]
        weights, values = product.inputs[side], product.inputs[1 - side]
        if weights.maker is None or len(contracted[0]) != 1 or not _free(product, side):
            return nothing  # pooling has no free axis
        if 0 in (*weights.shape, *values.shape) or _has_sites(product):
            return nothing
        axes = [self.factors.new(size) for size in weights.shape]
        keys = axes[contracted[side][0]]
        walk = self.walk(_Step(weights, axes, (keys,)), _weighing, self.softmax)
        if walk is None:
            return nothing
        steps, softmax = walk
        # What is wholly inside of a call is found when the call is searched.
        if product.calls and product.calls[:1] == steps[-1].value.maker.calls[:1]:
            return nothing

        value_axes = [self.factors.new(size) for size in values.shape]
        value_axes[contracted[1 - side][0]] = keys
        for i, j in zip(shared[side], shared[1 - side], strict=True):
            value_axes[j] = axes[i]
        size = self.factors.of(*(value_axes[i] for i in _free(product, 1 - side)))
        value = _Step(values, value_axes, (keys,))
        by_side = (axes, value_axes) if side == 0 else (value_axes, axes)
        outputs = [axes[i] for i in shared[side]]
        outputs += [by_side[i][j] for i in (0, 1) for j in _free(product, i)]
        heads = _Step(product.outputs[0], outputs, (size,))
        groups = self.groups(product, side, axes, heads)

        def scores(equation, step):
            return self.scores(equation, step, value, softmax.is_sigmoid)

        begin = softmax.scores
        begin = begin._replace(marks=(*begin.marks, groups.queries))
        walk = self.walk(begin, _scoring, scores)
        if walk is None:
            return nothing
        sites = self.sites(product, steps, softmax, walk[1], value, heads, groups)
        return steps[-1].value, sites

    def walk(self, step, passing, goal, seen=None) -> tuple[list[_Step], Any] | None:
        """Returns the steps back to a goal, depth first, and what the goal is.

        Args:
          step: Where it begins.
          passing: From an equation and its output to the inputs that may be passed.
          goal: From an equation, and the step that is its output, to what is sought, or
            None.
          seen: The values passed before.
        """
        seen = set() if seen is None else seen
        equation = step.value.maker
        if equation is None or step.value in seen or len(seen) > _FARTHEST:
            return None
        seen.add(step.value)
        found = goal(equation, step)
        if found is not None:
            return [step], found
        for position in passing(equation, step.value):
            before = self.back(equation, position, step)
            walk = before and self.walk(before, passing, goal, seen)
            if walk is not None:
                return [step, *walk[0]], walk[1]
        return None

    def back(self, equation, position, step) -> _Step | None:
        """Returns an input of an equation whose output is a step; None if marks end."""
        value, marks = equation.inputs[position], step.marks
        if equation.name == "reshape":
            axes = self.factors.regrouped(step.axes, value.shape)
            return axes and _Step(value, axes, marks)
        links = _links(equation, position, step.value)
        if links is None:
            return None
        axes = [self.factors.new(size) for size in value.shape]
        for axis, size, link in zip(step.axes, step.value.shape, links, strict=True):
            if link is not None and size == value.shape[link]:
                axes[link] = axis
            elif link is not None and equation.name in _RESIZING:
                marks = tuple(axes[link] if axis == mark else mark for mark in marks)
        if set(self.factors.of(*marks)) <= set(self.factors.of(*axes)):
            return _Step(value, axes, marks)
        return None

    def ahead(self, equation, position, step) -> _Step | None:
        """Returns the output of an equation, if an input is a step."""
        value = equation.outputs[position if len(equation.outputs) > 1 else 0]
        if equation.name == "reshape":
            axes = self.factors.regrouped(step.axes, value.shape)
            return axes and _Step(value, axes, step.marks)
        links = _links(equation, position, value)
        if links is None:
            return None
        axes = [self.factors.new(size) for size in value.shape]
        for i, link in enumerate(links):
            if link is not None and value.shape[i] == step.value.shape[link]:
                axes[i] = step.axes[link]
        return _Step(value, axes, step.marks)

    def softmax(self, equation, step) -> _Softmax | None:
        """Returns how weights are made, if this is the last equation of a softmax."""
        if equation.name == "logistic":
            return _Softmax(self.back(equation, 0, step), False, True)
        if equation.name in _EXPONENTIALS:  # exp(x - logsumexp(x))
            scores = self.back(equation, 0, step)
            shifted = scores.value.maker
            if shifted is None or shifted.name != "sub":
                return None
            are_shares = self.sums_to_one(shifted, scores, None)
            return None if are_shares is None else _Softmax(scores, are_shares)
        if equation.name != "div":
            return None
        top = self.back(equation, 0, step)
        if top is None or not top.value.is_made:  # 1 / (1 + exp(-x))
            bottom = self.back(equation, 1, step)
            if bottom is None or getattr(bottom.value.maker, "name", "") != "add":
                return None
            top = self.back(bottom.value.maker, 1, bottom)
            top = top or self.back(bottom.value.maker, 0, bottom)
        walk = top and self.walk(top, _weighing, _exponential)
        if walk is None:
            return None
        steps, exponential = walk
        scores = self.back(exponential, 0, steps[-1])
        if not equation.inputs[0].is_made:
            return _Softmax(scores, False, True)
        are_shares = self.sums_to_one(equation, step, exponential)
        return None if are_shares is None else _Softmax(scores, are_shares)

    def sums_to_one(self, equation, step, exponential) -> bool | None:
        """Returns whether a row sums to 1; None if there is no sum over keys.

        Args:
          equation: A division by the sum, or a subtraction of its logarithm.
          step: Its output, with the keys marked.
          exponential: What must be summed; None: any exponentials.
        """
        others = set(self.factors.of(*step.axes)) - set(self.factors.of(*step.marks))

        def summed(equation, step):
            is_sum = equation.name == "reduce_sum" and len(equation.eqn.params["axes"])
            if is_sum != 1 or set(self.factors.of(*step.axes)) != others:
                return None
            terms = self.back(equation, 0, step)
            walk = terms and self.walk(terms, _weighing, _exponential)
            if walk is None or exponential not in (None, walk[1]):
                return None
            return True

        total = self.back(equation, 1, step._replace(marks=()))
        walk = total and self.walk(total, _summing, summed)
        if walk is None:
            return None
        names = [each.value.maker.name for each in walk[0]]
        if exponential is None and "log" not in names:
            return None
        # What logsumexp adds behind the logarithm is the maximum.
        return "add" not in names[names.index("log") if exponential is None else 0 :]

    def groups(self, product, side, axes, heads) -> _Groups:
        """Returns which axes of weights are batches, heads and queries."""
        of = self.factors.of
        shared = sorted(product.eqn.params["dimension_numbers"][1][side])
        free = _free(product, side)
        own, together = self.head_factors(heads, axes, shared, free)
        is_shown = bool(own)
        chosen = None
        if not own and len(shared) > 1 and (own is None or not axes[shared[-1]]):
            chosen = shared[-1]  # [B, H, T, S] without more to tell
            own = of(axes[chosen])
        own = own or ()
        for merged in together:  # grouped heads: [B, T, K, G, V] to [B, T, K * G, V]
            known = {*own, *of(*(axes[i] for i in free))}
            if set(own) < set(merged) <= known:
                own = merged
        rest = [i for i in free if not of(axes[i]) or not set(of(axes[i])) <= set(own)]
        queries = ([i for i in rest if axes[i]] or rest)[-1]
        batch = {i: () for i in shared if not axes[i] and i != chosen}
        for i in (*shared, *rest):
            factors = tuple(x for x in of(axes[i]) if x not in own)
            if i == queries or not factors:
                continue
            # One key and value for all heads, [B, H, T, S] with values [B, S, V].
            if i in free and not is_shown and shared and i > shared[0]:
                own = (*own, *factors)
            else:
                batch[i] = factors
        return _Groups([batch[i] for i in sorted(batch)], own, of(axes[queries]))

    def head_factors(self, heads, axes, shared, free):
        """Returns what the program does with heads: which factors are theirs.

        Heads are merged or contracted with the size of values, or summed. None where
        nothing shows, () where the size is contracted alone. Also what else was merged.
        """
        of = self.factors.of
        (size,) = heads.marks
        own, together, waiting, seen = None, [], [heads], set()

        def is_valid(factors):  # an axis of queries is left
            return factors and any(
                not axes[i] or not set(of(axes[i])) <= set(factors) for i in free
            )

        def without_size(factors):
            return tuple(x for x in factors if x not in of(size))

        while waiting and len(seen) < _FARTHEST:
            step = waiting.pop(0)
            if step.value in seen:
                continue
            seen.add(step.value)
            for equation in step.value.users:
                position = equation.inputs.index(step.value)
                after = self.ahead(equation, position, step)
                if after is None:
                    continue
                params, gone = equation.eqn.params, ()
                if equation.name == "dot_general":
                    gone = sorted(params["dimension_numbers"][0][position])
                elif equation.name == "reduce_sum":
                    gone = params["axes"]
                gone = of(*(step.axes[i] for i in gone))
                if equation.name == "reduce_sum":
                    if set(of(size)) & set(gone):
                        continue
                    if set(gone) <= set(of(*(axes[i] for i in shared))) and gone:
                        return gone, together
                for factors in (gone, *map(of, after.axes)):
                    if set(of(size)) & set(factors) and is_valid(without_size(factors)):
                        return without_size(factors), together
                if set(of(size)) & set(gone):
                    own = ()
                together += [of(axis) for axis in after.axes if len(of(axis)) > 1]
                waiting.append(after)
        return own, together

    def scores(self, equation, step, value, is_sigmoid) -> _Scores | None:
        """Returns queries and keys, if this is their product and meant as attention."""
        if equation.name != "dot_general" or _has_sites(equation):
            return None
        contracted, _ = equation.eqn.params["dimension_numbers"]
        if not contracted[0]:
            return None
        keys, queries = (set(self.factors.of(mark)) for mark in step.marks)
        step_ = step._replace(marks=())
        for side in (0, 1):
            query = self.back(equation, side, step_)
            key = self.back(equation, 1 - side, step_)
            sizes = (
                self.factors.of(*(each.axes[i] for i in contracted[j]))
                for each, j in ((query, side), (key, 1 - side))
            )
            in_query, in_key = (set(self.factors.of(*x.axes)) for x in (query, key))
            if queries <= in_query - in_key and keys <= in_key - in_query:
                query = query._replace(marks=step.marks[1:])
                key = key._replace(marks=step.marks[:1])
                found = _Scores(equation, query, key, *sizes)
                if self.is_meant(found, value.value, is_sigmoid):
                    return found
        return None

    def is_meant(self, scores, value, is_sigmoid) -> bool:
        """Returns whether keys and values belong together, as attention's do."""
        query, key = scores.query.value, scores.key.value
        if query.is_made or key.is_made or value.is_made or is_sigmoid:
            if key.is_made and value.is_made:
                return _have_common_source(key, value)
            some = key.is_made or value.is_made
            return some and not is_sigmoid and _have_common_source(query, key, value)
        # All are inputs. Keys that are the values themselves are a codebook, and keys
        # [K, S], those of a matrix product, are the parameters of a layer.
        query, value = (
            self.origin(_Step(x, [self.factors.new(size) for size in x.shape])).value
            for x in (query, value)
        )
        key = self.origin(scores.key)
        if key.value is value and key.value is not query:
            return False
        last = self.factors.of(key.axes[-1])
        return len(key.axes) != 2 or last == self.factors.of(scores.key_size)

    def origin(self, step) -> _Step:
        """Returns the first value that has the same numbers."""
        while step.value.maker is not None:
            positions = _neutral(step.value.maker, step.value)
            before = positions and self.back(step.value.maker, positions[0], step)
            if not before:
                break
            step = before
        return step

    def weights(self, product, steps, groups) -> _Step | None:
        """Returns the weights to show: mixed and masked, but not dropped out."""
        names = [step.value.maker.name for step in steps]
        last = min(
            (i for i, name in enumerate(names) if name in _MIXING),
            default=len(steps) - 1,
        )
        best = here = last
        while here and names[here - 1] not in ("mul", "div"):
            here -= 1
            best = here if names[here] == "select_n" else best
        (keys,) = steps[0].marks
        whole = (*groups.batch, groups.heads, groups.queries, keys)
        for step in (*steps[best::-1], *steps[best + 1 : last + 1]):
            is_whole = set(self.factors.of(*step.axes)) == set(self.factors.of(*whole))
            is_visible = step.value.variable is not None
            if is_whole and is_visible and step.value.index <= product.index:
                return step
        return None

    def sites(self, product, steps, softmax, scores, value, heads, groups):
        """Returns the sites of an attention: those that variables of the level show."""
        batch, (keys,), (size,) = groups.batch, value.marks, heads.marks
        (queries,), (scored,) = scores.query.marks, scores.key.marks
        weights, heads = self.weights(product, steps, groups), self.emerging(heads)
        if weights is None or heads is None:
            return []
        # In front of which equation a value stands, and its axes but for batch axes;
        # None is for those of heads, what is left.
        wanted = {
            "query": (scores.product, scores.query, queries, None, scores.query_size),
            "key": (scores.product, scores.key, scored, None, scores.key_size),
            "weights": (weights.value, weights, groups.heads, groups.queries, keys),
            "value": (product, value, keys, None, size),
            "heads": (heads.value, heads, groups.queries, groups.heads, size),
        }
        variables, layouts, sites = {}, {}, []
        for name, (place, step, *axes) in wanted.items():
            step = self.standing(step, place.index)
            layout = step and self.layout(step, (*batch, *axes), groups.heads)
            if layout is None:
                continue
            variables[name], layouts[name] = step.value.variable, layout
            # An edit of a variable is an edit for all that read it from there on.
            is_own = name in ("weights", "heads") or (
                sum(user.index >= place.index for user in step.value.users) == 1
                and not step.value.is_output
            )
            write = layout.hidden if is_own else None
            facet = site.Facet(name, layout.shown, write, _READ_ELSEWHERE)
            sites.append(_site(place.index, variables[name], facet))
        if _make_map is not None:
            is_mixed = any(step.value.maker.name in _MIXING for step in steps)
            map_ = _Map(_agreeing(layouts), softmax.are_shares and not is_mixed)
            facet = site.Facet("map", map_, None, 'edit "weights"')
            leaves = {name: variables[name] for name, _ in map_.layouts}
            sites.insert(-1, _site(product.index, leaves, facet))
        return sites

    def standing(self, step, index) -> _Step | None:
        """Returns the last value with the same numbers that an equation may read."""
        while step.value.variable is None or step.value.index > index:
            maker = step.value.maker
            positions = maker and _neutral(maker, step.value)
            step = positions and self.back(maker, positions[0], step)
            if not step:
                return None
        return step

    def emerging(self, step) -> _Step | None:
        """Returns the first value with the same numbers that a variable holds."""
        while step.value.variable is None:
            users = [x for x in step.value.users if x.name in _NEUTRAL]
            if len(users) != 1:
                return None
            step = self.ahead(users[0], users[0].inputs.index(step.value), step)
            if step is None:
                return None
        return step

    def layout(self, step, groups, heads) -> "_Layout | None":
        """Returns how a value is shown; None where its axes are not these groups.

        Args:
          step: The value.
          groups: The factors of each axis to be shown; None: all others.
          heads: The factors of heads, in order.
        """
        of = self.factors.of
        factors = of(*step.axes)
        given = of(*(group for group in groups if group is not None))
        others = [x for x in dict.fromkeys((*of(heads), *factors)) if x not in given]
        groups = [others if group is None else of(group) for group in groups]
        groups = [[x for x in group if x in factors] for group in groups]
        order = [factors.index(x) for group in groups for x in group]
        if sorted(order) != list(range(len(factors))):
            return None
        is_aligned = tuple(others) == of(heads)[: len(others)]
        return _Layout(
            step.value.shape,
            tuple(self.factors.size((x,)) for x in factors),
            tuple(order),
            tuple(self.factors.size(tuple(group)) for group in groups),
            is_aligned,
        )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a value is shown in canonical axes.

    Attributes:
      shape: Its shape in the program.
      factors: The sizes into which its axes are split.
      order: These factors in the order of canonical axes.
      canonical: The shape that is shown.
      is_aligned: Whether a head of keys, or values, is of consecutive heads of queries.
    """

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    order: tuple[int, ...]
    canonical: tuple[int, ...]
    is_aligned: bool

    def shown(self, x: Array) -> Array:
        """Returns what is shown."""
        return x.reshape(self.factors).transpose(self.order).reshape(self.canonical)

    def hidden(self, x: Array, changed: Array) -> Array:
        """Returns what the program goes on with, of what is shown, changed."""
        del x
        ordered = changed.reshape([self.factors[i] for i in self.order])
        return ordered.transpose(np.argsort(self.order)).reshape(self.shape)


def _agreeing(layouts: dict[str, _Layout]) -> tuple[tuple[str, _Layout], ...]:
    """Returns the weights, and of queries, keys and values those that fit to them."""
    *_, num_heads, num_queries, num_keys = layouts["weights"].canonical
    known = [("weights", layouts["weights"])]
    lengths = {"query": num_queries, "key": num_keys, "value": num_keys}
    for name in lengths.keys() & layouts.keys():
        *_, length, own_heads, _ = layouts[name].canonical
        is_grouped = name != "query" and num_heads % own_heads == 0
        fits = is_grouped and layouts[name].is_aligned or own_heads in (1, num_heads)
        if fits and length == lengths[name]:
            known.append((name, layouts[name]))
    return tuple(known)


@dataclasses.dataclass(frozen=True)
class _Map:
    """Makes the map of weights and what is known, by name."""

    layouts: tuple[tuple[str, _Layout], ...]
    are_shares: bool

    def __call__(self, leaves: dict[str, Array]) -> Any:
        shown = {name: layout.shown(leaves[name]) for name, layout in self.layouts}
        weights = shown.pop("weights")
        *batch, num_heads, _, _ = weights.shape
        for name, x in shown.items():
            heads = num_heads if name == "query" else x.shape[-2]
            shape = (*batch, x.shape[-3], heads, x.shape[-1])
            shown[name] = jnp.broadcast_to(x, shape)
        return _make_map(weights, are_shares=self.are_shares, **shown)


def _site(index, value, facet) -> Site:
    variables, tree = jax.tree.flatten(value)
    params = {
        "facets": (facet,),
        "fit": None,
        "tree": tree,
        "kept": tuple(range(len(variables))),
        "batched": (),
    }
    return Site(index, variables, variables, params)


def _exponential(equation, step) -> _Equation | None:
    del step
    return equation if equation.name in ("exp", "exp2") else None


def _has_sites(equation) -> bool:
    """Returns whether an equation is of an attention that has its own sites."""
    return site.SEEN in str(equation.eqn.source_info.name_stack)


def _have_common_source(*values: _Value) -> bool:
    """Returns whether some array of numbers lies behind all values.

    All go back at the same pace, since the nearest is near, and all data is far.
    """
    seen = [{value} for value in values]
    fronts = list(seen)
    while any(fronts):
        if any(x.is_float and x.shape for x in set.intersection(*seen)):
            return True
        for i, front in enumerate(fronts):
            before = {x for value in front if value.maker for x in value.maker.inputs}
            fronts[i] = before - seen[i]
            seen[i] = seen[i] | fronts[i]
    return False

"""The compiled programs of the measures of importance: looks and edits of a model.

Each maps parameters and a batch to numbers. Programs are cached by model and metric, so
that measuring again, for instance at each evaluation of a training, compiles nothing.

B batch, P attention parts, H heads and F hidden units of a layer, X patterns of gates.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import models, tasks
from mha_haiku.core import sites
from mha_haiku.heads import edits, subject

Array = jax.Array
Program = Callable[[Any, tasks.Example], list[Array]]

# How many positions, over all examples and patterns of gates, run at once. On the CPU
# more of them overflow the caches and take 1.5 times as long.
_POSITIONS_AT_ONCE = {"cpu": 2**10}
_POSITIONS_ON_ACCELERATORS = 2**16


class Clean(NamedTuple):
    """A run without edits, and what the gates of heads do to the metric of others.

    Attributes:
      run: From edits to the metric `[B]`.
      before: The metric without any.
      names: The sites of the heads of P parts.
      heads: What they pass on, P arrays `[B, T, H, V]`.
      streams: What enters each layer, by the name of the site.
      values: What ablated heads pass on; None: zeros.
    """

    run: Callable[[edits.Edits], Array]
    before: Array
    names: list[str]
    heads: list[Array]
    streams: dict[str, Array]
    values: list[Array] | None

    @classmethod
    def of(cls, model, metric, closing, params, example) -> "Clean":
        """Runs the model once."""
        at = ["*/heads", "layer_*/stream"]
        output, found = subject.look(model, params, example, at, strict=False)
        streams = {name: x for name, x in found.items() if name.endswith("stream")}
        heads = {name: x for name, x in found.items() if name not in streams}
        if not heads:
            raise ValueError(
                "the model has no heads: no attention was found in it; mh.sites lists "
                "what there is."
            )

        def run(edits):
            edited = subject.run_edited(model, params, example, edits)
            return metric(edited.logits, example)

        before = metric(output.logits, example)
        names, heads = list(heads), list(heads.values())
        return cls(run, before, names, heads, streams, closing(heads))

    @property
    def counts(self) -> list[int]:
        """H of each part."""
        return [each.shape[-2] for each in self.heads]

    def gated(self, gates: Sequence[Array | None]) -> edits.Edits:
        """Returns the edits that gate the heads of each part."""
        values = self.values or [None] * len(self.names)
        given = [
            None if gate is None else (gate, value)
            for gate, value in zip(gates, values, strict=True)
        ]
        return edits.on_parts(
            self.names, given, lambda heads, own: edits.gated(heads, *own)
        )

    def open_gates(self) -> list[Array]:
        """Returns open gates of each example, P arrays `[B, H]`."""
        size = len(self.before)
        return [jnp.ones((size, count), jnp.float32) for count in self.counts]


@functools.lru_cache(maxsize=8)
def changes(model, metric, closing) -> Program:
    """Returns the change of the metric when one head is ablated, P arrays `[B, H]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        clean = Clean.of(own, metric, closing, params, example)
        if subject.is_scanned(own, model):
            return _changes_by_scan(clean, example)
        has_kinds = any(name.startswith("decoder/") for name in clean.names)
        is_deep = len(clean.names) > 2 * subject.FEW_LAYERS
        if has_kinds or is_deep or not clean.streams:
            return _changes_of_a_whole(clean, example)
        streams = list(clean.streams.items())
        layers = []
        for i, count in enumerate(clean.counts):
            # Layers below i do not depend on its gates: they are left out.
            name, stream = streams[i]

            def ablated(gates, i=i, name=name, stream=stream):
                own = [gates if j == i else None for j in range(len(clean.names))]
                return clean.run({name: lambda _: stream} | clean.gated(own))

            after = over(ablated, 1 - jnp.eye(count), example)
            layers.append((after - clean.before[None]).T)
        return layers

    return program


@functools.lru_cache(maxsize=8)
def slopes(model, metric, closing) -> Program:
    """Returns the absolute slopes of the metric by gates, P arrays `[B, H]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        clean = Clean.of(own, metric, closing, params, example)
        found = jax.grad(lambda gates: clean.run(clean.gated(gates)).sum())(
            clean.open_gates()
        )
        return [jnp.abs(layer) for layer in found]

    return program


@functools.lru_cache(maxsize=8)
def unit_slopes(model, metric) -> Program:
    """Returns the absolute slopes of the metric by gates of units, L of `[B, F]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        _, hidden = subject.look(own, params, example, ["*/hidden"])

        def total(gates):
            gated = edits.on_parts(
                list(hidden), gates, lambda units, gate: units * gate[:, None]
            )
            output = subject.run_edited(own, params, example, gated)
            return metric(output.logits, example).sum()

        gates = [jnp.ones((len(x), x.shape[-1])) for x in hidden.values()]
        found = iter(jax.grad(total)(gates))
        sizes = [x.shape[-1] for x in hidden.values()]
        if model.config is not None:  # which knows of layers without any, too
            sizes = models.hidden_sizes(model.config)
        nothing = jnp.zeros((len(example.inputs), 0))
        return [jnp.abs(next(found)) if size else nothing for size in sizes]

    return program


@functools.lru_cache(maxsize=8)
def shares(model, metric, closing, points) -> Program:
    """Returns integrated gradients of the gates, P arrays `[B, H]`."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = jnp.asarray((nodes + 1) / 2), jnp.asarray(weights / 2)

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        clean = Clean.of(own, metric, closing, params, example)

        def add(sums, point):
            node, weight = point
            gates = [node * gate for gate in clean.open_gates()]
            slopes = jax.grad(lambda gates: clean.run(clean.gated(gates)).sum())(gates)
            return [s - weight * each for s, each in zip(sums, slopes, strict=True)], ()

        init = [jnp.zeros_like(gate) for gate in clean.open_gates()]
        points = (nodes.astype(jnp.float32), weights.astype(jnp.float32))
        return jax.lax.scan(add, init, points)[0]

    return program


@functools.lru_cache(maxsize=8)
def numbers(model, name) -> Program:
    """Returns a statistic of the maps, P arrays `[B, H]`."""

    def number(attention_map, kind, *, example):
        tokens = subject.tokens(example, kind)
        values = getattr(attention_map.statistics(tokens=tokens), name)
        if values is None and kind == "cross":  # two texts have no equal tokens
            return jnp.full(attention_map.shape[:-2], jnp.nan)
        if values is None or values.shape != attention_map.shape[:-2]:
            raise ValueError(f"{name!r} is not one number per head.")
        return values

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        at = subject.by_kind(functools.partial(number, example=example), model)
        return list(subject.look(own, params, example, at)[1].values())

    return program


@functools.lru_cache(maxsize=8)
def metrics(model, metric, closing) -> Callable:
    """Returns the metric under patterns of gates, `[B, X]`.

    The program takes the gates `[X, P, H]` between parameters and batch.
    """

    @jax.jit
    def program(params, gates, example):
        own, params = subject.compact(model, params)
        clean = Clean.of(own, metric, closing, params, example)

        def gated(pattern):
            own = [pattern[i, :count] for i, count in enumerate(clean.counts)]
            return clean.run(clean.gated(own))

        return over(gated, gates, example).T

    return program


def _changes_of_a_whole(clean, example) -> list[Array]:
    """Returns what `changes` does, of a model that cannot leave layers out.

    Or of one with so many layers, not alike, that to compile those above each of them
    takes longer than to run all of them. The loop goes over the heads of all layers, so
    that the model is compiled once.
    """
    ends = np.cumsum(clean.counts)[:-1]

    def ablated(gates):
        return clean.run(clean.gated(jnp.split(gates, ends)))

    after = over(ablated, 1 - jnp.eye(sum(clean.counts)), example)
    return jnp.split((after - clean.before[None]).T, ends, axis=-1)


def _changes_by_scan(clean, example) -> list[Array]:
    """Returns what `changes` returns, of a model with scanned layers.

    The layer of the ablated head is an array here: a loop over layers, with one over
    their heads in it, around the one layer that is compiled.
    """
    num_layers, count = len(clean.names), clean.counts[0]
    pattern, _ = sites.numbered_by_layer(next(iter(clean.streams)))

    def of_layer(layer):
        i, stream = layer

        def ablated(gates):
            gates = jnp.ones((num_layers, count)).at[i].set(gates)
            return clean.run({pattern: sites.Resume(i, stream)} | clean.gated([*gates]))

        return over(ablated, 1 - jnp.eye(count), example)

    streams = jnp.stack(list(clean.streams.values()))
    after = jax.lax.map(of_layer, (jnp.arange(num_layers), streams))
    return list((after - clean.before[None, None]).swapaxes(1, 2))


def over(function: Callable, gates: Any, example: tasks.Example) -> Any:
    """Returns the function of each row of gates; runs as many at once as is fastest.

    Memory is that of those at once.

    Args:
      function: Of a row, to a tree of arrays.
      gates: `[X, ...]`, or a tree of such.
      example: A batch of the size that each row runs.
    """
    inputs = example.inputs, example.decoder_inputs
    length = max(x.shape[1] for x in inputs if x is not None)
    positions = example.inputs.shape[0] * length
    most = _POSITIONS_AT_ONCE.get(jax.default_backend(), _POSITIONS_ON_ACCELERATORS)
    count = len(jax.tree.leaves(gates)[0])
    at_once = max(1, min(count, most // positions))
    batch_size = at_once if at_once > 1 else None
    return jax.lax.map(function, gates, batch_size=batch_size)

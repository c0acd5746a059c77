"""The compiled programs of the measures of importance.

Each maps parameters and a batch to numbers. Programs are cached by model and metric, so
that measuring again, for instance at each evaluation of a training, compiles nothing.

B batch, L layers, H heads and F hidden units of a layer, P patterns of gates.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import modules, tasks
from mha_haiku.heads import subject

Array = jax.Array
Program = Callable[[Any, tasks.Example], list[Array]]

# How many positions, over all examples and patterns of gates, run at once. On the CPU
# more of them overflow the caches and take 1.5 times as long.
_POSITIONS_AT_ONCE = {"cpu": 2**10}
_POSITIONS_ON_ACCELERATORS = 2**16


@functools.lru_cache(maxsize=8)
def changes(model, metric, closing) -> Program:
    """Returns the change of the metric when one head is closed, L arrays `[B, H]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        if own is not model:
            return _changes_by_scan(own, metric, closing, params, example)
        clean = subject.run(model, params, example)
        replacement = closing(clean)
        before = metric(clean.logits, example)
        if not clean.hidden or len(clean.maps) > 2 * subject.FEW_LAYERS:
            return _changes_of_a_whole(
                model, metric, params, example, clean, replacement, before
            )
        layers = []
        for i, each in enumerate(clean.maps):
            # Layers below i do not depend on its gates: start from their output.
            def closed(gates, i=i):
                interventions = _at_layer(i, len(clean.maps), gates, replacement)
                start = (i, clean.hidden[i])
                output = subject.run(
                    model, params, example, interventions=interventions, start=start
                )
                return metric(output.logits, example)

            count = each.shape[-3]
            one_closed = 1 - jnp.eye(count)
            after = over(closed, one_closed, example)
            layers.append((after - before[None]).T)
        return layers

    return program


@functools.lru_cache(maxsize=8)
def slopes(model, metric, closing) -> Program:
    """Returns the absolute slopes of the metric by gates, L arrays `[B, H]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        clean = subject.run(own, params, example)
        replacement = closing(clean)
        total = _summed(own, metric, params, example, replacement)
        return [jnp.abs(layer) for layer in jax.grad(total)(_open(clean))]

    return program


@functools.lru_cache(maxsize=8)
def unit_slopes(model, metric, hidden_sizes) -> Program:
    """Returns the absolute slopes of the metric by gates of units, L of `[B, F]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)

        def total(gates):
            interventions = modules.Interventions(units=gates)
            output = subject.run(own, params, example, interventions=interventions)
            return metric(output.logits, example).sum()

        shapes = [(len(example.inputs), size) for size in hidden_sizes]
        gradient = jax.grad(total)([jnp.ones(shape, jnp.float32) for shape in shapes])
        return [jnp.abs(layer) for layer in gradient]

    return program


@functools.lru_cache(maxsize=8)
def shares(model, metric, closing, points) -> Program:
    """Returns integrated gradients of the gates, L arrays `[B, H]`."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = jnp.asarray((nodes + 1) / 2), jnp.asarray(weights / 2)

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)
        clean = subject.run(own, params, example)
        replacement = closing(clean)
        total = _summed(own, metric, params, example, replacement)

        def add(sums, point):
            node, weight = point
            gates = [node * gate for gate in _open(clean)]
            slopes = jax.grad(total)(gates)
            return [s - weight * each for s, each in zip(sums, slopes, strict=True)], ()

        nothing = [jnp.zeros_like(gate) for gate in _open(clean)]
        points = (nodes.astype(jnp.float32), weights.astype(jnp.float32))
        return jax.lax.scan(add, nothing, points)[0]

    return program


@functools.lru_cache(maxsize=8)
def numbers(model, name) -> Program:
    """Returns a statistic of the maps, L arrays `[B, H]`."""

    @jax.jit
    def program(params, example):
        own, params = subject.compact(model, params)

        def number(attention_map, kind):
            tokens = subject.tokens(example, kind)
            values = getattr(attention_map.statistics(tokens=tokens), name)
            if values is None and kind == "cross":  # two texts have no equal tokens
                return jnp.full(attention_map.shape[:-2], jnp.nan)
            if values is None or values.shape != attention_map.shape[:-2]:
                raise ValueError(f"{name!r} is not one number per head.")
            return values

        return subject.of_kinds(subject.run(own, params, example).maps, number)

    return program


@functools.lru_cache(maxsize=8)
def metrics(model, metric, closing) -> Callable:
    """Returns the metric under patterns of gates, `[B, P]`.

    The program takes the gates `[P, L, H]` between parameters and batch.
    """

    @jax.jit
    def program(params, gates, example):
        own, params = subject.compact(model, params)
        clean = subject.run(own, params, example)
        replacement = closing(clean)
        counts = [each.shape[-3] for each in clean.maps]

        def gated(pattern):
            layers = [pattern[i, :count] for i, count in enumerate(counts)]
            interventions = modules.Interventions(layers, replacement)
            output = subject.run(own, params, example, interventions=interventions)
            return metric(output.logits, example)

        return over(gated, gates, example).T

    return program


def _changes_of_a_whole(
    model, metric, params, example, clean, replacement, before
) -> list[Array]:
    """Returns what `changes` does, of a model that cannot start from a layer's input.

    Or of one with so many layers, not alike, that to compile those above each of them
    takes longer than to run all of them. The loop goes over the heads of all layers, so
    that the model is compiled once.
    """
    counts = [each.shape[-3] for each in clean.maps]
    ends = np.cumsum(counts)[:-1]

    def closed(gates):
        interventions = modules.Interventions(jnp.split(gates, ends), replacement)
        output = subject.run(model, params, example, interventions=interventions)
        return metric(output.logits, example)

    after = over(closed, 1 - jnp.eye(sum(counts)), example)
    return jnp.split((after - before[None]).T, ends, axis=-1)


def _changes_by_scan(model, metric, closing, params, example) -> list[Array]:
    """Returns what `changes` returns, of a model with scanned layers.

    The layer of the closed head is an array here: a loop over layers, with one over
    their heads in it, around the one layer that is compiled.
    """
    clean = subject.run(model, params, example)
    replacement = closing(clean)
    before = metric(clean.logits, example)
    num_layers, count = len(clean.maps), clean.maps[0].shape[-3]

    def of_layer(layer):
        i, hidden = layer

        def closed(gates):
            gates = jnp.ones((num_layers, count)).at[i].set(gates)
            output = subject.run(
                model,
                params,
                example,
                interventions=modules.Interventions(gates, replacement),
                start=(i, hidden),
            )
            return metric(output.logits, example)

        return over(closed, 1 - jnp.eye(count), example)

    inputs = (jnp.arange(num_layers), jnp.stack(clean.hidden))
    after = jax.lax.map(of_layer, inputs)
    return list((after - before[None, None]).swapaxes(1, 2))


def _at_layer(i, num_layers, gates, replacement) -> modules.Interventions:
    """Returns interventions on the heads of layer i only."""

    def only(x):
        return [x if j == i else None for j in range(num_layers)]

    return modules.Interventions(
        heads=only(gates),
        replacement=None if replacement is None else only(replacement[i]),
    )


def _summed(model, metric, params, example, replacement) -> Callable:
    """Returns a function of gates, L arrays `[B, H]`, to the sum of the metric."""

    def total(gates):
        interventions = modules.Interventions(gates, replacement)
        output = subject.run(model, params, example, interventions=interventions)
        return metric(output.logits, example).sum()

    return total


def _open(clean) -> list[Array]:
    """Returns open gates of each example, L arrays `[B, H]`."""
    return [jnp.ones(each.shape[:-2], jnp.float32) for each in clean.maps]


def over(function: Callable, gates: Any, example: tasks.Example) -> Any:
    """Returns the function of each row of gates; runs as many at once as is fastest.

    Memory is that of those at once.

    Args:
      function: Of a row, to a tree of arrays.
      gates: `[P, ...]`, or a tree of such.
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

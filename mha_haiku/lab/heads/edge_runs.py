"""Runs of a model in which every node reads what its own edges carry.

In a patched run an edge carries what its sender computes in this run, or what it has
written in the corrupted run. So each query, key and value of each head is made of a
stream of its own: what the parts of a model compute of what they read is taken out of
the program by its sites, which are edited where a part begins and looked at where it
ends.

B batch, T positions, S key positions, H heads of a part, G key/value heads, K query/key
and V value size per head, D width, L layers, U nodes that write, R places that read, X
patterns of edges.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from mha_haiku.core import models, sites
from mha_haiku.core.modules import anatomy
from mha_haiku.lab.heads import edits, running
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.training import tasks

Array = jax.Array
Params = Mapping[str, Mapping[str, Array]]

_QUERY, _KEY, _VALUE = ("query", "gates"), ("key",), ("value",)


class Pieces:
    """The parts of a model, as functions of parameters and of what they read.

    `pieces(params, wanted, given)` computes the sites `wanted` of the sites `given`,
    and nothing else.
    """

    def __init__(self, model: models.Model, params: Params, example: tasks.Example):
        """Traces the model."""
        self.graph = graphs.of_model(model)
        begins, ends = set(), {"logits"}
        for part in self.graph.parts:
            begins |= set(part.reads)
            ends.add(f"{part.path}/output")
            if part.groups:
                inner = ("query", "key", "value", "gates", "heads")
                begins |= {f"{part.path}/{name}" for name in inner}
        begins.add(f"{self.graph.stack}/stream")
        run = functools.partial(running.run, model)
        look = sites.look(run, sorted(begins | ends), strict=False)
        _, shapes = jax.eval_shape(look, params, example)
        self.names = list(shapes)
        given = {name: x for name, x in shapes.items() if name in begins}

        # The look is inside of the edit, and so sees what is computed, not what is set.
        def pieces(params, example, given):
            changes = {name: lambda _, x=x: x for name, x in given.items()}
            return list(sites.edit(look, changes)(params, example)[1].values())

        arrays, structure = jax.tree.flatten((params, example))
        count = len(arrays)

        def flat(*leaves):
            given_leaves = dict(zip(given, leaves[count:], strict=True))
            return pieces(*jax.tree.unflatten(structure, leaves[:count]), given_leaves)

        self._closed = jax.make_jaxpr(flat)(*arrays, *given.values())
        self._example, self._given = example, list(given)
        self._modules = [
            (x, name) for x in sorted(params) for name in sorted(params[x])
        ]
        self._programs: dict[tuple[str, ...], tuple] = {}

    def __call__(
        self, params: Params, wanted: Sequence[str], given: Mapping[str, Array]
    ) -> list[Array]:
        """Returns the sites that are wanted and exist, computed of those given."""
        wanted = tuple(name for name in wanted if name in self.names)
        if wanted not in self._programs:
            used = [name in wanted for name in self.names]
            self._programs[wanted] = partial_eval.dce_jaxpr(self._closed.jaxpr, used)
        jaxpr, used = self._programs[wanted]
        # Of layers that are alike, the parameters of one are given.
        leaves = [params.get(module, {}).get(name) for module, name in self._modules]
        leaves += jax.tree.leaves(self._example)
        leaves += [given.get(name) for name in self._given]
        leaves = [x for x, is_used in zip(leaves, used, strict=True) if is_used]
        found = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self._closed.consts))(*leaves)
        in_order = [name for name in self.names if name in wanted]
        by_name = dict(zip(in_order, found, strict=True))
        return [by_name[name] for name in wanted]


class Pair:
    """A clean and a corrupted batch, and runs between the two.

    Attributes:
      before: `[B]`, the metric of the clean run.
      after: `[B]`, the metric of the corrupted run.
    """

    def __init__(self, model, params, clean, corrupted, metric):
        """Runs the model on both."""
        if running.is_scanned(model, params):
            raise ValueError("model must have looped layers; models.unstacked helps.")
        self.pieces = Pieces(model, params, clean)
        self.graph, self.params, self.example = self.pieces.graph, params, clean
        self._metric = metric
        self._compact = running.compact(model, params)
        # Layers that are alike run as a scan of the first one.
        self._is_scanned = running.is_scanned(*self._compact)
        at = [_EMBEDDINGS[stack] for stack in self.graph.embeddings]
        at += [_written(part) for part in self.graph.parts]
        self._written = at
        pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), clean, corrupted)
        logits, seen = jax.lax.map(functools.partial(self._seen, at=at), pair)
        self.before, self.after = (metric(x, clean) for x in logits)
        self.clean, self.corrupted = (
            {name: x[i] for name, x in seen.items()} for i in (0, 1)
        )

    def _seen(self, example, at):
        output, found = running.look(*self._compact, example, at)
        return output.logits, found

    def matrix(self, values: Array) -> Array:
        """Returns `[..., E]` of edges as `[..., U, R]`, with zeros."""
        writers, readers = self.graph.places.T
        shape = (*values.shape[:-1], *self.graph.exists.shape)
        return jnp.zeros(shape).at[..., writers, readers].set(values)

    def patched(self, kept: Array) -> Array:
        """Returns the metric `[B]` where edges are kept by as much as `[E]` says.

        An edge carries `kept` times what its sender has written in this run, plus the
        rest of 1 times what it has written in the corrupted run.
        """
        graph, cut = self.graph, self.matrix(1 - kept)
        streams = {stack: self.clean[_EMBEDDINGS[stack]] for stack in graph.embeddings}
        # By stack: what each node has written in the corrupted run, less in this one.
        missing = {}
        for stack, stream in streams.items():
            count = len(graph.writers[graph.of_stack(stack)])
            first = self.corrupted[_EMBEDDINGS[stack]] - stream
            missing[stack] = jnp.zeros((count, *stream.shape)).at[0].set(first)

        def read(site, cut, streams, missing):
            stack = _stack(site)
            rows = cut[graph.of_stack(stack)]
            return streams[stack] + jnp.einsum("ur,ubtd->rbtd", rows, missing[stack])

        def step(layer, params, carry, given):
            streams, missing = carry
            entering = streams
            for part, (cut, theirs, writer) in zip(layer, given, strict=True):
                sources = [
                    read(site, own, entering if _enters(site) else streams, missing)
                    for site, own in zip(
                        part.reads, jnp.split(cut, len(part.reads), 1), strict=True
                    )
                ]
                if part.groups:
                    heads = self._heads(part, params, sources)
                    written = _contributions(part, params, theirs - heads)
                    at = {f"{part.path}/heads": heads}
                    (output,) = self.pieces(params, [f"{part.path}/output"], at)
                else:
                    at = {part.reads[0]: sources[0][0]}
                    (output,) = self.pieces(params, [f"{part.path}/output"], at)
                    written = (theirs - output)[None]
                own = jax.lax.dynamic_update_slice_in_dim(
                    missing[part.stack], written, writer, 0
                )
                missing = missing | {part.stack: own}
                streams = streams | {part.stack: streams[part.stack] + output}
            return (streams, missing), None

        given = [
            [
                (
                    cut[:, part.readers],
                    self.corrupted[_written(part)],
                    part.writer - graph.embeddings[part.stack],
                )
                for part in layer
            ]
            for layer in graph.layers
        ]
        (streams, missing), _ = self._over_layers(step, (streams, missing), given)
        end = f"{graph.stack}/stream"
        (stream,) = read(end, cut[:, -1:], streams, missing)
        (logits,) = self.pieces(self.params, ["logits"], {end: stream})
        return self._metric(logits, self.example)

    def slopes(self, share: Array) -> tuple[Array, Array]:
        """Returns what patching does to the metric at first order: edges and nodes.

        They are `[B, E]`, of an edge alone, and `[B, U]`, of all that reads a node.

        Args:
          share: How much of the embeddings is the clean run's where slopes are taken;
            the rest is the corrupted run's.
        """
        graph, end = self.graph, f"{self.graph.stack}/stream"
        shifts = {name: jnp.zeros_like(self.clean[name]) for name in self._written}
        shifts[end] = jnp.zeros_like(shifts[_EMBEDDINGS[graph.stack]])
        between = {
            name: jax.tree.map(
                lambda x, y: share * x + (1 - share) * y,
                self.clean[name],
                self.corrupted[name],
            )
            for name in map(_EMBEDDINGS.get, graph.embeddings)
        }
        sources = {site for part in graph.parts for site in part.reads}

        def total(shifts):
            changes = {
                name: lambda _, x=x, name=name: x + shifts[name]
                for name, x in between.items()
            }
            others = [name for name in shifts if name not in between]
            changes |= edits.on_parts(others, map(shifts.get, others), jnp.add)
            model, params = self._compact
            run = sites.edit(functools.partial(running.run, model), changes)
            output, seen = sites.look(run, sorted(sources))(params, self.example)
            return self._metric(output.logits, self.example).sum(), dict(seen)

        slopes, streams = jax.grad(total, has_aux=True)(shifts)
        # What each node has written in the corrupted run, less in the clean one.
        differences = {x: self.corrupted[x] - self.clean[x] for x in self._written}
        nodes = jnp.zeros((len(self.before), len(graph.writers)))
        missing = {}
        for stack, place in graph.embeddings.items():
            name = _EMBEDDINGS[stack]
            product = (differences[name] * slopes[name]).sum((1, 2))
            nodes = nodes.at[:, place].set(product)
            missing[stack] = [differences[name][None]]

        def write(layer, params, carry, given):
            written = []
            for part, difference in zip(layer, given, strict=True):
                is_units = not part.groups
                own = (
                    difference[None]
                    if is_units
                    else _contributions(part, params, difference)
                )
                written.append(own)
            return carry, written

        given = [
            [differences[_written(part)] for part in layer] for layer in graph.layers
        ]
        _, written = self._over_layers(write, (), given)
        for part, own in zip(graph.parts, sum(written, []), strict=True):
            missing[part.stack].append(own)
            name = _written(part)
            product = (differences[name] * slopes[name]).sum(1)
            heads = product.sum(-1) if part.groups else product.sum(-1)[:, None]
            nodes = nodes.at[:, part.writers].set(heads)
        missing = {stack: jnp.concatenate(each) for stack, each in missing.items()}

        def compare(layer, params, carry, given):
            results = []
            for part, (streams, slope) in zip(layer, given, strict=True):
                if part.groups:
                    read = self._head_slopes(part, params, streams, slope)
                else:
                    run = lambda x, part=part: self.pieces(  # noqa: E731
                        params, [f"{part.path}/output"], {part.reads[0]: x}
                    )[0]
                    read = [g[None] for g in jax.vjp(run, streams[0])[1](slope)]
                results.append(
                    [
                        jnp.einsum("ubtd,rbtd->bur", missing[_stack(site)], each)
                        for site, each in zip(part.reads, read, strict=True)
                    ]
                )
            return carry, results

        given = [
            [
                ([streams[site] for site in part.reads], slopes[_written(part)])
                for part in layer
            ]
            for layer in graph.layers
        ]
        _, compared = self._over_layers(compare, (), given)
        edges = jnp.zeros((len(self.before), *graph.exists.shape))
        for part, own in zip(graph.parts, sum(compared, []), strict=True):
            for i, (site, each) in enumerate(zip(part.reads, own, strict=True)):
                first = part.reader + i * len(part.nodes)
                columns = slice(first, first + len(part.nodes))
                edges = edges.at[:, graph.of_stack(_stack(site)), columns].set(each)
        last = jnp.einsum("ubtd,btd->bu", missing[graph.stack], slopes[end])
        edges = edges.at[:, graph.of_stack(graph.stack), -1].set(last)
        return edges[:, *graph.places.T], nodes

    # --- Attention whose heads read streams of their own

    def _heads(self, part, params, sources) -> Array:
        """Returns the heads' outputs of streams `[H, B, T, D]` of q, k and v."""
        read = [
            self._projected(part, params, kind, source)
            for kind, source in enumerate(sources)
        ]
        return self._attended(part, params, *read)

    def _projected(self, part, params, kind, sources) -> list[Array]:
        """Returns queries (and gates), keys or values `[B, T, H, K]`, each head's own.

        `sources` are streams `[H, B, T, D]`.
        """
        index = jnp.asarray(part.groups if kind else range(len(part.groups)))

        def of_head(source, place):
            found = self._read(part, params, kind, source)
            return [x[..., place, :] for x in found]

        found = jax.vmap(of_head)(sources, index)
        return [jnp.moveaxis(x, 0, -2) for x in found]

    def _read(self, part, params, kind, source) -> list[Array]:
        """Returns queries (and gates), keys or values of a stream `[B, T, D]`."""
        names = [f"{part.path}/{name}" for name in (_QUERY, _KEY, _VALUE)[kind]]
        return self.pieces(params, names, {part.reads[kind]: source})

    def _attended(self, part, params, queries, keys, values) -> Array:
        """Returns the heads' outputs, of keys and values `[B, S, H, K]` of their own.

        Attention runs as often as the largest number of heads that share a key.
        """
        groups = np.asarray(part.groups)
        rank = np.array([(groups[:i] == g).sum() for i, g in enumerate(groups)])
        # `[runs, G]`: the head whose key each key/value head has in a run.
        shared = [np.flatnonzero(groups == g) for g in range(groups.max() + 1)]
        chosen = [[own[i % len(own)] for own in shared] for i in range(rank.max() + 1)]
        query = dict(zip(_QUERY, queries, strict=False))

        def run(own):
            given = query | {
                "key": keys[0][..., own, :],
                "value": values[0][..., own, :],
            }
            given = {f"{part.path}/{name}": x for name, x in given.items()}
            return self.pieces(params, [f"{part.path}/heads"], given)[0]

        if len(chosen) == 1:
            return run(np.array(chosen[0]))
        found = jax.vmap(run)(jnp.array(chosen))
        return jnp.moveaxis(found[rank, :, :, np.arange(len(groups))], 0, -2)

    def _head_slopes(self, part, params, sources, slope) -> list[Array]:
        """Returns slopes `[H, B, T, D]` by what each head's q, k and v read.

        `sources` are the three streams; `slope` is by the outputs, `[B, T, H, V]`.
        """
        groups = np.asarray(part.groups)
        read, backs = zip(
            *(
                jax.vjp(functools.partial(self._read, part, params, kind), source)
                for kind, source in enumerate(sources)
            ),
            strict=True,
        )
        keys, values = ([x[0][..., groups, :]] for x in read[1:])
        attend = functools.partial(self._attended, part, params)
        _, back = jax.vjp(attend, read[0], keys, values)
        result = []
        for kind, slopes in enumerate(back(slope)):
            index = groups if kind else np.arange(len(groups))

            def of_head(head, place, slopes=slopes, kind=kind):
                own = [
                    jnp.zeros_like(x).at[..., place, :].set(y[..., head, :])
                    for x, y in zip(read[kind], slopes, strict=True)
                ]
                return backs[kind](own)[0]

            heads = jnp.arange(len(groups))
            result.append(jax.vmap(of_head)(heads, jnp.asarray(index)))
        return result

    def _over_layers(self, step, carry, given: list) -> tuple[Any, list]:
        """Returns the last carry of `step(parts, params, carry, given)`, and results.

        `given` has a tree for each layer, as have the results.
        """
        results = []
        if not self._is_scanned:
            for layer, each in zip(self.graph.layers, given, strict=True):
                carry, result = step(layer, self.params, carry, each)
                results.append(result)
            return carry, results
        (own, rest), first = _parted(self._compact[1]), self.graph.layers[0]

        def body(carry, each):
            params, given = each
            return step(first, rest | params, carry, given)

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
        carry, results = jax.lax.scan(body, carry, (own, stacked))
        return carry, [
            jax.tree.map(lambda x, i=i: x[i], results) for i in range(len(given))
        ]


_EMBEDDINGS = {"encoder": "embedding", "decoder": "decoder_embedding"}


def _stack(site) -> str:
    return site.partition("/")[0]


def _enters(site) -> bool:
    """Returns whether a site is the stream that enters a layer."""
    return "/layer_" in site and site.endswith("/stream")


def _written(part) -> str:
    """Returns the site of what tells what the nodes of a part write."""
    return f"{part.path}/{'heads' if part.groups else 'output'}"


def _contributions(part, params, heads) -> Array:
    """Returns what the heads write to the stream, `[H, B, T, D]`, without biases."""
    weights = params[f"{part.path}/linear"]["w"]
    weights = weights.reshape(*heads.shape[-2:], -1)
    return jnp.einsum("bthv,hvd->hbtd", heads, weights)


def _parted(params) -> tuple[Params, Params]:
    """Returns stacked parameters by the names of the first layer, and the others."""
    own, rest = {}, {}
    for name, leaves in params.items():
        layer = anatomy.layer_of(name)
        if anatomy.is_stacked(name):
            own[str(layer._replace(index=0))] = leaves
        else:
            rest[name] = leaves
    return own, rest

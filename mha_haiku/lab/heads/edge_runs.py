"""Runs of a model in which every node reads a separate stream, set by its edges.

In a patched run an edge carries what its sender computes in this run, or what it wrote
in the corrupted run. So the queries, keys and values of each head are computed from
separate streams. To get the parts of a model as functions of what they read, sites are
edited where a part begins and read where it ends.

B batch, T positions, S key positions, H heads of a part, G key/value heads, K query/key
and V value size per head, D width, L layers, U nodes that write, R places that read, X
patterns of edges.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from mha_haiku.core import models, sites
from mha_haiku.core.modules import anatomy
from mha_haiku.lab.heads import edits, model_runs
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.training import tasks

Array = jax.Array
Example = tasks.Example
Parts = Sequence[graphs.Part]
Params = Mapping[str, Mapping[str, Array]]
Streams = tuple[dict[str, Array], dict[str, Array]]  # and what is missing in them


class Pieces:
    """The parts of a model, as functions of parameters and of what they read.

    `pieces(params, outputs, values)` computes the sites `outputs` from sites `values`,
    and nothing else.
    """

    def __init__(
        self, model: models.Model, params: Params, example: Example, of: Parts
    ):
        """Traces the model; `of` lists the parts of its layers that are needed."""
        graph = graphs.of_model(model)
        inner = ("query", "key", "value", "gates", "heads")
        begins = {site for part in of for site in part.reads} | {graph.end}
        begins |= {f"{part.path}/{x}" for part in of for x in inner if part.groups}
        ends = {f"{part.path}/output" for part in of} | {"logits"}
        run = functools.partial(model_runs.run, model)
        look = sites.look(run, [tuple(begins | ends)], strict=False)
        shapes = jax.eval_shape(look, params, example)[1]
        begins_with = {name: x for name, x in shapes.items() if name in begins}

        # `look` is inside `edit`, and so sees computed values, not those that are set.
        def pieces(
            params: Params, example: Example, begins_with: Mapping[str, Array]
        ) -> list[Array]:
            changes = {(name,): lambda _, x=x: x for name, x in begins_with.items()}
            return [*sites.edit(look, changes)(params, example)[1].values()]

        self._jaxpr = jax.make_jaxpr(pieces)(params, example, begins_with)
        self._example = example
        self._begins, self._names = sorted(begins_with), list(shapes)
        self._modules = [
            (x, name) for x in sorted(params) for name in sorted(params[x])
        ]
        self._programs: dict[tuple[str, ...], tuple] = {}

    def __call__(
        self, params: Params, outputs: Sequence[str], values: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Computes the wanted sites that exist, by the ends of their names."""
        outputs = tuple(name for name in self._names if name in outputs)
        if outputs not in self._programs:
            used = [name in outputs for name in self._names]
            self._programs[outputs] = partial_eval.dce_jaxpr(self._jaxpr.jaxpr, used)
        jaxpr, used = self._programs[outputs]
        # Of layers with the same shapes, only the parameters of one are passed.
        leaves = [params.get(module, {}).get(name) for module, name in self._modules]
        leaves += jax.tree.leaves(self._example)
        leaves += [values.get(name) for name in self._begins]
        leaves = [x for x, is_used in zip(leaves, used, strict=True) if is_used]
        program = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self._jaxpr.consts))
        names = [name.rpartition("/")[-1] for name in outputs]
        return dict(zip(names, program(*leaves), strict=True))


class EdgeRuns:
    """A clean and a corrupted batch, and runs between the two.

    Attributes:
      graph: The graph of the model.
      example: The clean batch.
      before: `[B]`, the metric of the clean run.
      after: `[B]`, the metric of the corrupted run.
    """

    def __init__(
        self,
        model: models.Model,
        params: Params,
        clean: tasks.Example,
        corrupted: tasks.Example,
        metric: model_runs.Metric,
        *,
        runs_clean: bool = True,
    ):
        """Runs the model on both; the clean run can be left to `slopes`."""
        if model_runs.is_scanned(model, params):
            raise ValueError("model must have looped layers; see models.unstacked.")
        self.graph = graphs.of_model(model)
        self._compact = model_runs.compact(model, params)
        # Layers with the same shapes run as a scan of the first one.
        self._is_scanned = model_runs.is_scanned(*self._compact)
        layers = self.graph.layers[:1] if self._is_scanned else self.graph.layers
        self._params, self.example, self._metric = params, clean, metric
        self._pieces = Pieces(model, params, clean, sum(layers, ()))
        embeddings = [_EMBEDDINGS[stack] for stack in self.graph.stacks]
        self._written = [*embeddings, *(part.written for part in self.graph.parts)]
        # As one batch, which reads the parameters once.
        batches = [corrupted, *([clean] if runs_clean else [])]
        batch = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
        at = [tuple(self._written)]
        output, seen = model_runs.look(*self._compact, batch, at)
        count = len(clean.inputs)
        self.after = metric(output.logits[:count], clean)
        self._corrupted = {name: seen[name][:count] for name in self._written}
        if runs_clean:
            self.before = metric(output.logits[count:], clean)
            self._clean = {name: seen[name][count:] for name in self._written}

    def patched(self, kept: Array) -> Array:
        """Computes the metric `[B]` with edges kept by the shares `[E]`.

        An edge carries `kept` times what its sender writes in this run, plus `1 - kept`
        times what it wrote in the corrupted run.
        """
        graph, clean, corrupted = self.graph, self._clean, self._corrupted
        cut = jnp.zeros(graph.exists.shape).at[*graph.places.T].set(1 - kept)
        # By stack: the stream, and the differences of what nodes wrote in the corrupted
        # run from what they write in this one.
        streams, missing = {}, {}
        update = jax.lax.dynamic_update_slice_in_dim
        for stack, rows in graph.stacks.items():
            streams[stack] = clean[_EMBEDDINGS[stack]]
            first = corrupted[_EMBEDDINGS[stack]] - streams[stack]
            shape = (rows.stop - rows.start, *first.shape)
            missing[stack] = jnp.zeros(shape).at[0].set(first)

        def read(
            site: str, cut: Array, streams: dict[str, Array], missing: dict[str, Array]
        ) -> Array:
            stack = graphs.stack_of(site)
            added = jnp.tensordot(cut[graph.stacks[stack]].T, missing[stack], 1)
            return streams[stack][None] + added

        def step(
            layer: Parts, params: Params, carry: Streams, trees: Any
        ) -> tuple[Streams, None]:
            streams, missing = carry
            for part, tree in zip(layer, trees, strict=True):
                cuts, theirs, writer = tree
                sources = [
                    read(x, cut, streams, missing)
                    for x, cut in zip(part.reads, cuts, strict=True)
                ]
                inputs = {part.reads[0]: sources[0][0]}
                if part.groups:
                    heads = self._attended(
                        part, params, self._read(part, params, sources)
                    )
                    written = _contributions(part, params, theirs - heads)
                    inputs = {part.written: heads}
                name = f"{part.path}/output"
                output = self._pieces(params, [name], inputs)["output"]
                if not part.groups:
                    written = (theirs - output)[None]
                stack = graphs.stack_of(part.path)
                streams = streams | {stack: streams[stack] + output}
                missing = missing | {stack: update(missing[stack], written, writer, 0)}
            return (streams, missing), None

        def tree_of(part: graphs.Part):
            size = len(part.nodes)
            first = [part.reader + i * size for i in range(len(part.reads))]
            cuts = [cut[:, x : x + size] for x in first]
            writer = part.writer - graph.stacks[graphs.stack_of(part.path)].start
            return cuts, corrupted[part.written], writer

        (streams, missing), _ = self._over_layers(step, (streams, missing), tree_of)
        (stream,) = read(graph.end, cut[:, -1:], streams, missing)
        values = self._pieces(self._params, ["logits"], {graph.end: stream})
        return self._metric(values["logits"], self.example)

    def slopes(self, share: Array | None = None) -> Array:
        """Computes the change by patching each edge, at first order, `[B, E]`.

        Args:
          share: The share of the clean run in the embeddings at which slopes are taken;
            the rest is from the corrupted run. By default slopes are taken in the clean
            run itself.
        """
        graph, (slopes, streams) = self.graph, self._of_run(share)
        difference = {x: self._corrupted[x] - self._clean[x] for x in self._written}

        def step(layer: Parts, params: Params, carry: tuple[()], trees: Any):
            results = []
            for part, tree in zip(layer, trees, strict=True):
                sources, slope, written = tree
                if part.groups:
                    by = self._head_slopes(part, params, sources, slope)
                    written = _contributions(part, params, written)
                else:
                    by, written = [slope[None]], written[None]
                results.append((written, by))
            return carry, results

        def tree_of(part: graphs.Part):
            slope = slopes.get(part.written)
            if not part.groups:
                slope = slopes[part.reads[0]] - slopes[_left(part)]
            return [streams[x] for x in part.reads], slope, difference[part.written]

        _, results = self._over_layers(step, (), tree_of)
        # By stack, in the order of the graph: the differences that nodes add, and
        # slopes by the inputs of readers.
        added = {x: [difference[_EMBEDDINGS[x]][None]] for x in graph.stacks}
        slopes_by = {x: [] for x in graph.stacks}
        for part, (written, by) in zip(graph.parts, sum(results, []), strict=True):
            added[graphs.stack_of(part.path)].append(written)
            for site, x in zip(part.reads, by, strict=True):
                slopes_by[graphs.stack_of(site)].append(x)
        slopes_by[graphs.stack_of(graph.end)].append(slopes[graph.end][None])
        edges = jnp.zeros((len(self.before), *graph.exists.shape))
        for stack, rows in graph.stacks.items():
            # The readers of the embedding read all of the stack.
            columns = np.flatnonzero(graph.exists[rows.start])
            arrays = map(jnp.concatenate, (added[stack], slopes_by[stack]))
            # One large product for all layers: small ones take several times as long.
            written, by = (
                jnp.moveaxis(x, 0, 1).reshape(x.shape[1], len(x), -1) for x in arrays
            )
            edges = edges.at[:, rows, columns].set(written @ by.mT)
        return edges[:, *graph.places.T]

    def _of_run(self, share: Array | None) -> tuple[dict[str, Array], dict[str, Array]]:
        """Computes slopes of the metric by values at sites, and the streams read."""
        parts, (model, params), edit = self.graph.parts, self._compact, {}
        if share is not None:
            for name in (_EMBEDDINGS[stack] for stack in self.graph.stacks):
                clean, corrupted = self._clean[name], self._corrupted[name]
                between = share * clean + (1 - share) * corrupted
                edit[name,] = lambda _, between=between: between
        end = self._corrupted[_EMBEDDINGS[graphs.stack_of(self.graph.end)]]
        shifts = {self.graph.end: jnp.zeros_like(end)}
        for part in parts:
            names = [part.written] if part.groups else [part.reads[0], _left(part)]
            zeros = jnp.zeros_like(self._corrupted[part.written])
            shifts |= dict.fromkeys(names, zeros)
        at = (*self._written, *(site for part in parts for site in part.reads))

        def total(shifts: dict[str, Array]):
            changes = edit | edits.on_parts(shifts, shifts.values(), jnp.add)
            run = sites.edit(functools.partial(model_runs.run, model), changes)
            output, seen = sites.look(run, [at])(params, self.example)
            metric = self._metric(output.logits, self.example)
            return metric.sum(), (metric, dict(seen))

        slopes, (metric, seen) = jax.grad(total, has_aux=True)(shifts)
        if share is None:
            self.before = metric
            self._clean = {name: seen[name] for name in self._written}
        return slopes, seen

    # --- Attention whose heads read separate streams

    def _head_reads(
        self, part: graphs.Part, params: Params, kind: str, source: Array, head: Array
    ) -> dict[str, Array]:
        """Computes the query (and gates), key or value of a head from `[B, T, D]`."""
        names = [f"{part.path}/{name}" for name in graphs.READ[kind]]
        read = {part.reads["qkv".index(kind)]: source}
        values = self._pieces(params, names, read)
        # The heads of a group read the same key and value.
        place = head if kind == "q" else jnp.array(part.groups)[head]
        return {name: x[..., place, :] for name, x in values.items()}

    def _read(
        self,
        part: graphs.Part,
        params: Params,
        sources: Sequence[Array],
        axis: int | None = 0,
    ) -> dict[str, Array]:
        """Computes what heads read, `[B, T, H, K]`, from the streams of q, k and v.

        Streams are `[H, B, T, D]`, or `[B, T, D]` for all heads with `axis=None`.
        """
        read, heads = {}, jnp.arange(len(part.groups))
        for kind, source in zip("qkv", sources, strict=True):
            of_head = functools.partial(self._head_reads, part, params, kind)
            read |= jax.vmap(of_head, (axis, 0), -2)(source, heads)
        return read

    def _attended(
        self, part: graphs.Part, params: Params, read: dict[str, Array]
    ) -> Array:
        """Runs heads `[B, T, H, V]` with separate keys and values `[B, S, H, K]`."""
        # Attention runs once for each of the heads that share a key/value head.
        groups = np.array(part.groups)
        rank = np.array([(groups[:i] == g).sum() for i, g in enumerate(groups)])
        shared = [np.flatnonzero(groups == g) for g in range(groups.max() + 1)]
        # `[runs, G]`: the head whose key each key/value head has in a run.
        runs = range(rank.max() + 1)
        heads_of_runs = [[heads[i % len(heads)] for heads in shared] for i in runs]

        def run(heads: Array) -> Array:
            values = {name: read[name][..., heads, :] for name in ("key", "value")}
            inputs = {f"{part.path}/{name}": x for name, x in (read | values).items()}
            return self._pieces(params, [part.written], inputs)["heads"]

        outputs = jax.vmap(run)(jnp.array(heads_of_runs))
        return jnp.moveaxis(outputs[rank, :, :, np.arange(len(groups))], 0, -2)

    def _head_slopes(
        self, part: graphs.Part, params: Params, sources: Sequence[Array], slope: Array
    ) -> list[Array]:
        """Computes slopes `[H, B, T, D]` by the streams of each head's q, k and v.

        `sources` are the three streams; `slope` is the slope by the outputs,
        `[B, T, H, V]`.
        """
        attend = functools.partial(self._attended, part, params)
        read = self._read(part, params, sources, axis=None)
        (slopes,) = jax.vjp(attend, read)[1](slope)

        # Only the way back depends on the head: the streams are projected once.
        def of_head(
            kind: str, source: Array, head: Array, slopes: dict[str, Array]
        ) -> Array:
            reads = functools.partial(self._head_reads, part, params, kind, head=head)
            return jax.vjp(reads, source)[1](slopes)[0]

        return [
            jax.vmap(functools.partial(of_head, kind, source), (0, -2))(
                jnp.arange(len(part.groups)),
                {name: slopes[name] for name in graphs.READ[kind] if name in slopes},
            )
            for kind, source in zip("qkv", sources, strict=True)
        ]

    def _over_layers(
        self,
        step: Callable[..., tuple[Any, Any]],
        carry: Any,
        of_part: Callable[[graphs.Part], Any],
    ) -> tuple[Any, list]:
        """Runs `step(parts, params, carry, trees)`; returns the last carry and results.

        `of_part` makes the tree of a part; there is one result per layer.
        """
        results, layers = [], self.graph.layers
        trees = [[of_part(part) for part in layer] for layer in layers]
        if not self._is_scanned:
            for layer, tree in zip(layers, trees, strict=True):
                carry, result = step(layer, self._params, carry, tree)
                results.append(result)
            return carry, results
        # Stacked parameters get the names of the first layer.
        rest, of_layers = dict(self._compact[1]), {}
        for name in [x for x in rest if anatomy.is_stacked(x)]:
            layer: Any = anatomy.layer_of(name)
            of_layers[str(layer._replace(index=0))] = rest.pop(name)

        def body(carry: Any, x: tuple[dict[str, Any], Any]) -> tuple[Any, Any]:
            return step(layers[0], rest | x[0], carry, x[1])

        trees = jax.tree.map(lambda *x: jnp.stack(x), *trees)
        carry, results = jax.lax.scan(body, carry, (of_layers, trees))
        indices = range(len(layers))
        return carry, [jax.tree.map(lambda x, i=i: x[i], results) for i in indices]


_EMBEDDINGS = {"encoder": "embedding", "decoder": "decoder_embedding"}


def _left(part: graphs.Part) -> str:
    return f"{part.path.rpartition('/')[0]}/stream_after_feed_forward"


def _contributions(part: graphs.Part, params: Params, heads: Array) -> Array:
    """Computes the terms of heads in the stream, `[H, B, T, D]`, without biases."""
    weights = params[f"{part.path}/linear"]["w"]
    weights = weights.reshape(*heads.shape[-2:], -1)
    return jnp.einsum("bthv,hvd->hbtd", heads, weights)

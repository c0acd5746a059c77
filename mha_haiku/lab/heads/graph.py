"""The graph of a model: nodes that write to the residual stream and read from it.

Nodes are the embedding, the heads, the feed-forward parts and the logits. An edge goes
from a node that writes to one that reads: to a head's queries, keys or values, to a
feed-forward part or to the logits. A reader's input is the sum of what all its senders
wrote, so the graph describes a model exactly, as long as there is no norm on the stream
or between a part and the stream.

A node is a pair of integers: attention part and head; layer, counted over all stacks,
and `UNITS` for its feed-forward part; `EMBEDDING`, and `DECODER_EMBEDDING` in an
encoder-decoder; or `LOGITS`.

U nodes that write, R places that read, E edges, H heads of a part.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import model_runs

Node = tuple[int, int]

KINDS = ("q", "k", "v", "feed_forward", "logits")
# The sites that an edge of a kind changes; gates read what queries read.
READ = {"q": ("query", "gates"), "k": ("key",), "v": ("value",)}
LOGITS = (-1, -1)
EMBEDDING, DECODER_EMBEDDING = (-2, 0), (-2, 1)
UNITS = -1  # in place of a head, for the feed-forward part of the layer


class Part(NamedTuple):
    """An attention or a feed-forward part.

    Attributes:
      path: Its module, such as "encoder/layer_0/attention".
      nodes: Its heads, or the single node of a feed-forward part.
      reads: The sites of the streams that queries, keys and values are computed from;
        one site for a feed-forward part.
      writer: The index of its first node among the U writers.
      reader: The index of its first reader among the R readers: H queries, then keys,
        then values; or one for a feed-forward part.
      groups: `[H]`, the key/value head that each head reads; () for a feed-forward
        part.
    """

    path: str
    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    writer: int
    reader: int
    groups: tuple[int, ...] = ()

    @property
    def written(self) -> str:
        """The site that the part's nodes write: heads, or the output."""
        return f"{self.path}/{'heads' if self.groups else 'output'}"


class Graph(NamedTuple):
    """Writers and readers, in the order in which the model computes them.

    Attributes:
      layers: The parts of each layer, the encoder's first.
      writers: The U nodes that write.
      readers: The R inputs: a node and a kind of `KINDS`.
      exists: `[U, R]` booleans: where there is an edge.
      stacks: The slices of the U writers that write to each stack, from its embedding
        on, by the name of the stack; the logits read the last one.
    """

    layers: tuple[tuple[Part, ...], ...]
    writers: tuple[Node, ...]
    readers: tuple[tuple[Node, str], ...]
    exists: np.ndarray
    stacks: dict[str, slice]

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [part for layer in self.layers for part in layer]

    @property
    def end(self) -> str:
        """The site of the stream that the logits read."""
        return f"{list(self.stacks)[-1]}/stream"

    @property
    def places(self) -> np.ndarray:
        """`[E, 2]`, writer and reader of each edge, ordered by reader."""
        return np.argwhere(self.exists.T)[:, ::-1]

    @property
    def num_edges(self) -> int:
        """E."""
        return int(self.exists.sum())

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders `[E, 2]`, receivers `[E, 2]` and kinds `[E]`, as in `heads.Edges`."""
        senders, readers = self.places.T
        nodes, kinds = map(np.array, zip(*self.readers, strict=True))
        return np.array(self.writers)[senders], nodes[readers], kinds[readers]


def stack_of(site: str) -> str:
    """Finds the stack of a site."""
    return site.partition("/")[0]


def label(node: Sequence[int] | np.ndarray) -> str:
    """Returns the name of a node in tables and figures: "3.5" for a head."""
    layer, head = map(int, node)
    name = f"feed-forward {layer}" if head == UNITS else f"{layer}.{head}"
    return _NAMES.get((layer, head), name)


_NAMES = {
    LOGITS: "logits",
    EMBEDDING: "embedding",
    DECODER_EMBEDDING: "decoder embedding",
}


@functools.lru_cache(maxsize=8)
def of_model(model: models.Model) -> Graph:
    """Builds the graph of a model.

    Raises:
      ValueError: If the model is not from `models.build` or `interop.load`, or its
        stream is not the sum of what its nodes write.
    """
    config = model_runs.config_of(model)
    has_residual = config.attention.residual and config.feed_forward.residual
    if config.norm.position == "post" or not has_residual:
        raise ValueError(
            "model must have a stream that is the sum of what heads and feed-forward "
            "parts write: with norms only before parts (norm.position pre) and "
            f"residual connections, got {config.norm.position!r}."
        )
    heads = {x.path: (i, x) for i, x in enumerate(models.heads_of_layers(config))}
    units, num_decoder = models.hidden_sizes(config), models.num_decoder_layers(config)
    counts = {"encoder": config.num_layers, "decoder": num_decoder}
    layers, writers, readers, stacks = [], [], [], {}

    def part(
        path: str,
        nodes: tuple[Node, ...],
        reads: tuple[str, ...],
        order: int,
        kinds: Sequence[str],
        groups: Sequence[int] = (),
    ) -> Part:
        result = Part(path, nodes, reads, len(writers), len(readers), tuple(groups))
        writers.extend((node, stack_of(path), order) for node in nodes)
        for kind, site in zip(kinds, reads, strict=True):
            bound = order if "/layer_" in site else math.inf
            readers.extend((node, kind, stack_of(site), bound) for node in nodes)
        return result

    for stack, count in counts.items():
        if not count:
            continue
        first = len(writers)
        embedding = DECODER_EMBEDDING if stack == "decoder" else EMBEDDING
        writers.append((embedding, stack, -1))
        for i in range(count):
            path, parts, site, order = f"{stack}/layer_{i}", [], "stream", 3 * i
            for name in ("attention", "cross_attention"):
                if (module := f"{path}/{name}") not in heads:
                    continue
                index, place = heads[module]
                read, is_cross = f"{path}/{site}", name == "cross_attention"
                reads = (read, *("encoder/stream" if is_cross else read,) * 2)
                if indices := range(len(place.names)):
                    nodes = tuple((index, head) for head in indices)
                    size = len(indices) // place.num_key_value_heads
                    groups = place.groups or [head // size for head in indices]
                    parts.append(part(module, nodes, reads, order, "qkv", groups))
                site, order = f"stream_after_{name}", order + 1
            if units[len(layers)]:
                node, read = (len(layers), UNITS), f"{path}/{site}"
                name = f"{path}/feed_forward"
                parts.append(part(name, (node,), (read,), order, KINDS[3:4]))
            layers.append(tuple(parts))
        stacks[stack] = slice(first, len(writers))
    readers.append((LOGITS, "logits", list(stacks)[-1], math.inf))
    exists = [[a == b and i < j for *_, b, j in readers] for _, a, i in writers]
    nodes = tuple(node for node, *_ in writers)
    kinds = tuple((node, kind) for node, kind, *_ in readers)
    return Graph(tuple(layers), nodes, kinds, np.array(exists), stacks)

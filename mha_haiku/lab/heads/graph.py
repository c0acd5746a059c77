"""The graph of a model: which parts write to the residual stream, which read them.

Nodes are the embedding, each head, each feed-forward part and the logits. An edge goes
from a node that writes to one that reads: to a head's queries, keys or values, to a
feed-forward part or to the logits. What a reader reads is the sum of what all its
senders have written, so a model is this graph exactly, as long as no norm stands on the
stream or between a part and the stream.

A node is a pair of integers: attention part and head; `UNITS` of a layer, counted over
all stacks, for its feed-forward part; `EMBEDDING`, in an encoder-decoder of the encoder
and `DECODER_EMBEDDING` of the decoder; `LOGITS`.

U nodes that write, V places that read, E edges, H heads of a part.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import head_weights

Node = tuple[int, int]

KINDS = ("q", "k", "v", "feed_forward", "logits")
LOGITS = (-1, -1)
EMBEDDING, DECODER_EMBEDDING = (-2, 0), (-2, 1)
UNITS = -1  # in place of a head: the feed-forward part of the layer


class Part(NamedTuple):
    """An attention or a feed-forward part.

    Attributes:
      path: Its module, such as "encoder/layer_0/attention".
      stack: "encoder" or "decoder", to whose stream it writes.
      nodes: Its heads; or itself, a feed-forward part.
      reads: The sites of the streams that queries, keys and values are made of; one
        site of a feed-forward part.
      writer: The place of its first node among the U that write.
      reader: The place of its first reader among the V: the H queries, then keys, then
        values; or itself.
      groups: `[H]`, the key/value head that each head reads; () of a feed-forward part.
    """

    path: str
    stack: str
    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    writer: int
    reader: int
    groups: tuple[int, ...] = ()

    @property
    def writers(self) -> slice:
        """The places of its nodes among the U."""
        return slice(self.writer, self.writer + len(self.nodes))

    @property
    def readers(self) -> slice:
        """The places of its readers among the V."""
        return slice(self.reader, self.reader + len(self.reads) * len(self.nodes))


class Graph(NamedTuple):
    """What writes and what reads, in the order in which the model computes them.

    Attributes:
      layers: The parts of each layer, the encoder's first.
      writers: The U nodes.
      readers: The V nodes that read, each with its kind of `KINDS`.
      exists: `[U, V]` booleans: where there is an edge.
      embeddings: The place of the embedding among the U, by stack.
    """

    layers: tuple[tuple[Part, ...], ...]
    writers: tuple[Node, ...]
    readers: tuple[tuple[Node, str], ...]
    exists: np.ndarray
    embeddings: dict[str, int]

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [part for layer in self.layers for part in layer]

    @property
    def stack(self) -> str:
        """The stack that the logits read."""
        return list(self.embeddings)[-1]

    @property
    def places(self) -> np.ndarray:
        """`[E, 2]`, writer and reader of each edge; by reader, in their order."""
        return np.argwhere(self.exists.T)[:, ::-1]

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders `[E, 2]`, receivers `[E, 2]` and kinds `[E]`, as `heads.Edges`."""
        senders, readers = self.places.T
        nodes, kinds = zip(*self.readers, strict=True)
        return (
            np.array(self.writers)[senders],
            np.array(nodes)[readers],
            np.array(kinds)[readers],
        )

    def of_stack(self, stack: str) -> slice:
        """Returns the places of the nodes that write to a stack."""
        others = [place for place in self.embeddings.values()]
        begin = self.embeddings[stack]
        later = [place for place in others if place > begin]
        return slice(begin, min(later, default=len(self.writers)))


def label(node: Node) -> str:
    """Returns a node as it is written in tables and figures: "3.5" is a head."""
    layer, head = map(int, node)
    if (layer, head) in _NAMES:
        return _NAMES[layer, head]
    return f"feed-forward {layer}" if head == UNITS else f"{layer}.{head}"


_NAMES = {
    LOGITS: "logits",
    EMBEDDING: "embedding",
    DECODER_EMBEDDING: "decoder embedding",
}


@functools.lru_cache(maxsize=8)
def of_model(model: models.Model) -> Graph:
    """Returns the graph of a model.

    Raises:
      ValueError: If the model is not of `models.build` or `interop.load`, or its stream
        is no sum of what its parts have written.
    """
    config = head_weights.config_of(model)
    norms = models.NORM_PLACES[config.norm.position]
    if norms.end or norms.after:
        raise ValueError(
            "model must have no norms but those in front of its parts (norm.position "
            "pre): else what its parts write is no sum of what its nodes write, got "
            f"{config.norm.position!r}."
        )
    if not (config.attention.residual and config.feed_forward.residual):
        raise ValueError("model must have residual connections around all parts.")
    if config.attention.differential:
        raise ValueError("model must have heads that do not share their values.")
    has_decoder = config.family == "encoder_decoder"
    heads = {
        place.path: (i, place) for i, place in enumerate(models.heads_of_layers(config))
    }
    units = models.hidden_sizes(config)
    # By stack: how many steps have written, and the order of each writer and reader.
    writers, orders, readers, bounds, layers = [], [], [], [], []
    embeddings = {}

    def add(path, stack, order, nodes, reads, kinds, groups=()):
        part = Part(
            path, stack, nodes, reads[0], len(writers), len(readers), tuple(groups)
        )
        writers.extend(nodes)
        orders.extend([(stack, order)] * len(nodes))
        for kind, bound in zip(kinds, reads[1], strict=True):
            readers.extend((node, kind) for node in nodes)
            bounds.extend([bound] * len(nodes))
        return part

    counts = {"encoder": config.num_layers}
    if has_decoder:
        counts["decoder"] = models.num_decoder_layers(config)
    for stack, count in counts.items():
        embeddings[stack] = len(writers)
        node = EMBEDDING if stack == "encoder" else DECODER_EMBEDDING
        writers.append(node)
        orders.append((stack, -1))
        for i in range(count):
            layer, parts, site, order = f"{stack}/layer_{i}", [], "stream", 3 * i
            for name in ("attention", "cross_attention"):
                path = f"{layer}/{name}"
                if path not in heads:
                    continue
                index, place = heads[path]
                read = f"{layer}/{site}"
                sites, bound = (read,) * 3, ((stack, order),) * 3
                if name == "cross_attention":
                    sites = (read, *("encoder/stream",) * 2)
                    bound = (bound[0], *(("encoder", math.inf),) * 2)
                number = len(place.names)
                nodes = tuple((index, head) for head in range(number))
                groups = place.groups or [
                    head * place.num_key_value_heads // number for head in range(number)
                ]
                if nodes:
                    parts.append(
                        add(path, stack, order, nodes, (sites, bound), "qkv", groups)
                    )
                site, order = f"stream_after_{name}", order + 1
            number = len(layers)
            if units[number]:
                if config.feed_forward.parallel and parts:
                    site, order = "stream", order - 1
                reads = (f"{layer}/{site}",), ((stack, order),)
                node = (number, UNITS)
                path = f"{layer}/feed_forward"
                parts.append(add(path, stack, order, (node,), reads, KINDS[3:4]))
            layers.append(tuple(parts))
    readers.append((LOGITS, "logits"))
    bounds.append((stack, math.inf))
    exists = np.array(
        [[a == b and i < bound for b, bound in bounds] for a, i in orders]
    )
    return Graph(tuple(layers), tuple(writers), tuple(readers), exists, embeddings)

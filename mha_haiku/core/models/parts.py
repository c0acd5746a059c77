"""The layers that a config describes: their heads and hidden units.

The heads of a model are listed by its P attention parts: every layer of an encoder has
one, and in an encoder-decoder the encoder's parts come first, then the self-attention
of the decoder's layers, then their cross-attention. Everything "per layer" about heads
(`kept_heads`, gates, importance, attention maps) is in this order. Hidden units follow
the layers: the encoder's first, then the decoder's.
"""

from collections import Counter
from typing import NamedTuple

from mha_haiku.core.models import architecture
from mha_haiku.core.models.architecture import ModelConfig
from mha_haiku.core.modules import POSITION_SCHEMES, anatomy


class LayerHeads(NamedTuple):
    """The heads of a layer.

    Example:
      >>> layer = mh.models.heads_of_layers(config)[1]
      >>> layer.names, layer.num_key_value_heads, layer.path
      ((0, 1), 2, 'encoder/layer_1/attention')
    """

    names: tuple[int, ...]  # the indices of the heads in the unpruned layer, ascending
    num_key_value_heads: int  # the number of key/value heads they read
    # The key/value head that each head reads; None if all key/value heads serve the
    # same number of heads, in order.
    groups: tuple[int, ...] | None
    # The indices of the key/value heads in the unpruned layer.
    key_value_names: tuple[int, ...]
    kind: str = ""  # one of `architecture.KINDS`; "" in models with only one kind
    layer: int = 0  # the index of the layer among its kind

    @property
    def label(self) -> str:
        """The name to show: "layer 3", or "cross 3" if there are kinds."""
        return f"{self.kind or 'layer'} {self.layer}"

    @property
    def address(self) -> str:
        """The name in a user's flag: "3", or "cross.3" if there are kinds."""
        return f"{self.kind}.{self.layer}" if self.kind else f"{self.layer}"

    @property
    def path(self) -> str:
        """The path of its sites: "encoder/layer_3/attention"."""
        stack = "decoder" if self.kind in ("decoder", "cross") else "encoder"
        name = "cross_attention" if self.kind == "cross" else "attention"
        return f"{stack}/layer_{self.layer}/{name}"


def heads_of_layers(config: ModelConfig) -> tuple[LayerHeads, ...]:
    """Lists the heads of each of the P attention parts that a config describes.

    Example:
      >>> pruned = config.replace(attention=dict(kept_heads=[[0, 1], [0]]))
      >>> [(layer.label, layer.names) for layer in mh.models.heads_of_layers(pruned)]
      [('layer 0', (0, 1)), ('layer 1', (0,))]
    """
    kept, parts = config.attention.kept_heads, places(config)
    if kept is None:
        kept = [range(config.attention.num_heads)] * len(parts)
    return tuple(
        _layer_heads(config.attention, sorted(names))._replace(kind=kind, layer=layer)
        for names, (kind, layer) in zip(kept, parts, strict=True)
    )


def places(config: ModelConfig) -> list[tuple[str, int]]:
    """Lists the kind and the layer of each attention part, in order."""
    encoder = range(config.num_layers)
    decoder = range(num_decoder_layers(config))
    if not decoder:
        return [("", i) for i in encoder]
    layers = zip(architecture.KINDS, (encoder, decoder, decoder), strict=True)
    return [(kind, i) for kind, indices in layers for i in indices]


def part_of(config: ModelConfig, module: str) -> int | slice | None:
    """Returns which attention part, or slice of parts, a module is in, or None.

    Example:
      >>> mh.models.part_of(config, "encoder/layer_1/attention/query")
      1
      >>> mh.models.part_of(config, "encoder/layers/layer_0/attention/query")  # scanned
      slice(0, 2, None)
    """
    layer = anatomy.layer_of(module)
    if layer is None:
        return None
    kind = 0
    if layer.scope.startswith("decoder"):
        kind = 2 if layer.part.startswith("/cross_attention") else 1
    decoder = num_decoder_layers(config)
    sizes = config.num_layers, decoder, decoder
    before = sum(sizes[:kind])
    if layer.index is None:
        return slice(before, before + sizes[kind])
    return before + layer.index


def num_decoder_layers(config: ModelConfig) -> int:
    """Counts the layers of the decoder, 0 if there is none."""
    if config.family != "encoder_decoder":
        return 0
    return config.decoder.num_layers or config.num_layers


def num_all_layers(config: ModelConfig) -> int:
    """Counts the layers of encoder and decoder together."""
    return config.num_layers + num_decoder_layers(config)


def max_length(config: ModelConfig) -> int | None:
    """Returns the number of positions that the model has, or None if unlimited."""
    section = config.embedding
    is_limited = "max_length" in POSITION_SCHEMES[section.positions].fields
    return section.max_length if is_limited else None


def description(config: ModelConfig) -> str:
    """Describes a model in a few words."""
    counts = [len(layer.names) for layer in heads_of_layers(config)]
    heads = f"{counts[0]}" if len(set(counts)) == 1 else "/".join(map(str, counts[:16]))
    number, decoder = f"{config.num_layers}", num_decoder_layers(config)
    if decoder:
        number += f" + {decoder}"
    return (
        f"{config.family}: {number} layer{'s' * (number != '1')} "
        f"of {heads} heads{', ...' * (len(counts) > 16)}, model size "
        f"{config.model_size}, {config.embedding.positions} positions"
    )


def hidden_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Lists the number of hidden units of each of the L layers."""
    section = config.feed_forward
    return section.hidden_sizes or (section.hidden_size,) * num_all_layers(config)


def key_size(config: ModelConfig) -> int:
    """Returns K, the size of a head's queries, keys and values."""
    section = config.attention
    return section.key_size or config.model_size // max(1, section.num_heads)


def _layer_heads(config: architecture.AttentionConfig, names: list[int]) -> LayerHeads:
    num_groups = config.num_key_value_heads or config.num_heads
    group_of = [name * num_groups // config.num_heads for name in names]
    key_value_names = sorted(set(group_of))
    place = {group: i for i, group in enumerate(key_value_names)}
    groups = tuple(place[group] for group in group_of)
    is_even = len(set(Counter(groups).values())) < 2
    return LayerHeads(
        tuple(names),
        len(key_value_names),
        None if is_even else groups,
        tuple(key_value_names),
    )

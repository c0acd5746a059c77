"""The attention maps of a model with several kinds of attention."""

from collections.abc import Iterable
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Maps(tuple):
    """The attention maps of an encoder-decoder: a tuple that knows kinds of attention.

    Attributes:
      kinds: How many of the maps are of each of `architecture.KINDS`, in turn.
    """

    kinds: tuple[int, int, int]

    def __new__(cls, maps: Iterable[Any], kinds: tuple[int, int, int]) -> "Maps":
        """Returns the maps of the encoder, the decoder, and cross-attention."""
        result = super().__new__(cls, maps)
        result.kinds = kinds
        return result

    @property
    def encoder(self) -> tuple:
        """Those of the encoder's layers, `(B, H, S, S)` each."""
        return tuple(self[: self.kinds[0]])

    @property
    def decoder(self) -> tuple:
        """Those of the decoder's self-attention, `(B, H, T, T)` each."""
        return tuple(self[self.kinds[0] : sum(self.kinds[:2])])

    @property
    def cross(self) -> tuple:
        """Those of the decoder's positions on the encoder's, `(B, H, T, S)` each."""
        return tuple(self[sum(self.kinds[:2]) :])

    def tree_flatten(self) -> tuple[tuple, tuple[int, int, int]]:
        """Returns the maps, and their kinds."""
        return tuple(self), self.kinds

    @classmethod
    def tree_unflatten(cls, kinds: tuple[int, int, int], maps: Iterable[Any]) -> "Maps":
        """Returns the maps of these kinds."""
        return cls(maps, kinds)

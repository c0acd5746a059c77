"""A rectangle of a score bias as one of its own; see `masks.Part`."""

import dataclasses

import jax

from mha_haiku import tiles
from mha_haiku.positions import biases

Array = jax.Array


@tiles.pytree(data=("bias", "first_query", "first_key"))
class Part(biases.ScoreBias):
    """An aligned bias from a query and a key on.

    Attributes:
      bias: The whole bias.
      first_query: One integer, which query of the bias stands first; its axes are
        `[B..., H]`, of size 1, beside those of the bias.
      first_key: Which key does, likewise.
    """

    bias: biases.ScoreBias
    first_query: Array
    first_key: Array

    def check(self, *sizes):
        self.bias.check(*sizes)

    def aligned_tile(self, rows, columns, batch_ndim):
        return self.bias.aligned_tile(*self._there(rows, columns), batch_ndim)

    def add_gradient(self, total, cotangent, rows, columns):
        there = self._there(rows, columns)
        bias = self.bias.add_gradient(total.bias, cotangent, *there)
        return dataclasses.replace(total, bias=bias)

    def _there(self, rows, columns):
        first_query, first_key = self.first_query, self.first_key
        return rows + first_query.reshape(()), columns + first_key.reshape(())

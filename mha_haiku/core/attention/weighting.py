"""How scores become weights: what attention is told beside queries, keys and values.

`B...` batch axes, T query positions, S key positions, H query heads, V value size.
"""

from typing import NamedTuple

import jax

from mha_haiku.core import masks, positions, tiles
from mha_haiku.core.attention import normalizers, scores

Array = jax.Array


class Weighting(NamedTuple):
    """Which key a query sees, how much it weighs, and what its values are gated by.

    Attributes:
      mask: Which query may attend to which key.
      bias: What is added to the scores, or None; see `attend`.
      score: The score; None: scaled dot product.
      normalizer: What weights are over; None: softmax.
      gates: `[B..., T, H, 1]` or `[B..., T, H, V]`, or None.
      first_query: The position of the first query.
    """

    mask: masks.Mask = masks.full()
    bias: positions.ScoreBias | Array | None = None
    score: scores.Score | scores.ScoreFunction | None = None
    normalizer: normalizers.Normalizer | None = None
    gates: Array | None = None
    first_query: int | Array = 0

    def aligned(self, query: Array, num_keys: int, value_size: int) -> "Weighting":
        """Returns the same with its parts aligned with the batch axes, once for all.

        Args:
          query: `[B..., T, H, K]`.
          num_keys: S.
          value_size: V.

        Raises:
          ValueError: If a part does not fit.
          TypeError: If the score or the normalizer is none.
        """
        *batch_shape, num_queries, num_heads, key_size = query.shape
        batch_ndim, first_query = (
            len(batch_shape),
            tiles.checked_first(self.first_query),
        )
        score = scores.as_score(self.score)
        score.check(num_heads, key_size)
        normalizer = normalizers.as_normalizer(self.normalizer)
        if normalizer is not None:
            normalizer.check(num_heads)
            normalizer = normalizer.aligned(batch_ndim, num_heads)
        bias = positions.as_bias(self.bias)
        if bias is not None:
            is_known = isinstance(first_query, int)
            stop = first_query + num_queries if is_known else None
            bias.check(tuple(batch_shape), num_heads, stop, num_keys)
            bias = bias.aligned(batch_ndim)
        wanted = (*query.shape[:-1], value_size)
        if self.gates is not None and self.gates.shape not in (
            wanted,
            (*wanted[:-1], 1),
        ):
            raise ValueError(
                "gates must be [B..., T, H, 1] or [B..., T, H, V], of shape "
                f"{(*wanted[:-1], 1)} or {wanted}, got {self.gates.shape}."
            )
        return Weighting(
            self.mask,
            bias,
            score.aligned(batch_ndim),
            normalizer,
            self.gates,
            first_query,
        )

    def finished(self, values: Array, logsumexp: Array) -> tuple[Array, Array]:
        """Applies the normalizer and the gates to the results of softmax attention.

        Args:
          values: `[B..., T, H, V]`, weighted by softmax.
          logsumexp: `[B..., H, T]`, of the scores.

        Returns:
          The values, and the log of what their weights are divided by.
        """
        if self.normalizer is not None:
            values, logsumexp = self.normalizer(values, logsumexp)
        return values if self.gates is None else values * self.gates, logsumexp

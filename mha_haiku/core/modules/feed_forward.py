"""The feed-forward part of a transformer layer."""

import math
from collections.abc import Callable

import haiku as hk
import jax
from jaxtyping import Array, Float

from mha_haiku.core import checks, site_primitive


class FeedForward(hk.Module):
    """Two linear maps with an activation between, or three with a gate.

    Source: Vaswani et al. 2017, eq. 2, https://arxiv.org/abs/1706.03762; gated: Shazeer
    2020, eq. 5, https://arxiv.org/abs/2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        activation: Callable[[Array], Array] | None = None,
        gated: bool = False,
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ):
        """Initializes the module.

        Args:
          hidden_size: F.
          activation: Applied to the hidden units, or to the gate. Defaults to `gelu`.
          gated: Whether hidden units are multiplied by `activation` of a second linear
            map; with `jax.nn.silu` this is SwiGLU.
          with_bias: Whether the linear maps have biases.
          w_init: The initializer of the weights. Defaults to variance scaling.
          name: The module's name.

        Raises:
          ValueError: If `hidden_size` is not a positive integer.
        """
        super().__init__(name=name)
        self.hidden_size = checks.positive_integer("hidden_size", hidden_size)
        self.activation = activation or gelu
        self.gated = gated
        self.with_bias = with_bias
        self.w_init = w_init or hk.initializers.VarianceScaling(1.0)

    def __call__(
        self, x: Float[Array, "*B D"], *, dropout_rate: float = 0.0
    ) -> Float[Array, "*B D"]:
        """Applies the layer; the output has the input's width.

        Its sites are "hidden", `[..., F]`, and "output". A share `dropout_rate` of the
        hidden units, in [0, 1), is dropped, which needs an rng.
        """
        hidden = self._linear(self.hidden_size, "hidden")(x)
        if self.gated:
            hidden = hidden * self.activation(self._linear(self.hidden_size, "gate")(x))
        else:
            hidden = self.activation(hidden)
        hidden = site_primitive.site("hidden", hidden)
        if dropout_rate:
            hidden = hk.dropout(hk.next_rng_key(), dropout_rate, hidden)
        return site_primitive.site(
            "output", self._linear(x.shape[-1], "output")(hidden)
        )

    @hk.transparent
    def _linear(self, size: int, name: str) -> hk.Linear:
        return hk.Linear(size, self.with_bias, w_init=self.w_init, name=name)


def gelu(x: Array) -> Array:
    """Computes the exact Gaussian error linear unit, `x * (1 + erf(x / sqrt(2))) / 2`.

    Within 1e-7 |x| of `jax.nn.gelu(x, approximate=False)`, whose `erfc` costs an
    exponential and twice the passes on the CPU.

    Source: Hendrycks and Gimpel 2016, section 2, https://arxiv.org/abs/1606.08415.

    Example:
      >>> mh.modules.gelu(jnp.array([-10.0, 0.0, 10.0]))
      Array([-0.,  0., 10.], dtype=float32)
    """
    return x * ((1 + jax.lax.erf(x / math.sqrt(2))) / 2)

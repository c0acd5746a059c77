"""Gates that are learned together with the model, so that heads close by themselves.

B batch, L layers, H heads of a layer.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku import models, modules, tasks
from mha_haiku.heads import hard_concrete, subject

Array = jax.Array


class Learned(NamedTuple):
    """What learning gates led to.

    Attributes:
      params: The model's parameters, trained with the gates.
      log_alpha: L arrays `[H]`, the logits of the gates.
      loss: `[steps]`, the mean loss of each step's batch, without the penalty.
      expected_open: `[steps]`, the expected number of open heads.
    """

    params: Any
    log_alpha: list[Array]
    loss: np.ndarray
    expected_open: np.ndarray

    @property
    def gates(self) -> list[np.ndarray]:
        """L arrays `[H]` in [0, 1]: the gates without chance, 0 where closed."""
        return [np.asarray(hard_concrete.settled(x)) for x in self.log_alpha]

    @property
    def keep(self) -> list[np.ndarray]:
        """L arrays `[H]` of booleans: the heads whose gates are open."""
        return [gate > 0 for gate in self.gates]


def learn(
    model: models.Model,
    metric: subject.Metric,
    params: Any,
    sample: Callable[[Array], tasks.Example],
    *,
    penalty: float,
    steps: int,
    optimizer: optax.GradientTransformation,
    gate_learning_rate: float = 0.1,
    seed: int = 0,
    initial: float = 2.0,
    chunk: int = 100,
    progress: Callable = iter,
) -> Learned:
    """Trains a model with hard-concrete gates on its heads, and a price on open ones.

    The loss of a step is the mean metric plus `penalty` times the expected number of
    open heads. Sweeping the penalty sweeps the number of heads that stay.

    Args:
      model: The model.
      metric: Its loss per example.
      params: Where training starts; a converged model's, as in the source.
      sample: Makes a training batch from the number of a step, `[]` int32.
      penalty: Nats per open head.
      steps: How many are taken.
      optimizer: Of the parameters.
      gate_learning_rate: Of Adam on the logits of the gates, which have far to go.
      seed: Of the gates' chance.
      initial: Logits of the gates at the start; 2 is open with probability 0.97.
      chunk: Steps per compiled call.
      progress: Wraps the range of the chunks, as `tqdm.tqdm` does.

    Source: Voita et al. 2019, section 5.2, https://arxiv.org/abs/1905.09418.
    """
    counts = subject.num_heads(model, params, jax.eval_shape(sample, jnp.int32(0)))
    log_alpha = [jnp.full(count, initial) for count in counts]
    gate_optimizer = optax.adam(gate_learning_rate)

    def loss(trained, example, rng):
        params, log_alpha = trained
        keys = jax.random.split(rng, len(log_alpha))
        gates = [
            hard_concrete.sample(logits, key)
            for logits, key in zip(log_alpha, keys, strict=True)
        ]
        closed = modules.Interventions(heads=gates)
        output = subject.run(model, params, example, interventions=closed)
        number = sum(hard_concrete.open_probability(x).sum() for x in log_alpha)
        mean = metric(output.logits, example).mean()
        return mean + penalty * number, (mean, number)

    def take_step(carry, step):
        trained, states = carry
        rng = jax.random.fold_in(jax.random.key(seed), step)
        gradient, seen = jax.grad(loss, has_aux=True)(trained, sample(step), rng)
        moved, new_states = zip(
            *(
                each.update(slope, state, now)
                for each, slope, state, now in zip(
                    (optimizer, gate_optimizer), gradient, states, trained, strict=True
                )
            ),
            strict=True,
        )
        return (optax.apply_updates(trained, moved), new_states), seen

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def take_steps(carry, first, count):
        return jax.lax.scan(take_step, carry, first + jnp.arange(count))

    trained = (jax.tree.map(jnp.array, params), log_alpha)
    carry = (trained, (optimizer.init(trained[0]), gate_optimizer.init(log_alpha)))
    seen = []
    for first in progress(range(0, steps, chunk)):
        count = min(chunk, steps - first)
        carry, losses = take_steps(carry, jnp.int32(first), count)
        seen.append(jax.device_get(losses))
    losses, numbers = (np.concatenate(x) for x in zip(*seen, strict=True))
    params, log_alpha = jax.device_get(carry[0])
    return Learned(params, log_alpha, losses, numbers)

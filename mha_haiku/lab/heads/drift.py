"""Drift: how far the vectors of texts move when a model is edited.

A model without targets, such as a sentence encoder, has no loss. Instead its
mean-pooled outputs, in place of logits, are compared with the outputs of the unedited
model, in place of targets: every measure accepts a `measured_by_drift`.

B batch, T positions, D width.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.lab.heads import metrics, model_runs
from mha_haiku.lab.heads.model_runs import Batches, Measured
from mha_haiku.training import tasks


def measured_by_drift(model: models.Model, params: Any, batches: Batches) -> Measured:
    """Returns a subject whose metric is `metrics.drift` from the unedited model.

    The model's `Output` must have `output`; targets are ignored.

    Example:
      >>> drift = mh.heads.measured_by_drift(model, params, batches)
      >>> abs(mh.heads.ablation(drift).mean.round(2))
      array([[0.23, 0.  ],
             [0.05, 0.  ]])
    """
    compared = _Compared(batches, model, params)
    return Measured(mean_pooled(model), metrics.drift, params, compared)


@functools.lru_cache(maxsize=8)
def mean_pooled(model: models.Model) -> models.Model:
    """Replaces the logits of a model with vectors `[B, D]`.

    A vector is the mean of an example's outputs (of the decoder, in an encoder-decoder)
    over its valid positions.
    """

    def apply(
        params: Any,
        rng: jax.Array | None,
        inputs: jax.Array | np.ndarray,
        *,
        lengths: jax.Array | np.ndarray | None = None,
        **options: Any,
    ) -> models.Output:
        output = model.apply(params, rng, inputs, lengths=lengths, **options)
        if options.get("decoder_inputs") is not None:
            lengths = options.get("decoder_lengths")
        outputs: Any = output.output
        outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
        if lengths is None:
            return output._replace(logits=outputs.mean(1))
        valid = jnp.arange(outputs.shape[1])[None] < jnp.asarray(lengths)[:, None]
        total = jnp.where(valid[..., None], outputs, 0).sum(1)
        count = jnp.maximum(valid.sum(1), 1)[:, None]
        return output._replace(logits=total / count)

    scanned = model.scanned and mean_pooled(model.scanned)
    return model._replace(apply=apply, scanned=scanned)


def vectors(model: models.Model, params: Any, batches: Batches) -> np.ndarray:
    """Computes the `mean_pooled` vectors of all examples, `[N, D]` float32."""
    program = _vectors(model)
    return np.concatenate(model_runs.over(batches, lambda x: program(params, x)))


def same_neighbours(before: np.ndarray, after: np.ndarray) -> float:
    """Returns the share of vectors `[N, D]` with the same nearest vector by cosine."""
    nearest = []
    for vectors_ in (before, after):
        unit = vectors_ / np.linalg.norm(vectors_, axis=-1, keepdims=True)
        cosines = unit @ unit.T
        np.fill_diagonal(cosines, -np.inf)
        nearest.append(cosines.argmax(-1))
    return float(np.mean(nearest[0] == nearest[1]))


@dataclasses.dataclass(frozen=True, eq=False)
class _Compared:
    """Batches whose targets are a model's vectors of their inputs."""

    batches: Batches
    model: models.Model
    params: Any

    def __iter__(self) -> Iterator[tasks.Example]:
        model_runs.check_batches(self.batches)
        for example in self.batches:
            yield example._replace(targets=_vectors(self.model)(self.params, example))


@functools.lru_cache(maxsize=8)
def _vectors(model: models.Model):
    pooled = mean_pooled(model)
    return jax.jit(lambda params, x: model_runs.run(pooled, params, x).logits)

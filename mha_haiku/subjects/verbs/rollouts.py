"""Attention rollout from a position to the inputs, through the layers.

T positions, L layers.
"""

from typing import Any

import numpy as np

from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import answers, conversion
from mha_haiku.subjects.subject import Subject, parts_of, verb
from mha_haiku.subjects.verbs import values


@verb(command="rollout", folder="attention")
def rollout(
    subject: Subject,
    text: str | Any = None,
    *,
    query: int = -1,
    residual: float = 0.5,
) -> answers.Rollout:
    """Computes attention rollout: how much of each input reaches a position.

    The layers' mean attention is multiplied up to each layer; see `mh.heads.rollout`.

    Args:
      subject: The model.
      text: Text, or other inputs of one example; default: the first held-out example.
      query: Position that looks back, counted from the end if negative.
      residual: Share of the residual connection in a layer, in [0, 1).

    Raises:
      ValueError: If the model has two stacks of layers, or there is no such position.
    """
    inputs = subject.examples(1) if text is None else text
    batch = conversion.one(subject, inputs)
    result = values.maps(subject, batch)
    maps = tuple(result) if isinstance(result.maps, dict) else result.maps
    size = result[0].shape[-1]
    places = np.arange(size)
    if size == batch.inputs.shape[1]:
        places = np.flatnonzero(model_runs.valid(size, batch, "")[0])
    rows = places[[query]] if -len(places) <= query < len(places) else query
    shares = heads.rollout(maps, rows, residual=residual, per_layer=True)
    tokens = result.key_tokens or result.tokens or [[str(i) for i in range(size)]]
    return answers.Rollout(
        f"{subject.title}: rollout from position {np.ravel(rows)[0]}",
        tuple(tokens[0][i] for i in places),
        np.asarray(shares)[:, 0, 0, places],
        tuple(part.layer for part in parts_of(subject, batch)),
    )

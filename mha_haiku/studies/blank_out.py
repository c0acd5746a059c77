"""How much each input matters: by replacing it, and according to attention.

Dimensions: N examples, T positions, L layers, H heads, V value size, D model width. An
example asks for the answer at one position. Each input in turn is replaced by another
token: the task's mask token where it has one, else random other tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import tasks
from mha_haiku.heads.gradient_rollout import gradient_rollout, output_gradients
from mha_haiku.heads.rollout import rollout, value_rollout
from mha_haiku.runs import folders
from mha_haiku.training import evaluation, stepping

Array = jax.Array

# Folded into the key of held-out examples, into which they fold their indices: no
# example has this index, so questions are drawn independently of the examples.
_QUESTIONS = 2**32 - 1


def look(
    run: folders.Run, draws: int, params: Any, data: Any, indices: Array
) -> dict[str, Any]:
    """Returns the effect of each input and the measures, for a batch; under jit.

    Args:
      run: The run; tokens in, an answer at each position out.
      draws: How many random tokens replace an input, where there is no mask token.
      params: Its parameters.
      data: `task.held_out_data`.
      indices: `[N]` int32, which held-out examples.

    Returns:
      `row [N]`, the position of the answer; `asks [N]`, whether the example has one;
      `counted [N, T]`, the inputs to rank; `drop [N, T]`, how much the probability of
      the right answer falls without each; and `measures`, `[N, L, T]` by name, for the
      first 1 to L layers.
    """
    example = evaluation.held_out_batch(run.task, run.config.seed, data, indices)
    key = stepping.stream(run.config.seed, "held_out")
    key = jax.random.fold_in(key, np.uint32(_QUESTIONS))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
    row, asks = jax.vmap(functools.partial(_question, run.task))(keys, example)
    blanks = jax.vmap(functools.partial(_blanks, run.task, draws))(keys, example.inputs)
    return {
        "row": row,
        "asks": asks,
        "counted": _counted(run, example, row),
        "drop": drops(run, params, example, row, jnp.swapaxes(blanks, 0, 1)),
        "measures": _measures(run, params, example, row),
    }


def drops(
    run: folders.Run, params: Any, example: tasks.Example, row: Array, blanks: Array
) -> Array:
    """Returns how much the probability of the right answer falls without each input.

    Args:
      run: The run.
      params: Its parameters.
      example: N examples.
      row: `[N]`, the position of the answer.
      blanks: `[draws, N, T]`, the tokens that replace each input in turn.

    Returns:
      `[N, T]`, the mean over draws.
    """
    positions = jnp.arange(run.task.sequence_length)

    def probability(inputs):
        output = run.model.apply(
            params, None, inputs, lengths=example.lengths, is_training=False
        )
        logits = jax.nn.log_softmax(output.logits)
        return jnp.exp(_answer(row, logits, example))

    def per_draw(blanks):
        def without(s):
            at = positions[None] == s
            return probability(jnp.where(at, blanks, example.inputs))

        return jax.lax.map(without, positions)

    blanked = jax.lax.map(per_draw, blanks).mean(0)  # [T, N]
    return (probability(example.inputs)[None] - blanked).T


def _measures(run, params, example, row):
    """Returns the scores of the inputs by each measure, `[N, L, T]` by name."""
    answer = functools.partial(_answer, row)
    output, gradients = output_gradients(run.model, params, example, answer)
    maps, rows = output.maps, row[:, None]
    options = {"output_weights": _projections(params, maps), "per_layer": True}
    measures = {
        "raw": [rollout([layer], rows, residual=0.0) for layer in maps],
        "roll-out": rollout(maps, rows, per_layer=True),
        "value-weighted": value_rollout(maps, rows, **options),
        "gradient-weighted": gradient_rollout(maps, gradients, rows, per_layer=True),
    }
    return {
        name: jnp.moveaxis(jnp.asarray(x)[:, :, 0], 0, 1)
        for name, x in measures.items()
    }


def _answer(row, logits, example):
    """Returns the logit of the right answer at the row of each example, `[N]`."""
    return jax.vmap(lambda x, t, targets: x[t, targets[t]])(
        logits, row, example.targets
    )


def _question(task, key, example):
    """Returns a random position whose target counts, and whether there is one."""
    asked = example.weights > 0
    if hasattr(task, "mask_token"):
        asked &= example.inputs == task.mask_token
    chance = jax.random.uniform(jax.random.fold_in(key, 0), asked.shape)
    return jnp.argmax(jnp.where(asked, chance, -1)), asked.any()


def _blanks(task, draws, key, inputs):
    """Returns the tokens that replace each input in turn, `[draws, T]`."""
    if hasattr(task, "mask_token"):
        return jnp.full((1, *inputs.shape), task.mask_token, inputs.dtype)
    # A shift of 1 to num_tokens - 1, modulo num_tokens, is uniform over other tokens.
    shape = (draws, *inputs.shape)
    shift = jax.random.randint(jax.random.fold_in(key, 1), shape, 1, task.num_tokens)
    return (inputs[None] + shift) % task.num_tokens


def _counted(run, example, row):
    """Returns which inputs are ranked, `[N, T]`."""
    positions = jnp.arange(run.task.sequence_length)[None]
    counted = jnp.ones(example.inputs.shape, bool)
    if hasattr(run.task, "mask_token"):
        counted &= example.inputs != run.task.mask_token
    if example.lengths is not None:
        counted &= positions < example.lengths[:, None]
    if run.config.model.family == "causal":
        counted &= positions <= row[:, None]
    return counted


def _projections(params, maps):
    """Returns the output projection of each layer, `[H, V, D]`."""
    projections = []
    for i, layer in enumerate(maps):
        num_heads = layer.shape[-3]
        projection = params[f"encoder/layer_{i}/attention/linear"].get("w")
        if num_heads:
            projection = projection.reshape(num_heads, -1, projection.shape[-1])
        projections.append(projection)
    return projections

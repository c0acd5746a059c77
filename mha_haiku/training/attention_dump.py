"""Attention maps of a run, as one file of plain arrays.

Dimensions: N examples shown, L layers, H heads, T query positions, S key positions;
T' and S' are T and S, or the bins of a pooled map.
"""

import operator
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.training import evaluate
from mha_haiku.training import run as run_folder

_MEAN_EXAMPLES = 64
_MEAN_BATCH = 8


def dump(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    examples: int | Sequence[int] | None = None,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    out: str | os.PathLike | None = None,
    weights: bool = False,
) -> Path:
    """Runs a trained model and writes its attention to maps.npz.

    Up to `config.attention.full_length` positions the maps are whole, above they are
    pooled to `config.attention.pooled_size` bins.

    Args:
      workdir: The run's folder.
      step: Which checkpoint; None means the newest.
      layers: Which layers; None means all.
      heads: Which heads of every layer; None means all.
      examples: How many held-out examples, or their indices; None means
        `config.attention.examples`.
      text: A text to run on instead, as the task encodes it.
      tokens: Token ids to run on instead.
      out: The folder to write to; None means `attention` in the run's folder.
      weights: Whether to write whole maps at any length.

    Returns:
      The path of maps.npz: `layer_00`... `[N, H, T', S']`, `layer_names [L]`,
      `heads_00`... `[H]`, `tokens [N, T]`, `query_edges`, `key_edges`, `lengths [N]`,
      `predictions` and `targets` `[N, T]` (`[N, 1]` for sets), `title`, and for whole
      maps of held-out examples `mean_00`... `[H, T, S]` over `mean_examples` of them.

    Raises:
      ConfigError: If there is no such run, step, layer, head, example or token.
    """
    if text is not None and tokens is not None:
        raise ConfigError("Give text or tokens, not both.")
    run = run_folder.load_run(workdir, step)
    example = _example(run, examples, text, tokens)
    is_own = text is not None or tokens is not None
    length = example.inputs.shape[1]
    is_whole = weights or length <= run.config.attention.full_length
    size = length if is_whole else min(run.config.attention.pooled_size, length)

    num_heads = _heads_of_layers(run, example)
    layers = _chosen("layers", layers, len(num_heads))
    chosen = {i: _chosen("heads", heads, num_heads[i]) for i in layers}

    def select(maps):
        shown = [
            maps[i].weights() if is_whole else maps[i].pooled(size, size)
            for i in layers
        ]
        return [x[:, np.array(chosen[i])] for i, x in zip(layers, shown, strict=True)]

    @jax.jit
    def observe(params, example):
        output = _apply(run, params, example)
        return output.logits, select(output.maps)

    logits, selected = observe(run.params, example)
    edges = attention.bin_edges(length, size)
    arrays = {
        "title": np.array(f"{run.task.name}, step {run.step}"),
        "layer_names": np.array([f"layer {i}" for i in layers]),
        "query_edges": edges,
        "key_edges": edges,
        **_texts(run.task, jax.device_get(example), np.asarray(logits), is_own=is_own),
    }
    for i, maps in enumerate(selected):
        arrays[f"layer_{i:02d}"] = np.asarray(maps, run.config.attention.dtype)
        arrays[f"heads_{i:02d}"] = np.array([f"head {j}" for j in chosen[layers[i]]])
    if is_whole and not is_own:
        for i, mean in enumerate(_means(run, select)):
            arrays[f"mean_{i:02d}"] = np.asarray(mean, np.float32)
        arrays["mean_examples"] = np.array(_MEAN_EXAMPLES)
    folder = run_folder.Folder(Path(workdir).expanduser()).attention
    return _write(Path(out).expanduser() if out is not None else folder, arrays)


def _example(run, examples, text, tokens) -> tasks.Example:
    """Returns the batch to look at."""
    if text is None and tokens is None:
        if examples is None or isinstance(examples, int):
            count = run.config.attention.examples if examples is None else examples
            examples = range(checks.positive_integer("examples", count))
        for index in examples:
            checks.integer_in("examples", index, 0, 2**31 - 1)
        indices = jnp.asarray(list(examples), jnp.int32)
        return _held_out(run, indices)
    if run.task.num_tokens is None:
        raise ConfigError(
            f"The task {run.task.name!r} takes features, not text or tokens."
        )
    if text is not None:
        tokens = run.task.encode(text)
    for token in tokens:
        checks.integer_in("tokens", token, 0, run.task.num_tokens - 1)
    inputs = np.asarray(tokens, np.int32)[None]
    longest = run.config.model.max_length
    if run.config.model.positions == "learned" and inputs.shape[1] > longest:
        raise ConfigError(
            f"tokens must be at most config.model.max_length {longest} with learned "
            f"positions, got {inputs.shape[1]}."
        )
    if not inputs.size:
        raise ConfigError("tokens must not be empty.")
    return tasks.Example(inputs, inputs, np.zeros(inputs.shape, np.float32), None)


def _held_out(run, indices) -> tasks.Example:
    return evaluate.held_out_batch(
        run.task, run.config.seed, run.task.held_out_data, indices
    )


def _apply(run, params, example):
    return run.model.apply(
        params, None, example.inputs, lengths=example.lengths, is_training=False
    )


def _heads_of_layers(run, example) -> list[int]:
    output = jax.eval_shape(lambda params: _apply(run, params, example), run.params)
    return [layer.logsumexp.shape[-2] for layer in output.maps]


def _chosen(name, wanted, count) -> list[int]:
    if wanted is None:
        return list(range(count))
    return [checks.integer_in(name, index, 0, count - 1) for index in wanted]


def _means(run, select) -> list[jax.Array]:
    """Returns the mean map of each chosen layer over held-out examples."""

    @jax.jit
    def mean(params):
        def of_batch(indices):
            maps = select(_apply(run, params, _held_out(run, indices)).maps)
            return [x.mean(axis=0) for x in maps]

        indices = jnp.arange(_MEAN_EXAMPLES).reshape(-1, _MEAN_BATCH)
        return [x.mean(axis=0) for x in jax.lax.map(of_batch, indices)]

    return mean(run.params)


def _texts(task, example, logits, *, is_own) -> dict[str, np.ndarray]:
    """Returns what people read beside the maps."""
    num_examples, length = example.inputs.shape[:2]
    rows = [jax.tree.map(operator.itemgetter(i), example) for i in range(num_examples)]
    predicted = logits.argmax(axis=-1).reshape(num_examples, -1)
    targets = np.asarray(example.targets).reshape(num_examples, -1)
    counts = np.asarray(example.weights).reshape(num_examples, -1) > 0

    def labels(classes, shown):
        text = [
            [
                task.class_label(int(c)) if show else ""
                for c, show in zip(*row, strict=True)
            ]
            for row in zip(classes, shown, strict=True)
        ]
        return np.array(text, dtype=np.str_)

    lengths = example.lengths
    return {
        "tokens": np.array([task.labels(row) for row in rows], dtype=np.str_),
        "lengths": np.full(num_examples, length) if lengths is None else lengths,
        # A user's text has predictions everywhere and targets nowhere.
        "predictions": labels(predicted, counts | is_own),
        "targets": labels(targets, counts),
    }


def _write(folder, arrays) -> Path:
    path = folder / "maps.npz"
    partial = folder / "maps.partial.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(partial, **arrays)
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    return path

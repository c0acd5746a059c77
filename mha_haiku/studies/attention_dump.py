"""Attention maps of a run, and what its heads do, as two files of plain arrays.

Dimensions: N examples shown, L layers, H heads, T query positions, S key positions;
T' and S' are T and S, or the bins of a pooled map.
"""

import operator
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from mha_haiku import attention, checks, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.devices import cluster
from mha_haiku.runs import files, folders
from mha_haiku.studies import head_statistics, workbench

_MEAN_EXAMPLES = 64  # at least


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
    """Runs a trained model and writes its attention: maps.npz and statistics.npz.

    Up to `config.attention.full_length` positions the maps are whole, above they are
    pooled to `config.attention.pooled_size` bins, and nothing of size T x S is made.

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
      Beside it, statistics.npz holds the numbers of `attention.Statistics` that are one
      per head, by their names: `entropy [L, H]`, ..., means over the N examples (NaN
      where a layer has fewer heads); and `title`, `layer_names`, `head_names [H]` and
      `num_examples`.

    Raises:
      ConfigError: If there is no such run, step, layer, head, example or token.
    """
    if text is not None and tokens is not None:
        raise ConfigError("Give text or tokens, not both.")
    run = folders.load_run(workdir, step)
    own = _own_example(run, text, tokens)
    indices = _indices(run, examples)
    length = run.task.sequence_length if own is None else own.inputs.shape[1]
    run = workbench.placed(run, length=length)
    is_whole = weights or length <= run.config.attention.full_length
    size = length if is_whole else min(run.config.attention.pooled_size, length)
    of_layers = models.heads_of_layers(run.config.model)
    layers = head_statistics.chosen("layers", layers, len(of_layers))
    wanted = head_statistics.chosen(
        "heads", heads, run.config.model.attention.num_heads
    )
    # By their names: a layer of a pruned model has some of them.
    chosen = [[j for j in wanted if j in of_layers[i].names] for i in layers]
    places = [
        [of_layers[i].names.index(j) for j in names]
        for i, names in zip(layers, chosen, strict=True)
    ]

    observe = _observer(run, layers, places, None if is_whole else (size, size))

    def held_out(indices):
        return _observed(run, observe, examples_at(indices), len(indices))

    if own is None:
        examples_at = _in_whole_batches(run)
        example, logits, maps, numbers = held_out(indices)
    else:
        batch_size = workbench.whole_batch(run, 1)
        copies = jax.tree.map(lambda x: np.repeat(x, batch_size, axis=0), own)
        example, logits, maps, numbers = _observed(run, observe, copies, 1)
    edges = attention.bin_edges(length, size)
    names = {
        "title": np.array(f"{run.task.name}, step {run.step}"),
        "layer_names": np.array([f"layer {i}" for i in layers]),
    }
    arrays = {
        **names,
        "query_edges": edges,
        "key_edges": edges,
        **_texts(run.task, example, logits, is_own=own is not None),
    }
    for i, layer in enumerate(maps):
        arrays[f"layer_{i:02d}"] = layer.astype(run.config.attention.dtype)
        arrays[f"heads_{i:02d}"] = np.array([f"head {j}" for j in chosen[i]])
    if is_whole and own is None:
        # In batches of the size that is compiled already.
        starts = range(0, _MEAN_EXAMPLES, len(indices))
        batches = [np.arange(start, start + len(indices)) for start in starts]
        means = [[x.mean(axis=0) for x in held_out(batch)[2]] for batch in batches]
        for i, of_batches in enumerate(zip(*means, strict=True)):
            arrays[f"mean_{i:02d}"] = np.mean(of_batches, axis=0, dtype=np.float32)
        arrays["mean_examples"] = np.array(len(batches) * len(indices))
    shown = [j for j in wanted if any(j in names for names in chosen)]
    columns = [[shown.index(j) for j in names] for names in chosen]
    statistics = {
        **names,
        "head_names": np.array([f"head {j}" for j in shown]),
        "num_examples": np.array(len(example.inputs)),
        **head_statistics.summary(numbers, columns)[0],
    }
    folder = folders.Folder(Path(workdir).expanduser()).attention
    folder = folder if out is None else Path(out).expanduser()
    _write(folder / "statistics.npz", statistics)
    return _write(folder / "maps.npz", arrays)


def _observer(run, layers, heads_of_layers, pooled):
    """Returns a function of parameters and a batch of examples.

    It returns the batch, its logits, and of each layer the maps, pooled or whole, and
    the statistics of the heads.
    """

    def observe(params, example):
        example = workbench.spread(run, example)
        output = run.model.apply(
            params, None, example.inputs, lengths=example.lengths, is_training=False
        )
        tokens = head_statistics.tokens_of(run.task, example)
        maps, numbers = [], []
        for i, heads in zip(layers, heads_of_layers, strict=True):
            found = output.maps[i].statistics(pooled=pooled, tokens=tokens)
            cells = output.maps[i].weights() if pooled is None else found.pooled
            of_heads = head_statistics.per_head(found)
            heads = np.array(heads, np.int32)
            maps.append(cells[:, heads])
            numbers.append({name: x[:, heads] for name, x in of_heads.items()})
        return example, output.logits, maps, numbers

    return workbench.program(run, observe)


def _in_whole_batches(run):
    """Returns a function from indices to examples: these, and more to fill a batch."""
    held_out = workbench.held_out(run)

    def at(indices):
        size = workbench.whole_batch(run, len(indices))
        return held_out([*indices, *[indices[-1]] * (size - len(indices))])

    return at


def _observed(run, observe, example, count):
    """Returns what is seen in the first `count` examples of a batch, on the host."""
    found = jax.device_get(observe(run.params, example))
    return jax.tree.map(lambda x: x[:count], found)


@checks.user_mistakes()
def _indices(run, examples) -> list[int]:
    """Returns the indices of the held-out examples to show."""
    if examples is None or isinstance(examples, int):
        count = run.config.attention.examples if examples is None else examples
        return list(range(checks.positive_integer("examples", count)))
    indices = [checks.integer_in("examples", i, 0, 2**31 - 1) for i in examples]
    if not indices:
        raise ConfigError("examples must not be empty.")
    return indices


def _own_example(run, text, tokens) -> tasks.Example | None:
    """Returns a batch of the user's text or tokens, or None where there are none."""
    if text is None and tokens is None:
        return None
    if run.task.num_tokens is None:
        raise ConfigError(
            f"The task {run.task.name!r} takes features, not text or tokens."
        )
    if text is not None:
        tokens = run.task.encode(text)
    with checks.user_mistakes():
        for token in tokens:
            checks.integer_in("tokens", token, 0, run.task.num_tokens - 1)
    inputs = np.asarray(tokens, np.int32)[None]
    if not inputs.size:
        raise ConfigError("tokens must not be empty.")
    embedding = run.config.model.embedding
    if embedding.positions == "learned" and inputs.shape[1] > embedding.max_length:
        raise ConfigError(
            f"tokens must be at most config.model.embedding.max_length "
            f"{embedding.max_length} with learned positions, got {inputs.shape[1]}."
        )
    return tasks.Example(inputs, inputs, np.zeros(inputs.shape, np.float32), None)


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


def _write(path, arrays) -> Path:
    return files.write_arrays(path, arrays) if cluster.is_first() else path

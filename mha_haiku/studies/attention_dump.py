"""Attention maps of a run, and what its heads do, as arrays, pictures and a page.

Dimensions: N examples shown, L layers, H heads, T query positions, S key positions;
T' and S' are T and S, or the bins of a pooled map.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, checks, models, report, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.devices import cluster
from mha_haiku.heads import alignment, subject
from mha_haiku.runs import files, progress
from mha_haiku.studies import dossiers, head_statistics, imported_runs, zoom
from mha_haiku.studies.workbench import Bench

_logger = logging.getLogger("mha_haiku")
_MEAN_EXAMPLES = 64  # at least
_BATCH_POSITIONS = 2**13  # of all examples in a batch
_PAGE_BYTES = 2_000_000
_PICTURE = re.compile(
    r"(layer|encoder|decoder|cross)_\d{2,}\.(png|svgz?|pdf|e?ps|pgf|jpe?g|tiff?|webp|gif|avif|raw|rgba)"
)


class Own(NamedTuple):
    """Inputs to run on instead of held-out examples: one of the first three.

    Attributes:
      text: A text, as the task encodes it.
      tokens: Token ids.
      batch: N examples, on the host.
      names: Those of the N examples.
    """

    text: str | None = None
    tokens: Sequence[int] | None = None
    batch: tasks.Example | None = None
    names: Sequence[str] = ()


def dump(
    bench: Bench,
    *,
    own: Own | None = None,
    out: str | os.PathLike | None = None,
    **options: Any,
) -> Path:
    """Runs a trained model and writes its attention: maps.npz and statistics.npz.

    Arguments and errors are those of `measured`, and `out` is the folder to write to;
    None means `attention` in the run's folder, and `attention/own_text` there for own
    inputs.

    Returns:
      The path of maps.npz, beside which statistics.npz is.
    """
    arrays, statistics = measured(bench, own=own, **options)
    folder = bench.folder.attention
    folder = folder if own is None else folder / "own_text"
    folder = folder if out is None else checks.as_path(out)
    report.maps.checked(arrays, folder / "maps.npz")  # before any file changes
    if cluster.is_first():
        files.write_arrays(folder / "statistics.npz", statistics)
        files.write_arrays(folder / "maps.npz", arrays)
    return folder / "maps.npz"


def measured(
    bench: Bench,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    examples: int | None = None,
    indices: Sequence[int] | None = None,
    own: Own | None = None,
    weights: bool = False,
    means: bool = True,
    channels: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the arrays of maps.npz and of statistics.npz.

    Up to `config.attention.full_length` positions the maps are whole; longer ones are
    pooled to `config.attention.pooled_size` bins, and nothing of size T x S is made.

    Args:
      bench: The run.
      layers: Which layers, as `head_statistics.chosen_layers` takes them; None: all.
      heads: Which heads of every layer; None means all.
      examples: The number of held-out examples, the first; None means
        `config.attention.examples`.
      indices: Indices of held-out examples, in place of the first.
      own: Inputs to run on instead.
      weights: Whether maps are whole at any length.
      means: Whether there are means of whole maps over many examples.
      channels: Whether there are queries and keys too, where maps are whole.
      devices: Those that divide the work; None: all of all processes.

    Returns:
      Of each of the `layers [L]`, here of layer 1, `layer_01` `[N, H, T', S']` and
      `heads_01` `[H]`, for whole maps of held-out examples `mean_01` `[H, T, S]` over
      `mean_examples` of them, for pooled ones `patches_01 [N, H, n, R, R]` and
      `places_01 [N, H, n, 3]` as in `zoom.Patches`, and of `channels` `query_01 [N, H,
      T, K]`, `key_01` and `exact_01` as in `zoom.channels`; `masked [N, T', S']`, or
      `masked_01` where layers or heads differ; and the other fields of
      `report.maps.Maps` by their names, those of its decoder as `decoder_tokens` and so
      on.
      And statistics: numbers of `attention.Statistics` that are one per head, by their
      names: `entropy [L, H]`, ..., means over the N examples (NaN where a layer has
      fewer heads), with their `entropy_standard_error`, ...; where maps are whole, for
      each of `Task.alignments` also the share of `heads.alignment` (over the examples
      of `mean_examples`, if there are means; NaN but for cross-attention); `names`,
      `units` and `labels` of these; and `title`, `layer_names`, `head_names [H]` and
      `num_examples`.

    Raises:
      ConfigError: If there is no such layer, head, example or token.
    """
    run = bench.run
    if own is None:
        indices = _indices(run, examples, indices)
        names_of_examples = [f"held-out example {i}" for i in indices]
    else:
        own, names_of_examples = _own_batch(run, own)
    length, target_length = run.task.sequence_length, run.task.target_length or 0
    if own is not None:
        length = own.inputs.shape[1]
        if own.decoder_inputs is not None:
            target_length = own.decoder_inputs.shape[1]
    longest = max(length, target_length)
    is_whole = weights or longest <= run.config.attention.full_length
    num_bins = None if is_whole else run.config.attention.pooled_size
    layer_heads = models.heads_of_layers(run.config.model)
    layers = head_statistics.chosen_layers(run.config.model, layers)
    wanted = head_statistics.chosen(
        "heads", heads, run.config.model.attention.num_heads
    )
    # Heads go by their index in the unpruned layer; a pruned one has some of them.
    chosen = [[j for j in wanted if j in layer_heads[i].names] for i in layers]
    places = [
        [layer_heads[i].names.index(j) for j in names]
        for i, names in zip(layers, chosen, strict=True)
    ]

    is_all = len(layers) == len(layer_heads)
    bench = (bench.compact() if is_all else bench).placed(devices, length=length)
    observe = bench.once(
        f"maps of {layers}, {places}, {num_bins}, {channels}",
        lambda: _observer(bench, layers, places, num_bins, channels),
    )
    if own is None:
        batch_size = bench.batch_size(len(indices), _BATCH_POSITIONS)
        batches = bench.observations(
            observe, indices, batch_size=batch_size, name="attention maps"
        )
        seen = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    else:
        count = len(own.inputs)
        filled = np.minimum(np.arange(bench.whole_batch(count)), count - 1)
        example = jax.tree.map(lambda x: x[filled], own)
        with progress.during("attention maps: compiling"):
            seen = jax.device_get(observe(bench.run.params, example))
        seen = jax.tree.map(lambda x: x[:count], seen)
    example, answers, maps, numbers, masked, parts, products = seen

    edges = _edges(length, num_bins)
    names = {
        "title": np.array(bench.title),
        "step": np.array(run.step),
        "layers": np.array(layers),
        "layer_names": np.array([layer_heads[i].label for i in layers]),
    }
    alignments = alignment.of_batch(run.task.alignments, example)
    arrays = {
        **names,
        "example_names": np.array(names_of_examples),
        "query_edges": edges,
        "key_edges": edges,
        **_texts(run.task, example, answers, is_own=own is not None),
        **_masked(layers, masked),
    }
    if example.decoder_inputs is not None:
        arrays |= _decoder(run.task, example, alignments.get("aligned"), num_bins)
        arrays["kinds"] = np.array([layer_heads[i].kind for i in layers])
        arrays["numbers"] = np.array([layer_heads[i].layer for i in layers])
    per_layer = zip(layers, chosen, maps, parts, products, strict=True)
    for i, names_shown, layer, finer, product in per_layer:
        arrays[f"layer_{i:02d}"] = layer.astype(run.config.attention.dtype)
        arrays[f"heads_{i:02d}"] = np.array([f"head {j}" for j in names_shown], np.str_)
        if finer is not None:
            arrays[f"places_{i:02d}"] = finer.places
            arrays[f"patches_{i:02d}"] = finer.weights.astype(np.float16)
        if product is not None:
            query, key, exact = product
            arrays[f"query_{i:02d}"] = query.astype(np.float16)
            arrays[f"key_{i:02d}"] = key.astype(np.float16)
            arrays[f"exact_{i:02d}"] = np.array(exact.all())
    aligned = [_aligned(layers, layer_heads, maps, alignments)] if is_whole else []
    if means and is_whole and own is None:
        # The same batch size as above, which is compiled already.
        count = -(-_MEAN_EXAMPLES // batch_size) * batch_size
        batches = bench.observations(
            observe, range(count), batch_size=batch_size, name="means of maps"
        )
        of_batches, aligned = [], []
        for batch, _, weights_of_batch, *_ in batches:
            of_batches.append([x.mean(axis=0) for x in weights_of_batch])
            there = alignment.of_batch(run.task.alignments, batch)
            aligned.append(_aligned(layers, layer_heads, weights_of_batch, there))
        for i, batch_means in zip(layers, zip(*of_batches, strict=True), strict=True):
            arrays[f"mean_{i:02d}"] = np.mean(batch_means, axis=0, dtype=np.float32)
        arrays["mean_examples"] = np.array(count)
    shown = [j for j in wanted if any(j in names for names in chosen)]
    columns = [[shown.index(j) for j in names] for names in chosen]
    scores = [
        {
            name: np.concatenate([x[name] for x in batches if name in x])
            for name in dict.fromkeys(name for x in batches for name in x)
        }
        for batches in zip(*aligned, strict=True)
    ]
    numbers = zoom.summary(scores, columns) | zoom.summary(numbers, columns)
    statistics = {
        **names,
        **report.heads.to_arrays(numbers, layers=layers, heads=[shown] * len(layers)),
        "head_names": np.array([f"head {j}" for j in shown]),
        "num_examples": np.array(len(example.inputs)),
    }
    del statistics["heads"]  # as their names
    return arrays, statistics


def write_report(
    folder: str | os.PathLike,
    formats: Sequence[str] = ("png",),
    *,
    compare: str | os.PathLike | None = None,
) -> list[Path]:
    """Writes one picture per layer and `index.html` beside a folder's `maps.npz`.

    Each file appears whole or not at all. Pictures of layers that `maps.npz` no longer
    has are removed, so that the folder never mixes two runs. Without matplotlib a
    warning is logged and only the page is written. `compare` is the folder of another
    run; see `dossiers`.

    Returns:
      The written files: `layer_00.png`, `layer_01.png`, ... (`encoder_00.png`,
      `cross_00.png`, ... where layers are of several kinds), then `index.html`.

    Raises:
      ConfigError: If `maps.npz` is missing or is not what a run writes, or a file
        cannot be written.
    """
    folder = checks.as_path(folder)
    saved = report.maps.load(folder / "maps.npz")
    shown = dossiers.of_maps(folder, compare=compare)
    _, page = report.fitting.fitted(shown, _PAGE_BYTES, report.page.render)
    written = []
    if report.drawing.is_possible():
        count = saved.num_layers * len(formats)
        doing = {"name": "attention", "doing": "drawing"}
        with progress.Bar(count, unit="picture", **doing) as bar:
            for name, picture in report.figures.pictures(saved, formats):
                written.append(files.write(folder / name, picture))
                bar.advance()
    for path in folder.iterdir():
        if _PICTURE.fullmatch(path.name) and path not in written:
            path.unlink()
    return [*written, files.write(folder / "index.html", page)]


def _observer(bench, layers, heads_of_layers, num_bins, channels=False):
    """Returns a function of parameters and a batch of examples.

    It returns the batch, the likeliest classes with their probabilities, and per layer
    the maps (pooled or whole), the statistics of the heads, the masked cells, of pooled
    maps their finer parts, and of whole ones `channels` if they are asked for.
    """
    # Of heads that have the same places in all layers, the others are left out at once.
    is_same = all(heads == heads_of_layers[0] for heads in heads_of_layers)
    shared = np.array(heads_of_layers[0], np.int32) if is_same else slice(None)

    def observe(params, example):
        example = bench.spread(example)

        def observed(attention_map, kind):
            tokens = subject.tokens(example, kind)
            pooled = None
            if num_bins is not None:
                pooled = tuple(min(num_bins, x) for x in attention_map.shape[-2:])
            statistics = attention_map.statistics(pooled=pooled, tokens=tokens)
            cells = attention_map.weights() if pooled is None else statistics.pooled
            parts = None
            if pooled is not None:
                # Whole on every device: where the parts lie depends on the data.
                parts = zoom.patches(*bench.gathered((attention_map, cells)))
            masked = zoom.masked_cells(attention_map, *(pooled or (None, None)))
            numbers = zoom.per_head(statistics)
            products = None
            if channels and pooled is None:
                query, key, exact = zoom.channels(attention_map)
                products = query, key, jnp.full(query.shape[:2], exact)
            return of_heads((cells, numbers, masked, parts, products), shared)

        def of_heads(found, heads):
            cells, numbers, masked, parts, products = found
            if masked.shape[1] > 1:
                masked = masked[:, heads]
            cells, numbers, parts, products = jax.tree.map(
                lambda x: x[:, heads], (cells, numbers, parts, products)
            )
            return cells, numbers, masked, parts, products

        output, found = bench.observed(params, example, observed, layers)
        if not is_same:
            found = [
                of_heads(each, np.array(heads, int))
                for each, heads in zip(found, heads_of_layers, strict=True)
            ]
        answers = None
        if output.logits is not None:
            shares, answers = jax.lax.top_k(
                jax.nn.softmax(output.logits.astype(jnp.float32)),
                min(report.dossier.MOST_LIKELIEST, output.logits.shape[-1]),
            )
            answers = answers, shares
        return example, answers, *map(list, zip(*found, strict=True))

    return bench.program(observe)


def _edges(length, num_bins) -> np.ndarray:
    """Returns the edges of so many positions in at most so many bins; None: whole."""
    return attention.bin_edges(length, min(length, num_bins or length))


def _decoder(task, example, aligned, num_bins) -> dict[str, np.ndarray]:
    """Returns what stands along the maps of a decoder: see `report.maps.Maps`."""
    num_examples, length = example.decoder_inputs.shape
    lengths = example.decoder_lengths
    lengths = np.full(num_examples, length) if lengths is None else lengths
    predicted = [
        [task.class_label(c) if t < end else "" for t, c in enumerate(row)]
        for row, end in zip(np.asarray(example.targets).tolist(), lengths, strict=True)
    ]
    arrays = {
        "decoder_tokens": [task.decoder_labels(row) for row in rows_of(example)],
        "decoder_predicted": predicted,
        "decoder_edges": _edges(length, num_bins),
        "decoder_lengths": lengths,
        "alignment": aligned,
    }
    return {name: np.array(x) for name, x in arrays.items() if x is not None}


def _aligned(layers, layer_heads, maps, alignments) -> list[dict[str, np.ndarray]]:
    """Returns for each cross layer the scores `[N, H]` of each alignment, else {}."""
    return [
        {x: alignment.scores(weights, known) for x, known in alignments.items()}
        if layer_heads[i].kind == "cross"
        else {}
        for i, weights in zip(layers, maps, strict=True)
    ]


def rows_of(examples: tasks.Example) -> list[tasks.Example]:
    """Returns the examples of a batch on the host, one by one."""
    count = len(examples.inputs)
    return [jax.tree.map(lambda x, i=i: x[i], examples) for i in range(count)]


def _indices(run, examples, indices) -> list[int]:
    """Returns the indices of the held-out examples to show."""
    with checks.user_mistakes():
        if indices is None:
            count = run.config.attention.examples if examples is None else examples
            return list(range(checks.integer_in("examples", count, 1, 2**16)))
        if examples is not None:
            raise ValueError("Give examples or indices, not both.")
        if not indices:
            raise ValueError("indices must not be empty.")
        return [checks.integer_in("indices", i, 0, 2**31 - 1) for i in indices]


def _own_batch(run, own) -> tuple[tasks.Example, Sequence[str]]:
    """Returns a batch of a user's own inputs, and the names of its examples."""
    text, tokens, batch, names = own
    given = sum(x is not None for x in (text, tokens, batch))
    if given != 1:
        raise ConfigError(f"Give one of text, tokens and a batch, not {given} of them.")
    if batch is not None:
        if len(names) != len(batch.inputs):
            raise ValueError(
                f"names must be of the {len(batch.inputs)} examples of the batch, got "
                f"{len(names)}."
            )
        return batch, names
    if run.task.num_tokens is None:
        raise ConfigError(
            f"The task {run.task.name!r} takes features, not text or tokens."
        )
    if run.task.target_length is not None:
        raise ConfigError(
            f"The task {run.task.name!r} needs a target beside the text:\n"
            "python -m experiments.generate --source=... --attention writes both."
        )
    if text is not None:
        tokens = run.task.encode(text)
    with checks.user_mistakes():
        for token in tokens:
            checks.integer_in("tokens", token, 0, run.task.num_tokens - 1)
    inputs = np.asarray(tokens, np.int32)[None]
    if not inputs.size:
        raise ConfigError("tokens must not be empty.")
    length, trained = inputs.shape[1], run.task.sequence_length
    embedding = run.config.model.embedding
    is_imported = imported_runs.is_imported(run.config)
    is_limited = is_imported or embedding.positions == "learned"
    if is_limited and length > embedding.max_length:
        raise ConfigError(
            f"tokens must be at most config.model.embedding.max_length "
            f"{embedding.max_length} (positions of the model), got {length}."
        )
    if length > trained and not is_imported:
        _logger.warning(
            f"{length} tokens are more than the {trained} of the model's training: "
            f"what it does past these it has not learnt."
        )
    # A target per answer of the model, which is one for the whole text or one a token.
    targets = inputs if run.config.model.output.pool is None else inputs[:, 0]
    batch = tasks.Example(inputs, targets, np.zeros(targets.shape, np.float32), None)
    return batch, ["own tokens" if text is None else "own text"]


def _masked(layers, masked) -> dict[str, np.ndarray]:
    """Returns the masked cells: one array where it is the same for all layers."""
    masked = [each[:, 0] if each.shape[1] == 1 else each for each in masked]
    is_same = all(np.array_equal(each, masked[0]) for each in masked)
    if is_same and masked[0].ndim == 3:
        return {"masked": masked[0]}
    pairs = zip(layers, masked, strict=True)
    return {f"masked_{i:02d}": each for i, each in pairs}


def _texts(task, example, answers, *, is_own) -> dict[str, np.ndarray]:
    """Returns what is shown beside the maps: tokens, images, answers, targets."""
    num_examples, length = example.inputs.shape[:2]
    rows = rows_of(example)
    targets = np.asarray(example.targets).reshape(num_examples, -1)
    counts = np.asarray(example.weights).reshape(num_examples, -1) > 0
    shown = counts | is_own
    if answers is None:  # of a model without logits
        likeliest, shown = targets[..., None], np.zeros_like(counts)
        probabilities = np.full(likeliest.shape, np.nan)
    else:
        likeliest, probabilities = (
            x.reshape(*targets.shape, x.shape[-1]) for x in answers
        )

    def labels(classes, shown):
        shown = np.broadcast_to(shown, classes.shape)
        text = [
            task.class_label(c) if show else ""
            for c, show in zip(classes.ravel().tolist(), shown.ravel(), strict=True)
        ]
        return np.array(text, dtype=np.str_).reshape(classes.shape)

    lengths = example.lengths
    images = [task.images(row) for row in rows]
    likeliest = labels(likeliest, shown[..., None])
    return {
        "tokens": np.array([task.labels(row) for row in rows], dtype=np.str_),
        "lengths": np.full(num_examples, length) if lengths is None else lengths,
        # A user's text has predictions everywhere and targets nowhere.
        "predictions": likeliest[..., 0],
        "likeliest": likeliest,
        "probabilities": np.where(shown[..., None], probabilities, np.nan).astype("f4"),
        "targets": labels(targets, counts),
        **({} if images[0] is None else {"images": np.stack(images)}),
    }

"""Attention maps and statistics of a subject, as arrays, pictures and a page.

Dimensions: N examples shown, H heads, T query positions, S key positions.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, outputs
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import maps
from mha_haiku.lab.heads import alignment, running
from mha_haiku.records import Layer, labels, map_set
from mha_haiku.showing import drawing, figures, fitting, page
from mha_haiku.subjects import computing, conversion, dossiers, imported_runs
from mha_haiku.subjects.subject import Part, RunSubject, parts_of, refuse
from mha_haiku.subjects.verbs import per_head
from mha_haiku.training import tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import files, progress

_logger = logging.getLogger("mha_haiku")
_MEAN_EXAMPLES = 64  # at least
_BATCH_POSITIONS = 2**13  # of all examples in a batch
_PAGE_BYTES = 2_000_000
_PICTURE = re.compile(
    r"(layer|encoder|decoder|cross)_\d{2,}\.(png|svgz?|pdf|e?ps|pgf|jpe?g|tiff?|webp|gif|avif|raw|rgba)"
)


# Inputs to run on instead of held-out examples: a text, its tokens, or N examples on
# the host.
Own = str | Sequence[int] | tasks.Example


def dump(
    subject: RunSubject,
    *,
    own: Own | None = None,
    out: str | os.PathLike | None = None,
    **options: Any,
) -> Path:
    """Writes the result of `measured` to maps.npz in a folder, and returns its path.

    `out` defaults to `attention` in the run's folder, or to `attention/own_text` for a
    user's inputs.
    """
    if out is not None:
        folder = checks.as_path(out)
    elif subject.folder is None:
        refuse(subject, "dump", "has no folder; give out")
    else:
        folder = subject.folder.attention / ("" if own is None else "own_text")
    files.check_writable("out", folder)  # before the work
    found = measured(subject, own=own, **options)
    with checks.user_mistakes():
        found.check(is_finite=True)  # before any file changes
    if cluster.is_first():
        outputs.claim(folder, ["maps.npz"])
        found.save(folder / "maps.npz")
    return folder / "maps.npz"


def measured(
    subject: RunSubject,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    examples: int | Sequence[int] | None = None,
    own: Own | None = None,
    weights: bool = False,
    means: bool = True,
    devices: Sequence[jax.Device]  # pyright: ignore[reportInvalidTypeForm]
    | None = None,
) -> map_set.MapSet:
    """Collects the maps of a subject, and statistics of its heads on the same examples.

    Up to `config.attention.full_length` positions the maps are whole; longer ones are
    pooled to `config.attention.pooled_size` bins, and nothing of size T x S is made.
    Padding is left out: an example ends with its last valid position.

    Args:
      subject: The model.
      layers: Layers, as `per_head.chosen_layers` takes them. Defaults to all.
      heads: Heads of every layer. Defaults to all.
      examples: Number of held-out examples, or the indices of some. Defaults to
        `config.attention.examples`.
      own: Inputs to run on instead; see `Own`.
      weights: Whether maps are whole at any length.
      means: Whether the last example is the mean of whole maps over many examples.
      devices: The devices that divide the work. Defaults to all of all processes.

    Returns:
      The set, with statistics and, if maps are whole, with roles and a share of
      `heads.alignment` for each of `Task.alignments` (over the examples of the mean if
      there is one; NaN except in cross-attention).
    """
    if own is not None and examples is not None:
        raise ConfigError(
            "examples must be None with own inputs, which are shown instead, got "
            f"{checks.shown(examples)}."
        )
    length = subject.task.sequence_length
    target_length = subject.task.target_length or 0
    if own is None:
        indices = _indices(
            subject.config.attention.examples if examples is None else examples
        )
        names_of_examples = [f"held-out example {i}" for i in indices]
    else:
        batch, names_of_examples = _own_batch(subject, own)
        length, indices = batch.inputs.shape[1], range(len(batch.inputs))
        if batch.decoder_inputs is not None:
            target_length = batch.decoder_inputs.shape[1]
    is_whole = (
        weights or max(length, target_length) <= subject.config.attention.full_length
    )
    num_bins = None if is_whole else subject.config.attention.pooled_size
    layer_heads = parts_of(subject)
    layers = per_head.chosen_layers(layer_heads, layers)
    parts = [layer_heads[i] for i in layers]
    num_heads = subject.config.model.attention.num_heads
    wanted = per_head.chosen("heads", heads, num_heads)
    # Heads are named by their index in the unpruned layer, also in a pruned one.
    chosen = [[j for j in wanted if j in layer_heads[i].names] for i in layers]
    places = [
        [layer_heads[i].names.index(j) for j in names]
        for i, names in zip(layers, chosen, strict=True)
    ]

    is_all = len(layers) == len(layer_heads)
    subject = computing.compact(subject) if is_all else subject
    subject = computing.placed(subject, devices, length=length)
    observe = computing.once(
        subject,
        f"maps of {layers}, {places}, {num_bins}",
        lambda: _observer(subject, parts, places, num_bins),
    )
    if own is None:
        batch_size = computing.batch_size(subject, len(indices), _BATCH_POSITIONS)
        examples_at = None
    else:
        batch_size = computing.whole_batch(subject, len(indices))
        examples_at = lambda rows: jax.tree.map(lambda x: x[rows], batch)  # noqa: E731

    def looks(indices: Sequence[int], name: str):
        """Yields per batch the observations, and where heads should look."""
        options = {"batch_size": batch_size, "name": name, "examples_at": examples_at}
        for example, answers, seen in computing.observations(
            subject, observe, indices, **options
        ):
            known = alignment.of_batch(subject.task.alignments, example)
            seen = [x.aligned(known) for x in seen]
            yield example, answers, known.get("aligned"), seen

    found = looks(indices, "attention maps")
    example, answers, aligned, seen = jax.tree.map(lambda *x: np.concatenate(x), *found)
    shown = [
        Layer.of_model(layer_heads[i].kind, layer_heads[i].layer, i, names)
        for i, names in zip(layers, chosen, strict=True)
    ]
    bare = _examples(
        subject.task,
        names_of_examples,
        example,
        answers,
        aligned,
        num_bins=num_bins,
        is_own=own is not None,
    )
    mean = None
    if means and is_whole and own is None:
        # The same batch size as above, which is compiled already.
        count = -(-_MEAN_EXAMPLES // batch_size) * batch_size
        numbers, cells = [], []
        for *_, of_layers in looks(range(count), "means of maps"):
            cells.append([layer_seen.weights.mean(axis=0) for layer_seen in of_layers])
            numbers.append([layer_seen.numbers for layer_seen in of_layers])
        cells = [np.mean(x, 0, dtype=np.float32) for x in zip(*cells, strict=True)]
        mean = _mean(f"mean of {count} examples", example, cells)
        numbers = jax.tree.map(lambda *x: np.concatenate(x), *numbers)
        for each, shares in zip(seen, numbers, strict=True):  # over all these examples
            shares = {x: y for x, y in shares.items() if x not in attention.STATISTICS}
            each.numbers.update(shares)
    dtype = subject.config.attention.dtype
    found = maps.joined(
        subject.title, shown, seen, bare, step=subject.step, dtype=dtype
    )
    if mean is not None:
        found = dataclasses.replace(found, examples=(*found.examples, mean))
    return found


def write_report(
    folder: str | os.PathLike, formats: str | Sequence[str] = ("png",)
) -> list[Path]:
    """Writes one picture per layer and `index.html` next to a folder's `maps.npz`.

    Pictures (`layer_00.png`, or `cross_00.png`) that an earlier report has written of
    layers that are no longer in `maps.npz` are removed. Without matplotlib only the
    page is written. Returns the written paths, the page last.
    """
    folder, formats = checks.as_path(folder), drawing.formats_of(formats)
    saved = map_set.MapSet.load(folder / "maps.npz")
    _, html = fitting.fitted(dossiers.of_folder(folder), _PAGE_BYTES, page.render)
    written = []
    if drawing.is_possible():
        count = sum(bool(layer.heads) for layer in saved.layers) * len(formats)
        with progress.Bar(
            count, unit="picture", name="attention", doing="drawing"
        ) as bar:
            for name, picture in figures.pictures(saved, formats):
                outputs.claim(folder, [name])
                written.append(files.write(folder / name, picture))
                bar.update()
    for path in map(folder.joinpath, outputs.names(folder)):
        if _PICTURE.fullmatch(path.name) and path not in written:
            path.unlink(missing_ok=True)
    outputs.claim(folder, ["index.html"])
    return [*written, files.write(folder / "index.html", html)]


def _observer(
    subject: RunSubject,
    parts: Sequence[Part],
    heads_of_layers: Sequence[Sequence[int]],
    num_bins: int | None,
):
    """Makes a program that gives a batch, its answers, and each layer's `Seen`."""
    separators = computing.separators(subject)

    def observe(params: Any, example: tasks.Example):
        example = computing.spread(subject, example)

        def observed(attention_map: attention.AttentionMap, kind: str):
            return maps.see(
                attention_map,
                bins=num_bins,
                kind=kind,
                tokens=running.tokens(example, kind),
                separators=running.separators_at(example, kind, separators),
                lengths=running.key_lengths(example, kind),
            )

        output, seen = computing.observed(subject, params, example, observed, parts)
        pairs = zip(seen, heads_of_layers, strict=True)
        seen = [each.of_heads(np.array(heads, np.int32)) for each, heads in pairs]
        answers = None
        if output.logits is not None:
            shares, answers = jax.lax.top_k(
                jax.nn.softmax(output.logits.astype(jnp.float32)),
                min(map_set.MOST_LIKELIEST, output.logits.shape[-1]),
            )
            answers = answers, shares
        return example, answers, seen

    return computing.program(subject, observe)


@checks.user_mistakes()
def _indices(examples: int | Sequence[int]) -> list[int]:
    """Lists the indices of the held-out examples to show."""
    if not isinstance(examples, Sequence):
        return list(range(checks.integer_in("examples", examples, 1, 2**16)))
    if not examples:
        raise ValueError("indices of examples must not be empty.")
    return [checks.integer_in("indices", i, 0, 2**31 - 1) for i in examples]


def _own_batch(subject: RunSubject, own: Own) -> tuple[tasks.Example, Sequence[str]]:
    """Makes a batch of a user's inputs, and the names of its examples."""
    if isinstance(own, tasks.Example):
        return own, [f"text {i}" for i in range(len(own.inputs))]
    if subject.task.num_tokens is None:
        raise ConfigError(
            f"The task {subject.task.name!r} takes features, not text or tokens."
        )
    if subject.task.target_length is not None:
        raise ConfigError(
            f"The task {subject.task.name!r} needs a target next to the text:\n"
            "python -m mha_haiku generate --source=... --attention writes both."
        )
    is_text = isinstance(own, str)
    tokens = subject.task.encode(own) if is_text else own
    with checks.user_mistakes():
        for token in tokens:
            checks.integer_in("tokens", token, 0, subject.task.num_tokens - 1)
    rows = np.asarray(tokens, np.int32)[None]
    if not rows.size:
        raise ConfigError("tokens must not be empty.")
    length, trained = rows.shape[1], subject.task.sequence_length
    most = imported_runs.most_positions(subject.config)
    if most is not None and length > most:
        raise ConfigError(
            f"tokens must be at most config.model.embedding.max_length {most} "
            f"(positions of the model), got {length}."
        )
    if length > trained and not imported_runs.is_imported(subject.config):
        _logger.warning(
            f"{length} tokens are more than the {trained} of the model's training: "
            "its behavior past these is untrained."
        )
    # A target per answer of the model, which is one per text or one per token.
    targets = rows if subject.config.model.output.pool is None else rows[:, 0]
    batch = tasks.Example(rows, targets, np.zeros(targets.shape, np.float32), None)
    return batch, ["own text" if is_text else "own tokens"]


def _examples(
    task: tasks.Task,
    names: Sequence[str],
    example: tasks.Example,
    answers: tuple[np.ndarray, np.ndarray] | None,
    aligned: np.ndarray | None,
    *,
    num_bins: int | None,
    is_own: bool,
) -> list[map_set.Example]:
    """Makes the examples of a batch on the host, without their maps."""
    # A user's text has predictions everywhere and targets nowhere.
    classes = np.asarray(example.targets).reshape(len(names), -1)
    counts = np.asarray(example.weights).reshape(classes.shape) > 0
    shown = counts | is_own
    if answers is None:  # of a model without logits
        shown = np.zeros_like(counts)
    else:
        likeliest, shares = (x.reshape(*classes.shape, -1) for x in answers)

    def likeliest_at(place: tuple[int, int]) -> tuple[tuple[str, float], ...]:
        if not shown[place]:
            return ()
        pairs = zip(likeliest[place].tolist(), shares[place].tolist(), strict=True)
        labeled = ((task.class_label(c), share) for c, share in pairs)
        return tuple(pair for pair in labeled if pair[0])

    examples = []
    for n, (name, row) in enumerate(
        zip(names, conversion.rows_of(example), strict=True)
    ):
        tokens, read, predicted = task.labels(row), None, None
        lengths, sizes = [row.lengths], [len(tokens)]
        if row.decoder_inputs is not None:
            read = task.decoder_labels(row)
            predicted = list(map(task.class_label, classes[n].tolist()))
            lengths, sizes = [*lengths, row.decoder_lengths], [*sizes, len(read)]
        pairs = zip(lengths, sizes, strict=True)
        lengths = [size if x is None else max(1, int(x)) for x, size in pairs]
        known = None if aligned is None else aligned[n]
        queries, keys, kinds = _axes(num_bins, lengths, tokens, read, predicted, known)
        whole = classes.shape[1] == 1 < sizes[-1]
        places = [(n, t) for t in range(1 if whole else lengths[-1])]
        targets = (
            task.class_label(int(classes[x])) if counts[x] else "" for x in places
        )
        images = task.images(row)
        sides = ("",) if read is None else ("source ", "target ")
        padded = zip(sides, sizes, lengths, strict=True)
        said = [f"its last {x - y} {side}positions" for side, x, y in padded if x > y]
        examples.append(
            map_set.Example(
                name,
                queries,
                keys,
                (),
                note=f"{' and '.join(said)} are padding" if said else "",
                answers=map_set.Answers(
                    tuple(targets), tuple(map(likeliest_at, places)), whole
                ),
                images=None if images is None else images[: lengths[0]],
                kinds=kinds,
            )
        )
    return examples


def _mean(name: str, example: tasks.Example, weights: Sequence[Any]) -> map_set.Example:
    """Makes an example of the mean of whole maps, whose tokens are unknown."""
    tokens, *decoder = (
        [""] * side.shape[1]
        for side in (example.inputs, example.decoder_inputs)
        if side is not None
    )
    lengths = [len(each) for each in (tokens, *decoder)]
    queries, keys, kinds = _axes(None, lengths, tokens, *decoder, *decoder)
    return map_set.Example(
        name, queries, keys, tuple(weights), is_mean=True, kinds=kinds
    )


def _axes(
    num_bins: int | None,
    lengths: Sequence[Any],
    tokens: Sequence[str],
    read: Sequence[str] | None = None,
    predicted: Any = None,
    aligned: Any = None,
) -> tuple[map_set.Axis, map_set.Axis, dict[str, map_set.Axes]]:
    """Makes queries, keys, and the axes of layers of other kinds."""
    # Valid positions have `lengths`; `tokens` are the input tokens. A decoder has
    # `read` tokens and should predict others. Answers are the decoder's, whose axes are
    # therefore the axes of the example; `aligned` `[T, S]` is for cross-attention.

    def said(verb: str, texts: Sequence[str]) -> list[str]:
        return [f"{verb} “{labels.visible(x)}”" if x else "" for x in texts]

    if read is None:
        source = maps.axis(tokens, num_bins, length=lengths[0])
        return source, source, {}
    length, target_length = lengths
    source = maps.axis(tokens, num_bins, length=length, label="source token")
    reading, predicting = (
        maps.axis(texts, num_bins, length=target_length, label=label, notes=notes)
        for texts, label, notes in (
            (read, "token read", said("predicts", predicted)),
            (predicted, "token predicted", said("reads", read)),
        )
    )
    if aligned is not None:
        aligned = aligned[:target_length, :length]
    kinds = {
        "encoder": map_set.Axes(source, source, has_answers=False),
        "cross": map_set.Axes(predicting, source, aligned),
    }
    return reading, reading, kinds

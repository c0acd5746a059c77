"""Attention maps and statistics of a subject, as arrays, pictures and a page.

Dimensions: N examples shown, H heads, T query positions, S key positions.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import records
from mha_haiku.core import attention, checks, outputs
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import maps
from mha_haiku.lab.heads import alignment, model_runs
from mha_haiku.records import Layer, map_set
from mha_haiku.showing import canvas, figures, views
from mha_haiku.subjects import computation, conversion, dossiers
from mha_haiku.subjects.subject import Part, RunSubject, layers_of, parts_of, refuse
from mha_haiku.subjects.verbs import per_head
from mha_haiku.training import tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import files, progress

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
    with checks.user_mistakes():  # such as inputs that are too long for the model
        record = measured(subject, own=own, importance=True, **options)
    if cluster.is_first():
        outputs.claim(folder, ["maps.npz"])
        record.save(folder / "maps.npz")
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
    importance: bool = False,
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
      importance: Whether the importance of heads is measured on one example, if that
        takes seconds.
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
    task, config = subject.task, subject.config.attention
    length, target_length = task.sequence_length, task.target_length or 0
    if own is None:
        indices = _indices(config.examples if examples is None else examples)
        names = [f"held-out example {i}" for i in indices]
    else:
        batch, names = _own_batch(subject, own)
        length, indices = batch.inputs.shape[1], range(len(names))
        if batch.decoder_inputs is not None:
            target_length = batch.decoder_inputs.shape[1]
    is_whole = weights or max(length, target_length) <= config.full_length
    bins = None if is_whole else config.pooled_size
    parts = parts_of(subject)
    which = per_head.chosen_layers(parts, layers)
    num_heads = subject.config.model.attention.num_heads
    places = per_head.chosen("heads", heads, num_heads)

    alone = subject
    subject = computation.compact(subject) if len(which) == len(parts) else subject
    subject = computation.placed(subject, devices, length=length)
    observe = computation.once(
        subject,
        f"maps of {which}, {bins}",
        lambda: _observer(subject, [parts[i] for i in which], bins),
    )
    if own is None:
        batch_size = computation.batch_size(subject, len(indices), _BATCH_POSITIONS)
        examples_at = None
    else:
        batch_size = computation.whole_batch(subject, len(indices))
        examples_at = lambda rows: jax.tree.map(lambda x: x[rows], batch)  # noqa: E731

    def looks(indices: Sequence[int], name: str):
        """Yields per batch the observations, and where heads should look."""
        options = {"batch_size": batch_size, "name": name, "examples_at": examples_at}
        for example, answers, seen in computation.observations(
            subject, observe, indices, **options
        ):
            aligned = alignment.of_batch(task.alignments, example)
            seen = [x.aligned(aligned) for x in seen]
            yield example, answers, aligned.get("aligned"), seen

    looked = looks(indices, "attention maps")
    example, answers, aligned, seen = jax.tree.map(
        lambda *x: np.concatenate(x), *looked
    )
    record = maps.examples_of(
        task, example, names, answers, aligned, bins=bins, is_own=own is not None
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
        texts = [example.inputs, example.decoder_inputs, example.decoder_inputs]
        mean = maps.example(
            f"mean of {count} examples",
            *([""] * x.shape[1] for x in texts if x is not None),
            has_kinds=example.decoder_inputs is not None,
            is_mean=True,
        )._replace(weights=tuple(cells))
        numbers = jax.tree.map(lambda *x: np.concatenate(x), *numbers)
        for each, shares in zip(seen, numbers, strict=True):  # over all these examples
            shares = {x: y for x, y in shares.items() if x not in attention.STATISTICS}
            each.numbers.update(shares)
    whole = maps.joined(
        subject.title,
        [
            Layer.of_model(parts[i].kind, parts[i].layer, i, parts[i].names)
            for i in which
        ],
        seen,
        record,
        step=subject.step,
        dtype=config.dtype,
    )
    if mean is not None:
        whole = dataclasses.replace(whole, examples=(*whole.examples, mean))
    if importance and jax.process_count() == 1:
        one = examples_at or functools.partial(computation.held_out, alone)
        looked = per_head.quick_importance(alone, jax.device_get(one(indices[:1])))
        columns = records.Heads("", layers_of(parts), looked or {}).at(whole.layers)
        whole = dataclasses.replace(whole, columns={**whole.columns, **columns})
    # Heads are named by their index in the unpruned layer, also in a pruned one.
    return whole if heads is None else whole.of_heads([*map(str, places)])


def write_report(
    folder: str | os.PathLike, formats: str | Sequence[str] = ("png",)
) -> list[Path]:
    """Writes one picture per layer and `index.html` next to a folder's `maps.npz`.

    Pictures (`layer_00.png`, or `cross_00.png`) that an earlier report has written of
    layers that are no longer in `maps.npz` are removed. Without matplotlib only the
    page is written. Returns the written paths, the page last.
    """
    folder, formats = checks.as_path(folder), canvas.formats_of(formats)
    saved = map_set.MapSet.load(folder / "maps.npz")
    view = views.of_dossier(dossiers.of_folder(folder), budget=_PAGE_BYTES)
    written = []
    if canvas.is_possible():
        count = sum(bool(layer.heads) for layer in saved.layers) * len(formats)
        with progress.bar(count, unit="picture", name="attention") as bar:
            for name, picture in figures.pictures(saved, formats):
                outputs.claim(folder, [name])
                written.append(files.write(folder / name, picture))
                bar.update()
    for path in map(folder.joinpath, outputs.names(folder)):
        if _PICTURE.fullmatch(path.name) and path not in written:
            path.unlink(missing_ok=True)
    outputs.claim(folder, ["index.html"])
    return [*written, files.write(folder / "index.html", view.html)]


def _observer(subject: RunSubject, parts: Sequence[Part], bins: int | None):
    """Makes a program that gives a batch, its answers, and each layer's `Seen`."""
    marks = computation.marks(subject)

    def observe(params: Any, example: tasks.Example):
        example = computation.spread(subject, example)

        def observed(attention_map: attention.AttentionMap, kind: str):
            counted = attention_map, subject.model, example, kind, marks
            attention_map, told = model_runs.counted_map(*counted)
            return maps.see(attention_map, bins=bins, **told)

        output, seen = computation.observed(subject, params, example, observed, parts)
        answers = None
        if output.logits is not None:
            shares, answers = jax.lax.top_k(
                jax.nn.softmax(output.logits.astype(jnp.float32)),
                min(map_set.MOST_LIKELIEST, output.logits.shape[-1]),
            )
            answers = answers, shares
        return example, answers, seen

    return computation.program(subject, observe)


@checks.user_mistakes()
def _indices(examples: int | Sequence[int]) -> list[int]:
    """Lists the indices of the held-out examples to show."""
    if not isinstance(examples, Sequence):
        return list(range(checks.integer_in("examples", examples, 1, 2**16)))
    if not examples:
        raise ValueError("indices of examples must not be empty.")
    return [checks.integer_in("indices", i, 0, 2**31 - 1) for i in examples]


@checks.user_mistakes()
def _own_batch(subject: RunSubject, own: Own) -> tuple[tasks.Example, list[str]]:
    """Makes a batch of a user's inputs, and the names of its examples."""
    if isinstance(own, tasks.Example):
        return own, [f"text {i}" for i in range(len(own.inputs))]
    batch, _ = conversion.batch_of(subject, own)
    if subject.config.model.output.pool is not None:  # an answer for the whole text
        batch = batch._replace(targets=batch.targets[:, 0], weights=batch.weights[:, 0])
    return batch, ["own text" if isinstance(own, str) else "own tokens"]

"""One page with the whole content of a dossier, which opens without a network.

The weights in it are rounded to stay small. A weight `w` of a map whose largest weight
is `m` is stored as the code `round(levels * sqrt(w / m))`, compressed, in base64; the
page reads it back as `m * (code / levels) ** 2`, at most `m / levels` from `w` and, by
the square root, closer where `w` is small. Where weights may be negative, `m` is the
largest in size, and codes go from `-m` to `m`, 0 in the middle. The code `levels + 1`
is NaN, `levels + 2` a masked cell.

Text reaches the page as JSON without `<`, `>` or `&`, and the page shows it only as
text. The page's policy lets only its script run.
"""

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import math
import string
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mha_haiku.records import labels, map_set
from mha_haiku.records.heads import ROLE
from mha_haiku.records.map_set import Axes, Axis, Dossier, Example, MapSet
from mha_haiku.records.roles import ROLES

VERSION = 2
Pack = Callable[..., dict[str, Any]]  # `encode` with its options
# Cells of all maps together, up to which a cell has two bytes; above it one.
_MOST_FINE_CELLS = 2**18
_LEVELS = {1: 253, 2: 65533}
_MOST_ANSWERS = 512
_LONGEST_TOKEN = 200
# Texts of an axis, above which they are compressed.
_MOST_PLAIN_TOKENS = 1024
_PREDICTED = "token predicted"  # the label of an axis
_FEWEST_QUERIES = 16  # of which a role can be told


def render(dossier: Dossier) -> str:
    """Renders the page, a whole HTML document, to be stored as UTF-8."""
    return document("viewer", dossier.title, contents(dossier))


def document(name: str, title: str, content: Any) -> str:
    """Renders a page from the files of a folder here, and the content it shows."""

    def source(file: str) -> str:
        return folder.joinpath(file).read_text("utf-8")

    folder = importlib.resources.files("mha_haiku.showing")
    names = [f"{name}/{x}" for x in source(f"{name}/order.txt").split()]
    script = "\n".join(source(x) for x in names if x.endswith(".js"))
    # Inside a function, so that its names are not global in the browser's window.
    script = f"(() => {{\n'use strict';\n{script}}})();\n"
    style = "\n".join(source(x) for x in ["page.css", *names] if x.endswith(".css"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; "
        f"style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return string.Template(source("page.html")).substitute(
        policy=policy,
        title=html.escape(labels.one_line(title)),
        style=style,
        body=source(f"{name}/body.html"),
        script=script,
        data=to_json(content),
    )


def to_json(value: Any) -> str:
    r"""Converts a value to JSON that is inert inside an HTML `script` element.

    It is ASCII: other characters, U+2028 and U+2029 among them, are `\uXXXX`, and so
    are `<`, `>` and `&`.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def contents(dossier: Dossier) -> dict[str, Any]:
    """Converts a dossier to the JSON values that viewer/data.js reads.

    NaN is None, and packed values are base64 of zlib. Codes (see `encode`) have their
    `levels`, `bytes_per_cell`, whether they are `signed`, the `largest` weight and the
    `precision`, of all maps. `keys` are None if they are the queries. A kind of layers
    has its axes, images and answers instead of the example's, and its `alignment`.
    """
    examples = [example for each in dossier.sets for example in each.examples]
    maps = [weights for example in examples for weights in example.weights]
    cells = sum(weights.size for weights in maps)
    bytes_per_cell = 2 if cells <= _MOST_FINE_CELLS and not dossier.rounding else 1
    levels = _LEVELS[bytes_per_cell]
    signed = any((weights < 0).any() for weights in maps)
    pack = functools.partial(
        encode, levels=levels, rounding=dossier.rounding, signed=signed
    )
    sets = [_set(each, pack) for each in dossier.sets]
    largest = max(float(np.nanmax(np.abs(x), initial=0.0)) for x in maps)
    # To one digit, upwards, as the page says it.
    error = largest * (2 if signed else 1) / levels + dossier.rounding / 2
    unit = 10 ** math.floor(math.log10(error or 1))
    return {
        "version": VERSION,
        "title": labels.one_line(dossier.title),
        "notes": list(map(labels.one_line, _notes(dossier))),
        "levels": levels,
        "signed": signed,
        "bytes_per_cell": bytes_per_cell,
        "precision": math.ceil(error / unit) * unit,
        "largest": largest,
        "fewest_queries": _FEWEST_QUERIES,
        "roles": {name: role.attends for name, role in ROLES.items()},
        "sets": sets,
    }


def encode(
    weights: np.ndarray,
    masked: np.ndarray | None = None,
    *,
    levels: int,
    rounding: float = 0.0,
    signed: bool = False,
) -> dict[str, Any]:
    """Packs a layer's maps to `codes`, with each map's `largest` weight `[H]`.

    Weights are `[H, P, Q]`, and `masked` has booleans that broadcast to them. They are
    rounded to multiples of `rounding` first, or to a sixteenth of their map's largest
    if that is less. `levels` is the code of the largest: 253 or 65533. NaN is left out
    of the largest weights. With `signed` weights may be negative, and the largest is in
    size.
    """
    weights = weights.astype(np.float64)
    is_nan = np.isnan(weights)
    weights = np.where(is_nan, 0, weights)
    largest = np.abs(weights).max((1, 2), initial=0.0)
    is_empty = weights == 0  # elsewhere a weight shows that a mask is wrong
    most = np.where(largest > 0, largest, 1)[:, None, None]
    if rounding:
        # The same step for small weights and large ones: most are small, and hardly
        # differ then, which is what makes the codes short.
        step = np.minimum(rounding, most / 16)
        weights = np.clip(np.round(weights / step) * step, -most, most)
    roots = np.sign(weights) * np.sqrt(np.abs(weights) / most)
    middle = levels // 2
    codes = middle * (1 + roots) if signed else levels * roots
    codes = np.round(codes).astype("u1" if levels < 256 else "<u2")
    codes[is_nan] = levels + 1
    if masked is not None:
        codes[masked & is_empty] = levels + 2
    return {"codes": _packed(codes), "largest": largest.tolist()}


def _set(maps: MapSet, pack: Pack) -> dict[str, Any]:
    role = maps.columns.get(ROLE)
    roles = None
    if role is not None and role.names is not None:
        pairs = zip(role.names.tolist(), _plain(role.mean), strict=True)
        roles = [
            [
                {"name": labels.one_line(name), "score": score} if name else None
                for name, score in zip(names, scores, strict=True)
            ]
            for names, scores in pairs
        ]
    return {
        "name": labels.one_line(maps.name),
        "layers": [
            {
                "name": labels.one_line(layer.name),
                "heads": list(map(labels.one_line, layer.heads)),
            }
            | ({"kind": labels.one_line(layer.kind)} if layer.kind else {})
            for layer in maps.layers
        ],
        "numbers": [
            {
                "name": labels.one_line(name),
                "label": labels.one_line(number.label),
                "unit": labels.one_line(number.unit),
                "values": _plain(number.mean),
                "errors": _plain(number.standard_error),
                "ranks": _plain(number.ranks),
            }
            for name, number in maps.heads.numbers.items()
        ],
        "roles": roles,
        "missing": [list(map(labels.one_line, pair)) for pair in maps.missing],
        "examples": [_example(example, pack) for example in maps.examples],
    }


def _example(example: Example, pack: Pack) -> dict[str, Any]:
    weights = enumerate(example.weights)
    kinds = {kind: _kind(axes) for kind, axes in example.kinds.items()}
    return {
        "name": labels.one_line(example.name),
        "note": labels.one_line(example.note),
        "is_mean": example.is_mean,
        **_sides(example),
        "layers": [pack(layer, example.masked_cells(i)) for i, layer in weights],
        "answers": _answers(example),
        "images": _images(example.images),
        "why": None if example.why is None else _why(example.why),
    } | ({"kinds": kinds} if kinds else {})


def _kind(axes: Axes) -> dict[str, Any]:
    """Collects the fields of a kind of layer that override its example's fields."""
    sides = _sides(axes)
    if axes.alignment is not None:
        sides["alignment"] = np.argwhere(axes.alignment).tolist()
    sides["images"] = _images(axes.images)
    return sides | ({} if axes.has_answers else {"answers": None})


def _sides(axes: Axes | Example) -> dict[str, Any]:
    queries, keys = _axis(axes.queries), _axis(axes.keys)
    return {"queries": queries, "keys": None if keys == queries else keys}


def _axis(axis: Axis) -> dict[str, Any]:
    edges = axis.edges.tolist() if axis.is_pooled else None
    # The tokens of a bin are read in a row, with the spaces between them.
    spelled = map(labels.one_line, axis.tokens) if edges else labels.pieces(axis.tokens)
    tokens = [
        _cut(text) if token else ""
        for text, token in zip(spelled, axis.tokens, strict=True)
    ]
    content = {"tokens": _texts(tokens), "edges": edges}
    special = [i for i, x in enumerate(axis.tokens) if labels.is_special(x)]
    if special and not axis.is_pooled:
        content["special"] = special
    if axis.label:
        content["label"] = labels.one_line(axis.label)
    if any(axis.notes):
        content["notes"] = _texts(list(map(labels.one_line, axis.notes)))
    return content


def _texts(texts: list[str]) -> list[str] | str:
    """Packs texts if they are many."""
    if len(texts) <= _MOST_PLAIN_TOKENS:
        return texts
    # ASCII, as lone surrogates are no UTF-8.
    return _packed(json.dumps(texts, separators=(",", ":")).encode())


def _answers(example: Example) -> dict[str, Any] | None:
    """Collects targets and likeliest answers of the positions that have any."""
    if example.answers is None:
        return None
    targets, likeliest, whole = example.answers
    tokens = example.queries.tokens
    are_pieces = not whole and labels.begin_with_spaces(tokens)
    names = labels.pieces(tokens)

    def spelled(text: str, position: int) -> str:
        # An answer follows the token that it is given at.
        return _cut(
            labels.piece(text, tokens[position]) if are_pieces else labels.visible(text)
        )

    rows = [
        [
            None if whole else position,
            "" if whole else _cut(names[position]),
            [
                [
                    spelled(text, position),
                    None if math.isnan(share) else round(float(share), 6),
                ]
                for text, share in answers
            ],
            spelled(target, position) if target else "",
        ]
        for position, (target, answers) in enumerate(
            zip(targets, likeliest, strict=True)
        )
        if target or answers
    ]
    counted = [
        (answers[0][0] if answers else "", target)
        for target, answers in zip(targets, likeliest, strict=True)
        if target
    ]
    return {
        "whole": whole,
        "right": sum(answer == target for answer, target in counted),
        "counted": len(counted),
        "total": len(rows),
        "shown": rows[:_MOST_ANSWERS],
    }


def _images(images: np.ndarray | None) -> dict[str, Any] | None:
    if images is None:
        return None
    count, height, width = images.shape[:3]
    return {
        "height": height,
        "width": width,
        "channels": 1 if images.ndim == 3 else 3,
        "count": count,
        "codes": _packed(images),
    }


def _why(why: map_set.Why) -> dict[str, Any]:
    content = {name: getattr(why, name).tolist() for name in ("cells", "pairs")}
    for name in ("scores", "terms"):
        content[name] = [
            [float(f"{x:.4g}") for x in row]
            for row in getattr(why, name).reshape(len(why.cells), -1).tolist()
        ]
    return {"components": list(map(labels.one_line, why.components))} | content


def _notes(dossier: Dossier) -> list[str]:
    """Explains pooled maps and a decoder's maps, and names maps with NaN."""
    layers = [layer for maps in dossier.sets for layer in maps.layers]
    first = dossier.sets[0].examples[0]
    pooling = dict.fromkeys(first.axes(layer).pooling for layer in layers)
    notes = [*dossier.notes, *filter(None, pooling)]
    of_decoder = {
        layer.kind: first.axes(layer).queries.label
        for layer in dossier.sets[0].layers
        if layer.kind in ("decoder", "cross")
    }
    if of_decoder:
        predicting = [x for x, label in of_decoder.items() if label == _PREDICTED]
        named = "It is named by the token that it reads"
        if predicting:
            named += f", in {' and '.join(predicting)} maps by the one that it should "
            named += "predict"
        notes.append(
            "A row of a decoder or cross map is a position of the decoder: it has read "
            f"the target up to there, and predicts the next token. {named}."
        )
    for maps in dossier.sets:
        places = [
            f"{example.name}, {layer.name}, head {layer.heads[head]}"
            for example in maps.examples
            for layer, weights in zip(maps.layers, example.weights, strict=True)
            for head in np.flatnonzero(np.isnan(weights).any((1, 2))).tolist()
        ]
        if places:
            of = f" of {maps.name}" if len(dossier.sets) > 1 else ""
            count = "One map" if len(places) == 1 else f"{len(places)} maps"
            notes.append(f"{count}{of} with weights that are NaN, first: {places[0]}.")
    return notes


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TOKEN else text[:_LONGEST_TOKEN] + "…"


def _plain(values: np.ndarray | None) -> Any:
    """Converts to nested lists, to six digits, with None for what is not finite."""
    if values is None:
        return None
    if values.ndim:
        return [_plain(row) for row in values]
    return float(f"{values:.6g}") if np.isfinite(values) else None


def _packed(data: np.ndarray | bytes) -> str:
    data = data if isinstance(data, bytes) else data.tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _digest(text: str) -> str:
    """Computes the hash by which a content security policy names `text`."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

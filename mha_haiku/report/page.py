"""One page with all maps of a run: it holds its data, and opens without a network.

The weights in it are rounded to stay small. A weight `w` of a map whose largest weight
is `m` is stored as the code `round(levels * sqrt(w / m))`, compressed, in base64; the
page reads it back as `m * (code / levels) ** 2`, at most `m / levels` from `w` and, by
the square root, closer where `w` is small.

Text from the run reaches the page as JSON in which no `<`, `>` or `&` is left, and the
page shows it as text only. The page's policy lets nothing but its own script run.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import math
import string
import zlib
from typing import Any

import numpy as np

from mha_haiku.report import labels
from mha_haiku.report.maps import Maps

# Cells of all maps together: up to the first number with two bytes a cell, above it
# with one; above the second number the last examples are left out.
_MOST_FINE_CELLS = 2**18
_MOST_CELLS = 2**24
_MOST_ANSWERS = 512
_LONGEST_EXCERPT = 40
_SCRIPTS = ("data.js", "drawing.js", "text.js", "viewer.js")


def render(saved: Maps) -> str:
    """Returns the page as text, to be stored as UTF-8.

    Args:
      saved: The run's maps.

    Returns:
      A whole HTML document that asks for no other file.
    """
    script = "\n".join(map(_source, _SCRIPTS))
    # Inside a function, so that its names are not global in the browser's window.
    script = f"(() => {{\n'use strict';\n{script}}})();\n"
    style = _source("viewer.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; "
        f"style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return string.Template(_source("viewer.html")).substitute(
        policy=policy,
        title=html.escape(labels.one_line(saved.title)),
        style=style,
        script=script,
        data=to_json(contents(saved)),
    )


def to_json(value: Any) -> str:
    r"""Returns JSON that is inert inside an HTML `script` element.

    It is ASCII: other characters, U+2028 and U+2029 among them, are `\uXXXX`, and so
    are `<`, `>` and `&`.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def contents(saved: Maps) -> dict[str, Any]:
    """Returns what the page shows, as values that JSON knows.

    Args:
      saved: The run's maps.

    Returns:
      A dictionary; `examples[i]["layers"][l]` has `codes` (the text of `encode`) and
      each head's `largest` weight, for the bins that hold valid positions.
    """
    cells = sum(weights[0].size for weights in saved.weights)
    num_shown = min(saved.num_examples, max(1, _MOST_CELLS // max(cells, 1)))
    bytes_per_cell = 2 if cells * num_shown <= _MOST_FINE_CELLS else 1
    levels = 256**bytes_per_cell - 1
    examples = [_example(saved, example, levels) for example in range(num_shown)]
    if saved.means is not None:
        examples.append(_mean(saved, levels))
    largest = max(
        (m for one in examples for layer in one["layers"] for m in layer["largest"]),
        default=0.0,
    )
    # To one digit, upwards, as the page says it.
    unit = 10 ** math.floor(math.log10(largest / levels or 1))
    return {
        "title": labels.one_line(saved.title),
        "layers": [
            {"name": labels.one_line(name), "heads": list(map(labels.one_line, heads))}
            for name, heads in zip(saved.layer_names, saved.head_names, strict=True)
        ],
        "examples": examples,
        "num_examples": saved.num_examples,
        "pooled": saved.pooled,
        "bytes_per_cell": bytes_per_cell,
        "levels": levels,
        "largest": largest,
        "precision": math.ceil(largest / levels / unit) * unit,
    }


def encode(weights: np.ndarray, levels: int) -> tuple[str, list[float]]:
    """Rounds the maps of a layer and packs them into text.

    Args:
      weights: `[H, T', S']`.
      levels: The code of the largest weight of a map: 255 or 65535.

    Returns:
      The codes, row by row, as base64 of zlib; and each map's largest weight `[H]`.
    """
    weights = weights.astype(np.float64)
    largest = weights.max((1, 2), initial=0.0)
    shares = weights / np.where(largest > 0, largest, 1)[:, None, None]
    codes = np.round(levels * np.sqrt(shares)).astype("u1" if levels < 256 else "<u2")
    packed = base64.b64encode(zlib.compress(codes.tobytes(), 6)).decode()
    return packed, largest.tolist()


def _example(saved: Maps, example: int, levels: int) -> dict[str, Any]:
    rows, columns = saved.shown_cells(example)
    length = max(1, int(saved.lengths[example]))
    tokens = list(map(labels.visible, saved.tokens[example, :length].tolist()))
    return {
        "name": labels.one_line(saved.example_names[example]),
        "note": ""
        if length == saved.tokens.shape[1]
        else f"its last {saved.tokens.shape[1] - length} positions are padding",
        "queries": _bins(saved.query_edges, length, tokens),
        "keys": _bins(saved.key_edges, length, tokens),
        "layers": [
            _layer(weights[example, :, :rows, :columns], levels)
            for weights in saved.weights
        ],
        "answers": _answers(saved, example, tokens),
    }


def _mean(saved: Maps, levels: int) -> dict[str, Any]:
    length = saved.tokens.shape[1]
    return {
        "name": f"mean of {saved.mean_examples} examples",
        "note": "",
        "queries": _bins(saved.query_edges, length, None),
        "keys": _bins(saved.key_edges, length, None),
        "layers": [_layer(mean, levels) for mean in saved.means],
        "answers": None,
    }


def _layer(weights: np.ndarray, levels: int) -> dict[str, Any]:
    codes, largest = encode(weights, levels)
    return {"codes": codes, "largest": largest}


def _bins(
    edges: np.ndarray, length: int, tokens: list[str] | None
) -> list[tuple[str, str]]:
    """Returns each shown bin's positions and, of one example, the text there."""
    shown = labels.ranges(edges, length)
    if tokens is None:
        return [(positions, "") for positions in shown]
    texts = ["".join(tokens[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [
        (
            positions,
            text
            if len(text) <= _LONGEST_EXCERPT
            else text[: _LONGEST_EXCERPT - 1] + "…",
        )
        for positions, text in zip(shown, texts, strict=False)
    ]


def _answers(saved: Maps, example: int, tokens: list[str]) -> dict[str, Any]:
    """Returns predictions and targets: rows `[position, input, prediction, target]`.

    The position is None where the whole input has one answer.
    """
    predictions = saved.predictions[example].tolist()
    targets = saved.targets[example].tolist()
    whole = len(predictions) == 1 < saved.tokens.shape[1]
    answers = [
        (None if whole else position, "" if whole else tokens[position], *answer)
        for position, answer in enumerate(zip(predictions, targets, strict=True))
        if any(answer) and position < len(tokens)
    ]
    counted = [(got, wanted) for *_, got, wanted in answers if wanted]
    return {
        "right": sum(got == wanted for got, wanted in counted),
        "counted": len(counted),
        "total": len(answers),
        "shown": [
            (*where, *(labels.visible(text) if text else "" for text in (got, wanted)))
            for *where, got, wanted in answers[:_MOST_ANSWERS]
        ],
    }


def _source(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns `text` as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

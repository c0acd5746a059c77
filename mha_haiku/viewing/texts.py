"""What stands along the sides of a map: tokens as text, and images, of each example.

N examples, T query and S key positions.
"""

from typing import Any

import jax
import numpy as np

from mha_haiku.report import dossier


def of_each(name: str, tokens: Any, count: int, length: int) -> tuple:
    """Returns the text of each position of each example.

    Args:
      name: Of the argument, for messages.
      tokens: Text or numbers of T positions, which all examples share, or N times
        that; a string has a position for each of its characters. None: not known.
      count: N.
      length: T.

    Returns:
      N tuples of T strings; () where the tokens are None.

    Raises:
      ValueError: If there are fewer or more than that.
    """
    if tokens is None:
        return ()
    if isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)
    tokens = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
    is_nested = bool(tokens) and all(
        isinstance(x, list | tuple | np.ndarray | jax.Array) for x in tokens
    )
    rows = [list(row) for row in tokens] if is_nested else [tokens] * count
    if len(rows) < count:
        raise ValueError(
            f"{name} must be those of {count} examples, or of one for all, got "
            f"{len(rows)}."
        )
    for i, row in enumerate(rows):
        if len(row) != length:
            example = f" for example {i}" if is_nested else ""
            raise ValueError(
                f"{name} must be {length}, one for each position of the map, got "
                f"{len(row)}{example}."
            )
    return tuple(tuple(map(_text, row)) for row in rows)


def images_of_each(images: Any, count: int, length: int) -> tuple:
    """Returns the `dossier.Images` of each example.

    Args:
      images: `[S, h, w]` (grey) or `[S, h, w, 3]`, a picture for each position, which
        all examples share; or N of these in a list; or `dossier.Images`, one or N.
        Integers from 0 to 255 or floats from 0 to 1. None: there are none.
      count: N.
      length: S.

    Returns:
      N `dossier.Images`; () where there are none.

    Raises:
      ValueError: If there are fewer or more, or the values are others.
    """
    if images is None:
        return ()
    is_one = hasattr(images, "shape") or isinstance(images, dossier.Images)
    rows = [images] * count if is_one else list(images)
    if len(rows) != count:
        raise ValueError(
            f"images must be those of {count} examples, or of one for all, got "
            f"{len(rows)}."
        )
    return tuple(_images(each, length) for each in rows)


def _text(token: Any) -> str:
    if isinstance(token, bytes):
        return token.decode("utf-8", "replace")
    return token if isinstance(token, str) else str(token)


def _images(images: Any, length: int) -> dossier.Images:
    if isinstance(images, dossier.Images):
        return images
    pixels = np.asarray(images)
    is_grey, is_coloured = pixels.ndim == 3, pixels.ndim == 4 and pixels.shape[-1] == 3
    if not (is_grey or is_coloured) or len(pixels) != length:
        raise ValueError(
            f"images must be [S, h, w] or [S, h, w, 3] with S = {length} positions, "
            f"got shape {pixels.shape}."
        )
    if pixels.dtype.kind == "f":
        if not (pixels.min(initial=0) >= 0 and pixels.max(initial=0) <= 1):
            raise ValueError(
                "images of floats must be from 0 to 1, got "
                f"{pixels.min()} to {pixels.max()}."
            )
        pixels = np.round(255 * pixels)
    elif (
        pixels.dtype.kind not in "iub"
        or pixels.min(initial=0) < 0
        or pixels.max(initial=0) > 255
    ):
        raise ValueError(f"images must be integers from 0 to 255, got {pixels.dtype}.")
    return dossier.Images(pixels.astype(np.uint8))

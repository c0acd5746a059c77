"""Small pictures without matplotlib: numbers to colours, colours to a PNG file."""

import base64
import struct
import zlib

import numpy as np

from mha_haiku.report import drawing

# Colours at equal steps, between which lines are drawn: those of matplotlib's maps.
_VIRIDIS = """
440154 482878 3e4a89 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725
"""
_RED_BLUE = """
053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f
"""


def _stops(text: str) -> np.ndarray:
    return np.array([list(bytes.fromhex(word)) for word in text.split()], float)


_STOPS = {
    "viridis": _stops(_VIRIDIS),
    "viridis_r": _stops(_VIRIDIS)[::-1],
    "RdBu_r": _stops(_RED_BLUE),
}
MASKED = np.array([216, 216, 216], np.uint8)  # a grey that is on neither scale
PAPER = np.array([255, 255, 255], np.uint8)


def colours(values: np.ndarray, scale: drawing.Scale) -> np.ndarray:
    """Returns the colours of numbers, `[..., 3]` uint8; grey where they are NaN."""
    stops = _STOPS[scale.colours]
    share = (np.asarray(values, float) - scale.low) / (scale.high - scale.low)
    at = np.clip(np.nan_to_num(share), 0, 1) * (len(stops) - 1)
    places = np.arange(len(stops))
    rgb = np.stack([np.interp(at, places, stops[:, i]) for i in range(3)], -1)
    rgb = np.round(rgb).astype(np.uint8)
    return np.where(np.isnan(share)[..., None], MASKED, rgb)


def paint(value: float, scale: drawing.Scale) -> tuple[str, str]:
    """Returns the colour of a number and that of ink on it, as CSS names them."""
    rgb = colours(np.array(value), scale)
    linear = rgb / 255.0
    # Relative luminance; WCAG 2.1.
    linear = np.where(
        linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4
    )
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    ink = "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#fff"
    return "#" + bytes(rgb.tolist()).hex(), ink


def thumbnails(
    maps: np.ndarray, *, columns: int, side: int, gap: int = 4
) -> np.ndarray:
    """Returns the colours of maps beside each other, on one scale from 0.

    Args:
      maps: `[N, P, Q]`; NaN, drawn grey, where a cell is masked.
      columns: Maps beside each other.
      side: The most pixels of a map's side; of larger ones a pixel is the largest
        weight of its cells.
      gap: Pixels between maps.

    Returns:
      `[height, width, 3]` uint8.
    """
    maps = np.asarray(maps, float)
    largest = drawing.rounded_up(np.nanmax(maps, initial=0.0))
    small = [_shrunk(each, side) for each in maps]
    # Cells of small maps are squares of several pixels; a map is at least 1 x 1.
    times = max(1, side // max(small[0].shape))
    small = [each.repeat(times, 0).repeat(times, 1) for each in small]
    height, width = small[0].shape
    rows = -(-len(small) // columns)
    across = min(columns, len(small))
    sheet = np.empty((rows * (height + gap) - gap, across * (width + gap) - gap, 3))
    sheet[:] = PAPER
    scale = drawing.Scale(0.0, largest, "viridis")
    for i, each in enumerate(small):
        row, column = divmod(i, columns)
        top, left = row * (height + gap), column * (width + gap)
        # By the square root, as many small weights are seen then.
        drawn = colours(np.sqrt(each * largest), scale)
        sheet[top : top + height, left : left + width] = drawn
    return sheet.astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """Returns a PNG file of `[height, width, 3]` uint8.

    Source: https://www.w3.org/TR/png-3/.
    """
    height, width, _ = image.shape
    lines = np.zeros(
        (height, 1 + 3 * width), np.uint8
    )  # each begins with its filter, 0
    lines[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def address(content: bytes) -> str:
    """Returns a PNG file as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _shrunk(values: np.ndarray, side: int) -> np.ndarray:
    """Returns a map of at most `side` cells a side: the largest of those that join."""
    for axis in (0, 1):
        step = -(-values.shape[axis] // side)
        starts = np.arange(0, values.shape[axis], step)
        if step > 1:
            values = np.fmax.reduceat(values, starts, axis=axis)
    return values

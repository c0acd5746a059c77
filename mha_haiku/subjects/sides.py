"""The texts and pictures along maps of tokens, of pixels, of sound, and of towers.

B batch, T query and S key positions, n pictures of an example, of H x W pixels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_haiku.lab import text_maps
from mha_haiku.lab.heads import model_runs
from mha_haiku.lab.text_maps import Side
from mha_haiku.records import Layer
from mha_haiku.subjects import conversion
from mha_haiku.subjects.subject import Subject
from mha_haiku.training import tasks

_SOUND = "input_features"  # a keyword of models of sound, in transformers
_MOST_CHANNELS = 4
_MOST_MARKS = 5  # positions of a picture that are no patches: of its class, registers


def of_maps(subject: Subject, batch: tasks.Example, maps: Any) -> dict[str, Any]:
    """Finds the fields of `TextMaps` that say what is along maps.

    Positions of pixels are patches, "2,3", after up to `_MOST_MARKS` others, such as
    the class. Positions of log-mel features, frames 10 ms apart, are times. Image
    tokens of a text are patches, or "[image 5]" where each is of the whole picture.
    """
    pictures = _pictures(subject, batch)
    if pictures is not None and np.ndim(batch.inputs) == 2:
        return _of_towers(subject, batch, text_maps.layers_of(maps), pictures)
    tokens, keys = conversion.labels(subject, batch)
    every = list(maps.values() if isinstance(maps, Mapping) else maps)
    images: Any = ()
    if not keys and every and every[-1].shape[0] == len(batch.inputs):
        size, row = every[-1].shape[-1], ()
        if np.ndim(batch.inputs) == 3 and subject.codec.names[0] == _SOUND:
            step = np.shape(batch.inputs)[2] / 100 / size
            row = tuple(f"{i * step:.2f}s" for i in range(size))
        if pictures is not None:
            row, images = _patches(pictures[:, -1], size)
        keys = (row,) * len(batch.inputs) if row else ()
        tokens = tokens or keys
    keys = () if keys == tokens else keys
    return dict(tokens=tokens or None, key_tokens=keys or None, images=tuple(images))


def _of_towers(
    subject: Subject,
    batch: tasks.Example,
    layers: Mapping[Layer, Any],
    pictures: np.ndarray,
) -> dict[str, Any]:
    """Finds the sides of each kind of layers of a model of texts and pictures."""
    order, source = _order(subject, batch), conversion.labels(subject, batch)[1]
    # Made by queries, image tokens have no place in the picture.
    are_patches = not any(x.kind.startswith(_BY_QUERIES) for x in layers)
    text = _text_with_patches(subject, batch, source, pictures, are_patches)

    def of(kind: str, place: int, size: int) -> tuple[tuple, tuple]:
        """Finds the labels, and the images, of queries (0) or keys (1)."""
        inside, row, images = kind.removeprefix("language").strip(), (), ()
        texts = conversion.labels(subject, batch, inside)[place]
        if model_runs.reads_tokens(kind) and size == len(texts[0]):
            return text if texts == source else (texts, ())
        if kind.startswith(_BY_QUERIES) and not (place and inside.endswith("cross")):
            row = tuple(f"query {i}" for i in range(size))
        else:
            row, images = _patches(pictures[:, -1], size, order)
        return (row or ("",) * size,) * len(batch.inputs), tuple(images)

    by_kind: dict[str, Side] = {}
    for layer, map_ in layers.items():
        sizes = enumerate(map_.shape[-2:])
        (queries, _), (keys, images) = (of(layer.kind, *x) for x in sizes)
        by_kind.setdefault(layer.kind, Side(queries, keys, images))
    last = by_kind.pop([*layers][-1].kind)
    keys = None if last.key_tokens == last.tokens else last.key_tokens
    return dict(tokens=last.tokens, key_tokens=keys, images=last.images, sides=by_kind)


_BY_QUERIES = "qformer", "resampler"  # kinds


def _text_with_patches(
    subject: Subject,
    batch: tasks.Example,
    tokens: tuple,
    pictures: np.ndarray,
    are_patches: bool,
) -> tuple[tuple, tuple]:
    """Names the image tokens of texts by their patches, and takes the patches."""
    are_images = np.isin(np.asarray(batch.inputs), subject.codec.image_tokens)
    rows, images = [], []
    for row, is_image, parts in zip(tokens, are_images, pictures, strict=True):
        at, row = np.flatnonzero(is_image), np.array(row, object)
        row[at] = [f"[image {i}]" for i in range(len(at))]
        if are_patches and len(at) and len(at) % len(parts) == 0:
            names, patches = _patches(parts, len(at) // len(parts), marks=(0,))
            if names:
                row[at] = names * len(parts)
                own = np.zeros((len(row), *patches.shape[2:]), np.uint8)
                own[at] = patches.reshape(-1, *patches.shape[2:])
                images.append(own)
        rows.append(tuple(row))
    return tuple(rows), tuple(images if len(images) == len(rows) else ())


def _patches(
    pictures: np.ndarray,
    size: int,
    order: np.ndarray | None = None,
    *,
    marks: Any = range(_MOST_MARKS + 1),
) -> tuple[tuple[str, ...], np.ndarray]:
    """Cuts pictures `[N, H, W, 3]` into S = `size` patches `[N, S, h, w, 3]`.

    Also returns their labels; all is empty if patches of the pictures' shape would not
    be that many. Pixels that no patch of whole pixels has are cut off.
    """
    count, height, width, _ = pictures.shape
    for before in marks:
        rows = round(((size - before) * height / width) ** 0.5)
        columns = (size - before) // max(rows, 1)
        are_all = rows * columns == size - before > 0
        if are_all and columns * height == rows * width and rows <= height:
            break
    else:
        return (), np.zeros(0)
    h, w = height // rows, width // columns
    patches = pictures[:, : rows * h, : columns * w]
    patches = patches.reshape(count, rows, h, columns, w, 3).swapaxes(2, 3)
    patches = patches.reshape(count, rows * columns, h, w, 3)
    names = [f"{i},{j}" for i in range(rows) for j in range(columns)]
    if order is not None and len(order) == len(names):
        names, patches = [names[i] for i in order], patches[:, order]
    names = [f"[{i}]" for i in range(before)] + names
    return tuple(names), np.pad(patches, [(0, 0), (before, 0)] + [(0, 0)] * 3)


def _pictures(subject: Subject, batch: tasks.Example) -> np.ndarray | None:
    """Finds the pictures `[B, n, H, W, 3]`, uint8; the range is their own."""
    others, inputs = batch.others or {}, np.asarray(batch.inputs)
    pixels = inputs if inputs.ndim == 4 else np.asarray(others.get("pixel_values"))
    if pixels.ndim == 2 and "image_grid_thw" in others:
        pixels = _unfolded(subject, batch, pixels)
    if pixels.ndim not in (4, 5):
        return None
    if pixels.shape[-3] <= _MOST_CHANNELS:
        pixels = np.moveaxis(pixels, -3, -1)
    if len(pixels) % len(inputs):
        return None
    pixels = pixels.reshape(len(inputs), -1, *pixels.shape[-3:])
    low, high = pixels.min(), pixels.max()
    shares = (pixels - low) / max(high - low, 1e-9)
    gray = pixels.shape[-1] < 3
    shares = np.repeat(shares[..., :1], 3, -1) if gray else shares[..., :3]
    return np.round(255 * shares).astype(np.uint8)


# --- Qwen-VL: pixels are patches already, in blocks of those that become one token


def _blocks(
    subject: Subject, batch: tasks.Example, num_patches: int
) -> tuple[int, int, int, int]:
    """Counts pictures, patches along each side, and patches along a block's side."""
    grid = np.asarray((batch.others or {})["image_grid_thw"])
    is_image = np.isin(np.asarray(batch.inputs), subject.codec.image_tokens)
    block = round((num_patches / max(1, is_image.sum())) ** 0.5)
    return len(grid), *grid[0, 1:].tolist(), block


def _unfolded(subject: Subject, batch: tasks.Example, pixels: np.ndarray) -> np.ndarray:
    """Makes pictures `[N, H, W, 3]` of the patches `[N rows columns, 3 t h h]`."""
    count, rows, columns, block = _blocks(subject, batch, len(pixels))
    sides = {t: (pixels.shape[1] / 3 / t) ** 0.5 for t in (2, 1)}  # of t frames
    frames = next((t for t, side in sides.items() if side.is_integer()), 0)
    if not frames or count * rows * columns != len(pixels):  # of several sizes
        return np.zeros(0)
    side = int(sides[frames])
    shape = count, rows // block, columns // block, block, block
    last = pixels.reshape(*shape, 3, frames, side, side)[..., -1, :, :]
    last = last.transpose(0, 1, 3, 6, 2, 4, 7, 5)
    return last.reshape(count, rows * side, columns * side, 3)


def _order(subject: Subject, batch: tasks.Example) -> np.ndarray | None:
    """Finds the patch, counted row by row, at each position of the tower of vision."""
    pixels = np.asarray((batch.others or {}).get("pixel_values"))
    if pixels.ndim != 2:
        return None
    _, rows, columns, block = _blocks(subject, batch, len(pixels))
    places = np.arange(rows * columns).reshape(rows // block, block, -1, block)
    places = places.swapaxes(1, 2).reshape(-1, block**2)
    config: Any = getattr(subject.module, "config", None)
    config = getattr(config, "vision_config", None)
    if hasattr(config, "window_size"):  # then a window is in one piece
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import vision_utils  # pyright: ignore

        grid = torch.tensor([[1, rows, columns]])
        sizes = config.spatial_merge_size, config.window_size, config.patch_size
        units, _ = vision_utils.get_vision_window_index(grid, *sizes)
        places = places[np.asarray(units)]
    return places.ravel()

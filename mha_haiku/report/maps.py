"""The attention maps that a run saved: read from `maps.npz` and checked.

Dimensions: `L` layers, `N` examples, `H` heads (of a layer), `T` positions of the
input, `T'` and `S'` query and key bins, which are single positions in a whole map. In a
model with a decoder `S` positions are those of the source and `T` those of the target,
and a layer is of one of the `KINDS`, which have different axes.
"""

import dataclasses
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mha_haiku import checks
from mha_haiku.report import labels

KINDS = ("encoder", "decoder", "cross")


class Side(NamedTuple):
    """The positions along one side of the maps of a layer.

    Attributes:
      tokens: `[N, T]` text of each position.
      edges: `[T' + 1]`: bin `i` covers positions `edges[i]:edges[i + 1]`.
      lengths: `[N]`, valid positions of each example.
      label: What the tokens are to the positions: "token predicted"; "": the inputs.
      notes: `[N, T]` what is said of each position beside its token; or None.
    """

    tokens: np.ndarray
    edges: np.ndarray
    lengths: np.ndarray
    label: str = ""
    notes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Maps:
    """The maps of one run, as a report shows them.

    Attributes:
      title: The run and its step.
      layers: The number of each layer in the model, `[L]`, counted over all kinds.
      layer_names: `[L]`.
      head_names: For each layer, `[H]`.
      weights: For each layer, `[N, H, T', S']` attention weights.
      means: For each layer, `[H, T', S']`, over `mean_examples` examples; or None.
      mean_examples: The number of examples of `means`; 0 without means.
      example_names: `[N]`: "held-out example 3", "own text".
      sides: By the kind of layers, the queries and the keys of their maps.
      targets: `[N, T]`, or `[N, 1]` where the whole input has one answer; "" where
        there is nothing to predict.
      likeliest: As `targets` with a last axis: the likeliest answers, in order.
      probabilities: Those of `likeliest`, NaN where they are not known.
      masked: For each layer `[N, T', S']` or `[N, H, T', S']` booleans, true where no
        query may attend to any key; or None.
      patches: For each layer the `places [N, H, n, 3]` of finer parts of pooled maps
        (first query, first key, positions of a bin) and their weights `[N, H, n, R,
        R]`; or None.
      images: `[N, T, h, w]` (or with a last axis of 3 colours), or None.
      step: That of the run, or None.
      channels: For each layer the scaled queries `[N, H, T, K]` and the keys of whole
        maps, and whether their products are the whole scores; or None.
      kinds: The kind of each layer, `[L]`, one of `KINDS`; "" where there is but one.
      numbers: The number of each layer among those of its kind, `[L]`.
      alignment: `[N, T, S]` booleans: the source positions that each position of a
        decoder should look at; None where that is not known.
    """

    title: str
    layers: tuple[int, ...]
    layer_names: tuple[str, ...]
    head_names: tuple[tuple[str, ...], ...]
    weights: tuple[np.ndarray, ...]
    means: tuple[np.ndarray, ...] | None
    mean_examples: int
    example_names: tuple[str, ...]
    sides: Mapping[str, tuple[Side, Side]]
    targets: np.ndarray
    likeliest: np.ndarray
    probabilities: np.ndarray
    masked: tuple[np.ndarray, ...] | None
    patches: tuple[tuple[np.ndarray, np.ndarray], ...] | None
    images: np.ndarray | None
    step: int | None
    channels: tuple[tuple[np.ndarray, np.ndarray, bool], ...] | None
    kinds: tuple[str, ...]
    numbers: tuple[int, ...]
    alignment: np.ndarray | None

    @property
    def num_layers(self) -> int:
        return len(self.weights)

    @property
    def num_examples(self) -> int:
        return len(self.example_names)

    @property
    def pooled(self) -> bool:
        """Whether a cell covers more than one query and one key."""
        sides = [side for kind in set(self.kinds) for side in self.sides[kind]]
        return any(len(side.edges) <= side.tokens.shape[1] for side in sides)

    @property
    def has_one_answer(self) -> bool:
        """Whether the whole input has one answer, and not each position."""
        answering = self.sides.get("decoder") or self.sides[""]
        return self.targets.shape[1] == 1 < answering[0].tokens.shape[1]

    def shown_lengths(self, example: int, layer: int = 0) -> tuple[int, int]:
        """Returns how many queries and keys of an example are valid in a layer."""
        sides = self.sides[self.kinds[layer]]
        return tuple(max(1, int(side.lengths[example])) for side in sides)

    def shown_cells(self, example: int, layer: int = 0) -> tuple[int, int]:
        """Returns how many query and key bins of a layer hold valid positions."""
        lengths = self.shown_lengths(example, layer)
        pairs = zip(self.sides[self.kinds[layer]], lengths, strict=True)
        return tuple(int(np.searchsorted(x.edges[:-1], length)) for x, length in pairs)


def cells_of(
    alignment: np.ndarray, query_edges: np.ndarray, key_edges: np.ndarray
) -> np.ndarray:
    """Returns which cells `[T', S']` hold an aligned pair of positions `[T, S]`."""
    rows = np.logical_or.reduceat(alignment, query_edges[:-1], axis=0)
    return np.logical_or.reduceat(rows, key_edges[:-1], axis=1)


def _said(verb: str, tokens: np.ndarray) -> np.ndarray:
    """Returns what is said of positions: 'reads "v"'; "" where there is no token."""
    text = [
        f"{verb} “{labels.visible(x)}”" if x else "" for x in tokens.ravel().tolist()
    ]
    return np.array(text, np.str_).reshape(tokens.shape)


def load(path: str | os.PathLike[str]) -> Maps:
    """Returns what is in `maps.npz`, without unpickling anything, and all checked.

    Raises:
      ConfigError: If the file is missing, damaged, lacks an array, or holds arrays
        whose types, shapes or values do not fit together.
    """
    return checked(arrays_of(path), path)


def arrays_of(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by their names, without unpickling anything.

    Raises:
      ConfigError: If the file is missing, damaged, or not of plain arrays.
    """
    try:
        path = checks.regular_file(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise checks.ConfigError(f"{path} does not exist.") from None
    except OSError as error:
        raise checks.ConfigError(
            f"{path} cannot be read: {error.strerror or error}."
        ) from None
    # Raised for files that are not archives, are damaged, or hold pickled objects.
    except (
        EOFError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise checks.ConfigError(
            f"{path} is not a readable .npz archive of plain arrays: {error}"
        ) from None


def checked(arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> Maps:
    """Returns the maps in the arrays of a `maps.npz`, which may not be written yet.

    Raises:
      ConfigError: As `load`.
    """
    return _Reader(path, arrays).maps()


class _Reader:
    """Takes arrays from the archive, and checks the type and shape of each."""

    def __init__(self, path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]):
        self._path = path
        self._arrays = arrays

    def maps(self) -> Maps:
        tokens = self._text("tokens", (None, None))
        num_examples, num_positions = tokens.shape
        if not num_examples or not num_positions:
            self._fail("tokens", "hold at least one example and position", tokens.shape)
        layer_names = self._text("layer_names", (None,))
        if not len(layer_names):
            self._fail("layer_names", "name at least one layer", layer_names.shape)
        layers = range(len(layer_names))
        if "layers" in self._arrays:  # not in files of version 0.1
            layers = self._integers("layers", layer_names.shape).tolist()
        unnamed = sorted(
            name
            for name in self._arrays
            if re.fullmatch(r"layer_\d+", name) and int(name[6:]) not in layers
        )
        if unnamed:
            wanted = f"name every layer; {unnamed[0]} has no name"
            self._fail("layer_names", wanted, layer_names.shape)
        kinds, numbers, sides, alignment = ("",) * len(layers), layers, {}, None
        if "kinds" in self._arrays:
            kinds = self._text("kinds", layer_names.shape).tolist()
            numbers = self._integers("numbers", layer_names.shape).tolist()
            sides, alignment = self._sides_of_kinds(tokens)
            for kind in kinds:
                if kind not in KINDS:
                    self._fail("kinds", f"be {', '.join(KINDS)}", repr(kind))
        else:
            sides = {"": self._sides(tokens)}
        cells = [tuple(len(x.edges) - 1 for x in sides[kind]) for kind in kinds]
        heads = [self._text(f"heads_{i:02d}", (None,)) for i in layers]

        def per_layer(prefix, read, *first):
            if not any(name.startswith(f"{prefix}_") for name in self._arrays):
                return None
            return tuple(
                read(f"{prefix}_{i:02d}", (*first, len(names), *own))
                for i, names, own in zip(layers, heads, cells, strict=True)
            )

        weights = per_layer("layer", self._weights, num_examples)
        means = per_layer("mean", self._weights)
        example_names = [f"example {i + 1}" for i in range(num_examples)]
        if "example_names" in self._arrays:  # not in files of version 0.1
            example_names = self._text("example_names", (num_examples,)).tolist()
        predictions = self._text("predictions", (num_examples, None))
        answering = (sides.get("decoder") or sides[""])[0].tokens.shape
        if predictions.shape[1] not in (1, answering[1]):
            wanted = f"have shape {answering} or {(num_examples, 1)}"
            self._fail("predictions", wanted, predictions.shape)
        # Files of before have none of these.
        likeliest = predictions[..., np.newaxis]
        probabilities = np.full(likeliest.shape, np.nan)
        if "likeliest" in self._arrays:
            likeliest = self._text("likeliest", (*predictions.shape, None))
            probabilities = self._floats("probabilities", likeliest.shape)
        masked = per_layer("masked", self._mask, num_examples)
        if "masked" in self._arrays:
            same = self._booleans("masked", (num_examples, *cells[0]))
            masked = (same,) * len(layers)
        patches = None
        if any(name.startswith("patches_") for name in self._arrays):
            pairs = zip(layers, heads, strict=True)
            patches = tuple(
                self._patches(i, (num_examples, len(names))) for i, names in pairs
            )
        channels = None
        if any(re.fullmatch(r"query_\d+", name) for name in self._arrays):
            channels = tuple(
                self._channels(i, (num_examples, len(names)), sides[kind])
                for i, names, kind in zip(layers, heads, kinds, strict=True)
            )
        return Maps(
            title=str(self._text("title", ())),
            layers=tuple(layers),
            layer_names=tuple(layer_names.tolist()),
            head_names=tuple(tuple(names.tolist()) for names in heads),
            weights=weights,
            means=means,
            mean_examples=int(self._integers("mean_examples", ())) if means else 0,
            example_names=tuple(example_names),
            sides=sides,
            targets=self._text("targets", predictions.shape),
            likeliest=likeliest,
            probabilities=probabilities,
            masked=masked,
            patches=patches,
            images=self._images(tokens.shape),
            step=int(self._integers("step", ())) if "step" in self._arrays else None,
            channels=channels,
            kinds=tuple(kinds),
            numbers=tuple(numbers),
            alignment=alignment,
        )

    def _sides(self, tokens: np.ndarray, label: str = "") -> tuple[Side, Side]:
        edges = [self._edges(x, tokens.shape[1]) for x in ("query_edges", "key_edges")]
        lengths = self._lengths("lengths", tokens.shape)
        return tuple(Side(tokens, each, lengths, label) for each in edges)

    def _sides_of_kinds(self, tokens: np.ndarray):
        """Returns the sides of each kind of layers, and the alignment or None."""
        source = self._sides(tokens, "source token")
        read = self._text("decoder_tokens", (len(tokens), None))
        predicted = self._text("decoder_predicted", read.shape)
        edges = self._edges("decoder_edges", read.shape[1])
        lengths = self._lengths("decoder_lengths", read.shape)
        said = _said("predicts", predicted)
        reading = Side(read, edges, lengths, "token read", said)
        said = _said("reads", read)
        predicting = Side(predicted, edges, lengths, "token predicted", said)
        alignment = None
        if "alignment" in self._arrays:
            alignment = self._booleans("alignment", (*read.shape, tokens.shape[1]))
        sides = {
            "encoder": source,
            "decoder": (reading, reading),
            "cross": (predicting, source[1]),
        }
        return sides, alignment

    def _lengths(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        lengths = self._integers(name, shape[:1])
        if lengths.min() < 0 or lengths.max() > shape[1]:
            self._fail(name, f"be from 0 to {shape[1]}", lengths.tolist())
        return lengths

    def _text(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        return self._array(name, shape, "U", "text")

    def _integers(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        return self._array(name, shape, "iu", "integers")

    def _floats(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        return self._array(name, shape, "f", "floating-point numbers")

    def _weights(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        weights = self._floats(name, shape)
        # Written so that a NaN fails it too.
        if weights.size and not (weights.min() >= 0 and weights.max() < np.inf):
            given = f"values from {weights.min()} to {weights.max()}"
            self._fail(name, "hold finite weights of at least 0", given)
        return weights

    def _booleans(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._array(name, shape, "b", "booleans")

    def _mask(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a mask, which may be one for all heads."""
        has_heads = np.ndim(self._arrays.get(name)) == len(shape)
        return self._booleans(name, shape if has_heads else (shape[0], *shape[2:]))

    def _patches(
        self, layer: int, shape: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        if not shape[1]:  # no head
            return np.zeros((*shape, 0, 3), int), np.zeros((*shape, 0, 1, 1))
        places = self._integers(f"places_{layer:02d}", (*shape, None, 3))
        if places.size and (places.min() < 0 or places[..., 2].min() < 1):
            wanted = "hold places of at least 0 and widths of at least 1"
            self._fail(f"places_{layer:02d}", wanted, places.min())
        name, count = f"patches_{layer:02d}", places.shape[2]
        side = np.shape(self._arrays.get(name))[-1:] or (0,)
        return places, self._weights(name, (*shape, count, *side, *side))

    def _channels(
        self, layer: int, shape: tuple[int, int], sides: tuple[Side, Side]
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        queries, keys = (side.tokens.shape[1] for side in sides)
        query = self._floats(f"query_{layer:02d}", (*shape, queries, None))
        key = self._floats(f"key_{layer:02d}", (*shape, keys, query.shape[-1]))
        exact = self._array(f"exact_{layer:02d}", (), "b", "a boolean")
        return query, key, bool(exact)

    def _images(self, shape: tuple[int, int]) -> np.ndarray | None:
        if "images" not in self._arrays:
            return None
        colours = (3,) if self._arrays["images"].ndim == 5 else ()
        images = self._array("images", (*shape, None, None, *colours), "u", "uint8")
        if images.dtype != np.uint8:
            self._fail("images", "hold uint8", images.dtype)
        return images

    def _edges(self, name: str, num_positions: int) -> np.ndarray:
        edges = self._integers(name, (None,)).astype(np.int64)
        rises = len(edges) > 1 and (np.diff(edges) > 0).all()
        if not rises or edges[0] != 0 or edges[-1] != num_positions:
            self._fail(name, f"rise from 0 to {num_positions}", edges.tolist()[:9])
        return edges

    def _array(
        self, name: str, shape: tuple[int | None, ...], kinds: str, described: str
    ) -> np.ndarray:
        if name not in self._arrays:
            near = checks.nearest(name, self._arrays)
            raise checks.ConfigError(f"{self._path} has no array {name!r}.{near}")
        array = self._arrays[name]
        if array.dtype.kind not in kinds:
            self._fail(name, f"hold {described}", array.dtype)
        fits = array.ndim == len(shape) and all(
            wanted in (None, size)
            for wanted, size in zip(shape, array.shape, strict=True)
        )
        if not fits:
            wanted = str(tuple("any" if s is None else s for s in shape))
            self._fail(name, f"have shape {wanted.replace(chr(39), '')}", array.shape)
        return array

    def _fail(self, name: str, wanted: str, given: Any) -> None:
        raise checks.ConfigError(f"{self._path}: {name} must {wanted}, got {given}.")

"""What a page shows: maps, the text or images under them, and what is known of heads.

Plain arrays in named parts, so that anything can be shown that can be put into them. A
`Dossier` has sets of maps (of a run, of its steps, of another run), a set has layers
with heads, and examples with the maps of all of these.

Dimensions: L layers, H heads (of a layer), T query and S key positions, P query and Q
key bins, which are single positions in a whole map; K channels.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mha_haiku.report import maps
from mha_haiku.report.heads import PerHead
from mha_haiku.report.maps import Maps

MOST_LIKELIEST = 3
IMAGE_KINDS = ("positions", "grid")


class Axis(NamedTuple):
    """The positions along one side of a map.

    Attributes:
      tokens: `[T]` the text of each position, "" where it is not known.
      edges: `[P + 1]` integers that rise from 0 to T: bin `i` covers positions
        `edges[i]:edges[i + 1]`.
      label: What the tokens are to the positions: "token predicted"; "": the inputs.
      notes: `[T]` what is said of each position beside its token: 'reads "v"'; or ().
    """

    tokens: tuple[str, ...]
    edges: np.ndarray
    label: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, tokens: Iterable[str]) -> "Axis":
        """Returns the axis whose bins are single positions."""
        tokens = tuple(tokens)
        return cls(tokens, np.arange(len(tokens) + 1))

    @property
    def bins(self) -> int:
        """P, the number of bins."""
        return len(self.edges) - 1

    @property
    def is_pooled(self) -> bool:
        """Whether a bin covers more than one position."""
        return self.bins < len(self.tokens)


class Axes(NamedTuple):
    """What stands along the maps of one kind of layers.

    Attributes:
      queries: The rows.
      keys: The columns.
      alignment: Booleans `[T, S]` of positions (not bins): the keys that a query should
        look at, as the task knows; None where it does not.
      has_answers: Whether these queries are those that give the example's answers.
    """

    queries: Axis
    keys: Axis
    alignment: np.ndarray | None = None
    has_answers: bool = True

    def aligned_cells(self) -> np.ndarray | None:
        """Returns which cells `[P, Q]` hold an aligned pair of positions; or None."""
        if self.alignment is None:
            return None
        return maps.cells_of(self.alignment, self.queries.edges, self.keys.edges)


class Patch(NamedTuple):
    """A part of one head's map at a finer grain than the map of the example.

    Attributes:
      layer: The place of the layer in the set.
      head: The place of the head in the layer.
      query_edges: `[P + 1]` rising positions, of a part of the queries.
      key_edges: `[Q + 1]`, likewise.
      weights: `[P, Q]`.
    """

    layer: int
    head: int
    query_edges: np.ndarray
    key_edges: np.ndarray
    weights: np.ndarray


class Channels(NamedTuple):
    """What the scores of one layer are made of; of whole maps.

    Attributes:
      query: `[H, T, K]`, scaled so that a score is `sum(query[h, t] * key[h, s])`.
      key: `[H, S, K]`.
      exact: Whether that is the whole score: no bias, no soft cap.
    """

    query: np.ndarray
    key: np.ndarray
    exact: bool


class Images(NamedTuple):
    """What positions look like.

    Attributes:
      pixels: uint8. Of the kind "positions" `[T, h, w]` or `[T, h, w, 3]`, of the kind
        "grid" `[h, w]` or `[h, w, 3]`.
      kind: "positions": position i is picture i; "grid": positions are the patches of
        one picture, row by row.
      rows: Patches of a grid, from top to bottom.
      columns: From left to right.
      first: The position of a grid's first patch: 1 after a token for the class.
    """

    pixels: np.ndarray
    kind: str = "positions"
    rows: int = 0
    columns: int = 0
    first: int = 0


class Answers(NamedTuple):
    """What a model says at each position.

    Attributes:
      targets: `[T]`, or `[1]` for the whole input; "" where there is none.
      likeliest: For each of these up to three answers, the likeliest first, with their
        probabilities (NaN where they are not known).
      whole: Whether the whole input has one answer.
    """

    targets: tuple[str, ...]
    likeliest: tuple[tuple[tuple[str, float], ...], ...]
    whole: bool = False


class Example(NamedTuple):
    """The maps of one input.

    Attributes:
      name: "held-out example 3".
      queries: Its rows.
      keys: Its columns.
      weights: For each layer `[H, P, Q]`; NaN weights are shown as such.
      masked: Booleans, true where no query may attend to any key of the cell: `[P, Q]`
        if all layers have the same axes, or for each layer `[P, Q]`, `[H, P, Q]` or
        None; None where it is not known.
      note: What has to be said of it.
      answers: What the model says, or None.
      images: What the keys look like, or None.
      patches: Finer parts of pooled maps.
      channels: For each layer what its scores are made of, or None.
      is_mean: Whether it is the mean of examples, and no input.
      kinds: By the kind of a layer its axes, where they are not `queries` and `keys`.
    """

    name: str
    queries: Axis
    keys: Axis
    weights: tuple[np.ndarray, ...]
    masked: np.ndarray | tuple[np.ndarray | None, ...] | None = None
    note: str = ""
    answers: Answers | None = None
    images: Images | None = None
    patches: tuple[Patch, ...] = ()
    channels: tuple[Channels | None, ...] | None = None
    is_mean: bool = False
    kinds: Mapping[str, Axes] = {}

    def axes(self, layer: "Layer") -> Axes:
        """Returns what stands along the maps of a layer."""
        return self.kinds.get(layer.kind) or Axes(self.queries, self.keys)

    def masked_cells(self, layer: int) -> np.ndarray | None:
        """Returns `masked` of a layer, `[P, Q]` or `[H, P, Q]`, or None."""
        return self.masked[layer] if isinstance(self.masked, tuple) else self.masked


class Layer(NamedTuple):
    """A layer: its name, and those of its heads in the model that was not pruned.

    Its kind ("encoder", "decoder", "cross") is "" where all layers are of one kind.
    """

    name: str
    heads: tuple[str, ...]
    kind: str = ""


class Roles(NamedTuple):
    """What heads do.

    Attributes:
      names: `[L, H]` strings, "" where there is no head or its role is not known.
      scores: `[L, H]` in [0, 1], the score that decided; NaN where none did.
    """

    names: np.ndarray
    scores: np.ndarray


class MapSet(NamedTuple):
    """The maps of one model on some examples.

    Attributes:
      name: "step 300", "pruned".
      layers: `[L]`.
      examples: `[N]`, at least one.
      step: The training step; None if the set is not a moment of a training.
      numbers: Of heads, `[L, H]` as in `layers`; the columns of a layer that has fewer
        heads end with NaN.
      roles: What the heads do, likewise; or None.
      missing: Pairs of what was not computed ("importance") and the command that does.
    """

    name: str
    layers: tuple[Layer, ...]
    examples: tuple[Example, ...]
    step: int | None = None
    numbers: Mapping[str, PerHead] = {}
    roles: Roles | None = None
    missing: tuple[tuple[str, str], ...] = ()


class Dossier(NamedTuple):
    """All that one page shows.

    Attributes:
      title: What it is about.
      sets: At least one. Those that have a step are shown one after the other, others
        side by side.
      matches: `[L, H, 2]` integers: for each head of the first set (layer, head) of the
        one of the second set that attends most alike, -1 where there is none; or None.
      notes: What has to be said of all of it.
      rounding: Weights may be rounded to multiples of this, to need less room.
    """

    title: str
    sets: tuple[MapSet, ...]
    matches: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    rounding: float = 0.0


def of_maps(
    saved: Maps,
    *,
    name: str = "",
    step: int | None = None,
    numbers: Mapping[str, PerHead] | None = None,
    roles: Roles | None = None,
) -> MapSet:
    """Returns the saved maps of a run as a set, with their mean as the last example.

    Padding is left out: an example ends with its last valid position. Without a name
    the set has the title of the maps.
    """
    layers = tuple(
        Layer(layer, tuple(head.removeprefix("head ") for head in heads), kind)
        for layer, heads, kind in zip(
            saved.layer_names, saved.head_names, saved.kinds, strict=True
        )
    )
    examples = [_example(saved, example) for example in range(saved.num_examples)]
    if saved.means is not None:
        axes = _axes_by_kind(saved, None)
        examples.append(
            Example(
                f"mean of {saved.mean_examples} examples",
                *axes.pop("")[:2],
                saved.means,
                is_mean=True,
                kinds=axes,
            )
        )
    name = name or saved.title
    return MapSet(name, layers, tuple(examples), step, numbers or {}, roles)


def with_heads(maps: MapSet, places: Sequence[Sequence[int]]) -> MapSet:
    """Returns a set with the heads at some places of each layer, in that order."""
    width = max(map(len, places))

    def columns(values, missing=np.nan):
        if values is None:
            return None
        dtype = object if missing == "" else np.result_type(values, np.float32)
        kept = np.full((len(values), width, *values.shape[2:]), missing, dtype)
        for row, own, each in zip(kept, values, places, strict=True):
            row[: len(each)] = own[list(each)]
        return kept

    numbers = {
        name: each._replace(
            mean=columns(each.mean),
            standard_error=columns(each.standard_error),
            ranks=columns(each.ranks),
        )
        for name, each in maps.numbers.items()
    }
    roles = maps.roles
    if roles is not None:
        roles = Roles(columns(roles.names, ""), columns(roles.scores))
    layers = tuple(
        layer._replace(heads=tuple(layer.heads[j] for j in each))
        for layer, each in zip(maps.layers, places, strict=True)
    )
    examples = tuple(_with_heads(each, places) for each in maps.examples)
    return maps._replace(layers=layers, examples=examples, numbers=numbers, roles=roles)


def _with_heads(example: Example, places: Sequence[Sequence[int]]) -> Example:
    layers = list(enumerate(map(list, places)))
    masked = [example.masked_cells(i) for i, _ in layers]
    channels = example.channels and tuple(
        own and own._replace(query=own.query[each], key=own.key[each])
        for own, (_, each) in zip(example.channels, layers, strict=True)
    )
    return example._replace(
        weights=tuple(example.weights[i][each] for i, each in layers),
        masked=tuple(
            own[each] if own is not None and own.ndim == 3 else own
            for own, (_, each) in zip(masked, layers, strict=True)
        ),
        channels=channels,
        patches=tuple(
            each._replace(head=places[each.layer].index(each.head))
            for each in example.patches
            if each.head in places[each.layer]
        ),
    )


def check(dossier: Dossier) -> Dossier:
    """Returns the dossier, in which all sizes fit together.

    Raises:
      ValueError: If a number of positions, heads, layers, bins or pictures differs from
        another, or a value is none that can be shown. The message names both.
    """
    if not dossier.sets:
        raise ValueError("sets must not be empty.")
    for each in dossier.sets:
        _check_set(each)
    if dossier.matches is not None:
        if len(dossier.sets) < 2:
            raise ValueError("matches must be None where there is one set of maps.")
        _has_shape("matches", dossier.matches, (*_heads(dossier.sets[0]), 2))
    return dossier


def _heads(shown: MapSet) -> tuple[int, int]:
    return len(shown.layers), max((len(each.heads) for each in shown.layers), default=0)


def _check_set(shown: MapSet) -> None:
    where = f"of {shown.name!r}" if shown.name else "of the maps"
    for name, parts in (("layers", shown.layers), ("examples", shown.examples)):
        if not parts:
            raise ValueError(f"{name} {where} must not be empty.")
    for name, each in shown.numbers.items():
        _has_shape(f"{name} {where}", each.mean, _heads(shown))
        for part, of_each in (("standard errors", ()), ("ranks", (2,))):
            values = each.ranks if of_each else each.standard_error
            if values is not None:
                shape = (*_heads(shown), *of_each)
                _has_shape(f"{part} of {name} {where}", values, shape)
    if shown.roles is not None:
        for part, values in shown.roles._asdict().items():
            _has_shape(f"{part} of roles {where}", values, _heads(shown))
    for example in shown.examples:
        _check_example(example, shown.layers)


def _check_example(example: Example, layers: tuple[Layer, ...]) -> None:
    of = f"of {example.name!r}"
    for each in (Axes(example.queries, example.keys), *example.kinds.values()):
        _check_axes(each, of)
    for name in ("weights", "masked", "channels"):
        parts = getattr(example, name)
        if isinstance(parts, tuple) or name == "weights":
            _has_length(f"{name} {of}", parts, len(layers), "layers")
    for i, (layer, weights) in enumerate(zip(layers, example.weights, strict=True)):
        heads, axes = len(layer.heads), example.axes(layer)
        cells = axes.queries.bins, axes.keys.bins
        _are_weights(f"weights of {layer.name} {of}", weights, (heads, *cells))
        masked = example.masked_cells(i)
        if masked is not None:
            shapes = (cells, (heads, *cells))
            _has_shape(f"masked of {layer.name} {of}", masked, *shapes)
        if example.channels is not None and example.channels[i] is not None:
            channels = example.channels[i]
            size = np.shape(channels.query)[-1:]
            for name, axis in (("query", axes.queries), ("key", axes.keys)):
                shape = (heads, len(axis.tokens), *size)
                label = f"{name} channels of {layer.name} {of}"
                _has_shape(label, getattr(channels, name), shape)
    for patch in example.patches:
        _check_patch(patch, example, layers, of)
    if example.answers is not None:
        answers = example.answers
        wanted = 1 if answers.whole else len(example.queries.tokens)
        for name in ("targets", "likeliest"):
            _has_length(f"{name} {of}", getattr(answers, name), wanted, "positions")
        most = max(map(len, answers.likeliest), default=0)
        if most > MOST_LIKELIEST:
            raise ValueError(
                f"likeliest {of} must have at most {MOST_LIKELIEST} answers for each "
                f"position, got {most}."
            )
    if example.images is not None:
        _check_images(example.images, example.keys, of)


def _check_axes(axes: Axes, of: str) -> None:
    for side, axis in (("queries", axes.queries), ("keys", axes.keys)):
        _rises(f"edges of the {side} {of}", axis.edges, len(axis.tokens))
        if axis.notes:
            name, count = f"notes of the {side} {of}", len(axis.tokens)
            _has_length(name, axis.notes, count, "positions")
    if axes.alignment is not None:
        if np.asarray(axes.alignment).dtype != bool:
            kind = np.asarray(axes.alignment).dtype
            raise ValueError(f"alignment {of} must be booleans, got {kind}.")
        shape = len(axes.queries.tokens), len(axes.keys.tokens)
        _has_shape(f"alignment {of}", axes.alignment, shape)


def _check_patch(patch, example, layers, of) -> None:
    if patch.layer not in range(len(layers)):
        raise ValueError(f"patches {of} must be of its layers, got {patch.layer}.")
    if patch.head not in range(len(layers[patch.layer].heads)):
        raise ValueError(f"patches {of} must be of its heads, got {patch.head}.")
    _rises(f"query_edges of a patch {of}", patch.query_edges)
    _rises(f"key_edges of a patch {of}", patch.key_edges)
    axes = example.axes(layers[patch.layer])
    sides = ((patch.query_edges, axes.queries), (patch.key_edges, axes.keys))
    for edges, axis in sides:
        if edges[0] < 0 or edges[-1] > len(axis.tokens):
            raise ValueError(
                f"a patch {of} must lie in its {len(axis.tokens)} positions, got "
                f"{edges[0]} to {edges[-1]}."
            )
    cells = len(patch.query_edges) - 1, len(patch.key_edges) - 1
    _are_weights(f"weights of a patch {of}", patch.weights, cells)


def _check_images(images: Images, keys: Axis, of: str) -> None:
    if images.kind not in IMAGE_KINDS:
        kinds = " or ".join(map(repr, IMAGE_KINDS))
        raise ValueError(f"images {of} must be of kind {kinds}, got {images.kind!r}.")
    pixels, count = np.asarray(images.pixels), len(keys.tokens)
    if pixels.dtype != np.uint8:
        raise ValueError(f"images {of} must be uint8, got {pixels.dtype}.")
    is_grid = images.kind == "grid"
    shape = pixels.shape if is_grid else pixels.shape[1:]
    if len(shape) not in (2, 3) or shape[2:] not in ((), (3,)) or 0 in shape:
        wanted = "[h, w] or [h, w, 3]" if is_grid else "[S, h, w] or [S, h, w, 3]"
        raise ValueError(f"images {of} must be {wanted}, got {pixels.shape}.")
    if not is_grid:
        _has_length(f"images {of}", pixels, count, "positions")
    else:
        patches = images.rows * images.columns
        if min(images.rows, images.columns, images.first + 1) < 1:
            raise ValueError(
                f"a grid {of} must have rows and columns, got {images.rows} x "
                f"{images.columns} from position {images.first}."
            )
        if images.first + patches > count:
            raise ValueError(
                f"a grid {of} must have at most {count - images.first} patches from "
                f"position {images.first}, got {images.rows} x {images.columns}."
            )


def _rises(name: str, edges: np.ndarray, last: int | None = None) -> None:
    edges = np.asarray(edges)
    is_rising = (
        edges.ndim == 1
        and edges.size > (last is None)
        and edges.dtype.kind in "iu"
        and (np.diff(edges.astype(np.int64)) > 0).all()
    )
    if not is_rising or (last is not None and (edges[0], edges[-1]) != (0, last)):
        wanted = "rise" if last is None else f"rise from 0 to {last}"
        raise ValueError(f"{name} must be integers that {wanted}, got {edges}.")


def _are_weights(name: str, weights: np.ndarray, shape: tuple[int, ...]) -> None:
    weights = np.asarray(weights)
    if weights.dtype.kind != "f":
        raise ValueError(f"{name} must be floating-point, got {weights.dtype}.")
    _has_shape(name, weights, shape)
    # Written so that NaN passes.
    if (weights < 0).any() or np.isinf(weights).any():
        raise ValueError(
            f"{name} must be finite and at least 0 (or NaN), got values from "
            f"{np.nanmin(weights)} to {np.nanmax(weights)}."
        )


def _has_length(name: str, parts: Sequence, count: int, of_what: str) -> None:
    if len(parts) != count:
        wanted = f"one for each of {count} {of_what}"
        raise ValueError(f"{name} must be {wanted}, got {len(parts)}.")


def _has_shape(name: str, values: np.ndarray, *shapes: tuple[int, ...]) -> None:
    if np.shape(values) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {wanted}, got {np.shape(values)}.")


def _example(saved: Maps, example: int) -> Example:
    axes = _axes_by_kind(saved, example)
    shown = [saved.shown_cells(example, i) for i in range(saved.num_layers)]
    lengths = [saved.shown_lengths(example, i) for i in range(saved.num_layers)]

    def cells(layers):
        pairs = zip(layers, shown, strict=True)
        return tuple(x[example, ..., :rows, :columns] for x, (rows, columns) in pairs)

    images, channels = saved.images, None
    if saved.channels is not None:
        channels = tuple(
            Channels(query[example, :, :rows], key[example, :, :columns], exact)
            for (query, key, exact), (rows, columns) in zip(
                saved.channels, lengths, strict=True
            )
        )
    queries, keys, *_ = axes.pop("")
    return Example(
        saved.example_names[example],
        queries,
        keys,
        cells(saved.weights),
        masked=None if saved.masked is None else cells(saved.masked),
        note=_note(saved, example),
        answers=_answers(saved, example, len(queries.tokens)),
        images=None if images is None else Images(images[example, : len(keys.tokens)]),
        patches=_patches(saved, example, lengths),
        channels=channels,
        kinds=axes,
    )


def _axes_by_kind(saved: Maps, example: int | None) -> dict[str, Axes]:
    """Returns the axes of each kind of layers in an example; "": those of others.

    Without an example they are those of the mean of all, whose tokens are not known.
    """

    def axis(side):
        if example is None:
            return Axis(("",) * side.tokens.shape[1], side.edges, side.label)
        length = max(1, int(side.lengths[example]))
        tokens, notes = (
            () if x is None else tuple(x[example, :length].tolist())
            for x in (side.tokens, side.notes)
        )
        bins = int(np.searchsorted(side.edges[:-1], length))
        edges = np.minimum(side.edges[: bins + 1], length)
        return Axis(tokens, edges, side.label, notes)

    axes = {kind: Axes(*map(axis, sides)) for kind, sides in saved.sides.items()}
    if "decoder" not in axes:
        return axes
    # Answers are the decoder's, whose axes are therefore those of the example.
    axes[""] = axes.pop("decoder")
    axes["encoder"] = axes["encoder"]._replace(has_answers=False)
    if saved.alignment is not None and example is not None:
        queries, keys, *_ = axes["cross"]
        alignment = saved.alignment[example, : len(queries.tokens), : len(keys.tokens)]
        axes["cross"] = axes["cross"]._replace(alignment=alignment)
    return axes


def _note(saved: Maps, example: int) -> str:
    """Returns how much of an example is padding."""
    names = {"": "", "encoder": "source ", "decoder": "target "}
    padded = {
        names[kind]: side.tokens.shape[1] - max(1, int(side.lengths[example]))
        for kind, (side, _) in saved.sides.items()
        if kind in names
    }
    said = [f"its last {count} {x}positions" for x, count in padded.items() if count]
    return f"{' and '.join(said)} are padding" if said else ""


def _patches(saved: Maps, example: int, lengths) -> tuple[Patch, ...]:
    """Returns the patches of an example, without what lies past its end."""
    if saved.patches is None:
        return ()
    patches = []
    for layer, (places, weights) in enumerate(saved.patches):
        for head, number in np.ndindex(*places.shape[1:3]):
            query, key, width = places[example, head, number].tolist()
            steps = np.arange(weights.shape[-1] + 1) * width
            edges = [
                np.unique(np.minimum(first + steps, length))
                for first, length in zip((query, key), lengths[layer], strict=True)
            ]
            rows, columns = (len(each) - 1 for each in edges)
            part = weights[example, head, number, :rows, :columns]
            if part.size and part.any():
                patches.append(Patch(layer, head, *edges, part))
    return tuple(patches)


def _answers(saved: Maps, example: int, length: int) -> Answers:
    whole = saved.has_one_answer
    shown = slice(None) if whole else slice(length)
    answers = zip(
        saved.likeliest[example, shown].tolist(),
        saved.probabilities[example, shown].tolist(),
        strict=True,
    )
    return Answers(
        tuple(saved.targets[example, shown].tolist()),
        tuple(
            tuple(pair for pair in zip(texts, shares, strict=True) if pair[0])
            for texts, shares in answers
        ),
        whole,
    )

"""Saved maps for the tests: small, with a different size on every axis."""

import numpy as np
import pytest

from mha_haiku.report import dossier, heads, maps

HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "$x^2$",
    r"$\frac{",
    "a_b\n",
    "\u2028",
    "\"'`&amp;",
    "\N{GRINNING FACE}",
    "\u05d0\u05d1\u05d2",  # right to left
    "\u202eevil",
    "",
    "\x1b\t",
    "\u4e2d\u6587",
    "\u0301",  # a lone combining accent
    "\ud800",  # half of a surrogate pair
    "-->",
)


def archive(*, heads=(2, 3), num_examples=2, length=5, bins=None, **changes):
    """Returns the arrays of a `maps.npz`; a change of None leaves an array out."""
    rng = np.random.default_rng(0)
    edges = np.arange(length + 1)
    if bins is not None:
        edges = np.append(np.arange(0, length, -(-length // bins)), length)
    cells = len(edges) - 1
    text = np.array([[f"t{i}" for i in range(length)]] * num_examples)
    arrays = {
        "layer_names": np.array([f"layer {i}" for i in range(len(heads))]),
        "tokens": text,
        "query_edges": edges,
        "key_edges": edges,
        "lengths": np.full(num_examples, length),
        "predictions": text,
        "targets": text,
        "title": np.array("reverse, step 20"),
        "mean_examples": np.array(7),
    }
    for layer, count in enumerate(heads):
        scores = rng.normal(size=(num_examples, count, cells, cells)) * 3
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        arrays[f"layer_{layer:02d}"] = weights.astype(np.float16)
        arrays[f"mean_{layer:02d}"] = weights.mean(0).astype(np.float32)
        names = [f"head {i}" for i in range(count)]
        arrays[f"heads_{layer:02d}"] = np.array(names, dtype=str)
    arrays.update(changes)
    return {name: array for name, array in arrays.items() if array is not None}


def archive_of_kinds(bins=None, **changes):
    """Returns an archive of an encoder (S=5) and a decoder (T=4), a layer each."""
    rng, count = np.random.default_rng(1), 2
    arrays = archive(heads=(2, 3, 2), num_examples=count)
    source, target = np.arange(6), np.arange(5)
    if bins is not None:
        source, target = np.array([0, 2, 4, 5]), np.array([0, 3, 4])
    sides = {"encoder": (source, source), "decoder": (target, target)}
    sides["cross"] = target, source
    for layer, (rows, columns) in enumerate(sides.values()):
        heads = len(arrays[f"heads_{layer:02d}"])
        scores = rng.normal(size=(count, heads, len(rows) - 1, len(columns) - 1)) * 3
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        arrays[f"layer_{layer:02d}"] = weights.astype(np.float16)
        arrays[f"mean_{layer:02d}"] = weights.mean(0).astype(np.float32)
    read = np.array([["<s>", "a", "b", "c"], ["<s>", "d", "", ""]])
    predicted = np.array([["a", "b", "c", "<e>"], ["d", "<e>", "", ""]])
    alignment = np.zeros((count, 4, 5), bool)
    alignment[0, [0, 1, 2, 2], [4, 3, 0, 1]] = True
    arrays |= {
        "layers": np.array([0, 1, 2]),
        "layer_names": np.array([f"{kind} 0" for kind in sides]),
        "kinds": np.array(list(sides)),
        "numbers": np.zeros(3, int),
        "query_edges": source,
        "key_edges": source,
        "lengths": np.array([5, 3]),
        "decoder_tokens": read,
        "decoder_predicted": predicted,
        "decoder_edges": target,
        "decoder_lengths": np.array([4, 2]),
        "predictions": predicted,
        "targets": predicted,
        "alignment": alignment,
    }
    arrays.update(changes)
    return {name: array for name, array in arrays.items() if array is not None}


def hostile_archive():
    """Returns an archive whose every text is hostile."""
    text = np.array([HOSTILE])
    return archive(
        heads=(2,),
        num_examples=1,
        length=len(HOSTILE),
        tokens=text,
        predictions=text,
        targets=text[:, ::-1],
        title=np.array(f"</title>{HOSTILE[0]} $x^2$ \u2028"),
        layer_names=np.array([HOSTILE[1]]),
        heads_00=np.array(HOSTILE[2:4]),
    )


@pytest.fixture
def make(tmp_path):
    """Returns a function that saves an archive and gives the folder it is in."""

    def save(arrays=None, **options):
        np.savez(tmp_path / "maps.npz", **(arrays or archive(**options)))
        return tmp_path

    return save


@pytest.fixture
def load(make):
    """Returns a function that saves an archive and loads it."""
    return lambda *args, **options: maps.load(make(*args, **options) / "maps.npz")


@pytest.fixture
def hostile(load):
    """Returns loaded maps whose every text is hostile."""
    return load(hostile_archive())


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def whole(rng):
    """Returns a dossier that has every part: 2 layers of 2 and 1 heads, T=3, S=5."""
    queries, keys = dossier.Axis.whole("abc"), dossier.Axis.whole("uvwxy")
    layers = (dossier.Layer("layer 0", ("0", "3")), dossier.Layer("layer 2", ("1",)))
    masked = (np.arange(5) > np.arange(3)[:, None] + 1, np.tri(3, 5, -1) > 0)
    weights = tuple(
        np.where(hidden, 0, rng.random((count, 3, 5)))
        for hidden, count in zip(masked, (2, 1), strict=True)
    )
    example = dossier.Example(
        "held-out example 3",
        queries,
        keys,
        weights,
        masked=masked,
        note="short",
        answers=dossier.Answers(
            ("", "s", "r"), ((), (("s", 0.5),), (("p", 0.625), ("q", np.nan)))
        ),
        images=dossier.Images(rng.integers(0, 255, (5, 2, 3), np.uint8)),
        patches=(
            dossier.Patch(
                0, 1, np.array([1, 2, 3]), np.array([0, 1, 2, 4]), rng.random((2, 3))
            ),
        ),
        channels=(
            dossier.Channels(
                rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 4)), exact=False
            ),
            None,
        ),
    )
    ablation = heads.PerHead(
        np.array([[0.5, -0.125], [2, np.nan]]),
        "nats",
        "rise of the loss",
        np.array([[0.1, 0.2], [0.25, np.nan]]),
        np.array([[[1, 2], [1, 3]], [[np.nan, np.nan]] * 2]),
    )
    roles = dossier.Roles(
        np.array([["induction", ""], ["", ""]]),
        np.array([[0.75, np.nan], [np.nan, np.nan]]),
    )
    first = dossier.MapSet("one", layers, (example,), 4, {"ablation": ablation}, roles)
    second = dossier.MapSet("two", layers, (example,))
    matches = np.array([[[1, 0], [-1, -1]], [[0, 1], [-1, -1]]])
    return dossier.Dossier("both", (first, second), matches, ("a note",))

"""Saved maps for the tests: small, with a different size on every axis."""

import numpy as np
import pytest

from mha_haiku.report import maps

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

"""Saved maps, written and loaded, and maps whose texts are hostile."""

import numpy as np
import pytest

from mha_haiku import masks, records
from mha_haiku.records import map_set
from tests.showing.saved_maps import make_maps
from tests.showing.small_maps import make_map

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


@pytest.fixture
def load(tmp_path):
    """Returns a function that makes maps, saves them and loads them."""

    def load(maps=None, **options):
        path = (maps or make_maps(**options)).save(tmp_path / "maps.npz")
        return map_set.MapSet.load(path)

    return load


@pytest.fixture
def hostile(load):
    """Returns loaded maps whose every text is hostile."""
    return load(
        heads=(2,),
        num_examples=1,
        length=len(HOSTILE),
        tokens=[HOSTILE],
        predictions=[HOSTILE],
        targets=[HOSTILE[::-1]],
        name=f"</title>{HOSTILE[0]} $x^2$ \u2028",
        layers=(records.Layer(HOSTILE[1], HOSTILE[2:4]),),
    )


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def whole(rng):
    """Returns a dossier that has every part: 2 layers of 2 and 1 heads, T=3, S=5."""
    queries, keys = map_set.Axis.whole("abc"), map_set.Axis.whole("uvwxy")
    layers = (records.Layer("layer 0", ("0", "3")), records.Layer("layer 2", ("1",)))
    masked = (np.arange(5) > np.arange(3)[:, None] + 1, np.tri(3, 5, -1) > 0)
    weights = tuple(
        np.where(hidden, 0, rng.random((count, 3, 5)))
        for hidden, count in zip(masked, (2, 1), strict=True)
    )
    example = map_set.Example(
        "held-out example 3",
        queries,
        keys,
        weights,
        masked=masked,
        note="short",
        answers=map_set.Answers(
            ("", "s", "r"), ((), (("s", 0.5),), (("p", 0.625), ("q", np.nan)))
        ),
        images=rng.integers(0, 255, (5, 2, 3), np.uint8),
    )
    ablation = records.Column(
        np.array([[0.5, -0.125], [2, np.nan]]),
        "nats",
        "rise of the loss",
        np.array([[0.1, 0.2], [0.25, np.nan]]),
        np.array([[[1, 2], [1, 3]], [[np.nan, np.nan]] * 2]),
    )
    role = records.Column(
        np.array([[0.75, np.nan], [np.nan, np.nan]]),
        "score",
        "score that decides the role",
        names=np.array([["induction", ""], ["", ""]]),
    )
    columns = {"ablation": ablation, "role": role}
    first = map_set.MapSet("one", layers, (example,), 4, columns)
    second = map_set.MapSet("two", layers, (example,))
    return map_set.Dossier("both", (first, second), ("a note",))


@pytest.fixture(scope="session")
def attention_map():
    """`[2, 5, 4, 6]`, with padding of the second example."""
    return make_map(mask=masks.padding(np.array([6, 3])))

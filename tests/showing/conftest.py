"""Saved maps for the tests: small, with a different size on every axis."""

import dataclasses

import numpy as np
import pytest

from mha_haiku import masks, records
from mha_haiku.showing import map_set
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


def make_maps(*, heads=(2, 3), num_examples=2, length=5, bins=None, **changes):
    """Returns maps of a run: `changes` has what differs from what is made up here."""
    rng = np.random.default_rng(0)
    edges = _edges(length, bins)
    tokens = [[f"t{i}" for i in range(length)]] * num_examples
    tokens = changes.pop("tokens", tokens)
    answers = [changes.pop(x, tokens) for x in ("targets", "predictions")]
    lengths = changes.pop("lengths", [length] * num_examples)
    weights = [_weights(rng, (num_examples, n), edges, edges) for n in heads]
    examples = []
    for n, size in enumerate(lengths):
        axis = _axis(tokens[n], edges, size)
        shown = slice(len(answers[0][n]) if len(answers[0][n]) == 1 else size)
        targets, likeliest = (tuple(each[n][shown]) for each in answers)
        likeliest = tuple(((x, np.nan),) if x else () for x in likeliest)
        whole = len(targets) == 1 < length
        cells = np.s_[n, :, : axis.bins, : axis.bins]
        example = map_set.Example(
            f"example {n + 1}",
            axis,
            axis,
            tuple(each[cells].astype(np.float16) for each in weights),
            answers=map_set.Answers(targets, likeliest, whole),
        )
        examples.append(example._replace(**changes.get("example", {})))
    changes.pop("example", None)
    if changes.pop("has_mean", True):
        axis = _axis([""] * length, edges, length)
        means = tuple(each.mean(0).astype(np.float32) for each in weights)
        mean = map_set.Example("mean of 7 examples", axis, axis, means, is_mean=True)
        examples.append(mean)
    layers = tuple(
        records.Layer(f"layer {i}", tuple(map(str, range(count))), "", i, i)
        for i, count in enumerate(heads)
    )
    whole = map_set.MapSet("reverse, step 20", layers, tuple(examples), 20)
    return dataclasses.replace(whole, **changes)


def make_maps_of_kinds(bins=None):
    """Returns maps of an encoder (S=5) and a decoder (T=4), a layer each."""
    rng = np.random.default_rng(1)
    source, target = _edges(5, bins), _edges(4, bins)
    sides = {"encoder": (source, source), "decoder": (target, target)}
    sides["cross"] = target, source
    heads = (2, 3, 2)
    pairs = list(zip(heads, sides.values(), strict=True))
    weights = [_weights(rng, (2, count), *edges) for count, edges in pairs]
    tokens = [f"t{i}" for i in range(5)]
    read = [["<s>", "a", "b", "c"], ["<s>", "d", "", ""]]
    predicted = [["a", "b", "c", "<e>"], ["d", "<e>", "", ""]]
    alignment = np.zeros((2, 4, 5), bool)
    alignment[0, [0, 1, 2, 2], [4, 3, 0, 1]] = True
    examples = []
    for n, (size, target_size) in enumerate(((5, 4), (3, 2))):
        keys = _axis(tokens, source, size)._replace(label="source token")
        reading, predicting = (
            _axis(texts[n], target, target_size)._replace(
                label=label, notes=tuple(f"{verb} “{x}”" for x in of[n][:target_size])
            )
            for texts, label, verb, of in (
                (read, "token read", "predicts", predicted),
                (predicted, "token predicted", "reads", read),
            )
        )
        aligned = alignment[n, :target_size, :size]
        kinds = {
            "encoder": map_set.Axes(keys, keys, has_answers=False),
            "cross": map_set.Axes(predicting, keys, aligned),
        }
        answers = predicting.tokens, tuple(((x, 0.5),) for x in predicting.tokens)
        example = map_set.Example(
            f"example {n + 1}",
            reading,
            reading,
            (),
            answers=map_set.Answers(*answers),
            kinds=kinds,
        )
        bins_of = {kind: [x.bins for x in axes[:2]] for kind, axes in kinds.items()}
        bins_of["decoder"] = [reading.bins] * 2
        maps = tuple(
            each[n, :, :rows, :columns].astype(np.float16)
            for each, (rows, columns) in zip(
                weights, [bins_of[kind] for kind in sides], strict=True
            )
        )
        examples.append(example._replace(weights=maps))
    source, target = (
        map_set.Axis(("",) * int(edges[-1]), edges) for edges in (source, target)
    )
    source = source._replace(label="source token")
    means = tuple(each.mean(0).astype(np.float32) for each in weights)
    kinds = {
        "encoder": map_set.Axes(source, source, has_answers=False),
        "cross": map_set.Axes(target, source),
    }
    mean = map_set.Example("mean of 7 examples", target, target, means)
    examples.append(mean._replace(is_mean=True, kinds=kinds))
    layers = tuple(
        records.Layer(f"{kind} 0", tuple(map(str, range(count))), kind, i, 0)
        for i, (kind, count) in enumerate(zip(sides, heads, strict=True))
    )
    return map_set.MapSet("reverse, step 20", layers, tuple(examples), 20)


def _edges(length, bins):
    if bins is None:
        return np.arange(length + 1)
    return np.append(np.arange(0, length, -(-length // bins)), length)


def _axis(tokens, edges, length):
    edges = np.unique(np.minimum(edges, length))
    return map_set.Axis(tuple(tokens[:length]), edges)


def _weights(rng, shape, rows, columns):
    scores = np.exp(3 * rng.normal(size=(*shape, len(rows) - 1, len(columns) - 1)))
    return scores / scores.sum(-1, keepdims=True)


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

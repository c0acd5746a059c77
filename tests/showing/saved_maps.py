"""Saved maps: small, with a different size on every axis."""

import dataclasses

import numpy as np

from mha_haiku import records
from mha_haiku.records import map_set


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
    whole = map_set.MapSet(
        "reverse, step 20", layers, tuple(examples), 20, are_shares=True
    )
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

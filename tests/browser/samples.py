"""Dossiers for the browser: small ones of sizes that differ, and large ones."""

import numpy as np

from mha_haiku import records
from mha_haiku.records import Column, map_set

L, H, T, S = 2, 3, 5, 7
HOSTILE = [
    "</script><script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "\" onmouseover=\"document.title = 'run'",
    "javascript:document.title='run'",
    "<!--<script>",
    "${document.title = 'run'}",
    "\u202eright to left\u202d",
    "\ud800",  # half of a pair
    "&amp;&lt;b&gt;",
    "a" * 100_000,
    "\x00\x1b[31m",
    "']]></svg><script>document.title = 'run'</script>",
]


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns maps whose rows sum to 1, and differ much."""
    generator = np.random.default_rng(seed)
    scores = np.exp(3 * generator.standard_normal(shape))
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)


def role(names, scores) -> dict[str, records.Column]:
    """Makes the column of what heads do."""
    return {"role": records.Column(scores, "score", "what decides", names=names)}


def words(count: int, start: str = "w") -> map_set.Axis:
    return map_set.Axis.whole(f"{start}{i}" for i in range(count))


def layers(num_layers: int = L, num_heads: int = H) -> tuple[records.Layer, ...]:
    heads = tuple(map(str, range(num_heads)))
    return tuple(records.Layer(f"layer {i}", heads) for i in range(num_layers))


def example(
    name: str = "first", *, seed: int = 0, queries=None, keys=None, masked=None
) -> map_set.Example:
    queries, keys = queries or words(T, "q"), keys or words(S, "k")
    shape = H, queries.bins, keys.bins
    maps = [weights(*shape, seed=seed + i) for i in range(L)]
    if masked is not None:
        maps = [np.where(masked, 0, each).astype(np.float32) for each in maps]
    hidden = None if masked is None else (masked,) * L
    return map_set.Example(name, queries, keys, tuple(maps), hidden)


def maps(*examples: map_set.Example, name: str = ""):
    return map_set.MapSet(name, layers(), examples or (example(),))


def show(*sets: map_set.MapSet, title: str = "a title", **more) -> map_set.Dossier:
    return map_set.Dossier(title, sets or (maps(),), **more)


def hostile() -> map_set.Dossier:
    """Returns maps in which every text wants to run."""
    tokens = map_set.Axis.whole(HOSTILE)
    names = [HOSTILE[i % len(HOSTILE)] for i in range(L * (H + 1))]
    rows = [
        records.Layer(names[i * (H + 1)], tuple(names[i * (H + 1) + 1 :][:H]))
        for i in range(L)
    ]
    one = example(HOSTILE[0], queries=tokens, keys=tokens)
    answers = map_set.Answers(
        tuple(HOSTILE), tuple(((text, 0.5), (text, 0.25)) for text in HOSTILE)
    )
    one = one._replace(note=HOSTILE[1], answers=answers)
    sets = [map_set.MapSet(HOSTILE[i], tuple(rows), (one, one)) for i in range(2)]
    return show(*sets, title=HOSTILE[0], notes=tuple(HOSTILE))


def long(num_bins: int = 32) -> map_set.Dossier:
    """Returns a pooled map of 1,024 positions."""
    count = 1024
    edges = np.arange(num_bins + 1) * (count // num_bins)
    axis = map_set.Axis(tuple(f"w{i}" for i in range(count)), edges)
    coarse = np.full((H, num_bins, num_bins), 1 / num_bins, np.float32)
    one = map_set.Example("long", axis, axis, (coarse,) * L)
    return show(maps(one))


def kinds() -> map_set.Dossier:
    """Returns maps of an encoder, a decoder and cross-attention, which is aligned."""
    source = map_set.Axis.whole("34 Birnen")._replace(label="source token")
    read = ("<start>", *"drei", "und")
    target = (*read[1:], "<end>")
    reading = map_set.Axis.whole(read)._replace(
        label="token read", notes=tuple(f"predicts “{x}”" for x in target)
    )
    predicted = map_set.Axis.whole(target)._replace(
        label="token predicted", notes=tuple(f"reads “{x}”" for x in read)
    )
    alignment = np.zeros((len(target), 9), bool)
    alignment[[0, 1, 2, 4], [1, 1, 1, 0]] = True
    axes = {
        "encoder": map_set.Axes(source, source, has_answers=False),
        "cross": map_set.Axes(predicted, source, alignment),
    }
    causal = np.triu(np.ones((6, 6), bool), 1)
    masked = (None, None, causal, causal, None, None)
    shapes = [(9, 9)] * 2 + [(6, 6)] * 2 + [(6, 9)] * 2
    rows = []
    for i, (shape, hidden) in enumerate(zip(shapes, masked, strict=True)):
        hidden = np.zeros(shape, bool) if hidden is None else hidden
        rows.append(np.where(hidden, 0, weights(H, *shape, seed=i)).astype("f4"))
    # The last head of the last layer looks where it should in three rows of four.
    rows[-1][-1] = 0.02 + 0.8 * alignment
    rows[-1][-1][4] = rows[-1][-1][4, ::-1]
    rows[-1][-1] /= rows[-1][-1].sum(-1, keepdims=True)
    answers = map_set.Answers(target, tuple(((x, 0.9), ("?", 0.05)) for x in target))
    one = map_set.Example(
        "first", reading, reading, tuple(rows), masked, answers=answers, kinds=axes
    )
    names = [(kind, i) for kind in ("encoder", "decoder", "cross") for i in range(2)]
    heads = tuple(map(str, range(H)))
    own = tuple(records.Layer(f"{kind} {i}", heads, kind) for kind, i in names)
    aligned = np.full((6, H), np.nan)
    aligned[4:] = [[0, 0.25, 0.5], [0.25, 0, 0.75]]
    number = Column(aligned, "share", "rows whose largest weight is aligned")
    return show(map_set.MapSet("", own, (one,), columns={"aligned": number}))


def of_size(num_layers, num_heads, length, num_examples=1) -> map_set.Dossier:
    """Returns causal maps of this many layers, heads, positions and examples."""
    generator = np.random.default_rng(0)
    axis = words(length)
    hidden = np.triu(np.ones((length, length), bool), 1)
    examples = []
    for i in range(num_examples):
        scores = generator.standard_normal((num_layers, num_heads, length, length))
        # Heads prefer distances, as trained ones do: pure noise cannot be compressed.
        reach = np.exp(generator.uniform(0, 4, (num_layers, num_heads, 1, 1)))
        distance = np.arange(length)[:, None] - np.arange(length)
        exponents = scores - np.abs(distance) / reach
        masses = np.where(hidden, 0, np.exp(exponents))
        shares = (masses / masses.sum(-1, keepdims=True)).astype(np.float32)
        examples.append(
            map_set.Example(
                f"example {i}", axis, axis, tuple(shares), (hidden,) * num_layers
            )
        )
    heads = layers(num_layers, num_heads)
    return show(map_set.MapSet("", heads, tuple(examples)))

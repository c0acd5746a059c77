"""Measures of edges are what they say, run by run in float64 NumPy."""

import functools

import jax
import numpy as np
import pytest

from mha_haiku import heads, models, rasp
from mha_haiku.lab.heads import graph as graphs
from tests.lab.heads import test_circuits, test_kinds, test_patching
from tests.lab.heads.small_models import build, config

H, LAYERS = 2, 2
SMALL = {"num_layers": LAYERS, "attention__num_heads": H}


class Oracle(test_patching.Oracle):
    """Runs of a pre-norm model in which each reader sums what its edges carry.

    A reader's stream is summed by hand, and what a part makes of it is read in a run of
    the whole model that is given this stream.
    """

    def __init__(self, params, of, clean, corrupted, graph):
        super().__init__(params, of, clean, corrupted)
        self.graph = graph
        self.edges = [(graph.writers[w], graph.readers[r]) for w, r in graph.places]

    def written(self, part, value):
        """Returns what each node of a part writes, without the bias, by node."""
        if not part.groups:
            return {part.nodes[0]: value}
        weights = np.float64(self.params[f"{part.path}/linear"]["w"])
        weights = weights.reshape(len(part.nodes), -1, weights.shape[-1])
        return {x: value[:, :, i] @ weights[i] for i, x in enumerate(part.nodes)}

    def patched(self, kept):
        """Returns the metric where edges are kept by `[E]`."""
        kept = dict(zip(self.edges, kept, strict=True))
        embeddings = [(graphs.EMBEDDING, "embedding", "encoder")]
        embeddings += [(graphs.DECODER_EMBEDDING, "decoder_embedding", "decoder")]
        embeddings = [x for x in embeddings if x[1] in self.seen]
        ours = {node: self.seen[name] for node, name, _ in embeddings}
        theirs = {node: self.other[name] for node, name, _ in embeddings}
        streams = {stack: self.seen[name] for _, name, stack in embeddings}

        def read(site, reader, streams):
            total = streams[site.partition("/")[0]].copy()
            for (sender, other), share in kept.items():
                if other == reader and share != 1:
                    total += (1 - share) * (theirs[sender] - ours[sender])
            return total

        for layer in self.graph.layers:
            for part in layer:
                made = {}
                for site, kind in zip(part.reads, "qkv", strict=False):
                    if not part.groups:
                        source = read(site, (part.nodes[0], "feed_forward"), streams)
                        seen = self.run(changes={site: lambda _, x=source: x})[1]
                        made[f"{part.path}/output"] = seen[f"{part.path}/output"]
                        continue
                    for i, node in enumerate(part.nodes):
                        source = read(site, (node, kind), streams)
                        seen = self.run(changes={site: lambda _, x=source: x})[1]
                        for end in test_patching.NAMES[kind]:
                            name = f"{part.path}/{end}"
                            if name in seen:
                                own = made.setdefault(name, seen[name].copy())
                                own[:, :, i] = seen[name][:, :, i]
                changes = {name: lambda _, x=x: x for name, x in made.items()}
                seen = self.run(changes=changes)[1]
                ours |= self.written(part, seen[part.written])
                theirs |= self.written(part, self.other[part.written])
                stack = part.path.partition("/")[0]
                streams[stack] = streams[stack] + seen[f"{part.path}/output"]
        end = self.graph.end
        stream = read(end, (graphs.LOGITS, "logits"), streams)
        return self.run(changes={end: lambda _: stream})[0]


@functools.cache
def _case(name):
    """Returns a subject, corrupted batches and the oracle of a tiny model."""
    if name.startswith("encoder_decoder"):
        model, params = test_circuits._encoder_decoder()
        of = test_kinds.CONFIG
        if name.endswith("single"):  # as the oracle needs: keys are no other head's
            of = of.replace(attention=dict(num_key_value_heads=test_kinds.H))
            params = test_circuits.expanded(params, test_kinds.H, 2)
            sizes = {"num_tokens": test_kinds.SOURCES, "feature_size": None}
            model = models.build(of, **sizes, num_classes=test_kinds.TARGETS)
        clean, corrupted = test_kinds._example(0), test_kinds._example(2)
    else:
        of = config(**SMALL, **FIELDS[name])
        model, params = build(of), test_patching._sharp(of)
        clean, corrupted = test_patching._pair()
    subject = heads.Measured(model, heads.metrics.loss, params, [clean])
    oracle = Oracle(params, of, clean, corrupted, graphs.of_model(model))
    return subject, [corrupted], oracle


FIELDS = {
    "gated": {"attention__gate": "head"},
    "rms": {"norm__kind": "rms_norm", "positions": "rotary"},
    "no units": {"feed_forward__hidden_size": 0},
}


def _patterns(count, seed=0):
    generator = np.random.default_rng(seed)
    some = (generator.uniform(size=(2, count)) < 0.5).astype(float)
    shares = generator.uniform(size=(1, count))
    return np.concatenate([np.ones((1, count)), np.zeros((1, count)), some, shares])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_edges_carry_what_is_kept_and_the_rest_of_the_other_run(name):
    """All edges patched are the corrupted run, none of them the clean one."""
    subject, corrupted, oracle = _case(name)
    kept = _patterns(len(oracle.edges))
    found = heads.with_edges(subject, corrupted, kept)
    np.testing.assert_allclose(found[:, 0], oracle.clean, atol=5e-6)
    np.testing.assert_allclose(found[:, 1], oracle.corrupted, atol=5e-6)
    wanted = [oracle.patched(x) for x in kept]
    np.testing.assert_allclose(found, np.transpose(wanted), atol=5e-6)
    assert np.ptp(found, axis=1).min() > 1e-3


@pytest.mark.slow
def test_edges_of_an_encoder_decoder_carry_what_is_kept():
    subject, corrupted, oracle = _case("encoder_decoder, single")
    same = subject.batches[0]._replace(
        inputs=corrupted[0].inputs, decoder_inputs=corrupted[0].decoder_inputs
    )
    oracle = Oracle(oracle.params, oracle.of, subject.batches[0], same, oracle.graph)
    kept = _patterns(len(oracle.edges))[[0, 1, 3]]
    found = heads.with_edges(subject, [same], kept)
    np.testing.assert_allclose(found[:, 1], oracle.corrupted, atol=5e-6)
    wanted = [oracle.patched(x) for x in kept]
    np.testing.assert_allclose(found, np.transpose(wanted), atol=5e-6)


def _slopes(run, count, *, step=1e-4):
    """Returns what a run loses at first order when each share goes from 1 to 0."""
    result = []
    for i in range(count):
        shares = np.ones(count)
        low, high = (
            run(shares + sign * step * (np.arange(count) == i)) for sign in (-1, 1)
        )
        result.append((low - high) / (2 * step))
    return np.transpose(result)


@pytest.mark.slow
def test_attribution_is_the_derivative_along_each_edge():
    subject, corrupted, oracle = _case("gated")
    found = heads.edge_attribution(subject, corrupted)
    wanted = _slopes(oracle.patched, len(oracle.edges))
    np.testing.assert_allclose(found.per_example, wanted, atol=2e-6)
    assert (np.abs(wanted).max(0) > 1e-5).all()


@pytest.mark.slow
def test_integrated_attribution_of_the_embedding_is_all_that_changes():
    """Completeness: its edges add up to the change of the metric, ever more exactly."""
    subject, corrupted, oracle = _case("gated")
    change = oracle.corrupted - oracle.clean
    sums = {}
    for steps in (4, 32, 64):
        found = heads.integrated_edge_attribution(subject, corrupted, steps=steps)
        is_first = (found.senders == graphs.EMBEDDING).all(-1)
        sums[steps] = found.per_example[:, is_first].sum(-1)
    errors = [np.abs(x - change).max() for x in sums.values()]
    assert errors[1] < errors[0] / 6 and errors[2] < errors[0] / 12
    # The error falls as one over the number of steps, and so can be taken away.
    np.testing.assert_allclose(2 * sums[64] - sums[32], change, atol=1e-4)
    assert np.abs(change).max() > 5e-3


@pytest.mark.slow
def test_grouped_heads_and_scanned_layers_have_the_edges_of_their_twins(monkeypatch):
    grouped = config(
        num_layers=2, attention__num_heads=4, attention__num_key_value_heads=2
    )
    single = config(num_layers=2, attention__num_heads=4)
    params = test_patching._sharp(grouped)
    clean, corrupted = test_patching._pair()
    one = heads.Measured(build(grouped), heads.metrics.loss, params, [clean])
    twin = test_circuits.expanded(params, 4, 2)
    other = heads.Measured(build(single), heads.metrics.loss, twin, [clean])
    kept = _patterns(len(graphs.of_model(one.model).places))

    def of(subject):
        slopes = heads.edge_attribution(subject, [corrupted]).per_example
        return slopes, heads.with_edges(subject, [corrupted], kept)

    wanted = of(one)
    monkeypatch.setattr(heads.model_runs, "FEW_LAYERS", 1)
    for found in (
        of(other),
        of(one._replace(model=one.model._replace(description=""))),
    ):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), found, wanted
        )


def _induction():
    compiled = rasp.compile(rasp.PROGRAMS["induction"](), num_heads=3)
    clean, other = (compiled.examples(8, seed=i) for i in (0, 1))
    of = heads.Measured(compiled.model, heads.metrics.loss, compiled.params, [clean])
    return compiled, of, [other]


INDUCTION = {
    ("embedding", "0.2", "v"),
    ("embedding", "1.2", "q"),
    ("embedding", "1.2", "v"),
    ("0.2", "1.2", "k"),
    ("1.2", "logits", "logits"),
}


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["integrated_edge_attribution", "edge_patching"])
def test_the_circuit_of_induction_is_five_edges(measure):
    compiled, subject, corrupted = _induction()
    assert compiled.edges == {((0, 2), (1, 2), "k")}
    found = heads.circuit(subject, corrupted, edges=5, measure=measure)
    assert {(x["sender"], x["receiver"], x["kind"]) for x in found.rows()} == INDUCTION
    assert found.faithfulness == pytest.approx(1, abs=1e-3)
    assert found.rest == pytest.approx(0, abs=1e-3)
    assert "5 of 52 edges" in repr(found) and found.rows()[0]["value"] > 0


def test_edges_on_no_way_are_left_out():
    graph = graphs.of_model(build(config(**SMALL)))
    place = {
        (
            graphs.label(graph.writers[w]),
            graphs.label(graph.readers[r][0]),
            graph.readers[r][1],
        ): i
        for i, (w, r) in enumerate(graph.places.tolist())
    }
    edges = [
        ("0.1", "1.0", "k"),  # 0.1 reads nothing yet
        ("1.0", "logits", "logits"),
        ("embedding", "feed-forward 1", "feed_forward"),  # which nothing reads
        ("embedding", "1.1", "q"),  # the same
        ("embedding", "0.1", "v"),
    ]
    strength = np.zeros(len(place))
    for i, edge in enumerate(edges):
        strength[place[edge]] = 9 - i
    # Weaker edges follow in their order: three are a way, and no fewer are any.
    wanted = np.zeros(len(place), bool)
    wanted[[place[edges[i]] for i in (0, 1, 4)]] = True
    np.testing.assert_array_equal(heads.strongest(graph, strength, 3), wanted)
    assert not heads.strongest(graph, strength, 2).any()
    assert heads.strongest(graph, strength, len(place)).all()
    for count in range(0, len(place), 7):
        assert heads.strongest(graph, strength, max(1, count)).sum() <= max(1, count)


def test_models_that_are_no_graph_are_refused():
    subject, corrupted, _ = _case("gated")
    model = build(config(**SMALL, norm__position="post"))
    with pytest.raises(ValueError, match="a stream that is the sum"):
        heads.edge_attribution(subject._replace(model=model), corrupted)
    unknown = models.Model(None, subject.model.apply)
    with pytest.raises(ValueError, match="models.build or interop.load"):
        heads.edge_patching(subject._replace(model=unknown), corrupted)
    stacked = subject._replace(
        model=subject.model.scanned, params=models.stacked(subject.params)
    )
    with pytest.raises(ValueError, match="looped layers"):
        heads.edge_attribution(stacked, corrupted)
    with pytest.raises(ValueError, match="measure must be one of"):
        heads.circuit(subject, corrupted, edges=3, measure="guessing")
    with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
        heads.integrated_edge_attribution(subject, corrupted, steps=0)
    for kept in (np.ones((1, 1)), np.ones((2, 10**3)), np.ones(4)):
        with pytest.raises(ValueError, match=r"kept must be \[X, E\], E = "):
            heads.with_edges(subject, corrupted, kept)

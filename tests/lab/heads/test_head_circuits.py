"""Head-to-head edges of a function agree with the whole graph and with paths."""

import numpy as np
import pytest

from mha_haiku import heads
from mha_haiku.lab.heads import graph as graphs
from mha_haiku.lab.heads import head_circuits
from tests.lab.heads import test_circuits, test_edge_measures, test_patching
from tests.lab.heads.small_models import build, config


def _by_ends(graph):
    ends = (x.tolist() for x in graph.ends)
    return {(*a, *b, kind): i for i, (a, b, kind) in enumerate(zip(*ends, strict=True))}


@pytest.mark.slow
def test_edges_carry_what_they_do_in_the_graph_of_a_model_without_units():
    subject, corrupted, _ = test_edge_measures._case("no units")
    graph = graphs.of_model(subject.model)
    own = _by_ends(head_circuits.graph_of_heads(subject))
    places = _by_ends(graph)
    assert set(own) == {x for x in places if x[:2] != graphs.EMBEDDING}
    shares = test_edge_measures._patterns(len(own))
    kept = np.ones((len(shares), len(places)))  # of the embedding, all
    kept[:, [places[x] for x in own]] = shares
    found = heads.with_head_edges(subject, corrupted, shares)
    wanted = heads.with_edges(subject, corrupted, kept)
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    assert np.ptp(found, axis=1).min() > 1e-3


@pytest.mark.slow
def test_worth_of_an_edge_is_exact_where_the_rest_is_linear():
    """The last layer's heads, of a metric that is linear in what they write."""
    of = config(num_layers=2, attention__num_heads=2, feed_forward__hidden_size=0)
    of = of.replace(norm=dict(kind="none"))
    clean, corrupted = test_patching._pair()
    params = test_patching._sharp(of)

    def metric(logits, example):
        return logits[..., 0].sum(-1) - logits[..., 1].sum(-1)

    subject = heads.Measured(build(of), metric, params, [clean])
    found = heads.circuit_of_heads(subject, [corrupted], edges=5)
    paths = heads.path_patching(subject, [corrupted])
    assert found.kept.sum() == 5 and found.measure == "head_edge_attribution"
    ends = [(x.senders, x.receivers, x.kinds) for x in (found.edges, paths)]
    own, theirs = (
        {(*a, *b, kind): i for i, (a, b, kind) in enumerate(zip(*x, strict=True))}
        for x in ends
    )
    assert set(own) == set(theirs)
    columns = [theirs[x] for x in own]
    np.testing.assert_allclose(
        found.edges.per_example, paths.per_example[:, columns], rtol=1e-5, atol=2e-5
    )
    assert np.abs(found.edges.per_example).min(0).max() > 1e-3


@pytest.mark.slow
def test_a_circuit_of_all_edges_keeps_all_and_heads_that_share_keys_have_their_own():
    sizes = {"num_layers": 2, "attention__num_heads": 4}
    grouped = config(attention__num_key_value_heads=2, **sizes)
    params = test_patching._sharp(grouped)
    clean, corrupted = test_patching._pair()
    circuits = []
    for of, own in (
        (grouped, params),
        (config(**sizes), test_circuits.expanded(params, 4, 2)),
    ):
        subject = heads.Measured(build(of), heads.metrics.loss, own, [clean])
        count = len(head_circuits.graph_of_heads(subject).places)
        circuits += [
            heads.circuit_of_heads(subject, [corrupted], edges=x) for x in (count, 12)
        ]
    whole, some, whole_twin, some_twin = circuits
    # The effects of the two pairs nearly cancel: shares are those of each pair.
    base, other = whole.edges.base, whole.edges.other
    shares = [(x - other) / (base - other) for x in (whole.only, whole.without)]
    np.testing.assert_allclose(shares, [[1, 1], [0, 0]], atol=1e-4)
    assert whole.kept.all()
    for one, twin in ((whole, whole_twin), (some, some_twin)):
        np.testing.assert_allclose(
            one.edges.per_example, twin.edges.per_example, atol=5e-6
        )
        np.testing.assert_allclose(one.only, twin.only, atol=5e-6)

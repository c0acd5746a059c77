"""Roles of heads whose maps are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, models, rasp, tasks
from tests.lab.heads.small_models import build, config, example, random_params


def _one_layer(score_of, num_tokens=9):
    """A layer whose heads attend as [T, S] scores over positions say.

    Its stream holds the one-hot codes of the token and of the position.
    """
    count, length = len(score_of), len(score_of[0])
    of = models.ModelConfig().replace(
        model_size=num_tokens + length,
        embedding=dict(max_length=length),
        attention=dict(num_heads=count, key_size=length, scale=1.0),
        feed_forward=dict(hidden_size=0),
        norm=dict(kind="none"),
    )
    model = models.build(
        of, num_tokens=num_tokens, feature_size=None, num_classes=num_tokens
    )
    inputs = np.random.default_rng(0).integers(0, num_tokens, (6, length), np.int32)
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32),
        jax.eval_shape(model.init, jax.random.key(0), inputs),
    )
    params["embedding"]["embeddings"][:, :num_tokens] = np.eye(num_tokens)
    params["positions"]["positions"][:, num_tokens:] = np.eye(length)
    for kind, codes in (("query", score_of), ("key", [np.eye(length)] * count)):
        weights = params[f"encoder/layer_0/attention/{kind}"]["w"]
        weights[num_tokens:] = np.concatenate(codes, axis=1)
    example = tasks.Example(inputs, inputs, np.ones(inputs.shape, np.float32))
    return heads.Measured(model, heads.metrics.loss, params, [example])


@pytest.mark.slow
def test_roles_are_told_by_their_thresholds():
    length = 12
    previous, other = (np.roll(np.eye(length), -k, axis=1) for k in (1, 5))
    first, sixth = (np.eye(length)[[k]].repeat(length, 0) for k in (0, 5))
    weights = {
        "positional": 0.48 * previous + 0.4 * other,
        "previous_token": 0.8 * previous,
        "next_token": 0.8 * previous.T,
        "own_position": 0.8 * np.eye(length),
        "first_token": 0.55 * first,
        "no_clear_role": 0.46 * first + 0.4 * sixth,
        "broad": np.where((np.arange(length) % 11 > 2)[None], 1 / 8, 0) + 0 * first,
        "uniform": np.random.default_rng(0).uniform(0.5, 1, (length, length)) / length,
        # Further above the threshold of "positional", which is for other offsets.
        "both": 0.6 * previous,
    }
    scores = [
        np.log(x + (1 - x.sum(-1, keepdims=True)) / length + 1e-9)
        for x in weights.values()
    ]
    subject = _one_layer(scores)
    found = heads.roles(subject.model, subject.params, subject.batches)
    assert found["role"].names[0].tolist() == [*weights][:-1] + ["previous_token"]
    assert found["offset"].mean[0, :4].tolist() == [1, 1, -1, 0]
    share = found["positional"].mean[0, 0]
    assert share == pytest.approx(11 / 12)
    wanted = pytest.approx(np.log(8) / np.log(12), abs=1e-5)
    assert found["relative_entropy"].mean[0, 6] == wanted
    assert 0.95 < found["relative_entropy"].mean[0, 7] < 0.999
    assert "separator" not in found


@pytest.mark.parametrize("name", ["previous_token", "next_token", "own_position"])
def test_heads_of_a_near_offset_are_not_positional(name):
    both = {name: 0.55, "positional": 1.0, "first_token": 0.3}
    assert heads.role_of(both) == name
    # Below the threshold of the near offset there is no better name.
    assert heads.role_of(both | {name: 0.45}) == "positional"
    # Another role is still preferred if it is further above its threshold.
    assert heads.role_of(both | {"first_token": 0.7}) == "first_token"


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, [6, 4]])
def test_a_head_that_reads_backwards_is_anti_diagonal(lengths):
    """Query t looks at the last valid key but t."""
    own = [6, 6] if lengths is None else lengths
    key = np.broadcast_to(np.eye(6)[None, :, None], (2, 6, 1, 6))
    query = np.zeros((2, 6, 1, 6))
    for n, length in enumerate(own):
        query[n, :length, 0] = np.pad(np.eye(length)[::-1], ((0, 0), (0, 6 - length)))
    valid = np.arange(6) < np.array(own)[:, None]
    mask = valid[:, :, None] & valid[:, None]
    _, found = mh.attend(99 * query, key, key, mask=mask)
    told = heads.role_evidence(found, found.statistics(), lengths=lengths)
    sums = {name: np.asarray(x).sum(0) for name, x in told.items()}
    roles = heads.roles_of_evidence([sums])
    assert roles["role"].names.tolist() == [["anti_diagonal"]]
    assert roles["anti_diagonal"].mean[0, 0] == 1
    if lengths is not None:
        told = heads.role_evidence(found, found.statistics())
        sums = {name: np.asarray(x).sum(0) for name, x in told.items()}
        roles = heads.roles_of_evidence([sums])
        assert roles["anti_diagonal"].mean[0, 0] == pytest.approx(0.6)


@pytest.mark.slow
def test_offsets_far_away_are_others():
    key = np.eye(200)[None, :, None]
    _, found = mh.attend(999 * np.roll(key, -150, axis=1), key, key)
    told = heads.role_evidence(found, found.statistics())
    counts = np.asarray(told["positional"])[0, 0]
    # Queries 0 to 49 look 150 ahead, the others 50 back.
    assert (counts[-1], counts[128 + 50], counts.sum()) == (50, 150, 200)


@pytest.mark.slow
def test_causal_attention_of_others_has_the_roles_of_our_own():
    x = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    seen = np.tri(5, dtype=bool)[None, None]

    def by_others(query, key, value):
        scores = jnp.einsum("bthk,bshk->bhts", query, key) / 2
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        return jnp.einsum("bhts,bshv->bthv", weights, value)

    _, found = mh.look(by_others, ["*/map"])(*x)
    _, own = mh.attend(*x, mask=mh.masks.causal())
    told, expected = (
        heads.role_evidence(map_, map_.statistics()) for map_ in (*found.values(), own)
    )
    assert told.keys() == expected.keys()
    for name in told:
        np.testing.assert_allclose(told[name], expected[name], atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_roles_are_means_over_examples_and_queries_that_count():
    length = 8
    subject = _one_layer([20 * np.eye(length), np.zeros((length, length))])
    (batch,) = subject.batches
    count = len(batch.inputs)
    batches = [
        batch._replace(lengths=np.full(count, each, np.int32)) for each in (8, 4)
    ]
    found = heads.roles(subject.model, subject.params, batches)
    assert found["role"].names[0].tolist() == ["own_position", "uniform"]
    assert found["positional"].mean[0, 0] == 1
    assert found["relative_entropy"].mean[0, 1] == pytest.approx(1, abs=1e-6)
    sink = (1 / 8 + 1 / 4) / 2
    assert found["first_token"].mean[0, 1] == pytest.approx(sink, abs=1e-6)
    # Of induction the queries count whose token has occurred before.
    mass = shares = 0
    for each, size in zip(batches, (8, 4), strict=True):
        output = subject.model.apply(
            subject.params, None, each.inputs, lengths=each.lengths, is_training=False
        )
        mass += output.maps[0].statistics(tokens=each.inputs).after_same_token.sum(0)
        for row in each.inputs[:, :size].tolist():
            shares += np.mean([x in row[:i] for i, x in enumerate(row)])
    np.testing.assert_allclose(found["induction"].mean[0], mass / shares, rtol=1e-5)


@pytest.mark.slow
def test_separators_are_those_that_are_given():
    subject = _one_layer([np.zeros((6, 6))] * 2, num_tokens=5)
    (batch,) = subject.batches
    tokens = batch.inputs.copy()
    tokens[:, 2], tokens[:, [0, 1, 3, 4, 5]] = 4, tokens[:, [0, 1, 3, 4, 5]] % 4
    batch = batch._replace(inputs=tokens)
    params = subject.params
    params["encoder/layer_0/attention/query"]["w"][:5, 0] = 30
    params["encoder/layer_0/attention/key"]["w"][:, 0] = np.arange(11) == 4
    found = heads.roles(subject.model, params, [batch], separators=[4])
    assert found["role"].names[0].tolist() == ["separator", "uniform"]
    assert found["separator"].mean[0] == pytest.approx([1, 1 / 6], abs=1e-4)


@pytest.mark.slow
def test_induction_is_judged_where_a_token_occurs_again():
    known = rasp.compile(rasp.PROGRAMS["induction"](), num_heads=2)
    ((layer, head),) = [x for x, role in known.heads.items() if role == "induction"]
    found = heads.roles(known.model, known.params, [known.examples(4)])
    assert found["induction"].mean[layer, head] > 0.9
    assert found["role"].names[layer, head] == "induction"


@pytest.mark.slow
def test_heads_of_a_pruned_model_keep_their_names_and_places_without_one_have_none():
    of = config()
    params, pruned = heads.prune(random_params(of), of, [[0, 3], [], [2]])
    model, batches = build(pruned), [example()]
    found = heads.roles(model, params, batches)
    wanted = [[False] * 2, [True] * 2, [False, True]]
    assert (found["role"].names == "").tolist() == wanted
    assert np.isnan(found["first_token"].mean[1]).all()
    of_confidence = heads.confidence(
        heads.Measured(model, heads.metrics.loss, params, batches)
    )
    for measured in (found, of_confidence):
        assert [layer.heads for layer in measured.layers] == [("0", "3"), (), ("2",)]
        rows = [(row["layer"], row["head"]) for row in measured.table().rows]
        assert rows == [(0, 0), (0, 3), (2, 2)]
        assert measured.name_of(0, 1) == "layer 0, head 3"


def test_share_on_a_picture_is_of_the_words_that_see_it():
    weights = np.eye(5)
    weights[3:] = [[1 / 4, 3 / 4, 0, 0, 0], [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 2]]
    key, query = np.eye(5), np.log(weights + 1e-30) * 5**0.5
    key, query = (x[None, :, None] for x in (key, query))
    _, found = mh.attend(query, key, key, mask=mh.masks.causal())
    marks = np.arange(5)[None] % 3 > 0  # of 1, 2 and 4
    marks[:, 4] = False
    told = heads.role_evidence(found, found.statistics(), pictures=marks)
    np.testing.assert_allclose(
        told["on_image"], [[[(3 / 4 + 2 / 8) / 2, 1]]], atol=1e-6
    )

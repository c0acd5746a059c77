"""Heads of encoder-decoders: each kind is measured and named like other heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, heads, masks, models, tasks
from mha_haiku.lab.heads import model_runs
from tests import tiny_models
from tests.lab.heads.small_models import oracle

B, T, S, H, K = 3, 4, 6, 4, 2
SOURCES, TARGETS = 13, 7
LAYERS, DECODER_LAYERS = 1, 2
PARTS = LAYERS + 2 * DECODER_LAYERS
EMPTY = 1  # the example whose source is only padding

CONFIG = tiny_models.config(
    family="encoder_decoder",
    num_layers=LAYERS,
    decoder__num_layers=DECODER_LAYERS,
    attention__num_heads=H,
    attention__num_key_value_heads=2,
    attention__key_size=K,
)


def _example(seed=0):
    generator = np.random.default_rng(seed)
    return tasks.Example(
        inputs=generator.integers(0, SOURCES, (B, S)).astype(np.int32),
        targets=generator.integers(0, TARGETS, (B, T)).astype(np.int32),
        weights=np.float32([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]]),
        lengths=np.int32([S, 0, 5]),
        decoder_inputs=generator.integers(0, TARGETS, (B, T)).astype(np.int32),
        decoder_lengths=np.int32([2, T, 3]),
    )


@pytest.fixture(scope="module")
def of():
    """An encoder-decoder with random parameters, and a batch."""
    model = models.build(
        CONFIG, num_tokens=SOURCES, feature_size=None, num_classes=TARGETS
    )
    example = _example()
    params = tiny_models.random_parameters(model, example.model_inputs())
    return heads.Measured(model, heads.metrics.loss, params, [example])


@pytest.fixture(scope="module")
def clean(of):
    """The model's output for the batch."""
    (example,) = of.batches
    return jax.jit(functools.partial(model_runs.run, of.model))(of.params, example)


NAMES = [f"{each.path}/heads" for each in models.heads_of_layers(CONFIG)]


def _loss(of, gates, passed=None, seen=None):
    """Returns the mean loss of each example, `[B]` float64, by the oracle.

    Heads pass on `passed` of their part, as far as they are ablated; None: nothing.
    What heads pass on in the end is put into `seen`.
    """
    (example,) = of.batches

    logits, values = oracle(CONFIG, of.params, example, gates, passed)
    if seen is not None:
        seen.update({part: values[name] for part, name in enumerate(NAMES)})
    each = np.log(np.exp(logits).sum(-1))
    each -= np.take_along_axis(logits, example.targets[..., None], -1)[..., 0]
    counts = example.weights > 0
    return np.where(counts, each, 0).sum(-1) / counts.sum(-1)


@pytest.mark.slow
def test_ablated_heads_of_each_kind_pass_on_their_mean(of):
    (example,) = of.batches
    outputs = {}
    before = _loss(of, np.ones((PARTS, H)), seen=outputs)
    lengths = [example.lengths, *[example.decoder_lengths] * (PARTS - LAYERS)]
    passed = [
        np.concatenate([x[:n] for x, n in zip(outputs[part], own, strict=True)]).mean(0)
        for part, own in enumerate(lengths)
    ]
    value = heads.ablation_values.mean(of.model, of.params, of.batches)
    found = heads.ablation(of, ablation_value=value).per_example
    sizes = []
    for part, h in ((part, part % H) for part in range(PARTS)):
        gates = np.ones((PARTS, H))
        gates[part, h] = 0
        wanted = _loss(of, gates, passed) - before
        np.testing.assert_allclose(found[:, part, h], wanted, atol=2e-5)
        sizes.append(np.abs(wanted).max())
    assert min(sizes) > 5e-4


@pytest.mark.slow
def test_padding_is_not_felt_by_any_measure(of):
    """Nor by its gradients; tokens without an embedding stand in it."""
    (example,) = of.batches
    valid = np.arange(S) < example.lengths[:, None]
    decoder_valid = np.arange(T) < example.decoder_lengths[:, None]
    odd = example._replace(
        inputs=np.where(valid, example.inputs, SOURCES + 1),
        decoder_inputs=np.where(decoder_valid, example.decoder_inputs, -5),
    )
    for measure in (heads.ablation, heads.gradient, heads.confidence):
        one, other = (
            measure(of._replace(batches=[each])).per_example for each in (example, odd)
        )
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
    kinds = np.array([each.kind for each in models.heads_of_layers(CONFIG)])
    confidence = heads.confidence(of).per_example[EMPTY]
    assert (confidence[kinds == "decoder"] > 0).all()
    assert not confidence[kinds != "decoder"].any()


@pytest.mark.slow
def test_vectors_of_texts_are_means_over_the_decoder(of, clean):
    (example,) = of.batches
    found = heads.drift.vectors(of.model, of.params, of.batches)
    rows = zip(np.float64(clean.output), example.decoder_lengths, strict=True)
    wanted = np.stack([x[:n].mean(0) for x, n in rows])
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def _attending(encoder, decoder, cross):
    """A model whose maps are given: per kind, scores of heads as `[T, S]`."""

    def apply(params, rng, inputs, *, lengths, decoder_inputs, decoder_lengths, **_):
        maps = []
        for path, scores, own, other in (
            ("encoder/layer_0/attention", encoder, lengths, lengths),
            ("decoder/layer_0/attention", decoder, decoder_lengths, decoder_lengths),
            ("decoder/layer_0/cross_attention", cross, decoder_lengths, lengths),
        ):
            scores = jnp.asarray(np.stack(scores), jnp.float32)
            query = jnp.repeat(scores.swapaxes(0, 1)[None], len(inputs), 0)
            count, num_heads = scores.shape[-1], len(scores)
            key = jnp.eye(count)[None, :, None].repeat(num_heads, 2)
            key = key.repeat(len(inputs), 0)
            mask = masks.padding(other, own)
            score = attention.dot_product(1.0)
            with jax.named_scope(path):
                _, each = attention.attend(query, key, key, mask=mask, score=score)
            maps.append(each)
        return models.Output(None, models.Maps(maps, (1, 1, 1)))

    counts = [list(range(len(each))) for each in (encoder, decoder, cross)]
    of = tiny_models.config(
        family="encoder_decoder",
        num_layers=1,
        attention__num_heads=max(map(len, counts)),
        attention__kept_heads=counts,
    )
    return models.Model(None, apply, config=of)


@pytest.mark.slow
def test_roles_of_cross_heads():
    down = 30 * np.eye(T, S)
    shuffled = 30 * np.eye(S)[[4, 0, 3, 1]]
    cross = {
        "aligned": shuffled,
        "monotonic": 30 * np.eye(S)[[0, 1, 3, 5]],
        "monotonic, up": 30 * np.eye(S)[[5, 3, 1, 0]],
        "positional": down,
        "first_token": 30 * np.eye(S)[[0] * T],
        "uniform": 0 * down,
        "no_clear_role": 30 * np.eye(S)[[2, 5, 0, 4]],
    }
    own = 30 * np.eye(S)[:, [1, 2, 3, 4, 5, 0]].T
    model = _attending([own], [30 * np.eye(T)], list(cross.values()))
    example = _example()._replace(
        lengths=np.int32([S] * B), decoder_lengths=np.int32([T] * B)
    )
    aligned = {0: {"aligned": shuffled > 0}, 1: {"aligned": shuffled > 0}, 2: {}}

    def align(row):
        number = (row.inputs == example.inputs).all(-1).argmax()
        return aligned[int(number)]

    found = heads.roles(model, {}, [example], align=align)
    names = [name.split(",")[0] for name in cross]
    assert found["role"].names[2].tolist() == names
    assert found["role"].names[0][0] == "next_token"
    assert found["role"].names[1][0] == "own_position"
    assert found["aligned"].mean[2, :2].tolist() == [1, 0.25]
    assert np.isnan(found["aligned"].mean[:2]).all()
    assert np.isnan(found["own_position"].mean[2]).all()
    assert found["offset"].mean[2, 3] == 0
    # Without a known alignment there is none to score.
    found = heads.roles(model, {}, [example], align=lambda row: {})
    assert "aligned" not in found
    assert found["role"].names[2, 0] == "no_clear_role"
    # Examples without a source have no part in the means.
    lengths = np.int32([S, 0, S])
    padded = heads.roles(model, {}, [example._replace(lengths=lengths)], align=align)
    assert padded["role"].names[2].tolist() == names


def test_rollout_is_of_one_stack():
    _, each = attention.attend(*np.zeros((3, T, 1, K), np.float32))
    with pytest.raises(ValueError, match=r"one stack of layers.*output\.maps\.encoder"):
        heads.rollout(models.Maps([each] * 3, (1, 1, 1)), 0)

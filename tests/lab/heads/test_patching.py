"""Patching is what it says, run by run in float64 NumPy."""

import functools

import numpy as np
import pytest

from mha_haiku import heads, models
from tests.lab.heads import small_models, test_circuits, test_kinds
from tests.lab.heads.small_models import build, config, example, random_params

NAMES = {"q": ("query", "gates"), "k": ("key",), "v": ("value",)}


def _loss(logits, batch):
    each = np.log(np.exp(logits).sum(-1))
    each = each - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    counts = batch.weights > 0
    return np.where(counts, each, 0).sum(-1) / counts.sum(-1)


class Oracle:
    """Runs of a model in which what is computed can be replaced."""

    def __init__(self, params, of, clean, corrupted):
        self.params, self.of = params, of
        self.examples = clean, corrupted
        self.paths = [each.path for each in models.heads_of_layers(of)]
        (self.clean, self.seen), (self.corrupted, self.other) = map(self.run, (0, 1))

    def run(self, i=0, changes=None):
        logits, seen = small_models.oracle(
            self.of, self.params, self.examples[i], changes=changes
        )
        return _loss(logits, self.examples[0]), seen

    def edge(self, sender, receiver, kind):
        held = {
            name: lambda _, x=x: x
            for name, x in self.seen.items()
            if name.endswith("/heads")
        }
        name, head = f"{self.paths[sender[0]]}/heads", sender[1]
        sent = self.seen[name].copy()
        sent[:, :, head] = self.other[name][:, :, head]
        held[name] = lambda _: sent
        loss, seen = self.run(changes=held)
        if kind == "logits":
            return loss - self.clean
        path, head = self.paths[receiver[0]], receiver[1]
        read = {
            f"{path}/{name}": lambda _, x=seen[f"{path}/{name}"]: x
            for name in NAMES[kind]
            if f"{path}/{name}" in seen
        }

        def received(x):
            own = self.seen[f"{path}/heads"].copy()
            own[:, :, head] = x[:, :, head]
            return own

        return self.run(changes=read | {f"{path}/heads": received})[0] - self.clean

    def activation(self, name, *place, position=slice(None), into_clean=True):
        """Replaces a value, or a head of it, at a position or all."""
        base, given = self.clean, self.other
        if not into_clean:
            base, given = self.corrupted, self.seen

        def patched(x):
            x, at = x.copy(), (slice(None), position, *place)
            x[at] = given[name][at]
            return x

        return self.run(0 if into_clean else 1, {name: patched})[0] - base


def _check_edges(found, oracle, *, atol=5e-6):
    np.testing.assert_allclose(found.base, oracle.clean, atol=atol)
    np.testing.assert_allclose(found.other, oracle.corrupted, atol=atol)
    ends = zip(
        found.senders.tolist(), found.receivers.tolist(), found.kinds, strict=True
    )
    wanted = [oracle.edge(*each) for each in ends]
    np.testing.assert_allclose(found.per_example, np.transpose(wanted), atol=atol)
    return np.abs(np.transpose(wanted)).mean(0)


SMALL = {"attention__num_heads": 2, "attention__num_key_value_heads": 1}


LENGTHS = np.int32([5, 3])


def _pair():
    """A clean and a corrupted batch."""
    weights = np.float32(np.arange(5) < LENGTHS[:, None])
    return [example(i, 2, LENGTHS)._replace(weights=weights) for i in (0, 1)]


def _sharp(of):
    """Returns random parameters of which heads decide much."""
    return {
        module: {name: x * 3 for name, x in leaves.items()}
        if "attention/" in module
        else leaves
        for module, leaves in random_params(of).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"attention__gate": "head", "attention__sinks": "learned"},
        pytest.param({"norm__position": "post"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "attention__gate": "head",
                "attention__score": "sigmoid",
                "attention__normalizer": "none",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_edges_are_paths_of_their_own(fields):
    of = config(**SMALL, **fields)
    clean, corrupted = _pair()
    params = _sharp(of)
    subject = heads.Measured(build(of), heads.metrics.loss, params, [clean])
    found = heads.path_patching(subject, [corrupted])
    assert len(found.kinds) == 3 * 4 * 3 + 6
    oracle = Oracle(params, of, clean, corrupted)
    sizes = _check_edges(found, oracle)
    assert (sizes > 0).all() and sizes.max() > 1e-3
    row = found.rows()[-1]
    assert (row["sender_layer"], row["receiver_layer"], row["kind"]) == (
        2,
        -1,
        "logits",
    )
    assert row["mean"] == found.mean[-1]


@pytest.mark.slow
def test_edges_of_an_encoder_decoder():
    model, params = test_circuits._encoder_decoder()
    clean, corrupted = test_kinds._example(0), test_kinds._example(2)
    subject = heads.Measured(model, heads.metrics.loss, params, [clean])
    some = [(0, 1), (1, 0), (2, 3), (3, 2), (4, 1)]
    found = heads.path_patching(subject, [corrupted], senders=some, receivers=some)
    parts = [each.address for each in models.heads_of_layers(test_kinds.CONFIG)]
    edges = {
        f"{parts[i]} {parts[j]} {kind}"
        for (i, _), (j, _), kind in zip(
            found.senders, found.receivers, found.kinds, strict=True
        )
        if kind != "logits"
    }
    own = [f"{a} decoder.1 {k}" for a in ("decoder.0", "cross.0") for k in "qkv"]
    cross = ["decoder.0 cross.0 q", "decoder.1 cross.1 q"]
    cross += [f"{a} cross.1 q" for a in ("decoder.0", "cross.0")]
    encoder = [f"encoder.0 cross.{i} {k}" for i in (0, 1) for k in "kv"]
    assert edges == {*own, *cross, *encoder}
    oracle = Oracle(params, test_kinds.CONFIG, clean, corrupted)
    sizes = _check_edges(found, oracle)
    assert (sizes > 0).all() and sizes.max() > 1e-3


@pytest.mark.slow
def test_patched_heads_and_layers_are_those_of_the_other_run():
    of = config(num_layers=2, **SMALL)
    clean, corrupted = _pair()
    params = _sharp(of)
    subject = heads.Measured(build(of), heads.metrics.loss, params, [clean])
    oracle = Oracle(params, of, clean, corrupted)
    found = heads.activation_patching(
        subject, [corrupted], per_position=True, into="corrupted"
    )
    assert found.axes == ("layer", "head", "position")
    for i, h, t in np.ndindex(found.mean.shape):
        name = f"encoder/layer_{i}/attention/heads"
        wanted = oracle.activation(name, h, position=t, into_clean=False)
        np.testing.assert_allclose(found.per_example[:, i, h, t], wanted, atol=1e-5)
    np.testing.assert_allclose(found.base, oracle.corrupted, atol=1e-5)
    found = heads.activation_patching(
        subject, [corrupted], what="layers", per_position=True
    )
    assert found.axes == ("layer", "position")
    for i, t in np.ndindex(found.mean.shape):
        wanted = oracle.activation(f"encoder/layer_{i}/stream", position=t)
        np.testing.assert_allclose(found.per_example[:, i, t], wanted, atol=1e-5)
    whole = (found.other - found.base).mean()
    np.testing.assert_allclose(found.share, found.mean / whole)
    row = found.rows()[7]
    assert (row["layer"], row["position"], row["mean"]) == (1, 2, found.mean[1, 2])


@pytest.mark.slow
def test_patched_heads_of_an_encoder_decoder():
    model, params = test_circuits._encoder_decoder()
    clean, corrupted = test_kinds._example(0), test_kinds._example(2)
    subject = heads.Measured(model, heads.metrics.loss, params, [clean])
    found = heads.activation_patching(subject, [corrupted], per_position=True)
    assert found.kinds == ("encoder", "decoder", "decoder", "cross", "cross")
    oracle = Oracle(params, test_kinds.CONFIG, clean, corrupted)
    beyond = test_kinds.T
    assert np.isnan(found.mean[1:, :, beyond:]).all()
    for place in [(0, 2, 5), (1, 0, 3), (3, 1, 0)]:
        name = f"{oracle.paths[place[0]]}/heads"
        wanted = oracle.activation(name, place[1], position=place[2])
        np.testing.assert_allclose(found.per_example[:, *place], wanted, atol=1e-5)
    with pytest.raises(ValueError, match="what must be 'heads'"):
        heads.activation_patching(subject, [corrupted], what="layers")


def test_what_does_not_pair_is_refused():
    of = config(**SMALL)
    clean, corrupted = _pair()
    subject = heads.Measured(build(of), heads.metrics.loss, random_params(of), [clean])
    shorter = corrupted._replace(inputs=corrupted.inputs[:, :4])
    with pytest.raises(ValueError, match="corrupted must have inputs with the shapes"):
        heads.path_patching(subject, [shorter])
    with pytest.raises(TypeError, match="batches must be a list"):
        heads.activation_patching(subject, iter([corrupted]))
    with pytest.raises(ValueError, match=r"senders must be pairs.*got \(0, 2\)"):
        heads.path_patching(subject, [corrupted], senders=[(0, 2)])
    with pytest.raises(ValueError, match="kinds must be one of q, k, v, logits"):
        heads.path_patching(subject, [corrupted], kinds=["o"])
    longer = corrupted._replace(lengths=LENGTHS + np.int32([0, 1]))
    message = "corrupted must have the lengths .*, 3 for example 1, got 4"
    for measure in (
        heads.path_patching,
        heads.activation_patching,
        functools.partial(heads.circuit, edges=3),
        *heads.EDGE_MEASURES.values(),
    ):
        with pytest.raises(ValueError, match=message):
            measure(subject, [longer])

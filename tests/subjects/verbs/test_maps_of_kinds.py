"""Maps of a model with an encoder and a decoder: axes, tokens, alignment, its share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention, runs, tasks
from mha_haiku.core import outputs
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab.heads import alignment, model_runs
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects import dossiers
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training import train_step
from mha_haiku.training.runs import configuration, folders

N, S, T = 3, 5, 6
KINDS = ["encoder", "decoder", "decoder", "cross", "cross"]
DEVICES = jax.local_devices()[:1]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "reversing"


@pytest.fixture
def made(root, make_config):
    """The folder of an untrained run, whose second cross layer lost its first head."""
    if not root.exists():
        config = make_config(
            model__family="encoder_decoder",
            model__num_layers=1,
            model__decoder__num_layers=2,
            model__attention__kept_heads=[[0, 1]] * 4 + [[1]],
            attention__examples=N,
        ).replace(task=runs.default_config("reverse_seq2seq").task)
        config = config.replace(task=dict(min_length=2, max_length=S, num_tokens=7))
        task = configuration.make_task(config)
        model = folders.make_model(config.model, task)
        key = train_step.stream(0, "init")
        example = tasks.batch(task, key, (), jnp.arange(1))
        params = jax.jit(model.init)(key, **example.model_inputs())
        params = jax.tree.map(lambda x: 3 * x, params)
        folders.write_run(root, config, params, task)
        dumps.dump(Subject.of_folder(root))  # on all devices
    return root


@pytest.fixture
def saved(made):
    return MapSet.load(made / "attention" / "maps.npz")


@pytest.mark.slow
def test_maps_of_each_kind_are_those_of_the_model(made, saved):
    run = folders.load_run(made)
    example = run.examples(N)
    output = model_runs.run(run.model, run.params, example)
    assert [layer.kind for layer in saved.layers] == KINDS
    assert [layer.index for layer in saved.layers] == [0, 1, 2, 3, 4]
    assert [layer.number for layer in saved.layers] == [0, 0, 1, 0, 1]
    assert [layer.name for layer in saved.layers[2:4]] == ["decoder 1", "cross 0"]
    assert [len(layer.heads) for layer in saved.layers] == [2, 2, 2, 2, 1]
    sizes = {"encoder": (S, S), "decoder": (T, T), "cross": (T, S)}
    for weights, layer in zip(saved.mean.weights, saved.layers, strict=True):
        assert weights.shape == (len(layer.heads), *sizes[layer.kind])
    lengths = np.asarray(example.lengths).tolist()
    assert min(lengths) < S
    for n, (one, length) in enumerate(zip(saved.inputs, lengths, strict=True)):
        sizes = {"encoder": (length,) * 2, "decoder": (length + 1,) * 2}
        sizes["cross"] = length + 1, length
        for i, layer in enumerate(saved.layers):
            rows, columns = sizes[layer.kind]
            wanted = np.asarray(output.maps[i])[n, :, :rows, :columns]
            np.testing.assert_allclose(one.weights[i], wanted, atol=1e-3)
            hidden = np.broadcast_to(one.masked_cells(i), wanted.shape)
            assert not one.weights[i][hidden].any()
        encoder, decoder, cross = (one.axes(saved.layers[i]) for i in (0, 1, 3))
        words = tuple(np.asarray(example.inputs[n]).astype(str).tolist()[:length])
        assert encoder.keys.tokens == cross.keys.tokens == words
        assert decoder.queries.tokens == ("<start>", *words[::-1])
        assert cross.queries.tokens == one.answers.targets == (*words[::-1], "<end>")
        assert cross.queries.notes[0] == "reads “<start>”"
        assert decoder.keys.notes[-1] == "predicts “<end>”"
        assert (cross.queries.label, cross.keys.label) == (
            "token predicted",
            "source token",
        )
        assert cross.has_answers and not encoder.has_answers
        rows, columns = np.nonzero(cross.alignment)
        assert (rows + columns).tolist() == [length - 1] * length
        if length < S:
            assert one.note == (
                f"its last {S - length} source positions and its last "
                f"{S - length} target positions are padding"
            )
    assert saved.mean.axes(saved.layers[3]).alignment is None


@pytest.mark.slow
def test_the_share_of_aligned_rows_is_that_of_brute_force(made, saved):
    shown = dossiers.of_folder(made / "attention")
    number = shown.sets[0].columns["aligned"]
    run = folders.load_run(made)
    count = int(re.fullmatch(r"mean of (\d+) examples", saved.mean.name)[1])
    example = run.examples(count)
    output = model_runs.run(run.model, run.params, example)
    for i, each in enumerate(output.maps):
        if KINDS[i] != "cross":
            assert np.isnan(number.mean[i]).all()
            continue
        weights = np.asarray(each)
        shares = []
        for n, length in enumerate(np.asarray(example.lengths).tolist()):
            best = weights[n, :, :length].argmax(-1)
            shares.append((best == length - 1 - np.arange(length)).mean(-1))
        own = np.s_[i, : weights.shape[1]]
        np.testing.assert_allclose(number.mean[own], np.mean(shares, 0))
        error = np.std(shares, 0, ddof=1) / len(shares) ** 0.5
        np.testing.assert_allclose(number.standard_error[own], error)
    assert np.isnan(number.mean[4, 1])  # the pruned head


def test_rows_without_an_aligned_key_do_not_count():
    weights = np.zeros((2, 1, 3, 4))
    weights[0, 0, [0, 1, 2], [3, 1, 0]] = 1
    aligned = np.zeros((2, 3, 4), bool)
    aligned[0, 0, [2, 3]] = True
    aligned[0, 1, 2] = True
    scores = alignment.shares(weights.argmax(-1), aligned)
    np.testing.assert_array_equal(scores, [[0.5], [np.nan]])


@pytest.mark.slow
def test_layers_are_chosen_by_address_or_kind(made, saved, tmp_path):
    options = {"out": tmp_path, "means": False, "devices": DEVICES}
    subject = Subject.of_folder(made)
    path = dumps.dump(subject, layers=["cross.1", "encoder"], **options)
    some = MapSet.load(path)
    assert some.layers == (saved.layers[4], saved.layers[0])
    for one, other in zip(some.examples, saved.inputs, strict=True):
        np.testing.assert_array_equal(one.weights[0], other.weights[4])
    with pytest.raises(ConfigError, match="got 'cross.2'.*Did you mean 'cross."):
        dumps.dump(subject, layers=["cross.2"], **options)
    with pytest.raises(ConfigError, match="inputs must be a batch of examples"):
        own = "1 2 3"
        dumps.dump(subject, own=own, **options)


@pytest.mark.slow
def test_long_maps_of_each_kind_are_pooled_along_their_own_axes(made, saved, tmp_path):
    run = folders.load_run(made)
    config = run.config.replace(attention=dict(full_length=5, pooled_size=3))
    subject = Subject.of_run(run._replace(config=config), made.name)
    path = dumps.dump(subject, out=tmp_path, devices=DEVICES)
    pooled = MapSet.load(path)
    assert (
        pooled.inputs[0].queries.is_pooled
        and "role" not in pooled.columns
        and pooled.mean is None
    )
    for one, whole in zip(pooled.examples, saved.inputs, strict=True):
        axes = one.axes(pooled.layers[3])
        length = len(axes.keys.tokens)
        ends = [attention.bin_edges(size, 3) for size in (T, S)]
        edges = [
            np.unique(np.minimum(each, size))
            for each, size in zip(ends, (length + 1, length), strict=True)
        ]
        assert [axis.edges.tolist() for axis in axes[:2]] == [x.tolist() for x in edges]
        target, source = edges
        by_hand = np.add.reduceat(whole.weights[3].astype("f8"), source[:-1], axis=-1)
        sees = by_hand.sum(-1, keepdims=True) > 0
        by_hand = np.add.reduceat(by_hand, target[:-1], axis=-2)
        count = np.maximum(np.add.reduceat(sees, target[:-1], axis=-2, dtype=int), 1)
        np.testing.assert_allclose(one.weights[3], by_hand / count, atol=2e-3)
    dossiers.of_folder(tmp_path)


@pytest.mark.slow
def test_a_report_has_a_picture_for_each_layer_of_each_kind(made):
    pytest.importorskip("matplotlib")
    outputs.claim(made / "attention", ["layer_00.png"])  # by an earlier command
    (made / "attention" / "layer_00.png").write_bytes(b"of before")
    names = [path.name for path in dumps.write_report(made / "attention")]
    assert names == [
        *(
            f"{kind}_{i:02d}.png"
            for kind, i in zip(KINDS, (0, 0, 1, 0, 1), strict=True)
        ),
        "index.html",
    ]
    assert not (made / "attention" / "layer_00.png").exists()


@pytest.mark.slow
def test_a_run_in_memory_and_its_output_are_shown_with_their_kinds(made, saved):
    run = folders.load_run(made)
    view = mh.show(run)
    assert "token predicted" in view.html and "aligned" in view.html
    maps = mh.Subject.of_run(run, "run").maps(run.examples(N))
    view = mh.show(maps, tokens="abcdef", key_tokens="uvwxy")
    assert '"kind":"cross"' in view.html
    with pytest.raises(ValueError, match="key_tokens must be 5"):
        mh.show(maps, tokens="abcdef", key_tokens="abcdef")
    pytest.importorskip("matplotlib")
    figure = mh.plot(made / "attention" / "maps.npz", layer="cross.0")
    panels = [axes for axes in figure.axes if axes.get_images()]
    np.testing.assert_array_equal(
        panels[1].get_images()[0].get_array(),
        saved.examples[0].weights[3][1].astype("f4"),
    )
    assert len(mh.plot(maps).axes) == 4  # the heads of cross-attention, and the bar

"""Maps of a model with an encoder and a decoder: axes, tokens, alignment, its share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention, heads, report, runs, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.heads import alignment, subject
from mha_haiku.runs import configuration, folders
from mha_haiku.studies import attention_dump, dossiers
from mha_haiku.studies.workbench import Bench
from mha_haiku.training import stepping

N, H, S, T = 3, 2, 5, 6
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
        )
        config.task = runs.default_config("reverse_seq2seq").task
        config.task.update(min_length=2, max_length=S, num_tokens=7)
        task = configuration.make_task(config)
        model = folders.make_model(config, task)
        key = stepping.stream(0, "init")
        example = tasks.batch(task, key, (), jnp.arange(1))
        params = jax.jit(model.init)(key, **example.model_inputs())
        params = jax.tree.map(lambda x: 3 * x, params)
        folders.write_run(root, config, params, task)
        attention_dump.dump(Bench.load(root), channels=True)  # on all devices
    return root


@pytest.fixture
def saved(made):
    return report.maps.load(made / "attention" / "maps.npz")


@pytest.mark.slow
def test_maps_of_each_kind_are_those_of_the_model(made, saved):
    run = folders.load_run(made)
    example = run.examples(N)
    output = subject.run(run.model, run.params, example)
    assert saved.kinds == tuple(KINDS) and saved.numbers == (0, 0, 1, 0, 1)
    assert saved.layer_names[2:4] == ("decoder 1", "cross 0")
    assert [len(names) for names in saved.head_names] == [2, 2, 2, 2, 1]
    for weights, masked, each in zip(
        saved.weights, saved.masked, output.maps, strict=True
    ):
        np.testing.assert_allclose(weights, each, atol=1e-3)
        assert not weights[np.broadcast_to(masked[:, None], weights.shape)].any()
    assert saved.weights[1].shape == (N, H, T, T)
    assert saved.weights[3].shape == (N, H, T, S)
    for mean, each in zip(saved.means, saved.weights, strict=True):
        assert mean.shape == each.shape[1:]
    query, key, exact = saved.channels[3]
    assert (query.shape[2], key.shape[2], exact) == (T, S, True)
    lengths = np.asarray(example.lengths)
    (source, _), (reading, _) = saved.sides["encoder"], saved.sides["decoder"]
    assert source.lengths.tolist() == lengths.tolist()
    for n, length in enumerate(lengths.tolist()):
        words = np.asarray(example.inputs[n]).astype(str).tolist()[:length]
        assert source.tokens[n, :length].tolist() == words
        read = reading.tokens[n, : length + 1].tolist()
        assert read == ["<start>", *words[::-1]]
        predicted = saved.sides["cross"][0].tokens[n].tolist()
        assert predicted[: length + 1] == [*words[::-1], "<end>"]
        rows, columns = np.nonzero(saved.alignment[n])
        assert (rows + columns).tolist() == [length - 1] * length


@pytest.mark.slow
def test_the_share_of_aligned_rows_is_that_of_brute_force(made, saved):
    shown = dossiers.of_folder(made)
    number = shown.sets[0].numbers["aligned"]
    run = folders.load_run(made)
    example = run.examples(
        int(np.load(made / "attention" / "maps.npz")["mean_examples"])
    )
    output = subject.run(run.model, run.params, example)
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
    scores = alignment.scores(weights, aligned)
    np.testing.assert_array_equal(scores, [[0.5], [np.nan]])


@pytest.mark.slow
def test_roles_of_each_kind_are_those_of_the_model(made, saved):
    run = folders.load_run(made)
    batches = [run.examples(N)]
    align = run.task.alignments
    expected = heads.roles(run.model, run.params, batches, align=align)
    found = dossiers.roles(saved)
    assert found.names.tolist() == expected.names.tolist()
    for i, h in np.argwhere(~np.isnan(found.scores)).tolist():
        score = heads.ROLES[found.names[i, h]].score or found.names[i, h]
        assert found.scores[i, h] == pytest.approx(
            expected.scores[score][i, h], abs=2e-3
        )


@pytest.mark.slow
def test_layers_are_chosen_by_address_or_kind(made, saved, tmp_path):
    options = {"out": tmp_path, "means": False, "devices": DEVICES}
    bench = Bench.load(made)
    path = attention_dump.dump(bench, layers=["cross.1", "encoder"], **options)
    some = report.maps.load(path)
    assert (some.layers, some.layer_names) == ((4, 0), ("cross 1", "encoder 0"))
    np.testing.assert_array_equal(some.weights[0], saved.weights[4])
    with pytest.raises(ConfigError, match="got 'cross.2'.*Did you mean 'cross."):
        attention_dump.dump(bench, layers=["cross.2"], **options)
    with pytest.raises(ConfigError, match="experiments.generate --source="):
        own = attention_dump.Own(text="1 2 3")
        attention_dump.dump(bench, own=own, **options)


@pytest.mark.slow
def test_long_maps_of_each_kind_are_pooled_along_their_own_axes(made, saved, tmp_path):
    run = folders.load_run(made)
    config = run.config.copy_and_resolve_references()
    config.attention.full_length, config.attention.pooled_size = 5, 3
    bench = Bench(run._replace(config=config), folders.Folder(made))
    path = attention_dump.dump(bench, out=tmp_path, devices=DEVICES)
    pooled = report.maps.load(path)
    assert [x.shape[2:] for x in pooled.weights[::2]] == [(3, 3), (3, 3), (3, 3)]
    target, source = attention.bin_edges(T, 3), attention.bin_edges(S, 3)
    assert (
        pooled.sides["decoder"][0].edges.tolist() == target.tolist() != source.tolist()
    )
    by_hand = np.add.reduceat(saved.weights[3].astype("f8"), source[:-1], axis=-1)
    sees = by_hand.sum(-1, keepdims=True) > 0
    by_hand = np.add.reduceat(by_hand, target[:-1], axis=-2)
    count = np.maximum(np.add.reduceat(sees, target[:-1], axis=-2, dtype=int), 1)
    np.testing.assert_allclose(pooled.weights[3], by_hand / count, atol=2e-3)
    report.dossier.check(dossiers.of_maps(tmp_path))


@pytest.mark.slow
def test_a_report_has_a_picture_for_each_layer_of_each_kind(made):
    pytest.importorskip("matplotlib")
    (made / "attention" / "layer_00.png").write_bytes(b"of before")
    names = [path.name for path in attention_dump.write_report(made / "attention")]
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
    length = saved.sides["cross"][1].lengths[0]
    np.testing.assert_array_equal(
        panels[1].get_images()[0].get_array(),
        saved.weights[3][0, 1, : length + 1, :length].astype("f4"),
    )
    assert len(mh.plot(maps).axes) == 4  # the heads of cross-attention, and the bar

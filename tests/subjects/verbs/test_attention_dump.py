"""The maps of a run as arrays: which, of what, and how pooled."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention
from mha_haiku.core.checks import ConfigError
from mha_haiku.records import Layer
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import Subject, parts_of
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training import evaluation, train_step
from mha_haiku.training.runs import configuration, folders
from tests import jaxprs

N, T, H = 2, 6, 2


@pytest.fixture(scope="module")
def trained(trained, tmp_path_factory):
    """A copy of the folder of a short run of two layers and two heads."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    analyzed = shutil.ignore_patterns("attention", "heads")
    return shutil.copytree(trained(), folder, ignore=analyzed)


@pytest.fixture(scope="module")
def whole(trained):
    """The path of the maps as they are by default."""
    return dumps.dump(Subject.of_folder(trained))


def _pooled(make_config, trained):
    """Returns the run as if it had been told to pool maps of more than 5 positions."""
    run = folders.load_run(trained)
    config = make_config(attention__full_length=5, attention__pooled_size=4)
    return Subject.of_run(
        run._replace(config=config), trained.name, folders.Folder(trained)
    )


def _weights(maps, layer):
    """Returns the maps of a layer, `[N, H, T', S']`, of examples of one length."""
    return np.stack([each.weights[layer] for each in maps.inputs])


def _tokens(maps):
    return [list(each.queries.tokens) for each in maps.inputs]


def _maps(trained, inputs):
    loaded = folders.load_run(trained)
    apply = jax.jit(functools.partial(loaded.model.apply, is_training=False))
    output = apply(loaded.params, None, inputs)
    return loaded, output, [np.asarray(layer) for layer in output.maps]


@pytest.mark.slow
def test_whole_maps_of_held_out_examples(trained, whole):
    assert whole == trained / "attention" / "maps.npz"
    saved = MapSet.load(whole)
    loaded = folders.load_run(trained)
    example = evaluation.held_out_batch(loaded.task, 3, (), jnp.arange(N))
    _, output, maps = _maps(trained, example.inputs)
    for i, layer in enumerate(maps):
        found = _weights(saved, i)
        assert found.shape == (N, H, T, T) and found.dtype == np.float16
        np.testing.assert_allclose(found, layer, atol=1e-3)
        np.testing.assert_allclose(found.sum(-1), np.ones((N, H, T)), atol=5e-3)
    assert saved.layers == tuple(
        Layer(f"layer {i}", ("0", "1"), "", i, i) for i in range(2)
    )
    assert saved.name == "run (reverse), step 30" and saved.step == 30
    assert _tokens(saved) == np.asarray(example.inputs).astype(str).tolist()
    targets = [list(each.answers.targets) for each in saved.inputs]
    assert targets == np.asarray(example.targets).astype(str).tolist()
    order = np.argsort(-np.asarray(output.logits), -1)[..., :3]
    shares = np.take_along_axis(jax.nn.softmax(output.logits), order, -1)
    for n, each in enumerate(saved.inputs):
        assert each.queries.edges.tolist() == each.keys.edges.tolist() == [*range(7)]
        likeliest = np.array(each.answers.likeliest)  # pairs as text
        assert likeliest[..., 0].tolist() == order[n].astype(str).tolist()
        found = likeliest[..., 1].astype(np.float64)
        np.testing.assert_allclose(found, shares[n], rtol=1e-5)
        assert each.masked[1].shape == (T, T) and not each.masked[1].any()


@pytest.mark.slow
def test_mean_is_over_many_held_out_examples(trained, tmp_path):
    path = dumps.dump(Subject.of_folder(trained), out=tmp_path, examples=1)
    saved = MapSet.load(path)
    count = int(saved.mean.name.split()[2])
    assert saved.mean.name == f"mean of {count} examples"
    assert count > 8
    loaded = folders.load_run(trained)
    example = evaluation.held_out_batch(loaded.task, 3, (), jnp.arange(count))
    _, _, maps = _maps(trained, example.inputs)
    for i, layer in enumerate(maps):
        mean = saved.mean.weights[i]
        assert mean.shape == (H, T, T) and mean.dtype == np.float32
        np.testing.assert_allclose(mean, layer.mean(0), atol=1e-6)


@pytest.mark.slow
def test_chosen_layers_heads_examples_and_step(trained, tmp_path):
    whole = MapSet.load(
        dumps.dump(Subject.of_folder(trained, 20), out=tmp_path / "a", examples=4)
    )
    assert whole.name == "run (reverse), step 20"
    some = MapSet.load(
        dumps.dump(
            Subject.of_folder(trained, 20),
            out=tmp_path / "b",
            layers=[1],
            heads=[1],
            examples=[3, 0],
        )
    )
    assert some.layers == (Layer("layer 1", ("1",), "", 1, 1),)
    names = [each.name for each in some.inputs]
    assert names == ["held-out example 3", "held-out example 0"]
    np.testing.assert_allclose(
        _weights(some, 0), _weights(whole, 1)[[3, 0]][:, [1]], atol=1e-3
    )
    mean = whole.mean.weights[1][[1]]
    np.testing.assert_allclose(some.mean.weights[0], mean, atol=1e-6)
    assert _tokens(some) == [_tokens(whole)[i] for i in (3, 0)]


@pytest.mark.slow
def test_long_inputs_are_pooled_unless_weights_are_asked_for(
    trained, whole, make_config, tmp_path
):
    subject = _pooled(make_config, trained)
    path = dumps.dump(subject, out=tmp_path / "a")
    pooled, whole = MapSet.load(path), MapSet.load(whole)
    numbers = dict(whole.heads.numbers)
    assert numbers.pop("offset").unit == "positions"  # like roles, of whole maps only
    assert pooled.heads.numbers.keys() == numbers.keys()
    for name, number in numbers.items():  # which pooling does not change
        np.testing.assert_allclose(
            pooled.columns[name].mean, number.mean, 1e-4, 1e-6, err_msg=name
        )
    assert pooled.mean is None and "role" not in pooled.columns
    path = dumps.dump(subject, out=tmp_path / "b", weights=True)
    whole = MapSet.load(path)
    assert _weights(whole, 1).shape == (N, H, T, T)
    by_hand = _weights(whole, 1).astype(np.float32).reshape(N, H, 3, 2, 3, 2)
    by_hand = by_hand.sum(-1).mean(-2)
    np.testing.assert_allclose(_weights(pooled, 1), by_hand, atol=2e-3)
    for one in pooled.examples:
        edges = one.queries.edges.tolist()
        assert edges == [0, 2, 4, 6] == attention.bin_edges(6, 4).tolist()
        assert one.masked[1].shape == (3, 3)


def _bench(run):
    return Subject.of_run(run, "anywhere")


def long_run(make_config, length):
    """Returns an untrained run of inputs of that length."""
    config = make_config(
        task__sequence_length=length, model__positions="rotary", model__num_heads=1
    )
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task)
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = jax.jit(model.init)(train_step.stream(0, "init"), tokens)
    return folders.Run(config, task, model, params, 0)


@pytest.mark.slow
def test_of_a_long_input_no_matrix_is_made(make_config):
    length = 8192
    loaded = long_run(make_config, length)
    subject = _bench(loaded)
    example = evaluation.held_out_batch(loaded.task, 3, (), jnp.arange(1))

    def observed(pooled):
        observe = dumps._observer(subject, parts_of(subject), pooled)
        return jax.make_jaxpr(observe.__wrapped__)(loaded.params, example).jaxpr

    tile = 512 * 1024
    assert jaxprs.largest_array(observed(128)) <= tile < length**2
    assert jaxprs.largest_array(observed(None)) == length**2


@pytest.mark.slow
def test_text_and_tokens_of_a_user(trained, tmp_path):
    text = MapSet.load(
        dumps.dump(Subject.of_folder(trained), out=tmp_path / "a", own="4 0 1 1 2 3")
    )
    tokens = [4, 0, 1, 1, 2, 3]
    ids = MapSet.load(
        dumps.dump(Subject.of_folder(trained), out=tmp_path / "b", own=tokens)
    )
    for saved in (text, ids):
        assert _tokens(saved) == [[str(token) for token in tokens]]
        (one,) = saved.examples
        assert one.answers.targets == ("",) * T and all(one.answers.likeliest)
        _, _, maps = _maps(trained, np.array([tokens]))
        np.testing.assert_allclose(_weights(saved, 1), maps[1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "layers must be an integer from 0 to 1, got 2"),
        ({"heads": [0, -1]}, "heads must be an integer from 0 to 1, got -1"),
        ({"examples": 0}, "examples must be an integer from 1 to 65536, got 0"),
        ({"examples": [-1]}, "indices must be .*got -1"),
        ({"own": [0, 5]}, "inputs must be .*got 5"),
        ({"own": [1] * 7}, "positions for 6 tokens, got 7"),
        ({"own": "1 2 x 0 0 0"}, "got 'x'"),
        ({"own": [1], "examples": 2}, "examples must be None with own .*got 2"),
        ({"own": "1 2", "examples": [0]}, r"examples must be None .*got \[0\]"),
    ],
)
def test_what_is_not_there_is_refused(trained, tmp_path, options, message):
    subject = Subject.of_folder(trained)
    with pytest.raises(ConfigError, match=message):
        dumps.dump(subject, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_each_example_of_a_batch_has_a_name(trained, tmp_path):
    subject = Subject.of_folder(trained)
    batch = jax.device_get(computation.held_out(subject, range(2)))
    saved = MapSet.load(dumps.dump(subject, out=tmp_path, own=batch))
    assert [each.name for each in saved.examples] == ["text 0", "text 1"]


@pytest.mark.slow
def test_pictures_are_named_by_their_layers_and_old_ones_go(trained, tmp_path):
    for layers, formats, names in (
        ([0, 1], ["png"], {"layer_00.png", "layer_01.png"}),
        ([1], ["svg", "pdf"], {"layer_01.svg", "layer_01.pdf"}),
    ):
        path = dumps.dump(Subject.of_folder(trained), layers=layers, out=tmp_path)
        (tmp_path / "layer_07.png").touch()  # of the user
        written = dumps.write_report(path.parent, formats)
        written = {each.name for each in written}
        assert written == names | {"index.html"}
        kept = {"maps.npz", "layer_07.png"}
        assert {x.name for x in tmp_path.glob("[!.]*")} == written | kept

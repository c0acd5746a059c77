"""How devices share a run: the same losses, and what is refused before compiling."""

import json

import jax
import numpy as np
import pytest

from mha_haiku import devices
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import configuration, loop
from tests import tiny_runs

_FIELDS = {
    "model__dropout_rate": 0.0,
    "model__num_heads": 4,
    "model__num_layers": 1,
    "training__steps": 20,
    "training__report_every": 4,
    "training__evaluate_every": 20,
    "training__checkpoint_every": 20,
}


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def losses(make_config, run_folders):
    """A function from fields of `config.devices` to the losses of a run with them."""

    def train(count=4, **fields):
        name = "-".join(f"{k}{v}" for k, v in fields.items()) or f"devices{count}"
        folder = run_folders / name
        if (folder / "summary.json").exists():
            return _losses(folder)
        fields = {f"devices__{name}": value for name, value in fields.items()}
        loop.train(
            make_config(**_FIELDS, **fields), folder, devices=jax.devices()[:count]
        )
        return _losses(folder)

    return train


def _losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [x["loss"] for x in found] + [found[-1]["held_out_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"heads": 2, "sequence": 2},
        pytest.param({"sequence": 2, "shard_parameters": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_are_those_of_one_device(losses, fields):
    one, shared = losses(count=1), losses(**fields)
    assert len(one) == 6 and one[0] - one[-1] > 0.05
    np.testing.assert_allclose(shared, one, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_run_goes_on_with_devices_that_share_it_otherwise(
    losses, make_config, run_folders
):
    """Changes of `config.devices` change no result."""
    whole = losses(count=1)
    folder = run_folders / "moved"
    fields = _FIELDS | {"training__checkpoint_every": 8}
    agree = cluster.agree

    def stops_when_saved(stops, steps):
        return agree(stops or (folder / "checkpoints" / "8").exists(), steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "agree", stops_when_saved)
        config = make_config(**fields, devices__heads=2)
        assert loop.train(config, folder, devices=jax.devices()[:2]).interrupted
    loop.train(make_config(**fields), folder, devices=jax.devices()[:2])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["loss"] for line in lines]
    np.testing.assert_allclose(found[-1], whole[-2], atol=1e-5)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"]["devices"]["heads"] == 1


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"devices__heads": 3}, "heads 3 x sequence 1 must divide the 4 available"),
        ({"devices__heads": 4}, "must divide the 2 heads of layer 0, got 4"),
        (
            {"devices__heads": 2, "model__num_key_value_heads": 1},
            "must divide the 1 key/value heads of layer 0, got 2",
        ),
        (
            {"devices__heads": 2, "model__hidden_size": 13},
            "must divide the 13 hidden units, got 2",
        ),
        ({"training__batch_size": 6}, "multiple of the 4 devices that share it, got 6"),
        (
            {"devices__sequence": 2, "model__attention__implementation": "dense"},
            "implementation with config.devices.sequence must be one of auto, block",
        ),
        ({"devices__heads": 0}, "devices.heads must be an integer from 1 to"),
        ({"devices__shard_parameters": 1}, "shard_parameters must be True or False"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_is_refused(make_config, fields, what):
    with pytest.raises(ConfigError, match=what):
        tiny_runs.check_devices(make_config(**fields), 4)


@pytest.mark.parametrize(
    ("length", "what"),
    [(3, "must divide the 3 positions"), (6, "must divide the 6 positions")],
)
def test_a_sequence_that_the_ring_does_not_divide_is_refused(
    make_config, tmp_path, length, what
):
    config = make_config(devices__sequence=4, task__sequence_length=length)
    with pytest.raises(ConfigError, match=f"devices.sequence {what} .*, got 4"):
        loop.train(config, tmp_path, devices=jax.devices()[:4])


def test_devices_share_only_the_batch_unless_asked(make_config):
    here = jax.devices()[:2]
    assert isinstance(
        configuration.make_placement(make_config(), here), devices.Replicas
    )
    shared = configuration.make_placement(
        make_config(devices__shard_parameters=True), here
    )
    assert isinstance(shared, devices.Sharded) and shared.mesh.shape["data"] == 2


@pytest.fixture
def run(losses, run_folders):
    losses(heads=2, sequence=2)
    return run_folders / "heads2-sequence2"


@pytest.mark.slow
def test_analysis_takes_the_mesh_of_the_run_or_shares_examples(run):
    subject = Subject.of_folder(run)
    assert dict(computation.placed(subject).placement.mesh.shape) == {
        "data": 1,
        "heads": 2,
        "sequence": 2,
    }
    two = computation.placed(subject, jax.devices()[:2])
    assert two.placement.mesh.shape["data"] == 2
    assert computation.whole_batch(two, 3) == 4
    assert computation.placed(subject, jax.devices()[:1]) is subject
    # Three tokens of one's own are no two equal parts.
    assert computation.placed(subject, length=3).placement.mesh.shape["data"] == 4


@pytest.mark.slow
def test_analysis_finds_the_same_on_one_device_and_on_four(run, monkeypatch, tmp_path):
    def looked(name):
        maps = dumps.dump(Subject.of_folder(run), examples=3, out=tmp_path / name)
        subject = Subject.of_folder(run)
        found = subject.statistics(examples=5)
        ranked = subject.importance(examples=8, measures=["ablation", "gradient"])
        return (
            np.load(maps)["examples.0.weights.0"],
            {name: each.mean for name, each in found.numbers.items()},
            [each.per_example for each in ranked.columns.values()],
        )

    four = looked("four")
    one_device = jax.devices()[:1]
    monkeypatch.setattr(computation.jax, "devices", lambda: one_device)
    one = looked("one")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x.astype(float), y.astype(float), atol=2e-3 if x.dtype == "f2" else 2e-5
        ),
        four,
        one,
    )

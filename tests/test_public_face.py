"""The public names of `import mha_haiku`, and the modules that it does not load."""

import importlib
import importlib.resources
import json
import subprocess
import sys

import pytest

import mha_haiku as mh


def test_the_public_names_exist():
    for name in (
        *("MultiHeadAttention", "FeedForward"),
        *("EncoderLayer", "Encoder", "DecoderLayer", "Decoder"),
        *("attend", "AttentionMap", "masks", "positions", "models"),
        *("heads", "tasks", "runs", "studies", "devices", "rasp"),
    ):
        assert name in mh.__all__
    assert all(hasattr(mh, name) for name in mh.__all__)


def test_completion_offers_public_names_alone():
    offered = {name for name in dir(mh) if not name.startswith("__")}
    assert offered == set(mh.__all__)
    with pytest.raises(AttributeError, match="'mha_haiku' has no attribute 'chekcs'"):
        _ = mh.chekcs


def test_public_things_are_documented():
    for name in mh.__all__:
        assert getattr(mh, name).__doc__.strip(), name


def test_types_are_offered_to_checkers_and_the_version_to_people():
    assert importlib.resources.files(mh).joinpath("py.typed").is_file()
    assert all(part.isdigit() for part in mh.__version__.split("."))


# What `import mha_haiku` does not load: packages, and those of ours.
_HEAVY = "jax haiku safetensors scipy tqdm matplotlib sklearn tokenizers".split()
_ROOMS = "interop lab.rasp showing subjects training.devices training.runs".split()


@pytest.fixture(scope="module")
def loaded():
    """The modules that `import mha_haiku` loads."""
    program = "import json, sys, mha_haiku; print(json.dumps(list(sys.modules)))"
    completed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = set(json.loads(completed.stdout))
    assert "mha_haiku" in loaded
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_HEAVY, *(f"mha_haiku.{name}" for name in _ROOMS)])
def test_import_leaves_heavy_packages_and_rooms_alone(loaded, name):
    if name in ("matplotlib", "sklearn", "tokenizers"):
        pytest.importorskip(name)
    importlib.import_module(name)  # there is such a module
    assert not {x for x in loaded if f"{x}.".startswith(f"{name}.")}

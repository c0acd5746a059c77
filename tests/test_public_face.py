"""What `import mha_haiku` offers, and what it leaves alone."""

import json
import subprocess
import sys

import mha_haiku as mh


def test_the_public_names_exist():
    for name in (
        *("MultiHeadAttention", "FeedForward"),
        *("EncoderLayer", "Encoder", "DecoderLayer", "Decoder"),
        *("attend", "AttentionMap", "masks", "positions", "models"),
        *("heads", "tasks"),
    ):
        assert hasattr(mh, name)
        assert name in mh.__all__
    assert all(hasattr(mh, name) for name in mh.__all__)
    assert sorted(mh.__all__) == mh.__all__


def test_public_things_are_documented():
    for name in mh.__all__:
        assert getattr(mh, name).__doc__.strip(), name


def test_import_leaves_heavy_packages_alone():
    heavy = ("orbax", "matplotlib", "sklearn", "tokenizers", "tqdm", "ml_collections")
    program = "import json, sys, mha_haiku; print(json.dumps(list(sys.modules)))"
    completed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(completed.stdout)}
    assert {"mha_haiku", "haiku"} <= loaded
    assert not loaded & set(heavy)

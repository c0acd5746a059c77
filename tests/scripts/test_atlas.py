"""Model types of transformers under `mh.wrap`: a sample here, the table's each week."""

import pathlib
import re
import warnings

import pytest

for package in ("torch", "transformers", "torchax"):
    pytest.importorskip(package, reason="needs mha_haiku[torch]")

from scripts import atlas  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs
]
TABLE = pathlib.Path(atlas.__file__).parents[1] / "experiments" / "atlas.md"

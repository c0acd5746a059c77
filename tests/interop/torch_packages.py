"""torch and transformers; files that import them are skipped without torchax, too."""

import importlib.util

import pytest

WHY = "needs mha_haiku[torch]: torch, torchax and transformers"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
if importlib.util.find_spec("torchax") is None:
    pytest.skip(WHY, allow_module_level=True)

# For `pytestmark`: theirs.
WARNINGS = [
    pytest.mark.filterwarnings(f"ignore::{name}")
    for name in ("DeprecationWarning", "FutureWarning", "UserWarning")
]

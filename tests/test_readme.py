"""README's snippets run, and it names every config."""

import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def notebook():
    """What is defined after the Python snippets have run, one after the other."""
    namespace = {}
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) >= 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    return namespace


def test_snippets_run_and_give_what_their_comments_say(notebook):
    weights = np.asarray(notebook["weights"])
    assert weights.shape == (2, 8, 10, 10)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not weights[1, :, :, 7:].any()
    # A part is computed by itself: equal to rounding, which differs between processors.
    corner = weights[:, :, :3][..., [0, 9]]
    np.testing.assert_allclose(notebook["corner"], corner, rtol=2e-6)
    assert notebook["coarse"].shape == (2, 8, 5, 5)
    assert notebook["values"].shape == (2, 10, 8, 16)


def test_every_config_stands_in_the_table():
    configs = {path.stem for path in (ROOT / "configs").glob("[!_]*.py")}
    assert configs == set(re.findall(r"^\| `(\w+)` \|.*\d s", README, re.MULTILINE))


def test_every_file_that_it_names_exists():
    named = set(re.findall(r"\b(?:configs|scripts)/\w+(?:\.\w+)?", README))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []

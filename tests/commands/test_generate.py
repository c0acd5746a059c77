"""The command that writes texts: what it prints, and what it refuses."""

import pytest

from mha_haiku import commands, runs
from mha_haiku.subjects.subject import Subject
from tests.tiny_runs import write_untrained

TEXT = "the cat sat on the mat.\n" * 20
KINDS = {
    "causal": ("language_model", "causal"),
    "seq2seq": ("reverse_seq2seq", "encoder_decoder"),
    "encoder": ("reverse", "encoder"),
    "recall": ("associative_recall", "causal"),
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A function that makes the run of a kind, with random parameters, once."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text").write_text(TEXT)

    def make(kind):
        if (root / kind).exists():
            return root / kind
        task_name, family = KINDS[kind]
        config = runs.default_config(task_name).replace(
            model=dict(
                family=family,
                model_size=8,
                embedding=dict(max_length=17 if kind == "seq2seq" else 16),
            )
        )
        if kind == "causal":
            path = str(root / "text")
            config = config.replace(task=dict(sequence_length=8), data=dict(path=path))
        if kind == "seq2seq":
            config = config.replace(task=dict(min_length=2, max_length=4, num_tokens=5))
        return write_untrained(root / kind, config)

    return make


def _run(workdir, *flags):
    arguments = ["generate", f"--workdir={workdir}", "--compilation_cache=", *flags]
    return commands.run(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "prompt", "begun"), [("causal", "the ", "the "), ("seq2seq", "1 2", "")]
)
def test_a_text_is_printed_as_the_verb_returns_it(workdir, capsys, kind, prompt, begun):
    run = workdir(kind)
    assert _run(run, f"--prompt={prompt}", "--tokens=6", "--seed=4") == 0
    text = Subject.of_folder(run).generate(prompt, tokens=6, seed=4)
    out, told = capsys.readouterr()
    assert all("compiling" in line for line in told.splitlines())
    assert out.startswith(f"{begun}{text}\n\n") and out.endswith(" s\n")


@pytest.mark.parametrize(
    ("kind", "flags", "parts"),
    [
        ("causal", [], ["--prompt"]),
        ("causal", ["--prompt=the Dog"], ["'D' at character 4", "It knows '\\n .ac"]),
        ("causal", ["--prompt=" + "the " * 4], ["fewer tokens than the 16", "got 16"]),
        ("causal", ["--prompt=the", "--tokens=14"], ["prompt of 3", "1 to 13, got 14"]),
        ("causal", ["--prompt=a", "--top_p=0"], ["top_p must be", "got 0.0"]),
        ("seq2seq", ["--prompt=1 x"], ["text must be token ids", "got 'x'"]),
        ("seq2seq", ["--prompt=1 2 3 4 0"], ["at most 4 tokens", "got 5"]),
        ("encoder", ["--prompt=a"], ["of family 'encoder', which writes no text"]),
        ("recall", ["--prompt=k1"], ["'associative_recall'", "writes no text"]),
    ],
)
def test_a_mistake_is_told_in_two_lines(workdir, capsys, kind, flags, parts):
    assert _run(workdir(kind), *flags) == 2
    out, told = capsys.readouterr()
    mistake = told.removeprefix("compiling ...\n")
    assert out == "" and 1 <= len(mistake.splitlines()) <= 2
    for part in parts:
        assert part in told

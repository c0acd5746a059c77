"""The script that writes texts: what it prints and keeps, and what it refuses."""

import numpy as np
import pytest

from mha_haiku import commands, runs
from mha_haiku.records.map_set import MapSet
from mha_haiku.training.runs import files, folders
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


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _run(workdir, *flags):
    arguments = ["generate", f"--workdir={workdir}", "--compilation_cache=", *flags]
    return commands.run(arguments)


def _kept(workdir):
    return files.read_lines(folders.Folder(workdir).generated)


@pytest.mark.slow
def test_a_text_is_printed_and_kept(workdir, capsys):
    run = workdir("causal")
    assert _run(run, "--prompt=the ", "--tokens=6", "--seed=4") == 0
    out, told = capsys.readouterr()
    assert all("compiling" in line for line in told.splitlines())
    kept = _kept(run)[-1]
    text, end = out.split("\n\n6 tokens in ")
    assert text == f"the {kept['text']}" and len(kept["tokens"]) == 6
    assert " tokens/s" in end and f"Kept in: {run}/generated.jsonl" in end
    how = {"step": 3, "strategy": "sampled", "temperature": 0.8, "seed": 4}
    assert how.items() <= kept.items()
    assert _run(run, "--prompt=the ", "--tokens=6", "--seed=4") == 0
    assert _kept(run)[-2:] == [kept, kept]


@pytest.mark.slow
def test_several_texts_are_printed_in_turn(workdir, capsys, tmp_path):
    run = workdir("causal")
    (tmp_path / "prompts").write_bytes(b"the\r\na mat\r\n")
    before = len(_kept(run))
    assert _run(run, "--prompts=prompts", "--samples=2", "--tokens=3") == 0
    out = capsys.readouterr().out
    kept = _kept(run)[before:]
    assert [text["given"] for text in kept] == ["the", "the", "a mat", "a mat"]
    shown = [
        f"--- {i} of 4\n{text['given']}{text['text']}\n"
        for i, text in enumerate(kept, start=1)
    ]
    assert out.startswith("".join(shown)) and "\n\n12 tokens in " in f"\n{out}"


@pytest.mark.slow
def test_attention_is_that_of_the_text(workdir, capsys):
    run = workdir("causal")
    flags = ["--prompt=the ", "--tokens=6", "--temperature=0", "--attention"]
    assert _run(run, *flags) == 0
    folder = run / "attention" / "generated"
    assert f"Attention maps: {folder}/index.html" in capsys.readouterr().out
    kept = _kept(run)[-1]
    (example,) = MapSet.load(folder / "maps.npz").examples
    assert "".join(example.queries.tokens) == f"the {kept['text']}"
    np.testing.assert_allclose(example.weights[0].sum(-1), 1, atol=1e-2)
    assert not np.triu(example.weights[0], 1).any()


@pytest.mark.slow
def test_sources_are_answered_and_scored(workdir, capsys, tmp_path):
    run = workdir("seq2seq")
    (tmp_path / "sources").write_text("1 2\n3 4 0\n")
    assert _run(run, "--sources=sources", "--attention") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    one, other = _kept(run)[-2:]
    assert (first, second) == (f"1 2 -> {one['text']}", f"3 4 0 -> {other['text']}")
    maps = MapSet.load(run / "attention" / "generated" / "maps.npz")
    assert maps.layers[2].kind == "cross"
    shapes = [each.weights[2].shape[1:] for each in maps.examples]
    lengths = [len(each["tokens"]) + each["is_ended"] for each in (one, other)]
    assert shapes == list(zip(lengths, (2, 3), strict=True))
    assert _run(run, "--examples=6", "--beam=2") == 0
    out = capsys.readouterr().out
    assert "6 held-out examples" in out and "exact_match" in out and "wrong:" in out


@pytest.mark.parametrize(
    ("kind", "flags", "parts"),
    [
        ("causal", [], ["--prompt", "--sources", "must be given, got none"]),
        ("causal", ["--prompt=a", "--source=b"], ["got --prompt and --source"]),
        ("causal", ["--prompt="], ["prompt '': it must not be empty"]),
        ("causal", ["--prompt=the Dog"], ["'D' at character 4", "It knows '\\n .ac"]),
        ("causal", ["--source=the"], ["takes a prompt, not a source", "--prompt="]),
        ("causal", ["--prompt=" + "the " * 4], ["at most 15 tokens", "got 16"]),
        ("causal", ["--prompt=the", "--tokens=0"], ["tokens", "from 1 to 13, got 0"]),
        ("causal", ["--prompt=the", "--tokens=14"], ["16 positions", "got 14"]),
        ("causal", ["--prompt=a", "--temperature=-1"], ["temperature", "got -1.0"]),
        ("causal", ["--prompt=a", "--top_k=0"], ["top_k must be", "1", "got 0"]),
        ("causal", ["--prompt=a", "--top_k=99"], ["top_k must be", "to 13, got 99"]),
        ("causal", ["--prompt=a", "--top_p=0"], ["top_p must be", "got 0.0"]),
        (
            "causal",
            ["--prompt=a", "--top_k=3", "--temperature=0"],
            ["top_k must be left out with temperature 0"],
        ),
        (
            "causal",
            ["--prompt=a", "--beam=2", "--temperature=1"],
            ["temperature must be left out with beam"],
        ),
        (
            "causal",
            ["--prompt=a", "--length_penalty=1"],
            ["length_penalty needs a beam"],
        ),
        (
            "causal",
            ["--prompt=a", "--samples=2", "--temperature=0"],
            ["samples must be 1", "draws tokens"],
        ),
        ("causal", ["--prompts=none"], ["--prompts=none cannot be read", "No such"]),
        ("causal", ["--prompts=empty"], ["--prompts=empty is empty"]),
        ("causal", ["--prompts=gap"], ["--prompts=gap has an empty line, 2"]),
        ("causal", ["--prompts=latin"], ["--prompts=latin is not UTF-8 text"]),
        ("causal", ["--prompt=a", "--step=9"], ["9", "3"]),
        ("seq2seq", ["--prompt=1 2"], ["takes a source, not a prompt", "--source="]),
        ("seq2seq", ["--source="], ["source '': it must not be empty"]),
        ("seq2seq", ["--source=1 x"], ["source '1 x'", "got 'x'"]),
        ("seq2seq", ["--source=1 2 3 4 0"], ["at most 4 tokens", "got 5"]),
        ("seq2seq", ["--examples=0"], ["examples must be", "got 0"]),
        ("encoder", ["--prompt=a"], ["is of family 'encoder', which writes no text"]),
        ("recall", ["--prompt=k1"], ["'associative_recall'", "no next tokens"]),
    ],
)
def test_a_mistake_is_told_in_two_lines(workdir, capsys, tmp_path, kind, flags, parts):
    (tmp_path / "empty").write_text("")
    (tmp_path / "gap").write_text("the\n\nmat\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    run = workdir(kind)
    assert _run(run, *flags) == 2
    out, told = capsys.readouterr()
    assert out == "" and 1 <= len(told.splitlines()) <= 2
    for part in parts:
        assert part in told

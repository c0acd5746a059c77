"""Model types of transformers under `mh.wrap`: a sample, and weekly the whole table."""

import importlib.util
import pathlib

import pytest

for package in ("torch", "transformers", "torchax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip("needs mha_haiku[torch]", allow_module_level=True)

from scripts import atlas  # noqa: E402

# Of transformers.
pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = pathlib.Path(atlas.__file__).parents[1] / "experiments" / "atlas.md"
SAMPLE = {
    "albert": "right",  # one layer, run twice
    "bart": "right",
    "deberta-v2": "right",  # positions in the score
    "gemma2": "right",  # windows and caps
    "gpt_oss": "right",  # sinks and experts
    "qwen3_next": "right",  # most layers have no softmax
    "swin": "right",  # windows of an image
    "clip": "right",
    "wav2vec2": "right",
    "mamba": "no attention",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_type_of_the_sample_has_its_verdict(kind):
    record = atlas.tried(kind)
    assert (record["verdict"], record["inputs"] != {}) == (SAMPLE[kind], True), record


def _right():
    section = TABLE.read_text().split("\n## ")[1]
    text = " ".join(section.split("\n")[1:])
    return [
        x for line in text.split("- ") for x in line.rpartition(": ")[2].split(", ")
    ]


@pytest.mark.weekly
@pytest.mark.parametrize("kind", _right())
def test_type_that_the_table_calls_right_is_right(kind):
    assert atlas.tried(kind)["verdict"] == "right"


@pytest.mark.slow
def test_other_weights_than_torch_returns_are_wrong(monkeypatch):
    def other(module, given, run=atlas.run, **options):
        output = run(module, given, **options)
        for weights in output.get("attentions") or ():
            weights.copy_(weights.flip(-1))
        return output

    monkeypatch.setattr(atlas, "run", other)
    record = atlas.tried("bert")
    assert record["verdict"] == "wrong"
    assert record["reason"] == "2 of 2 maps of torch are none of ours"


@pytest.mark.slow
def test_table_has_each_type_once_and_results_are_kept(tmp_path, capsys):
    results, out = tmp_path / "found.jsonl", tmp_path / "table.md"
    flags = [f"--results={results}", f"--out={out}", "--workers=1"]
    # A model of torch that needs a package, and one that does not.
    assert atlas.run_command(["atlas", "--types=timm_wrapper,bert", *flags]) == 0
    assert "bert: right  2 maps" in capsys.readouterr().out
    table, kept = out.read_text(), results.read_text()
    assert "## Right\n\n- input_ids: bert\n" in table
    assert "## Not tried\n\n- ImportError:" in table and "timm_wrapper\n" in table
    assert atlas.run_command(["atlas", "--types=timm_wrapper,bert", *flags]) == 0
    assert results.read_text() == kept and out.read_text() == table


def test_unknown_type_is_refused(capsys):
    assert atlas.run_command(["atlas", "--types=lama"]) == 2
    assert "Did you mean 'llama'?" in capsys.readouterr().err

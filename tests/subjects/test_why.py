"""A subject's explanations of attention, where they are known."""

import importlib.util

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.subjects.subject import Subject


@pytest.mark.slow
def test_the_induction_head_looks_where_the_previous_token_head_wrote_its_token():
    known = mh.rasp.compile(mh.rasp.PROGRAMS["induction"]())
    place = {name: place for place, name in known.heads.items()}
    layer, head = place["induction"]
    writer = "layer {}, head {}".format(*place["previous_token"])
    subject = Subject(known.model, known.params, "induction")
    example = known.examples(8)
    row = np.asarray(example.inputs[0])
    query = next(t for t in range(2, len(row)) if row[t] in row[1:t])
    key = 1 + max(t for t in range(1, query) if row[t] == row[query])
    found = subject.why(row, layer=layer, head=head, query=query)
    assert found.place == (layer, head, query, key)
    assert found.title.endswith(f"'{row[query]}' '{row[key]}'")
    first = found.rows(1)[0]
    assert (first["query"], first["key"]) == ("token", writer)
    np.testing.assert_allclose(found.terms.sum(), found.total, rtol=1e-6)
    cells = subject.why(row, query=query)
    pair = cells.pairs[layer][head, 0, 0].tolist()
    assert [str(cells.components[m]) for m in pair] == ["token", writer]
    np.testing.assert_allclose(cells.terms[layer][head, 0, 0], first["term"], 1e-5)
    answer = known.answers.index(known.program.vocabulary[row[key]])
    written = subject.writes(row, layer=layer, head=head, query=query, answer=answer)
    best = written.rows(1)[0]
    assert best["component"] == "token" and best["source"].startswith(f"{key} ")
    reads = subject.reads(example)
    assert next(x for x in reads.rows() if x["by"] == "k")["reads"] == writer
    with pytest.raises(ValueError, match="inputs must be one text or one row, got 8"):
        subject.why(example, layer=layer, head=head)


@pytest.mark.slow
def test_the_page_of_a_text_says_why():
    known = mh.rasp.compile(mh.rasp.PROGRAMS["induction"]())
    subject = Subject(known.model, known.params, "induction")
    row = np.asarray(known.examples(1).inputs[0])
    maps = subject.maps(row, why=2)
    first, second = maps.why
    for part in first.keys:
        assert (first.keys[part][:, 1:] != second.keys[part][:, 1:]).all()
        weights = np.asarray(maps[part].weights())[0]
        order = np.argsort(-weights, -1, kind="stable")
        np.testing.assert_array_equal(first.keys[part], order[..., 0])
        np.testing.assert_array_equal(second.keys[part], order[..., 1])
    assert (
        '"why":{"components":["token","position","layer 0, head 0"' in maps.show().html
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_pytorch_module_has_the_numbers_of_our_model_of_its_weights(family, tmp_path):
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs mha_haiku[torch]: torchax is not installed")
    import torch
    import transformers

    sizes = {
        "GPT2": dict(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32),
        "Llama": dict(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            vocab_size=32,
        ),
    }[family]
    ends = dict(bos_token_id=0, eos_token_id=0, initializer_range=0.3)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **ends)
    name = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[family]
    module = getattr(transformers, name)(config).eval()
    module.save_pretrained(tmp_path)
    ours, theirs = mh.load(tmp_path), mh.wrap(module)
    row = np.arange(3, 10)[None]
    lens, expected = (each.lens(row).logits for each in (theirs, ours))
    size = np.abs(expected).max()
    np.testing.assert_allclose(lens, expected, atol=1e-4 * size)

    def joined(found, axis):  # tokens and positions are the embedding
        whole = found.take([0, 1], axis).sum(axis, keepdims=True)
        return np.concatenate([whole, np.delete(found, [0, 1], axis)], axis)

    place = dict(layer=1, head=1, query=5)
    found, own = (each.why(row, key=2, **place) for each in (theirs, ours))
    expected = joined(joined(own.terms, 0), 1)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found.terms, expected, atol=1e-4 * size)
    np.testing.assert_allclose(found.terms.sum(), found.total, atol=1e-4 * size)
    found, own = (each.writes(row, answer=7, **place) for each in (theirs, ours))
    size = np.abs(own.terms).max()
    np.testing.assert_allclose(found.terms, joined(own.terms, 1), atol=1e-4 * size)
    np.testing.assert_allclose(found.total, own.total, atol=1e-4 * size)

"""Texts that a run or a function writes: ends, whole characters, room, batches."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, models, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import decoding
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import generation
from mha_haiku.training.runs import folders
from tests import pretrained, tiny_models

TEXT = "aé b🙂 c\n" * 40
T = 6


@pytest.fixture
def bench_of(make_config, tmp_path):
    """A function that makes the subject of a model with random parameters."""

    def make(task, **fields):
        config = make_config(model__num_layers=1, **fields)
        model = folders.make_model(config.model, task)
        shapes = folders.abstract_state(config, task, model).params
        params = tiny_models.normal(shapes)
        run = folders.Run(config, task, model, params, 4)
        return Subject.of_run(run, "run", folders.Folder(tmp_path / "run"))

    return make


@pytest.fixture
def writer(bench_of, tmp_path):
    """A function that makes the subject of a causal model of a text."""

    def make(tokenizer="characters", positions="rotary", **fields):
        (tmp_path / "text").write_text(TEXT)
        options = {"path": str(tmp_path / "text"), "tokenizer": tokenizer}
        return bench_of(
            tasks.make("language_model", sequence_length=T, **options),
            task__name="language_model",
            model__family="causal",
            model__embedding__positions=positions,
            **fields,
        )

    return make


@pytest.fixture
def answerer(bench_of):
    """The subject of an encoder-decoder that is to reverse 2 to 4 tokens of 5."""
    task = tasks.make("reverse_seq2seq", min_length=2, max_length=4, num_tokens=5)
    return bench_of(task, model__family="encoder_decoder")


def _written(subject, count, seed=2):
    return subject.generate("the cat", tokens=count, temperature=1.5, seed=seed)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_text_ends_at_each_end_token_of_a_folder(tmp_path, file):
    pytest.importorskip("tokenizers")
    folder = pretrained.llama(tmp_path / "model", text=pretrained.WORDS * 3)
    free, subject = _written(mh.load(folder), 30), mh.load(folder)
    encoder = subject.task.encoder
    letters = {x for x in free[8:] if x.isascii()}  # of the second half of the text
    tokens = range(encoder.num_tokens)
    codes = set(map(ord, letters))
    ends = [x for x in tokens if codes & set(encoder.piece(x))]
    place = next(i for i, x in enumerate(free) if x in letters)
    path = folder / file
    contents = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(contents | {"eos_token_id": ends}))
    ended = mh.load(folder)
    text = _written(ended, 30)
    assert len(letters) > 3 and text == free[:place] and len(free) > place
    # The run that is made of it knows them, too.
    copied = mh.subjects.imported_runs.write(folder, tmp_path / "run").task
    assert copied.end_tokens == tuple(ends)
    texts = ended.generate(["the cat", "a dog"], tokens=30, temperature=1.5, seed=2)
    assert texts[0] == text and not letters & set(texts[1])


def _counting(params, tokens):
    return jax.nn.one_hot((tokens + 1) % 10, 10)


class _Digits:
    eos_token_id = 7

    def encode(self, text):
        return list(map(int, text))

    def decode(self, tokens):
        return "".join(map(str, tokens))


def test_a_function_ends_at_each_end_token_and_writes_several_texts():
    subject = mh.wrap(_counting, {}, _Digits())
    texts = subject.generate(["2", "34"], tokens=9, temperature=0)
    assert texts == ["3456", "56"]
    codec = subject.codec._replace(end_tokens=(7, 5))
    texts = subject.replace(codec=codec).generate(["2", "5"], temperature=0)
    assert texts == ["34", "6"]


def test_a_function_of_the_last_position_alone_writes():
    last = mh.wrap(lambda params, x: _counting(params, x)[:, -1], {}, _Digits())
    assert last.generate("12", tokens=3, temperature=0) == "345"


def test_parts_of_a_stream_are_whole_characters(writer, monkeypatch):
    pytest.importorskip("tokenizers")
    subject = writer("bpe")
    text = "é🙂a\nüz"
    tokens = subject.task.encode(text)
    options = dict(seed=0, temperature=None, top_k=None, top_p=None)
    for count, expected in ((len(tokens), text), (3, "é\N{REPLACEMENT CHARACTER}")):
        rows = tokens[:count, None]
        monkeypatch.setattr(decoding, "stream", lambda *_, r=rows, **__: iter(r))
        parts = generation.stream(subject, ["ab"], tokens=len(tokens), **options)
        parts = [part for (part,) in parts]
        assert "".join(parts) == expected and len(parts) == count + 1
        # A text that ends inside of a character says so, only at its end.
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts[:-1])


@pytest.mark.slow
def test_tokens_past_the_training_see_as_many_as_it_had(writer):
    subject = writer()
    assert generation._with_room(subject, 6) == subject
    far = generation._with_room(subject, 7)
    assert far.config.model.attention.window == T - 1
    assert subject.config.model.attention.window is None
    narrow = generation._with_room(writer(model__attention__window=2), 201)
    assert narrow.config.model.attention.window == 2
    # The last token's scores depend only on the T before it, in a model that has
    # learned one layer's worth of distances.
    text = "abc" + subject.generate("abc", tokens=8, temperature=0)
    row = subject.encode(text)
    output = subject.model.apply(
        subject.params, None, row[None, -T - 1 : -1], is_training=False
    )
    assert output.logits[0, -1].argmax() == row[-1]


def _ablated_both_ways(subject, part, head):
    """The subject with a head ablated by an edit, and by the parameters."""
    run, path = subject, models.heads_of_layers(subject.config.model)[part].path
    gates = [np.ones(2) for _ in models.heads_of_layers(run.config.model)]
    gates[part][head] = 0
    scaled = heads.scaled(run.params, run.config.model, gates)
    edited = run.model.edited(heads.edits.ablate(path, head))
    return [
        subject.replace(**change) for change in ({"model": edited}, {"params": scaled})
    ]


@pytest.mark.slow
def test_an_edited_model_writes_past_the_training_by_its_edits(writer):
    whole, logits = writer(), []
    for subject in (*_ablated_both_ways(whole, 0, 1), whole):
        run = generation._with_room(subject, 15)
        assert run.config.model.attention.window == T - 1
        tokens = np.arange(12)[None] % 5
        output = run.model.apply(run.params, None, tokens, is_training=False)
        logits.append(output.logits)
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert np.abs(logits[0] - logits[2]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_model_answers_without_any_of_its_heads(answerer, part):
    """A head of the encoder is computed once, before the first token."""
    answers = [
        subject.generate("1 2 3", tokens=5)
        for subject in _ablated_both_ways(answerer, part, 0)
    ]
    assert answers[0] == answers[1]
    name = {"encoder/layer_0/attention/hands": lambda x: x}
    with pytest.raises(ValueError, match="hands' names no site"):
        answerer.edited(name).generate("1 2")


@pytest.mark.slow
def test_positions_of_a_table_are_the_end_of_a_text(writer):
    subject = writer(positions="learned", model__embedding__max_length=10)
    assert len(subject.generate("abc")) == 7
    with pytest.raises(ValueError, match="tokens after a prompt of 3 .* 1 to 7"):
        subject.generate("abc", tokens=8)
    with pytest.raises(ConfigError, match="prompt must be of fewer tokens than the 10"):
        subject.generate("a" * 10)


def test_a_function_writes_as_long_as_its_logits_are_finite():
    def counting(params, tokens):  # a table of 6 positions, with NaN past its end
        positions = jnp.take(params, jnp.arange(tokens.shape[1]), axis=0)
        logits = jax.nn.one_hot((tokens + 1) % 9, 10) + positions.mean()
        return logits.at[..., 9].set(-jnp.inf)  # never written

    subject = mh.wrap(counting, np.ones(6, np.float32), _Digits())
    subject = subject.replace(codec=subject.codec._replace(end_tokens=()))
    assert subject.generate("127", tokens=3, temperature=0) == "801"
    for tokens in (4, 32):
        with pytest.raises(ValueError, match=f"tokens .* got {tokens}: .* not finite"):
            subject.generate("127", tokens=tokens, temperature=0)


@pytest.mark.slow
def test_answers_in_a_batch_are_those_of_single_sources(answerer):
    sources = ["1 2 3", "4 0", "2 2 2 2", "0 1", "3 4 0"]
    together = answerer.generate(sources)
    assert together == [answerer.generate(source) for source in sources]
    assert not any("<end>" in text or text.startswith(" ") for text in together)


@pytest.mark.parametrize(
    ("kind", "options", "strategy"),
    [
        ("prompt", {}, decoding.Sampled(0.8)),
        ("source", {}, decoding.Sampled(0.0)),
        ("source", {"top_k": 3}, decoding.Sampled(0.8, 3)),
        ("prompt", {"temperature": 0}, decoding.Sampled(0.0)),
        ("prompt", {"top_p": 0.5, "temperature": 2}, decoding.Sampled(2.0, None, 0.5)),
    ],
)
def test_options_say_how_tokens_are_chosen(kind, options, strategy):
    none = dict(temperature=None, top_k=None, top_p=None)
    assert generation._strategy(kind, **none | options) == strategy

"""Texts that a run writes: whole characters, room, batches, and scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, models, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import decoding
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import answering, generation
from mha_haiku.training.runs import folders

TEXT = "aé b🙂 c\n" * 40
T = 6


@pytest.fixture
def bench_of(make_config, tmp_path):
    """A function that makes the subject of a model with random parameters."""

    def make(task, **fields):
        config = make_config(model__num_layers=1, **fields)
        model = folders.make_model(config.model, task)
        generator = np.random.default_rng(0)
        params = jax.tree.map(
            lambda x: generator.standard_normal(x.shape).astype(x.dtype),
            folders.abstract_state(config, task, model).params,
        )
        run = folders.Run(config, task, model, params, 4)
        return Subject.of_run(run, "run", folders.Folder(tmp_path / "run"))

    return make


@pytest.fixture
def writer(bench_of, tmp_path):
    """A function that makes the subject of a causal model of a text."""

    def make(tokenizer="characters", positions="rotary", **fields):
        (tmp_path / "text").write_text(TEXT)
        given = {"path": str(tmp_path / "text"), "tokenizer": tokenizer}
        return bench_of(
            tasks.make("language_model", sequence_length=T, **given),
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


def _job(subject, *prompts, strategy=None, **options):
    strategy = strategy or decoding.Greedy()
    return generation.job(subject, "prompt", prompts, strategy, **options)


def _streamed(job):
    tokens = []
    parts = list(generation.stream(job, tokens))
    return parts, generation.text_of(job, 0, tokens)


def test_a_stream_never_shows_half_a_character(writer, monkeypatch):
    pytest.importorskip("tokenizers")
    subject = writer("bpe")
    text = "é🙂a\nüz"
    tokens = subject.task.encode(text)
    monkeypatch.setattr(decoding, "stream", lambda *_, **__: iter(tokens[:, None]))
    parts, streamed = _streamed(_job(subject, "ab", tokens=len(tokens)))
    assert len(parts) == len(tokens) + 1 and parts.count("") > 3
    assert "".join(parts) == streamed.text == text
    assert set("".join(parts)) == set(text)  # no part is replaced
    # A text that ends inside of a character says so.
    monkeypatch.setattr(decoding, "stream", lambda *_, **__: iter(tokens[:3, None]))
    parts, streamed = _streamed(_job(subject, "ab"))
    assert "".join(parts) == streamed.text == "é\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
def test_a_text_is_the_same_streamed_and_written_beside_others(writer):
    subject = writer()
    parts, alone = _streamed(_job(subject, "aé b", tokens=9))
    assert "".join(parts) == alone.text
    together = list(generation.write(_job(subject, "aé b", "c", tokens=9)))
    assert [text.given for text in together] == ["aé b", "c"]
    assert together[0].text == alone.text
    np.testing.assert_array_equal(together[0].tokens, alone.tokens)
    assert [len(text.tokens) for text in together] == [9, 9]
    # A prompt is gone on with by the likeliest tokens.
    row = np.concatenate([together[1].given_tokens, together[1].tokens])[None, :T]
    run = subject
    logits = run.model.apply(run.params, None, row, is_training=False).logits[0]
    np.testing.assert_array_equal(logits[:-1].argmax(-1), row[0, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_drawn_texts_differ_by_place_and_seed_and_are_the_same_again(
    writer, monkeypatch, batch
):
    monkeypatch.setattr(generation, "BATCH", batch)
    subject = writer()
    drawn = decoding.Sampled(20.0)

    def texts(seed):
        job = _job(subject, "a", "a", strategy=drawn, tokens=20, seed=seed)
        return [text.text for text in generation.write(job)]

    first = texts(3)
    assert first[0] != first[1] and first == texts(3) and texts(4) != first


@pytest.mark.slow
def test_tokens_past_the_training_see_as_many_as_it_had(writer):
    subject = writer()
    assert _job(subject, "abc", tokens=3).subject is subject
    far = _job(subject, "abc", tokens=4)
    assert models.windows(far.subject.config.model) == (T - 1,)
    assert models.windows(subject.config.model) == (None,)
    narrow = writer(model__attention__window=2)
    assert models.windows(_job(narrow, "a").subject.config.model) == (2,)
    # The last token's scores depend only on the T before it, in a model that has
    # learned one layer's worth of distances.
    (text,) = generation.write(far._replace(tokens=8))
    last = np.concatenate([text.given_tokens, text.tokens])[-T - 1 : -1]
    run = subject
    logits = run.model.apply(run.params, None, last[None], is_training=False).logits
    assert logits[0, -1].argmax() == text.tokens[-1]


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
        run = _job(subject, "abc", tokens=12).subject
        assert models.windows(run.config.model) == (T - 1,)
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
        next(
            generation.write(
                generation.job(
                    subject, "source", ["1 2 3"], decoding.Greedy(), tokens=5
                )
            )
        ).text
        for subject in _ablated_both_ways(answerer, part, 0)
    ]
    assert answers[0] == answers[1]
    name = {"encoder/layer_0/attention/hands": lambda x: x}
    run = answerer
    misspelled = answerer.replace(model=run.model.edited(name))
    with pytest.raises(ValueError, match="hands' names no site"):
        list(
            generation.write(
                generation.job(misspelled, "source", ["1 2"], decoding.Greedy())
            )
        )


@pytest.mark.slow
def test_positions_of_a_table_are_the_end_of_a_text(writer):
    subject = writer(positions="learned", model__embedding__max_length=10)
    assert _job(subject, "abc").tokens == 7
    assert len(next(generation.write(_job(subject, "abc"))).tokens) == 7
    with pytest.raises(ConfigError, match="prompt of 3 .* 10 positions, .* 1 to 7"):
        _job(subject, "abc", tokens=8)
    with pytest.raises(ConfigError, match="prompt must be of at most 9 tokens"):
        _job(subject, "a" * 10)


class _Digits:
    def encode(self, text):
        return list(map(int, text))

    def decode(self, tokens):
        return "".join(map(str, tokens))


def test_a_function_writes_as_long_as_its_logits_are_finite():
    def counting(params, tokens):  # a table of 6 positions, with NaN past its end
        positions = jnp.take(params, jnp.arange(tokens.shape[1]), axis=0)
        logits = jax.nn.one_hot((tokens + 1) % 9, 10) + positions.mean()
        return logits.at[..., 9].set(-jnp.inf)  # never written

    subject = mh.wrap(counting, np.ones(6, np.float32), _Digits())
    assert subject.generate("127", tokens=3, temperature=0) == "801"
    for tokens in (4, 32):
        with pytest.raises(ValueError, match=f"tokens .* got {tokens}: .* position 2"):
            subject.generate("127", tokens=tokens, temperature=0)


@pytest.mark.slow
def test_batches_of_answers_are_those_of_single_sources(answerer, monkeypatch):
    sources = ["1 2 3", "4 0", "2 2 2 2", "0 1", "3 4 0"]
    monkeypatch.setattr(generation, "BATCH", 2)

    def answers(sources):
        job = generation.job(answerer, "source", sources, decoding.Greedy())
        return [
            (text.given, text.text, text.is_ended) for text in generation.write(job)
        ]

    together = answers(sources)
    assert [given for given, *_ in together] == sources
    monkeypatch.setattr(generation, "BATCH", 1)
    assert together == [answers([source])[0] for source in sources]


@pytest.mark.slow
def test_held_out_answers_are_scored_by_the_task(answerer, monkeypatch):
    task = answerer.task
    batch = answerer.examples(10)

    def generated(model, params, prompts, *, source, **_):
        targets = np.asarray(batch.targets).copy()
        targets[wrong, 0] = (targets[wrong, 0] + 1) % task.num_tokens
        tokens = np.concatenate([prompts, targets], axis=1)
        np.testing.assert_array_equal(source, batch.inputs)
        return decoding.Generated(tokens, np.full(10, tokens.shape[1]), np.zeros(10))

    monkeypatch.setattr(decoding, "generate", generated)
    for wrong in ([], [3], np.arange(10)):  # noqa: B007  (`generated` reads it)
        score = answering.score(answerer, 10, decoding.Greedy())
        for value, low, high in score.values.values():
            assert 0 <= low <= value <= high <= 1
    wrong = np.arange(1, 10, 2)
    score = answering.score(answerer, 10, decoding.Greedy())
    assert score.is_right.tolist() == [True, False] * 5
    value, low, high = score.values["exact_match"]
    # The table of Wilson's intervals has 23.7 and 76.3 percent of 5 in 10.
    np.testing.assert_allclose([value, low, high], [0.5, 0.2366, 0.7634], atol=1e-4)
    rate, low, high = score.values["token_error_rate"]
    lengths = np.asarray(batch.lengths)
    np.testing.assert_allclose(rate, 5 / lengths.sum())
    assert low < rate < high
    lines = score.text(shown=2).splitlines()
    assert "wrong: 5" in lines and len(lines) == 12
    assert lines[-1].endswith(f"({score.right[3]})")
    source = batch.inputs[0][: lengths[0]].tolist()
    shown = [" ".join(map(str, row)) for row in (source, source[::-1])]
    assert f"  {shown[0]} -> {shown[1]}" in lines


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ({"kind": "prompt"}, decoding.Sampled(0.8)),
        ({"kind": "source"}, decoding.Greedy()),
        ({"kind": "source", "top_k": 3}, decoding.Sampled(0.8, 3)),
        ({"kind": "prompt", "temperature": 0}, decoding.Greedy()),
        (
            {"kind": "prompt", "top_p": 0.5, "temperature": 2},
            decoding.Sampled(2.0, None, 0.5),
        ),
        ({"kind": "prompt", "beam": 3}, decoding.Beam(3, 0.0)),
        ({"kind": "source", "beam": 1, "length_penalty": 0.6}, decoding.Beam(1, 0.6)),
    ],
)
def test_flags_say_how_tokens_are_chosen(flags, strategy):
    assert generation.strategy(**flags) == strategy

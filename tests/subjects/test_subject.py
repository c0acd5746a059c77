"""The subject of a run, of pretrained weights and of a function: the same verbs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, models, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.interop import torch_modules
from mha_haiku.subjects import computation, conversion, encoding
from mha_haiku.subjects.verbs import saved_models
from mha_haiku.training.runs import folders
from mha_haiku.training.tasks import tokenization
from tests import everyday, pretrained
from tests.interop import small_models
from tests.tiny_runs import write_untrained

TEXT, OTHER = "the cat sat on the mat", "the cat sat on the log"
PLACE, ANSWERS = 2, (11, 12)  # a position of the text, and two tokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A causal model of two layers, pretrained in no way."""
    folder = tmp_path_factory.mktemp("llama")
    return mh.load(pretrained.llama(folder, text=pretrained.text()))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """An encoder of sentences, without logits."""
    return mh.load(pretrained.bert(tmp_path_factory.mktemp("bert")))


def by_hand(params, tokens):
    """A layer of two heads of somebody's own."""
    x = params["table"][tokens]
    query, key = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qk")
    value = jnp.einsum("btd,dhv->bthv", x, params["v"])
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
    heads = jnp.einsum("bhts,bshv->bthv", weights, value)
    return (x + heads.reshape(x.shape)) @ params["table"].T


class Letters:
    def encode(self, text):
        return [ord(x) - ord("a") for x in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + x) for x in tokens)


@pytest.fixture(scope="module")
def foreign():
    """A function of somebody's own, with a tokenizer and examples."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    params = {"table": normal(26, 6)} | {name: normal(6, 2, 3) for name in "qkv"}
    tokens = jax.random.randint(next(keys), (3, 5), 0, 26)
    batch = tasks.Example(tokens, tokens, jnp.ones(tokens.shape), None)
    return mh.wrap(by_hand, params, Letters(), examples=[batch], name="by hand")


@pytest.mark.slow
def test_maps_of_a_text_are_those_of_its_tokens(llama):
    maps = llama.maps(TEXT)
    tokens = llama.encode(TEXT)
    output = llama.model.apply(llama.params, None, tokens[None], is_training=False)
    assert len(maps) == len(output.maps) == pretrained.L
    for ours, wanted in zip(maps, output.maps, strict=True):
        np.testing.assert_array_equal(ours.weights(), wanted.weights())
    assert len(maps.tokens[0]) == len(tokens)
    assert "".join(maps.tokens[0]).split() == TEXT.split()
    assert llama.decode(tokens).strip() == TEXT


@pytest.mark.parametrize("given", ["text", "texts", "ids", "rows", "array", "examples"])
def test_every_form_of_inputs_gives_the_same_logits(llama, given):
    tokens = llama.encode(TEXT)
    forms = {
        "text": TEXT,
        "texts": [TEXT],
        "ids": tokens.tolist(),
        "rows": [tokens],
        "array": jnp.asarray(tokens)[None],
        "examples": tasks.Example(
            tokens[None], tokens[None], np.ones((1, len(tokens)))
        ),
    }
    wanted = llama.model.apply(llama.params, None, tokens[None], is_training=False)
    logits = llama.logits(forms[given])
    is_one = given in ("text", "ids")
    np.testing.assert_allclose(logits if is_one else logits[0], wanted.logits[0])


@pytest.mark.slow
def test_a_shorter_text_of_several_is_padded_without_changing_its_maps(llama):
    alone, both = llama.maps("the cat"), llama.maps(["the cat", TEXT])
    length = len(llama.encode("the cat"))
    for one, two in zip(alone, both, strict=True):
        np.testing.assert_allclose(
            two.weights()[0, :, :length, :length], one.weights()[0], atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", everyday.some([{}, {"heads": 2}, {"sequence": 2}], 1), ids=repr
)
def test_edits_are_there_on_all_devices(llama, split):
    without = llama.ablated((0, 3), (1, 0)).edited({"layer_1/stream": lambda x: 2 * x})
    config = llama.config.replace(devices=split)
    subject = computation.placed(without.replace(config=config))
    assert subject.placement is not None
    tokens = np.tile(llama.encode(TEXT), (4, 1))
    run = jax.jit(functools.partial(subject.model.apply, is_training=False))
    placed = run(subject.params, None, tokens).logits
    expected = without.logits(tokens)
    np.testing.assert_allclose(placed, expected, atol=1e-4)
    assert np.abs(expected - llama.logits(tokens)).max() > 1e-2


@pytest.mark.slow
def test_patching_has_the_tokens_and_moves_the_answer(llama):
    clean = llama.encode(TEXT)
    corrupted = np.where(np.arange(len(clean)) == PLACE, 7, clean)
    found = llama.patch(
        TEXT, corrupted, answers=ANSWERS, what="layers", per_position=True
    )
    assert found.axes == ("layer", "position") and "".join(found.tokens) == TEXT
    clean, corrupted = llama.logits(clean)[-1], llama.logits(corrupted)[-1]
    difference = lambda x: float(x[ANSWERS[1]] - x[ANSWERS[0]])  # noqa: E731
    np.testing.assert_allclose(found.base, difference(corrupted), rtol=1e-4)
    np.testing.assert_allclose(found.other, difference(clean), rtol=1e-4)
    # In front of the first layer the texts differ at one position: all is mended there.
    np.testing.assert_allclose(found.share[0, PLACE], 1, atol=1e-3)
    assert "logit of the wrong answer" in found._repr_html_()
    assert len(mh.plot(found).axes) == 2


def test_texts_that_do_not_pair_are_refused(llama):
    with pytest.raises(ValueError, match="corrupted must have as many tokens as clean"):
        llama.patch(TEXT, "the dog sat")
    # Texts of several lengths are padded to one shape.
    cut = [[TEXT, "the cat sat"], [TEXT, "the dog"]]
    for verb in (llama.patch, llama.paths, llama.circuit):
        with pytest.raises(ValueError, match=r"as clean, \d+, got \d+: \[.*'og'\]\]"):
            verb(*cut, answers=ANSWERS)
        with pytest.raises(ValueError, match="as many tokens as clean"):
            verb([TEXT, TEXT], [TEXT, "the dog"], answers=ANSWERS)
        with pytest.raises(
            ValueError, match="corrupted must be as many as clean, 1, g"
        ):
            verb(TEXT, [TEXT, OTHER], answers=ANSWERS)
    with pytest.raises(ValueError, match=r"answers must be given, \(right, wrong\)"):
        llama.patch(TEXT, TEXT)
    with pytest.raises(ValueError, match="an answer must be a text of one token"):
        llama.patch(TEXT, TEXT, answers=("ran on", "on"))


_KINDS = [(0, "encoder"), (1, "decoder"), (2, "cross")]


def _of_two_stacks(params, x, decoder_inputs, lengths=None, decoder_lengths=None):
    """An encoder-decoder of somebody's own, which masks keys and no queries."""

    def attend(x, y, lengths, name):
        query = jnp.einsum("btd,dhk->bthk", x, params["q"])
        key, value = (jnp.einsum("bsd,dhk->bshk", y, params[n]) for n in "kv")
        keys = jnp.arange(y.shape[1])[None, None, None]
        ends = y.shape[1] if lengths is None else lengths[:, None, None, None]
        with jax.named_scope(name):
            scores = jnp.einsum("bthk,bshk->bhts", query, key)
            scores = jnp.where(keys < ends, scores, -1e3)
            heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)
            return x + heads.reshape(x.shape)

    x, y = params["table"][x], params["table"][decoder_inputs]
    with jax.named_scope("encoder"):
        x = attend(x, x, lengths, "self")
    with jax.named_scope("decoder"):
        y = attend(y, y, decoder_lengths, "self")
        y = attend(y, x, lengths, "cross")
    return y @ params["table"].T


@pytest.fixture(scope="module")
def translator(foreign):
    sources, targets = np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6]])
    batch = tasks.Example(sources, targets, np.ones((1, 3)), None, targets)
    return mh.wrap(_of_two_stacks, foreign.params, Letters(), examples=[batch])


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "kind"), _KINDS)
def test_places_of_a_wrapped_encoder_decoder_have_the_tokens_of_their_side(
    translator, layer, kind
):
    (batch,) = translator.batches
    queries = "abcd" if kind == "encoder" else "efg"
    keys = "efg" if kind == "decoder" else "abcd"
    (row,) = translator.strongest(layer, 0, count=1).rows()
    assert row["query token"] == queries[row["query"]]
    assert row["key token"] == keys[row["key"]]
    found = translator.why(batch, layer=layer, head=0)
    query, key = found.place[2:]
    assert found.title.endswith(f" {queries[query]!r} {keys[key]!r}")
    written = translator.writes(batch, layer=layer, head=0)
    assert written.labels[0] == tuple(f"{i} {x!r}" for i, x in enumerate(keys))


_PER_EXAMPLE = {
    "statistics": lambda x, batch: x.statistics(batch)["entropy"].mean,
    "roles": lambda x, batch: x.roles(batch)["relative_entropy"].mean,
    "confidence": lambda x, batch: (
        x.importance("confidence", batch).columns["confidence"].mean
    ),
    "reads": lambda x, batch: _mean_of_examples(x.reads(batch)),
}


def _mean_of_examples(found):
    counts, norms = found.counts[..., None, None], found.norms[..., None]
    divisors = {"q": counts, "k": counts, "v": norms}
    means = [(found.by[kind] / x).mean(0) for kind, x in divisors.items()]
    return np.array(means)[..., :-1]  # the last component is what rounding leaves


@pytest.mark.slow
@pytest.mark.parametrize("name", _PER_EXAMPLE)
def test_padding_of_a_function_that_masks_only_keys_does_not_count(translator, name):
    x, y = np.arange(8).reshape(2, 4), np.arange(6, 12).reshape(2, 3)
    weights, lengths, ends = np.ones(y.shape), np.array([2, 4]), np.array([3, 1])
    both = tasks.Example(x, y, weights, lengths, y, ends)
    alone = []
    for i, (s, t) in enumerate(zip(lengths, ends, strict=True)):
        target, ones = y[i : i + 1, :t], np.ones((1, t))
        alone.append(tasks.Example(x[i : i + 1, :s], target, ones, None, target))
    call = functools.partial(_PER_EXAMPLE[name], translator)
    found, expected = call(both), np.mean([*map(call, alone)], 0)
    # Two programs round differently, by their largest terms.
    atol = 1e-6 * max(10, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=atol)


def test_the_last_row_of_the_lens_is_the_model(llama):
    lens = llama.lens(TEXT)
    logits = llama.logits(TEXT)
    # Two programs round differently, by their largest logits.
    atol = 1e-5 * np.abs(logits).max()
    np.testing.assert_allclose(lens.logits[-1], logits, atol=atol)
    assert lens.texts.shape == (pretrained.L + 1, len(lens.tokens))
    assert lens.texts[-1, -1] == llama.task.class_label(int(logits[-1].argmax()))
    assert "output" in lens._repr_html_() and "output" in repr(lens)
    assert len(mh.plot(lens).axes) == 2


@pytest.mark.slow
def test_the_strongest_places_are_those_of_the_maps(llama):
    texts = [TEXT, "a dog ran", OTHER]
    found = llama.strongest(1, 2, texts, count=2)
    best = []
    for text in texts:
        weights = np.array(llama.maps(text)[1].weights())[0, 2]
        weights[0] = 0  # the first query sees only itself, so its weight is 1
        best.append(weights.max(-1))
    order = np.argsort([-x.max() for x in best])[:2]
    np.testing.assert_array_equal(found.examples, order)
    np.testing.assert_allclose(found.weights, [best[i].max() for i in order], rtol=1e-5)
    np.testing.assert_array_equal(found.queries, [best[i].argmax() for i in order])
    assert "query token" in found._repr_html_()


def test_gradients_of_the_drift_are_refused_before_any_work(bert, monkeypatch):
    monkeypatch.setattr(computation, "ablation_value", None)
    with pytest.raises(ConfigError, match="measures must not have gradient: the drift"):
        bert.importance(measures=["ablation", "gradient"], examples=4)


def test_a_run_that_started_from_other_parameters_is_not_resumed(tmp_path, make_config):
    subject = mh.load(write_untrained(tmp_path / "run", make_config()))
    folder = saved_models.save_run(subject, tmp_path / "further", steps=0)
    assert folders.start_of(folders.Folder(folder)) == folders.digest_of(subject.params)
    other = subject.replace(params=jax.tree.map(lambda x: x + 1, subject.params))
    with pytest.raises(ConfigError, match="started from other parameters"):
        saved_models.save_run(other, folder, steps=1)


@pytest.mark.parametrize("text", [" was ", "was ", "  was"])
def test_spaces_of_a_text_are_in_what_its_tokens_say(text):
    for train in tokenization.TRAINERS.values():
        codec = encoding.of_tokenizer(train(" was it", 260))
        assert codec.decode(codec.encode(text)) == text


@pytest.mark.slow
def test_a_config_is_trained_pruned_and_trained_on(tmp_path, make_config):
    config = make_config(training__steps=10)
    m = mh.train(config, tmp_path / "run")
    assert (tmp_path / "run" / "attention" / "maps.npz").exists()
    whole = m.metrics()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert whole["loss"] == pytest.approx(summary["metrics"]["held_out_loss"], rel=1e-5)
    small = m.prune([[1], [0, 1]])
    assert small.metrics()["loss"] != whole["loss"]
    label = small.importance("ablation", examples=8).first.label
    assert all("loss of the targets" in text for text in (repr(whole), label))
    after = small.train(tmp_path / "small", steps=2)
    assert after.step == 2 and repr(after).startswith("Subject('small'")
    kept = [list(x.names) for x in models.heads_of_layers(after.model.config)]
    assert kept == [[1], [0, 1]]
    with pytest.raises(ValueError, match="train is not for 'run', which has edits"):
        m.ablated((0, 0)).train(tmp_path / "edited", steps=1)


@pytest.mark.slow
def test_parameters_that_are_no_arrays_stay_what_they_are(foreign):
    def function(params, tokens):
        named = dict(zip(params["names"].tolist(), params["arrays"], strict=True))
        return by_hand(named, tokens) if params["number"] == 2 else None

    names, arrays = zip(*foreign.params.items(), strict=True)
    params = {"names": np.array(names), "arrays": arrays, "number": np.int64(2)}
    inputs = np.asarray(foreign.batches[0].inputs)
    ablated = mh.wrap(function, params).ablated((0, 1)).logits(inputs)
    cut = foreign.params | {"v": foreign.params["v"].at[:, 1].set(0)}
    np.testing.assert_allclose(ablated, by_hand(cut, inputs), atol=1e-5)


_OF_EXAMPLES = {
    "statistics": lambda x, n: x.statistics(n).numbers["entropy"].mean,
    "importance": lambda x, n: x.importance("ablation", n).per_example,
    "mean": lambda x, n: x.importance("ablation", n, ablation_value="mean").per_example,
    "measured": lambda x, n: [batch.inputs for batch in x.measured(n).batches],
    "roles": lambda x, n: [y.mean for y in x.roles(n).columns.values()],
    "reads": lambda x, n: x.reads(n).by,
    "strongest": lambda x, n: x.strongest(0, 0, n).weights,
    "circuit": lambda x, n: x.circuit(examples=n).edges.per_example,
}


@pytest.mark.parametrize(
    "name", everyday.those(_OF_EXAMPLES, "importance", "measured", "strongest")
)
def test_a_number_of_examples_takes_the_first_that_a_function_has(foreign, name):
    (batch,) = foreign.batches
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(3)]
    call = _OF_EXAMPLES[name]
    for own in (foreign, foreign.replace(batches=rows)):
        for count, there in ((2, 2), (3, 3), (64, 3)):
            if name == "circuit" and own is not foreign:
                continue  # pairs are of one batch
            several = own.replace(batches=own.batches[:there])
            if own is foreign:
                cut = jax.tree.map(lambda x, n=there: x[:n], batch)
                several = own.replace(batches=[cut])
            found, wanted = call(own, count), call(several, there)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
    np.testing.assert_array_equal(foreign.examples(2).inputs, batch.inputs[:2])
    assert len(foreign.replace(batches=rows).examples(9).inputs) == 3


@pytest.mark.parametrize("name", _OF_EXAMPLES)
@pytest.mark.parametrize("count", [0, -1, 2.5, float("nan"), True])
def test_what_is_no_number_of_examples_is_refused(llama, foreign, name, count):
    for subject in (llama, foreign, foreign.replace(batches=None)):
        wanted = "examples must be an integer"
        with pytest.raises((ConfigError, TypeError), match=wanted) as refusal:
            _OF_EXAMPLES[name](subject, count)
        assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "least"), [("bert_classes", False), ("bert_tokens", True)]
)
def test_a_classifier_reads_texts_with_its_own_tokenizer(case, least, tmp_path):
    """There is no task, as the meaning of the classes is unknown."""
    tokenizer = pretrained.words()
    if least:  # a token that the model has no row for refuses no other text
        tokenizer.add_tokens([f"more{i}" for i in range(31)])
    small_models.write(tmp_path, case)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    classifier = mh.load(tmp_path)
    text = "the cat sat"
    tokens = classifier.encode(text)
    assert tokens.tolist() == tokenizer.encode(text).ids
    assert classifier.decode(tokens[1:-1]) == text
    logits = classifier.logits(text)
    assert logits.shape == ((7,) if case == "bert_classes" else (5, 7))
    np.testing.assert_array_equal(logits, classifier.logits([tokens.tolist()])[0])
    assert classifier.maps(text).tokens == (("[CLS]", "the", "cat", "sat", "[SEP]"),)
    # It goes along, and what `interop.load` returns can be given to `wrap`.
    imported = mh.interop.load(classifier.save(tmp_path / "saved"))

    def logits_of(params, x):
        return imported.model.apply(params, None, x, is_training=False).logits

    wrapped = mh.wrap(logits_of, imported.params, imported.tokenizer)
    np.testing.assert_allclose(wrapped.logits(text), logits, rtol=0, atol=1e-6)
    if least:
        with pytest.raises(ConfigError, match="it needs 'more30'"):
            classifier.logits("the more30")


_REFUSALS = {
    "prune": (lambda x: x.ablated(0, 1).prune(), "prune is not for .* has edits"),
    "save": (lambda x: x.ablated(0, 1).save("folder"), "save is not for .* has edits"),
    "examples": (
        lambda x: x.replace(batches=None).examples(2),
        "pass examples to mh.wrap",
    ),
    "show": (lambda x: x.show(), "show is not for 'by hand', which has no task"),
    "inputs": (lambda x: x.maps(3.5), r"inputs must be a text, .*shape \(\)"),
    "empty": (lambda x: x.maps([""]), "inputs must not be empty"),
    "tokens": (
        lambda x: x.generate("a", tokens=0),
        "tokens after a prompt of 1 must be",
    ),
}


@pytest.mark.parametrize("name", _REFUSALS)
def test_what_makes_no_sense_is_refused_in_two_lines(foreign, name):
    call, message = _REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        call(foreign)
    assert len(str(refusal.value).splitlines()) <= 2


_OTHER = [1, 2, 7]
_NOT_THERE = {
    "answers": lambda x: x.patch([1, 2, 3], _OTHER, answers=(5, 10**6)),
    "an answer": lambda x: x.patch([1, 2, 3], _OTHER, answers=(5, -1)),
    "an  answer": lambda x: x.circuit([1, 2, 3], _OTHER, answers=(5.5, 1)),
    "answer": lambda x: x.writes(TEXT, layer=1, head=0, answer=10**6),
    "senders": lambda x: x.paths([1, 2, 3], _OTHER, answers=(5, 1), senders=[(0, 9)]),
    "inputs": lambda x: x.patch([1, 2, 10**6], _OTHER, answers=(5, 1)),
    " inputs": lambda x: x.look([1, -2, 3], ["*/heads"]),
    "layer": lambda x: x.ablated((-1, 0)),
    "head": lambda x: x.ablated((0, -1)),
    " layer": lambda x: x.why(TEXT, layer=2, head=0),
    " head": lambda x: x.why(TEXT, layer=0, head=-1),
    "  head": lambda x: x.why(TEXT, layer=1, head=0, sources=[(0, 4)]),
    "head must be None": lambda x: x.why(TEXT, head=1),
    "query": lambda x: x.why(TEXT, layer=0, head=0, query=99),
    "key": lambda x: x.why(TEXT, key=99),
    " key": lambda x: x.maps(TEXT, why=99),
    "count": lambda x: x.strongest(0, 0, [TEXT], count=-1),
    " count": lambda x: x.examples(0),
    "heads": lambda x: x.edited(heads.edits.ablate(0, 4)).logits(TEXT),
    "top_k": lambda x: x.generate(TEXT, tokens=2, top_k=10**6),
    "must keep": lambda x: x.prune([[0, 4], [1]]),
    "gates": lambda x: heads.scaled(x.params, x.model.config, [np.ones(4)]),
}


@pytest.mark.parametrize("name", _NOT_THERE)
def test_numbers_that_are_not_there_are_refused_by_name(llama, name):
    """Heads, layers, tokens, positions and counts, none of them clipped or wrapped."""
    words = " ".join(name.split())
    must = "" if "must" in words else " must "
    with pytest.raises(ValueError, match=rf"(^|\s){words}{must}"):
        _NOT_THERE[name](llama)


@pytest.mark.slow
def test_inputs_without_a_tokenizer_are_arrays(foreign):
    bare = mh.wrap(by_hand, foreign.params)
    assert bare.maps([1, 2, 3])[0].shape == (1, 2, 3, 3)
    with pytest.raises(
        ValueError, match="inputs must be arrays, got 'hello': the model has no"
    ):
        bare.maps("hello")
    with pytest.raises(ValueError, match=r"cannot be decoded, got \[1, 2\]: the model"):
        bare.decode([1, 2])
    with pytest.raises(ValueError, match="must be the number of a token, got 'a'"):
        bare.patch([1, 2], [1, 3], answers=("a", "b"))
    with pytest.raises(ValueError, match="by_hand takes no lengths="):
        foreign.maps(["hello", "you"])
    with pytest.raises(TypeError, match=r"tokenizer must have encode\(text\)"):
        mh.wrap(by_hand, {}, tokenizer=3)
    for other in (3, None, {"w": np.ones(3)}):
        with pytest.raises(TypeError, match="function must be a function"):
            mh.wrap(other)


def test_features_are_an_array():
    with pytest.raises(TypeError, match="rows of lists are tokens.*, got float32"):
        mh.wrap(lambda params, x: x).logits(list(np.ones((5, 3), np.float32)))


@pytest.mark.slow
def test_attention_outside_of_all_modules_is_a_part_of_a_function():
    """Its sites have no path: "map" and "heads"."""

    def function(params, tokens):
        x = params["embedding"][tokens]
        query = x.reshape(*x.shape[:2], 2, 4)
        values, _ = mh.attend(query, query, query, mask=mh.masks.causal())
        return values.reshape(x.shape) @ params["embedding"].T

    params = {"embedding": jax.random.normal(jax.random.key(0), (11, 8))}
    tokens = np.arange(12).reshape(2, 6) % 11
    subject = mh.wrap(function, params, examples=[tokens])
    (found,) = subject.maps(tokens)
    assert found.shape == (2, 2, 6, 6)
    without = subject.ablated((0, 1))
    mean = subject.importance("ablation").mean
    assert mean.shape == (1, 2) and (mean != 0).all()
    changed = np.abs(without.logits(tokens) - subject.logits(tokens)).max()
    assert changed > 1
    statistics = subject.statistics(tokens)
    np.testing.assert_allclose(
        statistics["entropy"].mean[0], found.statistics().entropy.mean(0), rtol=1e-5
    )
    answer = subject.why(tokens[0], layer=0, head=0)
    assert answer.terms.sum() == pytest.approx(answer.total, rel=1e-4)
    circuit = subject.circuit(*tokens, answers=(1, 2), edges=2)
    assert circuit.faithfulness == pytest.approx(1, abs=1e-4)


def _windowed(params, x, is_folded):
    """Attention within windows of 3 positions: rows of the batch, or seen by a mask."""
    count, length, _ = x.shape
    windows = x.reshape(-1, 3, x.shape[-1]) if is_folded else x
    query, key, value = (jnp.einsum("btd,dhk->bthk", windows, params[n]) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", query, key)
    places = np.arange(windows.shape[1]) // 3
    scores = jnp.where(places[:, None] == places, scores, -1e9)
    heads = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), value)
    return x + heads.reshape(count, length, -1)


@pytest.mark.slow
@pytest.mark.parametrize("ablation_value", ["zero", "mean", "resample"])
def test_windows_in_the_rows_of_a_batch_are_of_their_examples(ablation_value):
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    x, params = normal(4, 6, 8), {name: normal(8, 2, 4) for name in "qkv"}

    def metric(logits, example):
        return jnp.sin(logits[:, :4].sum((1, 2))) * jnp.arange(1.0, 5)

    measures = ["ablation", "gradient", "attribution", "confidence"]
    found, wanted = (
        mh.wrap(
            functools.partial(_windowed, is_folded=is_folded),
            params,
            metric=metric,
            examples=[x],
        ).importance(measures, ablation_value=ablation_value)
        for is_folded in (True, False)
    )
    for name in measures:
        ours, theirs = (each[name].per_example for each in (found, wanted))
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5)
        assert np.ptp(theirs) > 0.1


def test_one_text_at_a_time_has_no_other_to_resample(foreign):
    foreign = foreign.replace(metric=lambda logits, _: logits.mean((1, 2)))
    with pytest.raises(ValueError, match="at least two examples"):
        texts = ["hello", "you"]
        foreign.importance("ablation", texts, ablation_value="resample")


def _of_segments(params, tokens, segment):
    return by_hand(params, tokens) * segment[..., None]


@pytest.mark.slow
def test_a_function_gets_all_keywords_of_a_mapping(foreign):
    first = lambda logits, _: logits[:, 0].mean(-1)  # noqa: E731
    subject = mh.wrap(_of_segments, foreign.params, metric=first)
    tokens, segment = np.array([[1, 2, 3, 0], [4, 5, 6, 7]]), np.arange(8).reshape(2, 4)
    given = {"inputs": tokens, "segment": segment}
    wanted = by_hand(foreign.params, tokens) * segment[..., None]
    np.testing.assert_allclose(subject.logits(given), wanted, 1e-4, 1e-5)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    found = subject.importance("ablation", given | {"attention_mask": mask})
    for i, end in enumerate((3, 4)):
        alone = {name: x[i : i + 1, :end] for name, x in given.items()}
        alone = subject.importance("ablation", alone).columns["ablation"]
        ours = found.columns["ablation"].per_example[i]
        np.testing.assert_allclose(ours, alone.per_example[0], 1e-4, 1e-5)


def _looked_up(params, tokens, /, *, scale=1.0):
    return params["table"][tokens] * scale


_NAMED = {
    "lambda": lambda params, tokens: params["table"][tokens],
    "only by place": _looked_up,
    "partial": functools.partial(_looked_up, scale=1.0),
    "jit": jax.jit(lambda params, tokens: params["table"][tokens]),
}


@pytest.mark.parametrize("name", _NAMED)
def test_inputs_of_a_function_go_by_their_own_name(foreign, name):
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    wanted = foreign.params["table"][tokens]
    for given in ({"tokens": tokens}, {"inputs": tokens}):
        subject = mh.wrap(_NAMED[name], foreign.params, examples=[given])
        np.testing.assert_array_equal(subject.logits(given), wanted)
        for of in (subject, subject.measured(given)):
            np.testing.assert_array_equal(of.batches[0].inputs, tokens)
    with pytest.raises(ValueError, match="must have inputs or tokens, got words"):
        subject.logits({"words": tokens})


def _causal(params, tokens, attention_mask):
    """The layer by hand where queries see earlier keys of a mask, without positions."""
    x, size = params["table"][tokens], tokens.shape[1]
    query, key, value = (jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", query, key)
    scores = jnp.where(jnp.tri(size, dtype=bool), scores, -1e9)
    if jnp.issubdtype(attention_mask.dtype, jnp.floating):
        scores += attention_mask[:, None, None]
    else:
        scores = jnp.where(attention_mask[:, None, None] > 0, scores, -1e9)
    heads = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), value)
    return (x + heads.reshape(x.shape)) @ params["table"].T


def _loss(subject, given):
    measured = subject.measured(given)
    (batch,) = measured.batches
    return measured.metric(subject.logits(batch), batch).mean()


def _numbers(found, names):
    return [found.numbers[name].mean for name in names]


_WITH_MASK = _PER_EXAMPLE | {
    "statistics": lambda x, given: _numbers(
        x.statistics(given),
        ["entropy", "own_position", "previous_token", "first_token"],
    ),
    "anti_diagonal": lambda x, given: x.roles(given)["anti_diagonal"].mean,
    "loss": _loss,
    "ablation": lambda x, given: x.importance("ablation", given)["ablation"].mean,
    "mean": lambda x, given: (
        x.importance("ablation", given, ablation_value="mean")["ablation"].mean
    ),
    "strongest": lambda x, given: x.strongest(0, 1, given).weights.mean(),
    "patch": lambda x, given: (
        x.patch(given, given | {"inputs": given["inputs"] // 2}, answers=(3, 4)).mean
    ),
}


@pytest.mark.parametrize("name", everyday.those(_WITH_MASK, "ablation", "patch"))
def test_padding_that_a_mask_hides_counts_nowhere(foreign, name):
    row, zeros = np.array([3, 14, 5, 6, 11]), np.zeros(3, int)
    tokens = np.stack([[*row, *zeros], [*zeros, *row]])
    mask = np.stack([[*(row > 0), *zeros], [*zeros, *(row > 0)]])
    subject = mh.wrap(_causal, foreign.params)
    call = functools.partial(_WITH_MASK[name], subject)
    wanted = call({"inputs": row[None], "attention_mask": np.array([[0.0] * 5])})
    added = np.where(mask, 0, -1e9).astype(np.float32)
    for given in (mask, added) if name == "statistics" else (mask,):
        found = call({"inputs": tokens, "attention_mask": given})
        np.testing.assert_allclose(found, wanted, 1e-4, 1e-5)


@pytest.mark.slow
def test_labels_of_a_function_are_those_of_the_position_before(foreign, bert):
    tokens = np.array([[3, 14, 5, 6]])
    labels = np.array([[-100, -100, 5, 7]])
    given = {"inputs": tokens, "labels": labels}
    logs = jax.nn.log_softmax(by_hand(foreign.params, tokens))[0]
    wanted = -(logs[1, 5] + logs[2, 7]) / 2
    np.testing.assert_allclose(_loss(foreign, given), wanted, 1e-4)
    # Our own models say whether they predict the next token.
    (batch,) = conversion.batches(bert, given, targets=True)
    assert batch.targets.tolist() == [[0, 0, 5, 7]]
    # A function that names them reads them.
    taught = mh.wrap(lambda params, x, labels: labels[..., None] + 0.0, {})
    np.testing.assert_array_equal(taught.logits(given)[..., 0], labels)


class _Marked(Letters):
    """Puts a start token before a text, and knows no option to leave it out."""

    def encode(self, text):
        return [25, *super().encode(text)]


def test_an_answer_is_one_token_without_those_around_a_text(foreign, bert):
    whole = pretrained.words()
    ours = tokenization.Pretrained(whole.to_str())
    cat = whole.token_to_id("cat")
    for codec in (*map(encoding.of_tokenizer, (whole, ours)), bert.codec):
        assert codec.prompt("cat").tolist()[:2] == [2, cat]
        assert encoding.one_token(codec, "cat") == cat
        with pytest.raises(ValueError, match=r"which has 2: \['cat', '\w+'\]"):
            encoding.one_token(codec, "cat dog")
    codec = encoding.of_tokenizer(Letters())
    assert encoding.one_token(codec, "c") == 2
    with pytest.raises(ValueError, match="which has 2"):
        encoding.one_token(encoding.of_tokenizer(_Marked()), "c")
    subject = mh.wrap(by_hand, foreign.params, whole)
    texts = "the cat sat", "the dog sat"
    found = [subject.patch(*texts, answers=x).mean for x in (("cat", "dog"), (7, 8))]
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_only_the_loss_needs_next_tokens(foreign):
    def metric(logits, _):
        return logits[..., 0].mean(1)

    inputs = np.array([[3], [4]])
    subject = mh.wrap(by_hand, foreign.params, metric=metric, examples=inputs)
    found, given = (subject.importance("ablation", x)["ablation"] for x in (2, inputs))
    np.testing.assert_array_equal(found.per_example, given.per_example)
    for metric in (None, heads.metrics.loss):
        with pytest.raises(ValueError, match="at least two tokens, to predict"):
            mh.wrap(by_hand, foreign.params, metric=metric, examples=inputs)
    # Another metric may read them.
    rows = np.array([[3, 4, 5]])
    mistakes = heads.metrics.mistakes()
    subject = mh.wrap(by_hand, foreign.params, metric=mistakes, examples=rows)
    answers = by_hand(foreign.params, rows)[0, :2].argmax(-1)
    for x in (1, rows):
        wanted = (answers != rows[0, 1:]).mean()
        np.testing.assert_allclose(_loss(subject, x), wanted)


def test_arguments_that_would_be_ignored_are_refused(foreign, monkeypatch):
    with pytest.raises(ValueError, match=r"answers must be None without texts, got \("):
        foreign.circuit(answers=(3, 4), edges=3)
    for option in ({"examples": 3}, {"metric": "loss"}):
        with pytest.raises(ValueError, match="metric and examples must be None with"):
            foreign.circuit("abc", "abd", **option)
    monkeypatch.setattr(torch_modules, "is_module", lambda _: True)
    with pytest.raises(ValueError, match=r"params must be None .* by tokenizer="):
        mh.wrap(by_hand, Letters())


@pytest.mark.slow
def test_keywords_that_are_not_per_example_are_those_of_all_examples(foreign):
    def scaled(params, tokens, scale):
        return by_hand(params, tokens) * scale[0]

    rows = np.random.default_rng(0).integers(0, 7, (4, 5))
    scale = np.array([2.0, 3.0, 4.0])
    batches = [{"inputs": x, "scale": scale} for x in np.split(rows, 2)]
    metric = {"metric": lambda logits, _: logits.mean((1, 2))}
    subject = mh.wrap(scaled, foreign.params, examples=batches, **metric)
    batch = subject.examples(3)
    np.testing.assert_array_equal(batch.others["scale"], scale)
    np.testing.assert_array_equal(batch.inputs, rows[:3])
    together = [{"inputs": rows, "scale": scale}]
    plain = mh.wrap(scaled, foreign.params, examples=together, **metric)
    found = [x.circuit(examples=4, edges=2).rows() for x in (subject, plain)]
    assert len(found[0]) == len(found[1]) == 2
    batches[1] |= {"scale": 2 * scale}
    with pytest.raises(ValueError, match="must be of one length, with equal settings"):
        mh.wrap(scaled, foreign.params, examples=batches).examples(3)


@pytest.mark.slow
def test_what_edited_heads_write_is_not_split_into_their_values(llama):
    tokens, double = llama.encode(TEXT)[None, :5], {"*/heads": lambda x: 2 * x}
    edited = llama.edited(double)
    assert llama.writes(tokens, layer=1, head=0).terms.any()
    with pytest.raises(
        ValueError, match="what the head writes must add up to it, but are"
    ):
        edited.writes(tokens, layer=1, head=0)
    place = {"layer": 1, "head": 0, "query": 4, "key": 1}
    found = edited.why(tokens, **place)  # of the edited stream, whose terms are whole
    np.testing.assert_allclose(found.terms.sum() + found.position, found.total, 1e-4)
    with pytest.raises(
        ValueError, match="the part of layer 0, head 0 must add up to it"
    ):
        edited.why(tokens, **place, sources=[(0, 0)])

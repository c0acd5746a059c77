"""The README's table of verbs and kinds of subjects is what verbs do."""

import functools
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import runs
from mha_haiku.subjects.subject import VERBS, Subject
from tests import pretrained
from tests.tiny_runs import write_untrained

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "mha_haiku/subjects/README.md").read_text(encoding="utf-8")
(_HEAD, _, *_ROWS) = re.search(r"\| verb \| causal .*?\n\n", README, re.S)[
    0
].splitlines()[:-1]
KINDS = [cell.strip() for cell in _HEAD.split("|")[2:-1]]
TABLE = {
    (verb, kind): cell
    for row in _ROWS
    for verbs, *cells in [[x.strip() for x in row.split("|")[1:-1]]]
    for verb in re.findall(r"`(\w+)`", verbs)
    for kind, cell in zip(KINDS, cells, strict=True)
}
H, D, V, L = 2, 16, 32, 2


class _Words:
    """A tokenizer of letters."""

    eos_token_id = 0

    def encode(self, text):
        return [ord(x) % V for x in text]

    def decode(self, tokens):
        return "".join(chr(96 + token) for token in tokens)


def _matrices(**shapes):
    generator = np.random.default_rng(0)
    normal = lambda shape: generator.standard_normal(shape) / shape[0] ** 0.5  # noqa: E731
    return {name: jnp.float32(normal(shape)) for name, shape in shapes.items()}


_PARTS = {f"{name}{i}": (D, D) for i in range(L) for name in "qkvoab"}


def _blocks(params, x, is_causal):
    for i in range(L):
        with jax.named_scope(f"block_{i}"):
            q, k, v = (
                (x @ params[f"{name}{i}"]).reshape(*x.shape[:2], H, -1)
                for name in "qkv"
            )
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
            if is_causal:
                seen = jnp.tril(jnp.ones((1, 1, *scores.shape[2:]), bool))
                scores = jnp.where(seen, scores, -1e9)
            heads = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
            x = x + heads.reshape(x.shape) @ params[f"o{i}"]
            x = x + jax.nn.gelu(x @ params[f"a{i}"]) @ params[f"b{i}"]
    return x


def by_hand(params, tokens):
    """Makes a causal model of tokens."""
    x = params["embedding"][tokens] + params["positions"][None, : tokens.shape[1]]
    return _blocks(params, x, True) @ params["embedding"].T


def of_pixels(params, pixels):
    """Makes a classifier of images `[B, 8, 8]`, of patches of 2 by 2."""
    patches = pixels.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    x = _blocks(params, patches @ params["embedding"], False)
    return x.mean(1) @ params["classes"]


def _pair_of(subject):
    batch = subject.examples(2)
    one, other = (jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(2))
    same = {"lengths": one.lengths, "decoder_lengths": one.decoder_lengths}
    return one, other._replace(**same)


@functools.cache
def _subject(kind, folder):
    """Returns a tiny subject, two inputs of it, and what verbs take as examples."""
    small = dict(num_layers=1, model_size=16, attention=dict(num_heads=2))
    if kind == "causal":
        subject = mh.load(pretrained.llama(folder / kind, text=pretrained.text()))
        tokens = subject.encode("the cat sat on the mat")
        return subject, (tokens, tokens[::-1].copy()), 4
    if kind in ("encoder", "encoder-decoder"):
        name = "reverse" if kind == "encoder" else "reverse_seq2seq"
        config = runs.default_config(name).replace(model=small)
        write_untrained(folder / kind, config)
        subject = mh.load(folder / kind)
        return subject, _pair_of(subject), 4
    if kind == "sentences":
        subject = mh.load(pretrained.bert(folder / kind))
        return subject, ("the cat sat", "the mat sat"), 4
    if kind == "PyTorch module":
        if importlib.util.find_spec("torchax") is None:
            pytest.skip("needs mha_haiku[torch]: torchax is not installed")
        import transformers

        sizes = dict(n_embd=16, n_layer=2, n_head=2, vocab_size=V, n_positions=32)
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        texts = "abcabcab", "abdabcab"
        return mh.wrap(module, tokenizer=_Words()), texts, list(texts)
    if kind == "function":
        params = _matrices(embedding=(V, D), positions=(64, D), **_PARTS)
        texts = "abcabcab", "abdabcab"
        return mh.wrap(by_hand, params, _Words()), texts, list(texts)
    params = _matrices(embedding=(4, D), classes=(D, 3), **_PARTS)
    images = np.float32(np.random.default_rng(1).standard_normal((2, 8, 8)))
    metric = lambda logits, _: -logits[..., 0]  # noqa: E731
    subject = mh.wrap(of_pixels, params, metric=metric, examples=images)
    return subject, (images[:1], images[1:]), images


CALLS = {
    "ablated": lambda s, x, y, n, out: s.ablated((0, 1)).maps(x),
    "check": lambda s, x, y, n, out: s.check(x),
    "circuit": lambda s, x, y, n, out: s.circuit(x, y, answers=(1, 2), edges=5),
    "compositions": lambda s, x, y, n, out: s.compositions(),
    "edited": lambda s, x, y, n, out: s.edited({"*/weights": lambda w: w}).maps(x),
    "generate": lambda s, x, y, n, out: s.generate(
        "1 2 3" if s.name == "encoder-decoder" else "abc", tokens=2
    ),
    "importance": lambda s, x, y, n, out: s.importance(examples=n),
    "learn_gates": lambda s, x, y, n, out: s.learn_gates(
        out, penalty=0.1, steps=1, tuning_steps=1, examples=None if s.task else n
    ),
    "lens": lambda s, x, y, n, out: s.lens(x),
    "logits": lambda s, x, y, n, out: s.logits(x),
    "look": lambda s, x, y, n, out: s.look(x, ["*/heads"]),
    "maps": lambda s, x, y, n, out: s.maps(x),
    "measured": lambda s, x, y, n, out: s.measured(n),
    "metrics": lambda s, x, y, n, out: s.metrics(examples=None if s.task else n),
    "patch": lambda s, x, y, n, out: s.patch(x, y, answers=(1, 2)),
    "paths": lambda s, x, y, n, out: s.paths(x, y, answers=(1, 2)),
    "plot": lambda s, x, y, n, out: s.plot(x),
    "prune": lambda s, x, y, n, out: s.prune(0.5, examples=n),
    "reads": lambda s, x, y, n, out: s.reads(n),
    "roles": lambda s, x, y, n, out: s.roles(n),
    "rollout": lambda s, x, y, n, out: s.rollout(x),
    "save": lambda s, x, y, n, out: s.save(out),
    "show": lambda s, x, y, n, out: s.show(x),
    "sites": lambda s, x, y, n, out: s.sites(x),
    "statistics": lambda s, x, y, n, out: s.statistics(n),
    "strongest": lambda s, x, y, n, out: s.strongest(0, 0, n),
    "sweep": lambda s, x, y, n, out: s.sweep(keep=0.5, sizes=1, examples=n),
    "train": lambda s, x, y, n, out: s.train(
        out, steps=1, **{} if s.task else {"examples": n}
    ),
    "why": lambda s, x, y, n, out: s.why(x, layer=0, head=0, query=1),
    "writes": lambda s, x, y, n, out: s.writes(x, layer=0, head=0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("subjects")


def test_every_verb_and_reason_is_in_the_table():
    methods = ("edited", "ablated")
    assert {verb for verb, _ in TABLE} == {*VERBS, *methods} == set(CALLS)
    assert all(hasattr(Subject, verb) for verb, _ in TABLE)
    reasons = set(re.findall(r"^- \*\*(\w)\*\*: ", README, re.M))
    assert {cell for cell in TABLE.values() if cell != "yes"} == reasons


# Of models that are built here, these take minutes, and have tests of their own.
_LONG = ("learn_gates", "train", "sweep", "prune", "reads", "why", "writes")
_BUILT = ("causal", "encoder", "encoder-decoder", "sentences")
_QUICK = ("ablated", "edited", "logits", "look", "maps", "measured", "sites")


def _marks(kind, verb):
    """Kinds that differ in their code run with each change, the others weekly."""
    if kind not in ("causal", "function", "PyTorch module"):
        return pytest.mark.weekly
    return () if kind == "function" and verb in _QUICK else pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        pytest.param(kind, verb, marks=_marks(kind, verb))
        for kind in KINDS
        for verb in CALLS
        if TABLE[verb, kind] != "yes" or kind not in _BUILT or verb not in _LONG
    ],
)
def test_a_verb_is_as_its_cell_says(kind, verb, folder, tmp_path):
    subject, inputs, examples = _subject(kind, folder)
    call = functools.partial(CALLS[verb], subject, *inputs, examples, tmp_path / "new")
    if TABLE[verb, kind] == "yes":
        call()
        return
    with pytest.raises((ValueError, TypeError)) as refusal:
        call()
    assert len(str(refusal.value).splitlines()) <= 2


def test_examples_that_are_gone_through_once_are_all_kept():
    params = _matrices(embedding=(V, D), positions=(64, D), **_PARTS)
    rows = [np.arange(4)[None] + i for i in range(3)]
    subject = mh.wrap(by_hand, params, examples=(row for row in rows))
    assert [int(batch.inputs[0, 0]) for batch in subject.batches] == [0, 1, 2]

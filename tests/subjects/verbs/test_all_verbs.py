"""Every verb sees the edits of a subject, on one device and on four, or refuses them.

Ablating heads and setting what their output projection makes of them to 0 are the same
model, one by an edit and one by parameters.
"""

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads
from mha_haiku.subjects import computation, pictures
from mha_haiku.subjects.subject import VERBS
from tests import everyday, pretrained

TEXT, OTHER, ANSWERS = "the cat sat on the mat", "the cat sat on the log", (11, 12)
ABLATED = (1, 2), (0, 0)


def _pair(subject):
    """Texts of as many tokens, which differ in one."""
    tokens = subject.encode(TEXT)
    return tokens, np.where(np.arange(len(tokens)) == 2, 7, tokens)


CALLS = {
    "circuit": lambda x: x.circuit(*_pair(x), answers=ANSWERS, edges=20).only,
    "generate": lambda x: x.generate(TEXT, tokens=4, temperature=0),
    "importance": lambda x: [
        each.per_example for each in x.importance(examples=4).columns.values()
    ],
    "lens": lambda x: x.lens(TEXT).logits,
    "logits": lambda x: x.logits([TEXT, OTHER]),
    "look": lambda x: x.look(TEXT, ["*/stream"])[1],
    "maps": lambda x: [each.weights() for each in x.maps(TEXT)],
    "measured": lambda x: heads.ablation(x.measured(4)).per_example,
    "metrics": lambda x: x.metrics(),
    "patch": lambda x: x.patch(*_pair(x), answers=ANSWERS, what="layers").per_example,
    "paths": lambda x: x.paths(*_pair(x), answers=ANSWERS).per_example,
    "plot": lambda x: x.plot(TEXT, layer=1).axes[0].images[0].get_array(),
    "roles": lambda x: {n: c.mean for n, c in x.roles(4).numbers.items()},
    "rollout": lambda x: x.rollout().shares,
    "show": lambda x: pictures.map_set_of(x).examples[0].weights,
    "sites": lambda x: repr(x.sites(TEXT)),
    "statistics": lambda x: [
        each.mean for each in x.statistics(examples=4).numbers.values()
    ],
    "strongest": lambda x: x.strongest(1, 0, [TEXT, OTHER]).weights,
    "why": lambda x: x.why(TEXT, layer=1, head=0).terms,
    "writes": lambda x: x.writes(TEXT, layer=1, head=0).terms,
}
# Whose examples devices share.
SHARED = ("importance", "measured", "metrics", "roles", "show", "statistics")
REFUSING = {
    "compositions": lambda x, folder: x.compositions(),
    "learn_gates": lambda x, folder: x.learn_gates(folder, penalty=0.1, steps=1),
    "prune": lambda x, folder: x.prune(0.5),
    "reads": lambda x, folder: x.reads(2),
    "save": lambda x, folder: x.save(folder),
    "sweep": lambda x, folder: x.sweep(keep=0.5),
    "train": lambda x, folder: x.train(folder, steps=1),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return mh.load(pretrained.llama(folder, text=pretrained.text()))


@pytest.fixture(scope="module")
def edited(whole):
    return whole.ablated(*ABLATED)


@pytest.fixture(scope="module")
def expected(whole):
    gates = [np.ones(pretrained.H) for _ in range(pretrained.L)]
    for layer, head in ABLATED:
        gates[layer][head] = 0
    return whole.replace(params=heads.scaled(whole.params, whole.model.config, gates))


def test_every_verb_is_tried():
    # Only a PyTorch module can be checked: tests/interop/test_certificate.py.
    assert sorted([*CALLS, *REFUSING, "check"]) == sorted(VERBS)


@pytest.mark.parametrize(
    ("name", "devices"),
    everyday.those(
        [*((name, 4) for name in CALLS), *((name, 1) for name in SHARED)],
        *((name, 4) for name in ("look", "maps", "sites", "metrics", "patch")),
    ),
)
def test_a_verb_gives_what_the_edited_function_gives(
    whole, edited, expected, name, devices, monkeypatch
):
    available = jax.devices()[:devices]
    monkeypatch.setattr(computation.jax, "devices", lambda: available)
    found, wanted, before = map(CALLS[name], (edited, expected, whole))
    if name in ("generate", "sites"):
        assert found == wanted
        return
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)  # noqa: E731
    jax.tree.map(same, found, wanted)
    with pytest.raises(AssertionError):  # the edits matter
        jax.tree.map(same, found, before)


@pytest.mark.parametrize("name", REFUSING)
def test_a_verb_of_parameters_refuses_edits_in_two_lines(edited, name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is not for .*, which has edits") as e:
        REFUSING[name](edited, tmp_path / "new")
    assert len(str(e.value).splitlines()) <= 2 and not list(tmp_path.iterdir())

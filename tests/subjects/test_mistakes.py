"""A mistake names the argument; where one reading makes sense, it is taken."""

import ast
import inspect
import textwrap

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.subjects.subject import VERBS, Subject
from tests.subjects.test_subject import Letters, by_hand


@pytest.fixture(scope="module")
def subject():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"table": (26, 6)} | dict.fromkeys("qkv", (6, 2, 3))
    params = {
        name: jax.random.normal(key, shapes[name])
        for name, key in zip(shapes, keys, strict=True)
    }
    return mh.wrap(by_hand, params, Letters())


READINGS = {
    "a layer and a head": (lambda x: x.ablated(0, 1), lambda x: x.ablated((0, 1))),
    "a list of heads": (
        lambda x: x.ablated([(0, 1), (0, 0)]),
        lambda x: x.ablated((0, 1), (0, 0)),
    ),
    "numbers of NumPy": (
        lambda x: x.ablated(*np.argwhere([[False, True]])),
        lambda x: x.ablated((0, 1)),
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_heads_are_read_in_the_one_way_that_makes_sense(subject, name):
    found, wanted = (make(subject).logits("abc") for make in READINGS[name])
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found - subject.logits("abc")).max() > 1e-3


def test_texts_and_tokens_are_one_or_several(subject):
    assert [x.tolist() for x in subject.encode(["ab", "c"])] == [[0, 1], [2]]
    assert subject.decode(5) == "f" and subject.decode(np.array([5, 6])) == "fg"
    _, found = subject.look("ab", "*/heads")
    assert len(found) == 1


MISTAKES = {
    "edits must be a dict of functions, got \\[": lambda x: x.edited(
        [{"*/heads": len}]
    ),
    "edits must be a dict of functions": lambda x: x.edited({"*/heads": 5}),
    "prompt must be a text or a list of texts, got array": lambda x: x.generate(
        np.array([[1, 2]])
    ),
    "tokens must be an integer or a list of integers": lambda x: x.decode([[1], ["a"]]),
    "text must be a text or a list of texts": lambda x: x.encode(5),
    "measures must be a text or a list": lambda x: x.importance(len),
    "at must be a text or a list of texts": lambda x: x.look("ab", (0, 1)),
    "layers must be a list of integers or texts or None": lambda x: x.statistics(
        ["ab"], layers=0
    ),
    "layer must be an integer, got '0'": lambda x: x.strongest("0", 0, ["ab"]),
    "head must be an integer or None, got 1.5": lambda x: x.why(
        "ab", layer=0, head=1.5
    ),
    "a head must be a tuple of 2 integers": lambda x: x.ablated((0, 1, 2)),
    "inputs must be a list of texts": lambda x: x.maps(["a", 1]),
    "why must be an integer, got True": lambda x: x.maps("ab", why=True),
    "keep must be a number or a list of lists of integers": lambda x: x.prune("half"),
    "metric_drop must be a number": lambda x: x.prune(metric_drop=[0.1]),
    "answers must be a tuple of 2": lambda x: x.patch("ab", "ac", answers=5),
    "edits must be a dict": lambda x: mh.edit(by_hand, 5),
    "at must be a text": lambda x: mh.look(by_hand, 5),
    "subject must be a Measured": lambda x: mh.heads.ablation(5),
    "model must be a Model": lambda x: mh.heads.logit_lens(5, {}, {}),
    "config must be a ModelConfig, got 'encoder'": lambda x: mh.models.part_of(
        "encoder", "nan"
    ),
    "at must be an integer or a text": lambda x: mh.heads.edits.ablate(("a", 1), 0),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_names_the_argument(subject, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        MISTAKES[message](subject)


@pytest.mark.parametrize("name", mh.models.__all__)
def test_functions_of_models_refuse_what_is_no_model(name):
    function = getattr(mh.models, name)
    if not inspect.isfunction(function):
        return
    parameters = inspect.signature(function).parameters.values()
    count = sum(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)
    with pytest.raises((TypeError, ValueError), match=r"must be|missing"):
        function(*["nan"] * count)


def test_what_fits_is_left_as_it_is():
    @mh.verb
    def halves(subject, count: int, shares: tuple[float, ...] = (), more=None):
        return count, shares, more

    try:
        made = mh.wrap(lambda params, x: x)
        shares = np.float32([0.5])
        assert made.halves(np.int32(2), shares, more="x") == (2, shares, "x")
        with pytest.raises(TypeError, match="halves.*missing 1 required"):
            made.halves()
    finally:
        del VERBS["halves"], Subject.halves


def test_every_verb_is_typed_as_a_method():
    tree = ast.parse(textwrap.dedent(inspect.getsource(Subject)))
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    typed = {alias.name: x.module for x in imports for alias in x.names}
    assert typed == {name: verb.function.__module__ for name, verb in VERBS.items()}

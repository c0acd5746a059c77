"""The examples in the docstrings of public names give what they say.

Examples find these names:

- `jax`, `jnp`, `np`, `hk` (Haiku), `mh`;
- `model`, `params`, `config`: a causal model of two layers of two heads. It is compiled
  by `mh.rasp` and not trained, so that its heads are known: head 0 of layer 0 looks at
  the token before, head 0 of layer 1 is an induction head, and the others are noise;
- `batches`: a list of one batch of eight examples, four tokens that are repeated;
  `tokens`: their inputs, `[8, 9]`; `corrupted`: a list of one batch of other examples;
- `measured`: all these with the loss, as `mh.heads` takes it; `subject`: a `Subject`;
- the working directory is empty and temporary. Where an example names "runs/reverse",
  a run of a few steps is there.
"""

import doctest
import functools
import inspect
import shutil

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.subjects.subject import VERBS

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_RUN = "runs/reverse"

# The modules whose names are public; "" is `mh` itself.
_MODULES = ["", "attention", "devices", "heads", "interop", "masks", "models"]
_MODULES += ["modules", "positions", "rasp", "runs", "subjects", "tasks"]
# Modules and names whose examples compile for more than a second.
_SLOW = ["", "attention", "heads", "modules", "runs", "subjects"]


def _module(name):
    return getattr(mh, name) if name else mh


def _things():
    """Yields the name, object and module of public examples, each object once."""
    seen = set()
    for module in _MODULES:
        whole = ".".join(filter(None, ("mh", module)))
        names = sorted(_module(module).__all__)
        for name, thing in [("", _module(module))] + [
            (name, getattr(_module(module), name)) for name in names
        ]:
            if ">>>" in (getattr(thing, "__doc__", "") or "") and id(thing) not in seen:
                seen.add(id(thing))
                yield f"{whole}.{name}".rstrip("."), thing, module


def _case(name, module):
    marks = [pytest.mark.slow] if {name, module} & {*_SLOW} else []
    return pytest.param(name, marks=marks)


_THINGS = {name: thing for name, thing, _ in _things()}


@functools.cache
def _names():
    compiled = mh.rasp.compile(mh.rasp.PROGRAMS["induction"](), num_heads=2)
    model, params = compiled.model, compiled.params
    batches, corrupted = ([compiled.examples(8, seed=seed)] for seed in (0, 1))
    loss = mh.heads.metrics.loss
    return {
        **{"jax": jax, "jnp": jnp, "np": np, "hk": hk, "mh": mh},
        **{"model": model, "params": params, "config": model.config},
        **{"batches": batches, "corrupted": corrupted, "tokens": batches[0].inputs},
        "measured": mh.heads.Measured(model, loss, params, batches),
        "subject": mh.Subject(model, params, "induction", metric=loss, batches=batches),
    }


@pytest.fixture
def own_verbs():
    """Takes back the verbs that an example has added."""
    before = {*VERBS}
    yield
    for name in {*VERBS} - before:
        del VERBS[name]
        delattr(mh.Subject, name)


@pytest.mark.parametrize(
    "name",
    [_case(name, module) for name, _, module in _things()],
)
def test_an_example_gives_what_it_says(name, own_verbs, tmp_path, monkeypatch, request):
    text = inspect.cleandoc(_THINGS[name].__doc__)
    monkeypatch.chdir(tmp_path)
    if _RUN in text:
        shutil.copytree(request.getfixturevalue("trained")(), tmp_path / _RUN)
    test = doctest.DocTestParser().get_doctest(text, dict(_names()), name, None, None)
    said = []
    with jax.numpy_rank_promotion("allow"):  # as outside of tests
        doctest.DocTestRunner(verbose=False, optionflags=_OPTIONS).run(
            test, out=said.append
        )
    assert not said, "".join(said)

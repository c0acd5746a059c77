"""Wrapped functions are measured and trained, as runs that resume."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mha_haiku as mh
from mha_haiku import tasks
from mha_haiku.training import train_step
from mha_haiku.training.runs import trainers

D, H, V, N, T = 6, 2, 7, 12, 5
ROWS = np.random.default_rng(0).integers(0, V, (N, T))
HOW = {"steps": 20, "optimizer": optax.sgd(0.1), "freeze": "qkv.1"}
DRAWN = [jax.random.normal(jax.random.key(i), (D, D)) for i in range(4)]
PARAMS = {"embedding": DRAWN[3].repeat(2, 0)[:V], "qkv": DRAWN[:3], "no parameter": 3}


def causal(params, tokens, *, rng=None):
    """Predicts the next token, in training with dropout of all that heads write."""
    x = params["embedding"][tokens]
    heads = [(x @ w).reshape(*x.shape[:2], H, -1) for w in params["qkv"]]
    with jax.named_scope("layer"):
        heads = mh.attend(*heads, mask=mh.masks.causal())[0]
    if rng is not None:
        heads = heads * jax.random.bernoulli(rng, 0.5, heads.shape) * 2
    return (x + heads.reshape(x.shape)) @ params["embedding"].T


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return mh.wrap(causal, PARAMS, examples=ROWS).train(folder, **HOW)


def test_a_run_has_what_ours_have_and_frozen_parameters_stay(trained):
    root, whole = trained.folder.root, mh.wrap(causal, PARAMS)
    assert {"checkpoints", "metrics.jsonl", "data.npz"} < {
        x.name for x in root.iterdir()
    }
    assert "step 20" in mh.show(root).html  # its maps
    differs = lambda x, y: bool((x != y).any())  # noqa: E731
    changed = jax.tree.map(differs, trained.params, whole.params)
    assert jax.tree.leaves(changed) == [True, True, False, True]
    assert len(trained.examples(N).inputs) == 2  # held out of twelve
    losses = [x.metrics(examples=ROWS)["loss"] for x in (trained, whole)]
    assert losses[0] < losses[1] - 0.1
    assert repr(whole.metrics(examples=ROWS)).endswith("# loss of the next token, nats")


def test_a_step_is_that_of_optax_on_a_batch_of_the_loop(tmp_path):
    subject = mh.wrap(lambda params, tokens: causal(params, tokens), PARAMS)
    how = {"examples": ({"tokens": row[None]} for row in ROWS), "batch_size": 4}
    found = subject.train(tmp_path / "run", steps=1, optimizer=optax.sgd(1.0), **how)
    task = tasks.Wrapped.of_batch(subject.measured(ROWS).batches[0], "")
    key = jax.random.fold_in(train_step.stream(0, "data"), 0)
    tokens = tasks.batch(task, key, task.train_data, jnp.arange(4)).inputs

    def loss(floats):
        logs = jax.nn.log_softmax(causal(floats, tokens)[:, :-1])
        return -jnp.take_along_axis(logs, tokens[:, 1:, None], 2).mean()

    floats = {name: PARAMS[name] for name in ("embedding", "qkv")}
    wanted = jax.tree.map(jnp.subtract, floats, jax.grad(loss)(floats))
    for x, y in zip(*map(jax.tree.leaves, (found.params, wanted)), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-5)


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(trained, tmp_path, monkeypatch):
    subject, take_steps = (
        mh.wrap(causal, PARAMS, examples=ROWS),
        trainers.Trainer.take_steps,
    )

    def interrupted(self, stop):
        take_steps(self, stop)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(trainers.Trainer, "take_steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subject.train(tmp_path / "run", **HOW)
    found = subject.train(tmp_path / "run", **HOW)
    assert found.step == 20
    jax.tree.map(np.testing.assert_array_equal, found.params, trained.params)


def test_what_cannot_be_trained_or_opened_is_refused_in_two_lines(trained):
    train, root = mh.wrap(causal, PARAMS).train, trained.folder.root
    new = {"workdir": root / "new", "steps": 1, "examples": ROWS}
    for call, words in (
        (lambda: mh.load(root), r"trained causal, which it cannot.*\nThe same call of"),
        (lambda: trained.train(root / "new", steps=1), "no examples to train on"),
        (lambda: train(root, steps=3, examples=ROWS), "holds a run; give"),
        (lambda: train(**new, freeze="w"), "got 'w'"),
        (lambda: train(**new | {"examples": ROWS[:1]}), "both parts"),
    ):
        with pytest.raises(ValueError, match=words) as refusal:
            call()
        assert len(str(refusal.value).splitlines()) <= 2

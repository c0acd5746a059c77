"""Tiny runs, and what can be made to happen to them."""

import os
import pathlib
import signal

import jax
import jax.numpy as jnp

from mha_haiku import runs
from mha_haiku.training import train_step
from mha_haiku.training.runs import (
    checkpoints,
    configuration,
    folders,
    loop,
    metrics_log,
    trainers,
)


def train(config, workdir, devices=2, **options):
    """Trains on some of the CPU devices."""
    return runs.train(config, workdir, devices=jax.local_devices()[:devices], **options)


def state(workdir, config, at=None):
    """Returns the state in a checkpoint."""
    task = configuration.make_task(config)
    abstract = folders.abstract_state(
        config, task, folders.make_model(config.model, task)
    )
    stored = checkpoints.read(pathlib.Path(workdir) / "checkpoints", at)
    return checkpoints.restored(stored.arrays(), abstract)


def reports(workdir):
    """Returns the reports without what depends on the clock."""
    found = metrics_log.read(pathlib.Path(workdir) / "metrics.jsonl")
    for report in found:
        del report["examples_per_second"], report["seconds"]
    return found


class Opens(BaseException):
    """A run's folder is open, and its task would be made."""


def open_only(monkeypatch):
    """Raises `Opens` where a run's folder is open."""

    def opens(*_):
        raise Opens

    monkeypatch.setattr(loop, "_make_task", opens)


def act(monkeypatch, action):
    """Calls `action(trainer)` after every dispatch."""
    take_steps = trainers.Trainer.take_steps

    def take_and_act(self, stop):
        take_steps(self, stop)
        action(self)

    monkeypatch.setattr(trainers.Trainer, "take_steps", take_and_act)


def interrupt_at(at):
    """Returns an action that interrupts the run at a step."""

    def act(self):
        if self.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    return act


def break_step(monkeypatch, at, *, gradient=1.0, loss=1.0):
    """Multiplies gradient and loss of a step; the first is 1."""
    gradients = train_step.gradients

    def broken(*args, seed, step, **kwargs):
        found, sums = gradients(*args, seed=seed, step=step, **kwargs)
        is_bad = step + 1 == at
        found = jax.tree.map(lambda x: x * jnp.where(is_bad, gradient, 1), found)
        return found, sums._replace(loss=sums.loss * jnp.where(is_bad, loss, 1))

    monkeypatch.setattr(train_step, "gradients", broken)

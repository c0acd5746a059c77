"""mha_haiku: its training step, and its attention module."""

import tempfile
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import numpy as np

import mha_haiku as mh
from mha_haiku import devices
from mha_haiku.training import optimizers, train_step
from mha_haiku.training.runs import configuration, folders
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str, size: int, attention: Mapping[str, Any] | None = None
) -> worker.Program:
    """Prepares what is measured in a case."""
    if case == "training":
        return _training(sizes.training_config(), size)
    shape = sizes.AttentionSize(**attention or {})
    mask = mh.masks.causal() if shape.is_causal else None

    def apply(x):
        module = mh.MultiHeadAttention(shape.heads, shape.head_width)
        return module(x, x, x, mask)[0]

    module = hk.without_apply_rng(hk.transform(apply))
    x = jax_programs.normal(0, (1, 1, shape.width))
    params = jax.jit(module.init)(jax.random.key(0), x)
    if case != "monitored":
        options = {"case": case, "calls": size}
        return jax_programs.attention(params, module.apply, shape, **options)
    step = jax.jit(jax_programs.forward_and_backward(module.apply))
    step = mh.monitor(step, every=size, out=tempfile.mkdtemp())
    x = jax_programs.normal(0, (shape.batch, shape.length, shape.width))

    def run():
        for _ in range(size):
            jax.block_until_ready(step(x, params, x))

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return worker.Program(run, units=size, facts={"parameters": count})


def _training(config, steps) -> worker.Program:
    """Returns the work of `mha_haiku.training.runs.loop` between two reports."""
    placement = devices.Replicas(jax.local_devices()[:1])
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task)
    transformation = optimizers.make(config.optimizer, steps=config.training.steps)
    dispatch = train_step.make_dispatch(
        model,
        task,
        transformation,
        batch_size=config.training.batch_size,
        placement=placement,
        max_steps=config.training.steps_per_dispatch,
    )
    seed = np.uint32(config.seed)

    def initial(seed):
        return train_step.initial_state(model, transformation, task, seed)

    first_state = jax.device_get(jax.jit(initial)(seed))
    state = placement.put_state(first_state)
    data = placement.put(task.train_data)
    dispatch = dispatch.lower(state, data, seed, np.int32(0)).compile()
    sums = None

    def reset():
        nonlocal state
        state = placement.put_state(first_state)
        jax.block_until_ready(state)

    def take_steps():
        nonlocal state, sums
        taken = 0
        while taken < steps:
            taken = min(steps, taken + config.training.steps_per_dispatch)
            state, report = dispatch(state, data, seed, np.int32(taken))
            sums = placement.fetch(report).sums

    return worker.Program(
        take_steps,
        reset,
        units=steps,
        facts={"parameters": jax_programs.count(first_state.params)},
        finish=lambda: {"last loss": float(sums.loss.sum() / sums.weight.sum())},
    )

"""Several seeds of a config: in one program, or one after the other."""

import jax
import numpy as np

from mha_haiku import devices
from mha_haiku.training.runs import checkpoints, configuration, starting, trainers
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import sizes


def prepare(
    case: str,
    size: int,
    seeds: int,
    together: bool,
    compiles: bool,
    batch_size: int | None = None,
) -> worker.Program:
    """Prepares what is measured.

    Args:
      case: A name of `sizes.TRAINING_CASES`.
      size: Steps per seed in a run.
      seeds: Number of seeds.
      together: Whether they are in one program; else one is trained after the other.
      compiles: Whether a run compiles its programs too.
      batch_size: Examples of a step. Defaults to the config's.
    """
    config = sizes.training_config(case)
    batch_size = batch_size or config.training.batch_size
    config = config.replace(training=dict(batch_size=batch_size))
    task = configuration.make_task(config)
    configs = [config.replace(seed=config.seed + i) for i in range(seeds)]
    groups = [configs] if together else [[own] for own in configs]

    def prepared(group):
        stored = checkpoints.Elsewhere(None)
        opened = [starting.Opened(own, None, stored, None) for own in group]
        here = jax.local_devices()[:1]
        placement = devices.Replicas(here, several=len(group) > 1)
        return trainers.Trainer(opened, task, placement)

    ready = [] if compiles else list(map(prepared, groups))
    starts = [trainer.placement.fetch(trainer.state) for trainer in ready]

    def reset():
        for trainer, start in zip(ready, starts, strict=True):
            trainer.state = trainer.placement.put_state(start)

    def run():
        for i, group in enumerate(groups):
            trainer, taken = prepared(group) if compiles else ready[i], 0
            while taken < size:
                taken = min(size, taken + config.training.steps_per_dispatch)
                stops = trainers.joined([np.int32(taken)] * len(group))
                trainer.state, report = trainer.dispatch(
                    trainer.state, trainer.train_data, trainer.seeds, stops
                )
                jax.block_until_ready(report)

    return worker.Program(run, reset, units=size * seeds, warm_up=int(not compiles))

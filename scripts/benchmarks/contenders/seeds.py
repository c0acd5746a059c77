"""Several seeds of a config: in one program, or in turn."""

import jax
import numpy as np

from mha_haiku import devices
from mha_haiku.training.runs import checkpoints, configuration, folders, trainers
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
      size: Steps of each seed in a run.
      seeds: How many.
      together: Whether they are in one program; else one is trained after another.
      compiles: Whether a run compiles its programs too, in turn one for each seed.
      batch_size: Examples of a step; None: the config's.
    """
    config = sizes.training_config(case)
    batch_size = batch_size or config.training.batch_size
    config = config.replace(training=dict(batch_size=batch_size))
    task = configuration.make_task(config)
    placement = devices.Replicas(jax.local_devices()[:1])
    model = folders.make_model(config, task, placement)
    configs = [config.replace(seed=config.seed + i) for i in range(seeds)]
    counts = [1] * seeds
    if together:
        configs, counts = configs[:1], [seeds]

    def prepared(own, count):
        stored = [checkpoints.Elsewhere(None)] * count
        return trainers.Trainer(own, task, model, stored, placement)

    ready = [] if compiles else list(map(prepared, configs, counts))
    starts = [trainer.together.fetch(trainer.state) for trainer in ready]

    def reset():
        for trainer, start in zip(ready, starts, strict=True):
            trainer.state = trainer.together.put_states(start)

    def run():
        for i, (own, count) in enumerate(zip(configs, counts, strict=True)):
            trainer, taken = prepared(own, count) if compiles else ready[i], 0
            while taken < size:
                taken = min(size, taken + config.training.steps_per_dispatch)
                stops = trainer.together.joined([np.int32(taken)] * count)
                trainer.state, report = trainer.dispatch(
                    trainer.state, trainer.train_data, trainer.seeds, stops
                )
                jax.block_until_ready(report)

    return worker.Program(run, reset, units=size * seeds, warm_up=int(not compiles))

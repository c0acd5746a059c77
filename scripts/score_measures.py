"""Scores the measures of head importance on models whose important heads are known.

Run: python scripts/score_measures.py

Printed is each measure's AUROC: the probability that a head that does the work is
ranked above one that does not; 1 is perfect, 0.5 is chance. The models are set by hand
(scripts/known_heads.py), over several seeds; and one is trained while half of
its heads are closed, and so are dead: their rows of the output map are zero.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from configs import reverse
from mha_haiku import devices, heads, models, modules
from mha_haiku.runs import configuration, folders
from mha_haiku.studies.workbench import Bench
from mha_haiku.training import optimizers, stepping
from scripts import known_heads

MEASURES = {
    **{name: entry.measure for name, entry in heads.MEASURES.items()},
    "ablation, mean": lambda of: heads.ablation(
        of, closing=heads.closing.mean(of.model, of.params, of.batches)
    ),
    "ablation, resample": lambda of: heads.ablation(of, closing=heads.closing.resample),
}
_DEAD_STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each hand-built model")
    seeds = parser.parse_args().seeds
    if seeds < 1:
        parser.error(f"--seeds must be at least 1, got {seeds}")
    print(f"{'':24}" + "".join(f"{name:>20}" for name in MEASURES))
    for name, make in known_heads.ALL.items():
        scores = [
            known_heads.scores(make(seed=seed), MEASURES) for seed in range(seeds)
        ]
        _print(name, {key: np.mean([each[key] for each in scores]) for key in MEASURES})
    _print("trained, dead heads", known_heads.scores(_with_dead_heads(), MEASURES))


def _print(name, scores) -> None:
    print(
        f"{name:24}" + "".join(f"{scores[key]:>20.2f}" for key in MEASURES), flush=True
    )


def _with_dead_heads() -> known_heads.KnownHeads:
    """Trains `reverse` with eight heads, every second of which is closed throughout."""
    config = reverse.get_config()
    config.model.attention.num_heads, config.model.num_layers = 8, 2
    task = configuration.make_task(config)
    model = folders.make_model(config, task)
    alive = np.tile([True, False], 4)
    gates = np.tile(alive.astype(np.float32), (2, 1))
    interventions = modules.Interventions(heads=gates)

    def apply(*arguments, **options):
        return model.apply(*arguments, interventions=interventions, **options)

    placement = devices.Replicas(jax.local_devices()[:1])
    adam = optimizers.make(config.optimizer, steps=_DEAD_STEPS)
    closed = models.Model(model.init, apply)
    dispatch = stepping.make_dispatch(
        closed,
        task,
        adam,
        batch_size=config.training.batch_size,
        placement=placement,
        max_steps=_DEAD_STEPS,
    )
    state = stepping.initial_state(closed, adam, task, config.seed)
    state, data = placement.put((state, task.train_data))
    state, _ = dispatch(state, data, np.uint32(config.seed), np.int32(_DEAD_STEPS))
    params = placement.fetch(state.params)
    run = folders.Run(
        config, task, model, heads.scaled(params, config.model, gates), _DEAD_STEPS
    )
    of = Bench(run, folders.Folder(pathlib.Path("dead_heads"))).subject(128)
    return known_heads.KnownHeads(of, config.model, gates > 0, {})


if __name__ == "__main__":
    sys.exit(main())

"""Scores the measures of head importance on models whose important heads are known.

Run: python scripts/score_measures.py

A score is an AUROC: the probability that a head that does the work is ranked above one
that does not; 1 is perfect, 0.5 is chance. The models are compiled from programs
(mha_haiku/rasp), over several seeds, and their other heads write as much as the program
bears; and one is trained while half of its heads are closed, and so are dead: their
rows of the output map are zero.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from configs import reverse
from mha_haiku import devices, heads, models, modules, rasp
from mha_haiku.runs import configuration, folders
from mha_haiku.studies.workbench import Bench
from mha_haiku.training import optimizers, stepping

MEASURES = {
    **{name: entry.measure for name, entry in heads.MEASURES.items()},
    "ablation, mean": lambda of: heads.ablation(
        of, closing=heads.closing.mean(of.model, of.params, of.batches)
    ),
    "ablation, resample": lambda of: heads.ablation(of, closing=heads.closing.resample),
}
# How much the other heads write: the most with which all answers are right.
_NOISES = (1e-2, 1e-3, 1e-4)
_EXAMPLES = 32
_DEAD_STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each compiled model")
    parser.add_argument(
        "--programs", default="", help="names with commas between them; all if left out"
    )
    flags = parser.parse_args()
    if flags.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {flags.seeds}")
    names = flags.programs.split(",") if flags.programs else list(rasp.PROGRAMS)
    unknown = set(names) - set(rasp.PROGRAMS)
    if unknown:
        parser.error(
            f"--programs must be among {', '.join(rasp.PROGRAMS)}, got {min(unknown)}"
        )
    scores = {}
    for name in names:
        for seed in range(flags.seeds):
            known, subject = known_heads(name, seed)
            for key, measure in MEASURES.items():
                value = rasp.auroc(measure(subject).mean, known.is_real)
                scores.setdefault(key, {}).setdefault(name, []).append(value)
        _print_line(name, {key: np.mean(own[name]) for key, own in scores.items()})
    subject, is_alive = _with_dead_heads()
    dead = {
        key: rasp.auroc(measure(subject).mean, is_alive)
        for key, measure in MEASURES.items()
    }
    _print_line("trained, dead heads", dead)
    _print_table(scores, dead)


def known_heads(name: str, seed: int) -> tuple[rasp.Compiled, heads.Subject]:
    """Returns a compiled model and it as a subject, with as much noise as it bears."""
    for noise in _NOISES:
        known = rasp.compile(rasp.PROGRAMS[name](), noise=noise, seed=seed)
        batches = [known.examples(_EXAMPLES, seed=seed)]
        subject = heads.Subject(known.model, heads.metrics.loss, known.params, batches)
        wrong = subject._replace(metric=_MISTAKES)
        open_gates = np.ones((1, *known.is_real.shape))
        if not heads.closed(wrong, open_gates).any():
            return known, subject
    raise RuntimeError(f"{name} is wrong at every noise")


_MISTAKES = heads.metrics.mistakes()


def _print_line(name, scores) -> None:
    values = ", ".join(f"{key} {value:.2f}" for key, value in scores.items())
    print(f"{name}: {values}", flush=True)


def _print_table(scores, dead) -> None:
    """Prints, as Markdown, each measure's scores over programs."""
    print("\n| measure | mean over programs | of 1.00 | lowest | spread | dead heads |")
    print("|---|---|---|---|---|---|")
    for key, own in scores.items():
        means = {name: np.mean(values) for name, values in own.items()}
        lowest = min(means, key=means.get)
        spread = np.mean([np.std(values) for values in own.values()])
        perfect = sum(value > 0.999 for value in means.values())
        print(
            f"| {key} | {np.mean(list(means.values())):.3f} "
            f"| {perfect} of {len(means)} | {means[lowest]:.2f} ({lowest}) "
            f"| {spread:.3f} | {dead[key]:.2f} |"
        )


def _with_dead_heads() -> tuple[heads.Subject, np.ndarray]:
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
    subject = Bench(run, folders.Folder(pathlib.Path("dead_heads"))).subject(128)
    return subject, gates > 0


if __name__ == "__main__":
    sys.exit(main())

"""Scores what is said to find heads and edges on models of which they are known.

Run: python scripts/score_measures.py

A score is an AUROC: the probability that a head that does the work is ranked above one
that does not, or an edge between two such heads above another; 1 is perfect, 0.5 is
chance. The models are compiled from programs (mh.rasp), over several seeds, and
their other heads write as much as the program bears. For patching, the corrupted
example is any other one. Roles are scored over the heads of all programs at once. One
more model is trained while half of its heads are ablated, and so are dead: their rows
of the output map are zero.
"""

import argparse
import functools
import operator
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import tqdm

from configs import reverse
from mha_haiku import devices, heads, models, rasp
from mha_haiku.core import sites
from mha_haiku.subjects.studies.workbench import Bench
from mha_haiku.training import optimizers, stepping
from mha_haiku.training.runs import configuration, folders

MEASURES = {
    **{name: entry.measure for name, entry in heads.MEASURES.items()},
    "ablation, resample": lambda of: heads.ablation(
        of, ablation_value=heads.ablation_values.resample
    ),
}
# Compiled anew for each model, whose means are constants of it.
_OF_ONE_SEED = {
    "ablation, mean": lambda of: heads.ablation(
        of, ablation_value=heads.ablation_values.mean(of.model, of.params, of.batches)
    ),
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
    # Models are small: compiling takes nearly all the time.
    jax.config.update("jax_disable_most_optimizations", True)
    scores, roles = {}, {}
    bar = tqdm.tqdm(total=len(names) * flags.seeds, unit="model")
    for programs in _alike([rasp.PROGRAMS[name]() for name in names]):
        sizes = functools.reduce(operator.or_, map(rasp.sizes, programs))
        for program in programs:
            for seed in range(flags.seeds):
                known, subject, corrupted = known_heads(program, sizes, seed)
                measures = MEASURES | (_OF_ONE_SEED if seed == 0 else {})
                found = _of_heads(known, subject, corrupted, measures)
                found |= _of_edges(known, subject, corrupted)
                for key, value in found.items():
                    own = scores.setdefault(key, {})
                    own.setdefault(program.name, []).append(value)
                _add_roles(roles, known, subject)
                bar.update()
            values = ", ".join(
                f"{'/'.join(key)} {np.mean(own[program.name]):.2f}"
                for key, own in scores.items()
                if program.name in own
            )
            bar.write(f"{program.name}: {values}")
    bar.close()
    _print_table("of heads", {k: x for (of, k), x in scores.items() if of == "heads"})
    for of in ("edges", "edges to logits"):
        own = {key: x for (kind, key), x in scores.items() if kind == of}
        _print_table(f"of {of}", own)
    for role, (values, is_real) in roles.items():
        if any(is_real):
            score = rasp.auroc(values, is_real)
            print(f"role {role}: {score:.3f}, {sum(is_real)} heads")
    subject, is_alive = _with_dead_heads()
    for key, measure in (MEASURES | _OF_ONE_SEED).items():
        found = rasp.auroc(measure(subject).mean, is_alive)
        print(f"trained, dead heads, {key}: {found:.2f}")


def _alike(programs) -> list[list[rasp.Program]]:
    """Returns the programs by kind and depth: with equal sizes one jitted for all."""
    groups = {}
    for program in programs:
        key = program.is_causal, rasp.sizes(program).num_layers
        groups.setdefault(key, []).append(program)
    return list(groups.values())


def known_heads(program, sizes, seed) -> tuple[rasp.Compiled, heads.Measured, list]:
    """Returns a compiled model, it as a subject, and corrupted batches.

    The other heads write as much as the program bears.
    """
    for noise in _NOISES:
        known = rasp.compile(program, noise=noise, sizes=sizes, seed=seed)
        clean, other = (
            known.examples(_EXAMPLES, seed=each) for each in (seed, seed + 100)
        )
        subject = heads.Measured(known.model, heads.metrics.loss, known.params, [clean])
        open_gates = np.ones((1, *known.is_real.shape))
        # Answers are right by a margin of 6 nats, so the loss of a mistake is large.
        if heads.closed(subject, open_gates).max() < 0.1:
            return known, subject, [other]
    raise RuntimeError(
        f"{program.name} makes mistakes with as little noise as {noise}."
    )


def _of_heads(known, subject, corrupted, measures) -> dict[tuple[str, str], float]:
    """Returns AUROCs of all that gives a number per head."""
    found = {name: measure(subject).mean for name, measure in measures.items()}
    found["activation patching"] = heads.activation_patching(subject, corrupted).mean
    (example,) = subject.batches
    parts = heads.logit_attribution(
        subject.model, subject.params, example, classes=example.targets
    ).heads
    found["logit attribution"] = np.stack([abs(x).mean((0, 1)) for x in parts])
    return {
        ("heads", key): rasp.auroc(values, known.is_real)
        for key, values in found.items()
    }


def _of_edges(known, subject, corrupted) -> dict[tuple[str, str], float]:
    """Returns AUROCs of all that gives a number per edge, where there are any."""
    found = {}
    for through_units in (True, False):
        edges = heads.path_patching(subject, corrupted, through_units=through_units)
        is_to_logits = edges.kinds == "logits"
        ends = zip(
            map(tuple, edges.senders.tolist()),
            map(tuple, edges.receivers.tolist()),
            edges.kinds.tolist(),
            strict=True,
        )
        is_real = np.array(
            [
                sender in known.senders
                if kind == "logits"
                else (sender, receiver, kind) in known.edges
                for sender, receiver, kind in ends
            ]
        )
        name = "path patching" + ("" if through_units else ", units held")
        effects = np.abs(edges.per_example).mean(0)
        for of, own in (("edges", ~is_to_logits), ("edges to logits", is_to_logits)):
            if is_real[own].any():
                found[of, name] = rasp.auroc(effects[own], is_real[own])
    if known.edges:
        values = np.stack(
            [
                heads.circuits.compositions(known.model, known.params, kind)
                for kind in heads.circuits.KINDS
            ],
            axis=-1,
        )
        is_real = np.zeros(values.shape, bool)
        for sender, receiver, kind in known.edges:
            is_real[(*sender, *receiver, heads.circuits.KINDS.index(kind))] = True
        found["edges", "composition of weights"] = rasp.auroc(values, is_real)
    return found


def _add_roles(roles, known, subject) -> None:
    """Adds the scores of heads, for those roles that heads of programs are named by."""
    found = heads.roles(subject.model, subject.params, subject.batches)
    for role in ("previous_token", "next_token", "induction"):
        values, is_real = roles.setdefault(role, ([], []))
        score = found.scores[heads.ROLES[role].score or role]
        values += score.ravel().tolist()
        is_real += [known.heads.get(place) == role for place in np.ndindex(score.shape)]


def _print_table(title, scores) -> None:
    """Prints, as Markdown, the scores of each method over programs."""
    print(f"\n| {title} | mean over programs | 1.00 of | lowest | spread over seeds |")
    print("|---|---|---|---|---|")
    for key, own in scores.items():
        means = {name: np.mean(values) for name, values in own.items()}
        lowest = min(means, key=means.get)
        spread = np.mean([np.std(values) for values in own.values()])
        perfect = sum(value > 0.995 for value in means.values())
        print(
            f"| {key} | {np.mean(list(means.values())):.3f} "
            f"| {perfect} of {len(means)} | {means[lowest]:.2f} ({lowest}) "
            f"| {spread:.3f} |"
        )


def _with_dead_heads() -> tuple[heads.Measured, np.ndarray]:
    """Trains `reverse` with eight heads, every second one ablated throughout."""
    config = reverse.get_config().replace(
        model=dict(num_layers=2, attention=dict(num_heads=8))
    )
    task = configuration.make_task(config)
    model = folders.make_model(config, task)
    alive = np.tile([True, False], 4)
    gates = np.tile(alive.astype(np.float32), (2, 1))
    apply = sites.edit(model.apply, heads.edits.gate(gates))
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
    subject = Bench(run, folders.Folder(pathlib.Path("dead_heads"))).measured(128)
    return subject, gates > 0


if __name__ == "__main__":
    sys.exit(main())

"""Scores methods that find heads and edges on models whose circuits are known.

Run: python scripts/score_measures.py --results=score_measures.jsonl

The models are compiled from programs, of seven kinds (experiments/compiled_kinds/):
plain, with redundant heads, with backup heads, with decoys, with noise in all weights,
with a compressed stream, and trained further with the circuit held fixed. For patching,
the corrupted example is any other one. For each method, over models, with 95 percent t
intervals, we report:

- AUROC: the probability that a head of the circuit is ranked above another, or an edge;
  1 is perfect, 0.5 is chance.
- CPR and CMD (Mueller et al. 2025, section 3.1, https://arxiv.org/abs/2504.13151): the
  areas under faithfulness f and under |1 - f| against the share of heads, or edges,
  that is kept, the highest ranked first. All others are as in the corrupted run; f is
  the share of the corruption's effect on the loss that is avoided. 1 and 0 are the
  best values, up to the circuit's size.
- Seconds of one model, the median; the first model of its sizes includes compiling.

Controls are a random order, and a random circuit of the same size in each layer.

A model that is in the file of `--results` is not measured again. Two commands at a
time, each with some of the `--kinds`, can share the file.
"""

import functools
import json
import operator
import pathlib
import sys
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
import tqdm

from experiments import compiled_kinds
from mha_haiku import commands, heads, rasp
from mha_haiku.core import checks, sites
from mha_haiku.lab.heads import clean_runs as edited_runs
from mha_haiku.lab.heads import model_runs
from mha_haiku.training import tasks

Place = tuple[int, int]
Edge = tuple[Place, Place, str]  # sender, receiver, kind; as in `heads.Edges`


def _mean(outputs):
    """As `heads.ablation_values.mean` of one batch without padding, compiled once."""
    return [x.mean((0, 1)) for x in outputs]


MEASURES = {
    **{name: entry.measure for name, entry in heads.MEASURES.items()},
    "ablation, resample": lambda of: heads.ablation(
        of, ablation_value=heads.ablation_values.resample
    ),
    "ablation, mean": lambda of: heads.ablation(of, ablation_value=_mean),
}
# Programs of the full run; those that a kind does not suit are left out, with a note.
PROGRAMS = (
    *("induction", "preceding_again", "second_previous", "two_token_induction"),
    *("two_hops", "shift_by_name", "three_hops", "sort_different"),
)
# Strengths of the other heads' outputs: the largest with right answers is used.
_NOISES = (1e-2, 1e-3, 1e-4)
_EXAMPLES = 32
_EDGES_KEPT = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)  # shares, as in MIB
_CHANCE = "random order"


class Known(NamedTuple):
    """A model whose circuit is known, and its examples."""

    kind: str
    compiled: rasp.Compiled
    subject: heads.Measured
    corrupted: list[tasks.Example]


def main(
    *,
    programs: str = ",".join(PROGRAMS),
    kinds: str = ",".join(compiled_kinds.KINDS),
    seeds: int = 3,
    results: str = "",
) -> None:
    """Scores, and prints the tables.

    Args:
      programs: Names of programs, with commas between.
      kinds: Names of kinds of models, with commas between.
      seeds: Models of each program and kind.
      results: A file of JSON lines, one for each model.
    """
    with checks.user_mistakes():
        checks.positive_integer("--seeds", seeds)
        for flag, names, every in (
            ("--programs", programs, rasp.PROGRAMS),
            ("--kinds", kinds, compiled_kinds.KINDS),
        ):
            for name in names.split(","):
                checks.choice(flag, name, every)
    path, records = pathlib.Path(results), []
    if results and path.exists():
        records = [json.loads(line) for line in path.read_text().splitlines()]
    done = {(each["kind"], each["program"], each["seed"]) for each in records}
    models = _models(kinds.split(","), programs.split(","), seeds)
    models = [x for x in models if (x[0], x[1].name, x[3]) not in done]
    bar = tqdm.tqdm(models, unit="model")
    for kind, program, sizes, seed in bar:
        try:
            known = known_model(kind, program, sizes, seed)
        except ValueError as error:
            bar.write(f"left out, {kind} {program.name} {seed}: {error}")
            continue
        record = {"kind": kind, "program": program.name, "seed": seed}
        records.append(record | measured(known))
        if results:
            with path.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    if records:
        print_tables(records)


def _models(kinds, names, seeds) -> list[tuple]:
    """Returns kind, program, sizes and seed of models, equal sizes in a row."""
    groups = {}
    for program in (rasp.PROGRAMS[name]() for name in names):
        key = program.is_causal, rasp.sizes(program).num_layers
        groups.setdefault(key, []).append(program)
    return [
        (kind, program, functools.reduce(operator.or_, own), seed)
        for programs in groups.values()
        for kind in kinds
        for own in [[_sizes(kind, each) for each in programs]]
        for program in programs
        for seed in range(seeds)
    ]


def _sizes(kind, program) -> rasp.Sizes:
    if kind in ("redundant", "backup"):
        is_backup = kind == "backup"
        try:
            program = compiled_kinds.doubled(program, is_backup=is_backup)
        except ValueError:
            pass  # which is said when it is made
    return rasp.sizes(program)


def known_model(kind, program, sizes, seed, *, examples=_EXAMPLES) -> Known:
    """Returns a model of a kind, with the strongest outputs of other heads.

    Raises:
      ValueError: If the program does not suit the kind, or answers are wrong.
    """
    for noise in _NOISES:
        try:
            compiled = compiled_kinds.KINDS[kind](
                program, noise=noise, sizes=sizes, seed=seed
            )
            break
        except ValueError as found:
            error = found
    else:
        raise error
    clean, other = (
        compiled.examples(examples, seed=key_seed) for key_seed in (seed, seed + 100)
    )
    subject = heads.Measured(
        compiled.model, heads.metrics.loss, compiled.params, [clean]
    )
    return Known(kind, compiled, subject, [other])


def measured(known: Known) -> dict:
    """Returns the scores of all methods on a model, as JSON has them."""
    started = time.time()
    kept = _heads_kept(known.subject.model, metric=known.subject.metric)
    edges_kept = _edges_kept(known.subject.model, metric=known.subject.metric)
    (clean,), (other,) = known.subject.batches, known.corrupted
    params = known.subject.params
    words = f"{known.kind} {known.compiled.program.name} {clean.inputs.tolist()}"
    generator = np.random.default_rng(zlib.crc32(words.encode()))
    result = {"heads": {}, "edges": {}}
    is_real = known.compiled.is_real
    methods = head_methods() | {
        _CHANCE: lambda *_: generator.uniform(size=is_real.shape)
    }
    curve = functools.partial(kept, params, clean, other)
    for name, method in methods.items():
        values, seconds = _timed(method, known.subject, known.corrupted)
        result["heads"][name] = scores = {
            "auroc": compiled_kinds.auroc(values, is_real),
            "seconds": seconds,
        }
        scores |= _areas(curve(_nested(values)), np.linspace(0, 1, values.size + 1))
    every = _all_edges(known.compiled)
    is_edge = np.array([_is_real(known.compiled, each) for each in every])
    is_between = np.array([kind != "logits" for *_, kind in every])
    counts = np.ceil(np.array(_EDGES_KEPT) * len(every)).astype(int)
    curve = functools.partial(edges_kept, params, clean, other)
    methods = edge_methods() | {
        _CHANCE: lambda *_: dict(
            zip(every, generator.uniform(size=len(every)), strict=True)
        )
    }
    for name, method in methods.items():
        found, seconds = _timed(method, known.subject, known.corrupted)
        values = np.array([found.get(each, np.nan) for each in every])
        result["edges"][name] = scores = {"seconds": seconds}
        for which, at in (("auroc", is_between), ("auroc to logits", ~is_between)):
            has = at & ~np.isnan(values)
            if is_edge[has].any() and not is_edge[has].all():
                scores[which] = compiled_kinds.auroc(values[has], is_edge[has])
        if not np.isnan(values).any():
            masks = [_mask(every, order_of(values)[:n], is_real.shape) for n in counts]
            scores |= _areas(curve(np.array(masks)), counts / len(every))
    # Faithfulness of the circuit, and of a random one.
    random = generator.permuted(is_real, axis=1)
    f = _faithful(kept(params, clean, other, _with_ends([is_real, random])))
    result["circuits"] = {"true": f[1], "random": f[2]}
    result["seconds"] = time.time() - started
    return result


def head_methods() -> dict[str, Callable]:
    """Returns functions of subject and corrupted batches to `[L, H]`, by name."""

    def attribution(subject, _):
        (example,) = subject.batches
        parts = heads.logit_attribution(
            subject.model, subject.params, example, classes=example.targets
        ).heads
        return np.stack([abs(x).mean((0, 1)) for x in parts])

    return {
        **{
            name: lambda subject, _, measure=measure: measure(subject).mean
            for name, measure in MEASURES.items()
        },
        "activation patching": lambda *of: heads.activation_patching(*of).mean,
        "logit attribution": attribution,
    }


def edge_methods() -> dict[str, Callable]:
    """Returns functions of subject and corrupted batches to `{Edge: value}` by name."""

    def as_edges(measure):
        def method(subject, corrupted):
            edges = measure(subject, corrupted)
            ends = (map(tuple, x.tolist()) for x in (edges.senders, edges.receivers))
            every = zip(*ends, edges.kinds.tolist(), strict=True)
            values = edges.strength.tolist()
            return _through_units(dict(zip(every, values, strict=True)))

        return method

    def composition(subject, _):
        found = {}
        for kind in heads.circuits.KINDS:
            scores = heads.circuits.compositions(subject.model, subject.params, kind)
            for place in np.argwhere(~np.isnan(scores)).tolist():
                ends = tuple(place[:2]), tuple(place[2:])
                found[*ends, kind] = float(scores[*place])
        return found

    measures = {"path patching": heads.path_patching, **heads.EDGE_MEASURES}
    methods = {name: as_edges(each) for name, each in measures.items()}
    return {**methods, "composition of weights": composition}


def _through_units(found: dict[Edge, float]) -> dict[Edge, float]:
    """Returns values of edges that lead through feed-forward parts, too.

    If these are separate nodes, a path has the value of its weakest step, and an edge
    the value of its best path.
    """
    for unit in sorted({end for _, end, kind in found if kind == "feed_forward"})[::-1]:
        into = {start: x for (start, end, _), x in found.items() if end == unit}
        out_of = {each[1:]: x for each, x in found.items() if each[0] == unit}
        for start, first in into.items():
            for end, second in out_of.items():
                way = min(first, second)
                found[start, *end] = max(found.get((start, *end), way), way)
    return found


def _timed(method, *given):
    start = time.perf_counter()
    return method(*given), time.perf_counter() - start


def _all_edges(compiled) -> list[Edge]:
    """Returns all edges from a head to a later layer's heads, or to the logits."""
    places = [*np.ndindex(compiled.is_real.shape)]
    return [
        (sender, receiver, kind)
        for sender in places
        for receiver in places
        if sender[0] < receiver[0]
        for kind in heads.circuits.KINDS
    ] + [(sender, heads.patching.LOGITS, "logits") for sender in places]


def _is_real(compiled, edge) -> bool:
    sender, _, kind = edge
    return sender in compiled.senders if kind == "logits" else edge in compiled.edges


def order_of(values) -> np.ndarray:
    """Returns the places of a flat array, the largest value first."""
    return np.argsort(-np.ravel(values), kind="stable")


def _nested(values) -> np.ndarray:
    """Returns `[n + 1, L, H]` gates: none of n heads, the best one, two, ... all."""
    ranks = np.empty(values.size, int)
    ranks[order_of(values)] = np.arange(values.size)
    kept = ranks[None] < np.arange(values.size + 1)[:, None]
    return np.float32(kept.reshape(-1, *values.shape))


def _with_ends(circuits) -> np.ndarray:
    gates = [np.zeros_like(circuits[0]), *circuits, np.ones_like(circuits[0])]
    return np.float32(gates)


def _faithful(metric) -> list[float]:
    """Returns faithfulness from losses `[B, P]`, of nothing kept first and all last."""
    mean = np.asarray(metric, np.float64).mean(0)
    return ((mean[0] - mean) / (mean[0] - mean[-1])).tolist()


def _areas(metric, shares) -> dict[str, float]:
    """Returns CPR and CMD from losses `[B, P]` with growing shares kept."""
    f = np.array(_faithful(metric))
    return {
        "cpr": float(np.trapezoid(f, shares)),
        "cmd": float(np.trapezoid(np.abs(1 - f), shares)),
    }


@model_runs.compiled
def _heads_kept(model, params, clean, corrupted, gates, *, metric):
    """Returns losses `[B, P]` with heads of gates `[P, L, H]` kept, no others."""
    _, theirs = model_runs.look(model, params, corrupted, ["*/heads"])
    values = [*theirs.values()]
    run = edited_runs.Clean.of(model, params, clean, metric, lambda _: values)
    return edited_runs.over(run.gated, gates, clean).T


@model_runs.compiled
def _edges_kept(model, params, clean, corrupted, kept, *, metric):
    """Returns losses `[B, P]` with some edges kept, `[P, L H, L H + 1, 3]` booleans.

    A receiver, in front of its layer, reads each sender's output of this run along kept
    edges and of the corrupted run along the others; embeddings are clean, and
    feed-forward parts are recomputed from these. The last receiver is the logits.
    """
    _, theirs = model_runs.look(model, params, corrupted, ["*/heads"])
    names = [*theirs]
    theirs = [*theirs.values()]
    num_heads = theirs[0].shape[-2]

    def run(kept):
        kept = kept.reshape(len(names), num_heads, -1, 3)
        ours = []

        def mixed(receiver, kind):
            """Returns the edits that set all heads to a receiver's inputs."""
            return {
                name: lambda _, own=own, other=other, i=i: jnp.where(
                    kept[i, :, receiver, kind][:, None], own, other
                )
                for i, (name, own, other) in enumerate(
                    zip(names, ours, theirs, strict=False)
                )
            }

        for layer, name in enumerate(names):
            if not layer:  # which reads only embeddings
                ours.append(model_runs.look(model, params, clean, [name])[1][name])
                continue
            path = name.removesuffix("heads")
            edits = {}
            for kind, of in enumerate(("query", "key", "value")):
                each = f"{path}{of}"

                def given(head, kind=kind, each=each, layer=layer):
                    change = mixed(layer * num_heads + head, kind)
                    given_run = sites.edit(
                        functools.partial(model_runs.run, model, params), change
                    )
                    found = sites.look(given_run, [each])(clean)[1][each]
                    return jnp.take(found, head, axis=-2)

                found = jax.lax.map(given, jnp.arange(num_heads))
                found = jnp.moveaxis(found, 0, -2)
                edits[each] = lambda _, found=found: found
            edited = sites.edit(functools.partial(model_runs.run, model, params), edits)
            ours.append(sites.look(edited, [name])(clean)[1][name])
        output = model_runs.run_edited(model, params, clean, mixed(-1, 0))
        return metric(output.logits, clean)

    return jax.lax.map(run, kept).T


def _mask(every, chosen, shape) -> np.ndarray:
    """Returns chosen edges as `_edges_kept` takes them, `[L H, L H + 1, 3]`."""
    count = shape[0] * shape[1]
    result = np.zeros((count, count + 1, 3), bool)
    for i in chosen:
        sender, receiver, kind = every[i]
        place = count, 0
        if kind != "logits":
            kinds = heads.circuits.KINDS
            place = receiver[0] * shape[1] + receiver[1], kinds.index(kind)
        result[sender[0] * shape[1] + sender[1], *place] = True
    return result


def print_tables(records: list[dict]) -> None:
    """Prints, as Markdown, the scores of each method on each kind."""
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    records_of = {
        kind: [record for record in records if record["kind"] == kind] for kind in kinds
    }
    counts = ", ".join(f"{kind} {len(own)}" for kind, own in records_of.items())
    print(f"\nModels: {counts}.")
    for of, score in (
        *(("heads", score) for score in ("auroc", "cpr", "cmd")),
        *(("edges", score) for score in ("auroc", "auroc to logits", "cpr", "cmd")),
    ):
        areas = ["cpr", "cmd"] if score == "auroc" else []  # of all kinds, next to it
        rows = {}
        for name in dict.fromkeys(name for record in records for name in record[of]):
            own = {
                kind: [x[of][name] for x in records_of[kind] if name in x[of]]
                for kind in kinds
            }
            found = [x for group in own.values() for x in group]
            if any(score in record for record in found):
                rows[name] = [_interval(x, score) for x in (*own.values(), found)]
                rows[name] += [_interval(found, area) for area in areas]
                seconds = np.median([record["seconds"] for record in found])
                rows[name].append(f"{seconds:.2f}")
        _print_table(f"{of}, {score}", [*kinds, "all", *areas, "seconds"], rows)
    rows = {
        f"faithfulness of {name}": [
            _interval([x["circuits"] for x in own], key) for own in records_of.values()
        ]
        for name, key in (("the circuit", "true"), ("a random one", "random"))
    }
    _print_table("control", kinds, rows)


def _print_table(title, columns, rows) -> None:
    print(
        f"\n| {title} | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|"
    )
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def _interval(records, score) -> str:
    """Returns a mean and half its 95 percent t interval, where that is not 0."""
    values = [record[score] for record in records if score in record]
    if not values:
        return ""
    half = 0.0
    if len(values) > 1:
        half = scipy.stats.sem(values) * scipy.stats.t.ppf(0.975, len(values) - 1)
    return f"{np.mean(values):.3f}" + (f" ± {half:.3f}" if half >= 5e-4 else "")


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

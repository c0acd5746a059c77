"""Tests `heads.why` on compiled models, where the reasons of attention are known.

Run: python scripts/score_why.py

A head of a compiled program compares two codes: the components that wrote the query's
code and the key's code are its planted pair. In each cell of a head of the program
where a query selects a key, the script tests whether the largest pair of components is
a planted one. It also reports how well the inputs of heads over the examples
(`heads.why.reads`) and composition of weights distinguish the program's edges from
others, as an AUROC.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from mha_haiku import heads, rasp
from mha_haiku.lab.rasp import compiler, language, layout
from scripts import score_measures

_EXAMPLES = 8  # of each model whose cells are asked for


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", default="", help="names with commas; all if none")
    parser.add_argument("--seed", type=int, default=0, help="of the compiled models")
    flags = parser.parse_args(given)
    names = flags.programs.split(",") if flags.programs else list(rasp.PROGRAMS)
    if unknown := set(names) - set(rasp.PROGRAMS):
        every = ", ".join(rasp.PROGRAMS)
        parser.error(f"--programs must be among {every}, got {min(unknown)}")
    # Models are small: compiling takes nearly all the time.
    jax.config.update("jax_disable_most_optimizations", True)
    shares, cells, edges = {}, 0, {"measured": [], "weights": []}
    print("| program | cells | planted pair first | edges, measured | from weights |")
    print("|---|---|---|---|---|", flush=True)
    for name in names:
        program = rasp.PROGRAMS[name]()
        sizes = rasp.sizes(program)
        _, known, subject, *_ = score_measures.known_model(
            "plain", program, sizes, flags.seed
        )
        own = layout.Layout(known.program)
        generator = np.random.default_rng(flags.seed)  # draws places first of all
        num_heads = known.config.attention.num_heads
        places = compiler._places(own, num_heads, generator)
        assert {place: head.name for head, place in places.items()} == known.heads
        hits = planted_first(known, subject.batches[0], own, places)
        found = of_edges(known, subject, own, places)
        shares[name], cells = np.mean(hits), cells + len(hits)
        for key, value in found.items():
            edges[key].append(value)
        own = [f"{value:.3f}" for value in found.values()] or ["-", "-"]
        line = [name, f"{len(hits)}", f"{shares[name]:.3f}", *own]
        print(f"| {' | '.join(line)} |", flush=True)
    values = np.array(list(shares.values()))
    resampled = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.quantile(resampled, (0.05, 0.95))
    print(
        f"\nplanted pair first: {values.mean():.4f} of the cells of a program, 90 % "
        f"interval over {len(values)} programs {low:.4f} to {high:.4f}, lowest "
        f"{values.min():.3f}; {cells} cells"
    )
    for key, own in edges.items():
        if own:
            print(f"edges, {key}: AUROC {np.mean(own):.3f}, lowest {min(own):.3f}")


def planted_first(known, example, own, places) -> list[bool]:
    """Returns for each cell that matters whether a planted pair is the largest."""
    rows, hits = np.asarray(example.inputs)[:_EXAMPLES], []
    for row in rows:
        one = example._replace(
            inputs=row[None], targets=None, weights=None, lengths=None
        )
        # The first position scores as selected keys do where a share is wanted.
        ranked = [
            heads.why.cells(known.model, known.params, one, key=-rank, count=1)
            for rank in (1, 2)
        ]
        values = {
            language.tokens: [known.program.vocabulary[i] for i in row[1:]],
            language.indices: list(range(len(row) - 1)),
        }
        language._values(known.program.output, known.program.is_causal, values)
        for head, (layer, h) in places.items():
            planted = {
                (writer(own, places, each.queries), writer(own, places, each.keys))
                for each in head.selector.conditions
            }
            for t in range(1, len(row)):
                seen = range(t if known.program.is_causal else len(row) - 1)
                selected = language._selected(head.selector, t - 1, seen, values)
                for found in ranked:
                    if found.keys[layer][h, t] - 1 in selected:
                        pair = found.pairs[layer][h, t, 0].tolist()
                        first = tuple(str(found.components[m]) for m in pair)
                        hits.append(first in planted)
                        break
    return hits


def writer(own, places, part) -> str:
    """Returns the component that writes the code of a sequence."""
    if part is language.tokens:
        return "token"
    if part is language.indices:
        return "position"
    if isinstance(part, language.Head):
        return "head {}.{}".format(*places[part])
    if part in own.slots:  # looked up by hidden units
        return f"feed-forward {own.layer(part)}"
    return writer(own, places, part.inputs[0])


def of_edges(known, subject, own, places) -> dict[str, float]:
    """Returns AUROCs of the program's edges without hidden units; {}: there are none.

    Edges through hidden units do not count, as a head then reads the units.
    """
    direct = {
        (writer(own, places, each), place, kind)
        for head, place in places.items()
        for kind, sequences in language.inputs_of(head).items()
        for each in sequences
    }
    is_direct = {
        edge: ("head {}.{}".format(*edge[0]), *edge[1:]) in direct
        for edge in known.edges
    }
    if not any(is_direct.values()):
        return {}
    found = heads.why.reads(known.model, known.params, subject.batches)
    graphs = {"measured": [], "weights": []}
    for kind in heads.circuits.KINDS:
        graphs["measured"].append(np.abs(found.graph(kind)))
        graphs["weights"].append(found.composition[kind])
    is_real = np.zeros((*graphs["weights"][0].shape, 3), bool)
    values = {key: np.stack(own, -1) for key, own in graphs.items()}
    for edge, is_known in is_direct.items():
        sender, receiver, kind = edge
        place = (*sender, *receiver, heads.circuits.KINDS.index(kind))
        is_real[place] = is_known
        if not is_known:
            values["weights"][place] = np.nan
    # Where a head's queries read exactly nothing there is no number, and no effect.
    is_edge = ~np.isnan(values["weights"])
    values["measured"] = np.where(is_edge, np.nan_to_num(values["measured"]), np.nan)
    return {key: rasp.auroc(own, is_real) for key, own in values.items()}


if __name__ == "__main__":
    sys.exit(main())

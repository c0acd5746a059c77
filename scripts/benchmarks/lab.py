"""Compares questions about all heads of a model with TransformerLens.

Run: python scripts/benchmarks/lab.py --case=ablation
     python scripts/benchmarks/lab.py --case=statistics --rounds=3

A model of GPT-2's smallest size (12 layers of 12 heads, 50,257 tokens) with random
weights, in float32 on the CPU. Needs pip install -e '.[bench]'. All run in turn in
processes of their own; seconds of "ablation", "resampling" and "patching" are of one
head. "forward" is our own forward pass with the loss: of each of 144 runs half of the
layers on average, and the product with the vocabulary, have to be computed, which is
0.68 of a forward pass by its operations.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402

# Case: texts, tokens of each, what it measures, and the largest shares of the time of
# our forward pass and of TransformerLens that are promised; None: no promise.
_CASES = {
    "forward": (8, 64, "a forward pass with the loss", None, 1.1),
    "ablation": (8, 64, "the loss with one head ablated, a head", 0.75, 0.75),
    "resampling": (8, 64, "the loss with one head resampled, a head", 0.75, 0.75),
    "patching": (1, 64, "the answer with one head patched, a head", 0.6, 0.5),
    "statistics": (1, 1024, "statistics of all maps; a cache of all", None, 1.0),
}
_QUICK_LENGTH = 16


def _duel(case, is_quick) -> list[command.Duel]:
    batch, length, title, of_forward, of_theirs = _CASES[case]
    same = {
        "model": "tiny" if is_quick else "whole",
        "batch": batch,
        "length": _QUICK_LENGTH if is_quick else length,
    }
    contenders = [
        command.contender("ours", "lab_ours", use=case, calls=4, **same),
        command.contender(
            "transformer_lens", "lab_transformer_lens", use=case, calls=4, **same
        ),
    ]
    promises = [results.Promise("ours", of_theirs, "transformer_lens")]
    if of_forward is not None:
        contenders.append(
            command.contender("forward", "lab_ours", use="forward", calls=8, **same)
        )
        promises.append(results.Promise("ours", of_forward, "forward"))
    if case == "statistics":
        peak = results.Promise("ours", 0.9, "transformer_lens", "peak MiB")
        promises.append(peak)
    return [
        command.Duel(
            case,
            f"{case}: {title}; {batch} x {same['length']} tokens",
            "call" if of_forward is None else "head",
            tuple(contenders),
            ("transformer_lens",),
            tuple(promises),
            with_memory=case == "statistics",
        )
    ]


CASES = dict.fromkeys(_CASES, _duel)

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

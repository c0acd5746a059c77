"""Measures long texts in models that we did not write.

Run: python scripts/benchmarks/long_context.py --case=logits_8192
     python scripts/benchmarks/long_context.py --case=page_8192 --rounds=3

A model of GPT-2's smallest size with random weights, made by transformers and wrapped
by `mh.wrap`, compared with PyTorch or not, next to PyTorch's attention; attention
written by hand in JAX; and a page of SmolLM2 as a PyTorch module. In float32 on the
CPU. Memory is the peak above the memory before, logits included. Needs pip install -e
'.[bench,models,parity]'.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402

# Case, which ends with the tokens of its text: title; contenders, ours and what it is
# compared with; the largest share of the time of that, and the most MiB, that are
# promised.
_CASES = {
    "logits_8192": ("logits", ("logits", "sdpa"), 1.5, 2048),
    "logits_4096": ("logits", ("logits", "eager", "sdpa"), 0.8, None),
    "statistics_8192": ("statistics of heads", ("statistics", "logits"), 2.5, 2048),
    "weights_2048": ("statistics, all weights", ("statistics", "weights"), 1, 2048),
    "gates_4096": ("gradient of all gates of heads", ("gates",), None, 4096),
    "by_hand_32768": ("12 heads in 10 lines, a page", ("by_hand",), None, 3072),
    "page_8192": ("a page of 270 heads of SmolLM2", ("page",), None, 4096),
    "first_logits_64": ("wrap, logits", ("compared_logits", "alone_logits"), 1.5, None),
    "first_maps_64": ("wrap, maps", ("compared_maps", "alone_maps"), 1.5, None),
    "short_128": ("12 layers in 10 lines", ("blocks", "whole"), 1.05, None),
    "trace_128": ("tracing 12 layers", ("trace_blocks", "trace_whole"), 1.2, None),
}
_QUICK_LENGTH = 32


def _duel(case, is_quick) -> list[command.Duel]:
    title, uses, share, most = _CASES[case]
    length = _QUICK_LENGTH if is_quick else int(case.rpartition("_")[2])
    same = {"length": length, "model": "tiny" if is_quick else "whole"}
    contenders = tuple(
        command.contender(use, "long_models", use=use, **same) for use in uses
    )
    promises = []
    if share is not None:
        promises.append(results.Promise(uses[0], share, uses[1]))
    if most is not None:
        promises.append(results.Promise(uses[0], most, quantity="peak MiB"))
    title = f"{case}: {title}; 1 x {length} tokens"
    duel = command.Duel(
        case, title, "call", contenders, uses[1:2], tuple(promises), with_memory=True
    )
    return [duel]


CASES = dict.fromkeys(_CASES, _duel)

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

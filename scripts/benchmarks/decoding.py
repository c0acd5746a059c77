"""Compares decoding with a cache to reading the parameters, and to transformers.

Run: python scripts/benchmarks/decoding.py --case=small_1

Greedy decoding of 1 or 16 texts, with room for 512 tokens, by the model of
configs/text_lm.py (small) and one of GPT-2's size (large), in float32 with random
weights. It is compared with the sum of all parameters, the fastest way to read them,
and with `generate` of transformers on PyTorch with either of its caches. A step is one
token per text; late tokens are the last that there is room for. Needs
pip install -e '.[bench,parity]'.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402

# Case: model, texts, steps in a sample, and the largest share of torch's time that is
# promised.
_CASES = {
    "small_1": ("small", 1, 256, 0.5),
    "small_16": ("small", 16, 128, 0.5),
    "large_1": ("large", 1, 16, 0.83),
    "large_16": ("large", 16, 8, 1.2),
}


def _decoding(case, is_quick) -> list[command.Duel]:
    model, batch, steps, share = _CASES[case]
    steps = 2 if is_quick else steps
    same = {"model": model, "batch": batch, "steps": steps}
    uses = {"ours": "early", "late": "late", "reading": "reading"}
    uses |= {"dynamic": "dynamic", "static": "static"}
    contenders = tuple(
        command.contender(name, "decoding_models", use=use, **same)
        for name, use in uses.items()
    )
    promises = (
        results.Promise("ours", 1.5, "reading"),
        results.Promise("ours", share, ("dynamic", "static")),
        results.Promise("late", 1.1, "ours"),
        results.Promise("late", share, ("dynamic", "static")),
    )
    title = f"{case}: a step of decoding; {batch} texts, {steps} steps a sample"
    return [command.Duel(case, title, "step", contenders, ("reading",), promises)]


CASES = dict.fromkeys(_CASES, _decoding)

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

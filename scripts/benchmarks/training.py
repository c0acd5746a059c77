"""Compares training steps: ours and of a wrapped module with PyTorch's, and monitored.

Run: python scripts/benchmarks/training.py --case=translation
     python scripts/benchmarks/training.py --case=monitor
     python scripts/benchmarks/training.py --case=wrapped --rounds=3

Contenders build the same model, with as many parameters, and take turns in separate
processes; ratios are of times, so that below 1 is faster than the base. Needs
pip install -e '.[bench]'; missing libraries are skipped and named. On a machine with
other load no promise about time is judged.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, results  # noqa: E402
from scripts.benchmarks.contenders import sizes  # noqa: E402


def _translation(case, is_quick) -> list[command.Duel]:
    size = ", ".join(f"{x.removeprefix('config.')} {y}" for x, y in sizes.TRANSLATION)
    title = f"{case}: a training step of an encoder-decoder, 2 a sample; {size}"
    contenders = tuple(
        command.contender(name, module, case="training", size=2)
        for name, module in (("ours", "ours"), ("torch", "torch_eager"))
    )
    promise = results.Promise("ours", 1.1, "torch")
    return [command.Duel(case, title, "step", contenders, ("torch",), (promise,))]


def _monitor(case, is_quick) -> list[command.Duel]:
    size = sizes.AttentionSize(1, 32 if is_quick else 1024, 256, 4, True)
    same = {"attention": size._asdict(), "size": 50}
    contenders = (
        command.contender("plain", "ours", case="forward_and_backward", **same),
        command.contender("monitored", "ours", case="monitored", **same),
    )
    title = f"{case}: attention with its gradient, one call in 50 observed; {size}"
    promise = results.Promise("monitored", 1.03, "plain")
    return [command.Duel(case, title, "call", contenders, ("plain",), (promise,))]


def _wrapped(case, is_quick) -> list[command.Duel]:
    options, cases = {"size": 2 if is_quick else 6}, ("train", "llama")
    of = tuple(command.contender(x, "torch_eager", case=x, **options) for x in cases)
    title = f"{case}: a step of `train` on a Llama of 20 million parameters, 8 x 128"
    promise = results.Promise("train", 1.2, "llama")
    return [command.Duel(case, title, "step", of, ("llama",), (promise,))]


CASES = {"translation": _translation, "monitor": _monitor, "wrapped": _wrapped}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

"""Compares a training step of an encoder-decoder with PyTorch's nn.Transformer.

Run: python scripts/benchmarks/training.py --case=translation

Both build the same model, with as many parameters, and take turns in separate
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
    config, steps = sizes.training_config(), 2
    model = config.model
    title = (
        f"{case}: a training step of an encoder-decoder; batch "
        f"{config.training.batch_size}, source {config.task.max_length}, target "
        f"{config.task.max_length + 1}, width {model.model_size}, layers "
        f"{model.num_layers} + {model.num_layers}, heads {model.attention.num_heads}, "
        f"feed-forward {model.feed_forward.hidden_size}; {steps} steps a sample"
    )
    contenders = tuple(
        command.contender(name, module, case="training", size=steps)
        for name, module in (("ours", "ours"), ("torch", "torch_eager"))
    )
    promise = results.Promise("ours", 1.1, "torch")
    return [command.Duel(case, title, "step", contenders, ("torch",), (promise,))]


CASES = {"translation": _translation}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

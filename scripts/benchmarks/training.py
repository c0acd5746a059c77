"""Compares training with Haiku and PyTorch, and measures start-up.

Run: python scripts/benchmarks/training.py --case=reverse
     python scripts/benchmarks/training.py --case=start

All contenders build the same model, with as many parameters, and take turns in separate
processes; ratios are of times, so that below 1 is faster than the base. Needs
pip install -e '.[bench]'; missing libraries are skipped and named. On a machine with
other load no promise about time is judged.
"""

import pathlib
import sys
from collections.abc import Iterable
from typing import Any

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, duel, results  # noqa: E402
from scripts.benchmarks.contenders import sizes  # noqa: E402

_MODULES = {"ours": "ours", "haiku": "jax_libraries", "torch": "torch_eager"}

# Steps in a sample: about half a second, but two steps at least for a scan to scan.
_STEPS = {"reverse": 100, "length_64": 4, "translation": 2}


def _training(case, is_quick) -> list[command.Duel]:
    config = sizes.training_config(case)
    steps = 2 if is_quick else _STEPS[case]
    model = config.model
    title = (
        f"{case}: a training step; batch {config.training.batch_size}, length "
        f"{config.task.sequence_length}, vocabulary {config.task.num_tokens}, width "
        f"{model.model_size}, layers {model.num_layers}, "
        f"heads {model.attention.num_heads}, "
        f"feed-forward {model.feed_forward.hidden_size}; {steps} steps a sample"
    )
    promise = results.Promise("ours", 1.0, "haiku")
    contenders = _libraries(("ours", "haiku"), case=case, size=steps)
    return [command.Duel(case, title, "step", contenders, ("haiku",), (promise,))]


def _translation(case, is_quick) -> list[command.Duel]:
    config = sizes.training_config(case)
    steps, model = 2 if is_quick else _STEPS[case], config.model
    title = (
        f"{case}: a training step of an encoder-decoder; batch "
        f"{config.training.batch_size}, source {config.task.max_length}, target "
        f"{config.task.max_length + 1}, width {model.model_size}, layers "
        f"{model.num_layers} + {model.num_layers}, heads {model.attention.num_heads}, "
        f"feed-forward {model.feed_forward.hidden_size}; {steps} steps a sample"
    )
    contenders = _libraries(("ours", "torch"), case=case, size=steps)
    promise = results.Promise("ours", 1.1, "torch")
    return [command.Duel(case, title, "step", contenders, ("torch",), (promise,))]


def _start(case, is_quick) -> list[command.Duel]:
    limits = {"train_cold": 30.0, "train_warm": 12.0, "help": 1.5, "import": 0.3}
    steps = {"steps": 20} if is_quick else {}
    title = (
        f"{case}: from the start of the process to summary.json of configs/reverse.py, "
        "without compiled programs and with; --help; importing mha_haiku after jax and "
        "haiku"
    )
    contenders = tuple(
        command.contender(
            name, "command", case=name, **(steps if "train" in name else {})
        )
        for name in limits
    )
    promises = tuple(results.Promise(*limit) for limit in limits.items())
    return [command.Duel(case, title, "start", contenders, (), promises, retries=0)]


def _libraries(names: Iterable[str], **options: Any) -> tuple[duel.Contender, ...]:
    return tuple(command.contender(x, _MODULES[x], **options) for x in names)


CASES = {
    "reverse": _training,
    "length_64": _training,
    "translation": _translation,
    "start": _start,
}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

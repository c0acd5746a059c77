"""Compares training, attention and start-up with Haiku, Flax and PyTorch.

Run: python scripts/benchmarks/training.py --case=reverse
     python scripts/benchmarks/training.py --case=attention --contenders=ours,haiku

All contenders build the same model, with as many parameters, and take turns in separate
processes; ratios are of times, so that below 1 is faster than the base. Needs
pip install -e '.[bench]'; missing libraries are skipped and named. On a machine with
other load no promise about time is judged.
"""

import pathlib
import sys

# The scripts use each other and experiments/, neither of which is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import command, duel, results  # noqa: E402
from scripts.benchmarks.contenders import sizes  # noqa: E402

# Contender: its module in contenders/, and options of the module's `prepare`.
_LIBRARIES = {
    "ours": ("ours", {}),
    "haiku": ("plain_haiku", {}),
    "haiku_scan": ("plain_haiku", {"scan": True}),
    "flax": ("flax_nnx", {}),
    "torch": ("torch_eager", {}),
}

# Steps in a sample: about half a second, but two steps at least for a scan to scan.
_STEPS = {"reverse": 100, "length_64": 4, "translation": 2}

_CROSS_QUERIES = 48  # of cross-attention, to keys of the usual length

_ACCURATE = 10  # calls in a sample of a few milliseconds each


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
    promise = results.Promise("ours", 1.0, "torch", aim=0.5)
    contenders = _libraries(_LIBRARIES, case=case, size=steps)
    return [
        command.Duel(case, title, "step", contenders, ("torch", "haiku"), (promise,))
    ]


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


def _attention(case, is_quick) -> list[command.Duel]:
    size = sizes.ATTENTION
    names = [name for name in _LIBRARIES if name != "haiku_scan"]
    duels = []
    for direction, calls, limit in (
        ("forward", _ACCURATE, 0.6),
        ("forward_and_backward", _ACCURATE // 2, 0.9),
    ):
        calls = 1 if is_quick else calls
        title = (
            f"{case}: the attention module, {direction.replace('_', ' ')}; batch "
            f"{size.batch}, length {size.length}, width {size.width}, heads "
            f"{size.heads}; {calls} calls a sample"
        )
        promise = results.Promise("ours", limit, "haiku")
        contenders = _libraries(names, case=direction, size=calls)
        duels.append(
            command.Duel(case, title, "call", contenders, ("haiku",), (promise,))
        )
    return duels


def _map(case, is_quick) -> list[command.Duel]:
    duels = []
    for direction, uses in (
        ("forward", ("formula", "mapless", "ignored", "returned", "weights")),
        ("forward_and_backward", ("formula", "mapless", "ignored")),
    ):
        calls = 1 if is_quick else _ACCURATE
        cross = {"num_queries": _CROSS_QUERIES} if case == "cross_map" else {}
        contenders = tuple(
            command.contender(
                use, "attention_map", case=direction, size=calls, use=use, **cross
            )
            for use in uses
        )
        title = (
            f"{case}: what the map of {'cross-' * bool(cross)}attention costs, "
            f"{direction.replace('_', ' ')}; neither the formula nor mapless has one"
        )
        # The compiler's count of temporary bytes leaves out what fused kernels allocate
        # while they run, so against other arithmetic only the measured peak says much.
        promises = tuple(
            results.Promise("ignored", 1.0, base, quantity)
            for base, quantity in (
                ("mapless", "flops"),
                ("mapless", "temporary bytes"),
                ("formula", "flops"),
                ("formula", "peak MiB"),
            )
        )
        bases = ("formula", "mapless")
        duels.append(
            command.Duel(
                case, title, "call", contenders, bases, promises, with_memory=True
            )
        )
    return duels


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


def _libraries(names, **options) -> tuple[duel.Contender, ...]:
    contenders = []
    for name in names:
        module, more = _LIBRARIES[name]
        contenders.append(command.contender(name, module, **options, **more))
    return tuple(contenders)


CASES = {
    "reverse": _training,
    "length_64": _training,
    "translation": _translation,
    "attention": _attention,
    "start": _start,
    "map": _map,
    "cross_map": _map,
}

# Takes argv; returns the exit status.
run = command.command(CASES, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

"""Measures how training scales over devices, as far as one machine can show it.

Run: python scripts/benchmarks/scaling.py

Work: virtual devices share this machine's cores, so no speed-up can be seen here. We
measure the processor time of a whole step of the same batch on 1, 2 and 4 devices: it
rises by the total cost of sharing (duplicate work, copies, waiting).

Traffic: the training program is compiled for 8, 64 and 512 devices, without running it;
from its text we read how much a device sends in a step.

Estimate: on paper, from both: the operations of a step over a device's rate, and the
bytes that it sends over its bandwidth, one after the other as if nothing overlapped.
"""

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ["JAX_NUM_CPU_DEVICES"] = "512"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from configs import text_lm
from mha_haiku import commands, devices, runs
from mha_haiku.core import checks
from mha_haiku.training import optimizers, stepping
from mha_haiku.training.runs import configuration, folders
from scripts.benchmarks import compiled_traffic

_KINDS = {
    "data": {},
    "data, parameters shared": {"shard_parameters": True},
    "heads": {"heads": 4},
    "sequence": {"sequence": 4},
}
_SMALL = {"width": 128, "length": 256, "layers": 2, "batch": 8}
_LARGE = {"width": 2048, "length": 4096, "layers": 2, "batch": 8}  # batch a data part
_COUNTS = (8, 64, 512)


class _Program(NamedTuple):
    """A compiled training program and its arguments."""

    compiled: jax.stages.Compiled
    state: stepping.TrainState | None
    data: object


def main(
    *,
    rounds: int = 5,
    rate: float = 1e14,
    bandwidth: float = 5e10,
    devices: Sequence[int] = _COUNTS,
) -> int:
    """Measures, and prints the tables.

    Args:
      rounds: Number of alternating runs.
      rate: Operations per second of a device.
      bandwidth: Bytes per second that a device sends.
      devices: Numbers of devices, as 8,64.
    """
    with checks.user_mistakes():
        checks.positive_integer("--rounds", rounds)
        checks.positive_number("--rate", rate)
        checks.positive_number("--bandwidth", bandwidth)
    for count in devices:
        if not 4 <= count <= 512 or count % 4:
            raise checks.ConfigError(
                f"--devices must be multiples of 4 up to 512, got {count}"
            )
    _print_work(rounds)
    _print_traffic(devices, rate, bandwidth)
    return 0


def _print_work(rounds) -> None:
    print(f"Work: processor time of a step, {_told(_SMALL)}; {rounds} rounds")
    print(f"{'':36}{'of one device':>16}{'quartiles':>16}{'efficiency':>12}")
    config = _config(_SMALL, _SMALL["batch"])
    one = _compiled(config, 1)
    for kind, fields in _KINDS.items():
        for count in (2, 4):
            own = {
                name: min(x, count) if name != "shard_parameters" else x
                for name, x in fields.items()
            }
            other = _compiled(_config(_SMALL, _SMALL["batch"], **own), count)
            ratios = []
            for _ in range(rounds):
                alone, one = _seconds(one)
                shared, other = _seconds(other)
                ratios.append(shared / alone)
            low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            spread = f"[{low:.2f}, {high:.2f}]"
            print(
                f"{f'{kind}, {count} devices':36}{middle:16.2f}{spread:>16}"
                f"{1 / middle:12.0%}",
                flush=True,
            )


def _print_traffic(devices, rate, bandwidth) -> None:
    # All in the open: of a loop XLA counts one round.
    config = _config(_LARGE, _LARGE["batch"]).replace(
        model=dict(attention=dict(implementation="dense"))
    )
    operations = _compiled(config, 1, runs=False)
    operations = operations.compiled.cost_analysis()["flops"]
    print(
        f"\nTraffic and estimate: {_told(_LARGE)} for each part of the data,\n"
        f"{operations:.3g} operations; {rate:.3g} operations/s, {bandwidth:.3g} bytes/s"
    )
    print(f"{'':36}{'sent by a device':>18}{'most by':>20}{'efficiency':>12}")
    for kind, fields in _KINDS.items():
        parts = fields.get("heads", 1) * fields.get("sequence", 1)
        for count in devices:
            batch = _LARGE["batch"] * count // parts
            program = _compiled(_config(_LARGE, batch, **fields), count, runs=False)
            sent = compiled_traffic.of_program(program.compiled.as_text())
            seconds = operations / parts / rate
            efficiency = seconds / (seconds + sent.total / bandwidth)
            most = max(sent.by_kind, key=sent.by_kind.get)
            print(
                f"{f'{kind}, {count} devices':36}{sent.total / 2**20:14.1f} MiB"
                f"{most:>20}{efficiency:12.0%}",
                flush=True,
            )


def _config(sizes, batch_size, **fields) -> runs.RunConfig:
    return text_lm.get_config().replace(
        task=dict(sequence_length=sizes["length"]),
        model=dict(
            num_layers=sizes["layers"],
            model_size=sizes["width"],
            dropout_rate=0.0,
            embedding=dict(max_length=sizes["length"]),
            attention=dict(num_heads=8),
            feed_forward=dict(hidden_size=4 * sizes["width"]),
        ),
        training=dict(batch_size=batch_size, steps_per_dispatch=1),
        devices=fields,
    )


def _compiled(config, count, *, runs=True) -> _Program:
    """Returns the program of a training step, on the first devices."""
    shared = configuration.make_placement(config, jax.devices()[:count])
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task, shared)
    adam = optimizers.make(config.optimizer, steps=config.training.steps)
    dispatch = stepping.make_dispatch(
        model,
        task,
        adam,
        batch_size=config.training.batch_size,
        placement=shared,
        max_steps=1,
    )

    def initial(seed):
        return stepping.initial_state(model, adam, task, seed)

    if runs:
        state = shared.initial_state(initial, np.uint32(0))
        data = shared.put(task.train_data)
    else:
        state = _abstract(shared, jax.eval_shape(initial, 0))
        data = _abstract(shared, task.train_data)
    compiled = dispatch.lower(state, data, np.uint32(0), np.int32(1)).compile()
    return _Program(compiled, state if runs else None, data)


def _abstract(shared, tree):
    """Returns the shapes of what devices are given; hundreds of copies fit nowhere."""

    def of_leaf(path, x):
        if isinstance(shared, devices.Replicas):
            return jax.ShapeDtypeStruct((len(shared.devices), *x.shape), x.dtype)
        sharding = shared.sharding_of(path, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map_with_path(of_leaf, tree)


def _seconds(program) -> tuple[float, _Program]:
    """Returns the processor seconds of a step, and the program after it."""
    state, most = program.state, 3
    before = 0.0
    for i in range(most + 1):
        if i == 1:  # the first warms up
            before = time.process_time()
        stop = np.int32(10**6)
        state, report = program.compiled(state, program.data, np.uint32(0), stop)
        jax.block_until_ready(report)
    return (time.process_time() - before) / most, program._replace(state=state)


def _told(sizes) -> str:
    return (
        f"{sizes['layers']} layers of width {sizes['width']}, {sizes['batch']} x "
        f"{sizes['length']} tokens"
    )


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))

"""A run with faults: trains like experiments.train, but draws no maps.

Run: python -m scripts.reliability_worker --config=configs/reverse.py --workdir=runs/x \
         --fault='{"signal": 100}'

Faults are met at a step: "signal" sends the process SIGTERM, "exit" and "exception" end
it right after the save of that step, "slow" sleeps in every dispatch from there on,
"fill" keeps the disk full from there on, and "empty" makes room again. "not_finite" and
"spike" are lists of steps, whose gradient is NaN, or whose loss is multiplied.
"""

import functools
import json
import os
import signal
import sys
import time

from mha_haiku import commands
from mha_haiku.commands.groups import Cache, Config


def main(
    *, config: Config, override_config: bool = False, fault: str = "{}", cache: Cache
) -> int:
    """Trains, and causes the fault.

    Args:
      override_config: Resume a run that had another config.
      fault: The fault, as JSON.
    """
    from mha_haiku.training.runs import loop

    _inject(json.loads(fault), config.folder)
    run = config.value, config.folder
    summary = loop.train(*run, override_config=override_config)
    return 130 if summary.interrupted else 0


def _inject(fault, workdir) -> None:
    from mha_haiku.training import stepping
    from mha_haiku.training.runs import checkpoints, trainers

    take_steps, save = trainers.Trainer.take_steps, checkpoints.Checkpoints.save

    def is_due(name, at):
        if name in fault and at >= fault[name]:
            del fault[name]  # once
            return True
        return False

    def take_and_act(self, stop):
        take_steps(self, stop)
        if self.step >= fault.get("slow", self.step + 1):
            time.sleep(0.2)
        if is_due("signal", self.step):
            os.kill(os.getpid(), signal.SIGTERM)
        if fault.get("fill", stop + 1) <= self.step < fault.get("empty", stop + 1):
            _fill(workdir.parent / "ballast")
        if is_due("empty", self.step):
            del fault["fill"]
            (workdir.parent / "ballast").unlink()

    def save_and_end(self, step, tree, **kwargs):
        save(self, step, tree, **kwargs)
        if is_due("exit", step):
            sys.exit(3)
        if is_due("exception", step):
            raise RuntimeError("injected")

    trainers.Trainer.take_steps = take_and_act
    checkpoints.Checkpoints.save = save_and_end
    if "not_finite" in fault or "spike" in fault:
        stepping.gradients = functools.partial(
            _broken_gradients, stepping.gradients, fault
        )


def _broken_gradients(gradients, fault, *args, step, **kwargs):
    """Like `step.gradients`; the first step is 1 here, as it is in reports."""
    import jax
    import jax.numpy as jnp

    def at(name, value):
        steps = jnp.array(fault.get(name, [0]))
        return jnp.where(jnp.isin(step + 1, steps), value, 1)

    gradient, sums = gradients(*args, step=step, **kwargs)
    gradient = jax.tree.map(lambda x: x * at("not_finite", jnp.nan), gradient)
    return gradient, sums._replace(loss=sums.loss * at("spike", 1000.0))


def _fill(path) -> None:
    """Writes until the disk is full to the last byte."""
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

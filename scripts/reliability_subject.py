"""The run that faults are injected into, and its required result."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_CONFIG = "configs/reverse.py"
_LOSSES = ("loss", "held_out_loss")
# Small, and with a checkpoint under way most of the time.
FIELDS = {
    "training.steps": 300,
    "training.batch_size": 32,
    "training.steps_per_dispatch": 10,
    "training.report_every": 10,
    "training.evaluate_every": 20,
    "training.evaluation_examples": 64,
    "training.checkpoint_every": 20,
}
STEPS, EVERY = FIELDS["training.steps"], FIELDS["training.checkpoint_every"]


class UnavailableError(Exception):
    """This machine cannot produce a fault."""


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a process."""

    status: int
    out: str
    stderr: str

    @property
    def line(self) -> str:
        """Returns stderr as one line, warnings left out."""
        lines = [x for x in self.stderr.splitlines() if not x.startswith("warning:")]
        return " ".join(lines)


class Subject:
    """Starts runs in a folder, and compares what they leave with an undisturbed one."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._count = 0
        self._abstract = None
        started = time.perf_counter()
        self.reference = self.new_workdir()
        self.must_end(self.reference)  # and fills the compilation cache
        self.start_seconds = time.perf_counter() - started
        self.train_seconds = self.start_seconds
        again = self.new_workdir()
        process = self.start(again)
        started = time.perf_counter()
        process.wait_for("starts")
        self.start_seconds = time.perf_counter() - started
        process.end()
        self.train_seconds = time.perf_counter() - started - self.start_seconds
        if not self.is_as_reference(again):
            raise RuntimeError("two undisturbed runs differ")

    def new_workdir(self) -> pathlib.Path:
        """Returns a path in a separate folder."""
        self._count += 1
        return self.folder / f"{self._count:03d}" / "run"

    def command(self, workdir, *flags: str, fault: str = "{}") -> list[str]:
        """Returns the command line of a run."""
        fields = [f"--config.{name}={value}" for name, value in FIELDS.items()]
        return [
            *(sys.executable, "-m", "scripts.reliability_worker"),
            *(f"--config={_CONFIG}", f"--workdir={workdir}", f"--fault={fault}"),
            f"--compilation_cache={self.folder / 'compiled'}",
            *fields,
            *flags,
        ]

    def start(self, workdir, *flags: str, fault="{}", devices=1) -> "Process":
        """Starts a run."""
        return Process(self.command(workdir, *flags, fault=fault), devices)

    def run(self, workdir, *flags: str, fault="{}", devices=1) -> End:
        """Runs to any end."""
        return self.start(workdir, *flags, fault=fault, devices=devices).end()

    def must_end(self, workdir, *flags: str, devices=1) -> None:
        """Runs to a good end."""
        end = self.run(workdir, *flags, devices=devices)
        if end.status:
            raise RuntimeError(f"a run ended with {end.status}: {end.stderr}")

    def after_resuming(self, workdir, *, is_report_split: bool = False) -> str | None:
        """Runs to the end; returns differences from the reference.

        Args:
          workdir: A run that was disturbed.
          is_report_split: Whether its reports are about other steps, as an interruption
            ends one early.
        """
        end = self.run(workdir)
        if end.status:
            return f"resuming ended with {end.status}: {end.line}"
        names = ("held_out_loss",) if is_report_split else _LOSSES
        is_same = self.is_as_reference(workdir, names)
        return None if is_same else "other bits than undisturbed"

    def is_as_reference(self, workdir, names=_LOSSES) -> bool:
        """Returns whether a run came to the reference's bits and reported losses."""
        states = [self.digest(x, STEPS) for x in (workdir, self.reference)]
        losses = [self.losses(x, names) for x in (workdir, self.reference)]
        return states[0] == states[1] and losses[0] == losses[1]

    def latest(self, workdir) -> int | None:
        """Returns the newest good checkpoint's step, or None where none was saved."""
        from mha_haiku.training.runs import checkpoints

        if not (workdir / "checkpoints").exists():
            return None
        with checkpoints.Checkpoints(workdir / "checkpoints", read_only=True) as stored:
            return stored.latest()

    def digest(self, workdir, step: int | None = None) -> str:
        """Returns the sha256 of all arrays of a checkpoint."""
        import jax

        digest = hashlib.sha256()
        for path, leaf in jax.tree.leaves_with_path(self.state(workdir, step)):
            digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
            digest.update(leaf.tobytes())
        return digest.hexdigest()

    def state(self, workdir, step: int | None = None):
        """Returns the state in a checkpoint; the newest if no step is given."""
        from mha_haiku.training.runs import checkpoints

        with checkpoints.Checkpoints(workdir / "checkpoints", read_only=True) as stored:
            return stored.restore(self.abstract(), step)

    def abstract(self):
        """Returns the shapes and dtypes of the state."""
        if self._abstract is None:
            from mha_haiku.commands import config_files
            from mha_haiku.training.runs import configuration, folders

            config = config_files.load(_CONFIG)
            overrides = [(f"config.{x}", str(value)) for x, value in FIELDS.items()]
            config = config_files.override(config, overrides)
            task = configuration.make_task(config)
            model = folders.make_model(config.model, task)
            self._abstract = folders.abstract_state(config, task, model)
        return self._abstract

    def losses(self, workdir, names=_LOSSES) -> dict[int, list[float]]:
        """Returns the losses of the reports that are due, by their steps."""
        from mha_haiku.training.runs import metrics_log

        every = FIELDS["training.report_every"]
        return {
            report["step"]: [report[name] for name in names if name in report]
            for report in metrics_log.read(workdir / "metrics.jsonl")
            if report["step"] % every == 0
        }


class Process:
    """A process on its way, whose output is read as it comes."""

    def __init__(self, command: list[str], devices: int = 1):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            command,
            cwd=_REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._parts = {"stdout": [], "stderr": []}
        self._lines: queue.Queue = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in self._parts
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, word: str, timeout: float = 120) -> bool:
        """Returns whether a line with `word` came on stdout."""
        until = time.monotonic() + timeout
        with contextlib.suppress(queue.Empty):
            while (
                line := self._lines.get(timeout=until - time.monotonic())
            ) is not None:
                if word in line:
                    return True
        return False

    def send(self, number: int) -> bool:
        """Sends a signal; returns whether the process was still there."""
        if self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def end(self, timeout: float = 300) -> End:
        """Waits for the end."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for thread in self._threads:
            thread.join()
        stdout, stderr = ("".join(self._parts[name]) for name in ("stdout", "stderr"))
        return End(status, stdout, stderr)

    def _read(self, name) -> None:
        for line in getattr(self._process, name):
            self._parts[name].append(line)
            if name == "stdout":
                self._lines.put(line)
        if name == "stdout":
            self._lines.put(None)

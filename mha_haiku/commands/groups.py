"""Flags that commands share, in groups: a command takes a group as one parameter.

`ready()` of a group is called before the command, in the parameters' order.
"""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Sequence

import jax

from mha_haiku.commands import config_files
from mha_haiku.commands.signatures import Overrides
from mha_haiku.core import checks
from mha_haiku.showing import canvas
from mha_haiku.subjects.subject import RunSubject, Subject
from mha_haiku.training import tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import RunConfig, folders

_CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


class Group:
    """Flags that belong together; subclasses are dataclasses."""

    def ready(self) -> None:
        """Prepares the command."""


@dataclasses.dataclass(frozen=True)
class Run(Group):
    """A trained run.

    Args:
      workdir: Folder of a trained run.
      step: Step of a checkpoint; defaults to the newest.
      trust: Execute the Python file that a run names as its task.
    """

    workdir: str
    step: int | None = None
    trust: bool = False

    def subject(self) -> RunSubject:
        """Loads the run."""
        return Subject.of_folder(self.workdir, self.step, trust=self.trust)


@dataclasses.dataclass(frozen=True)
class Config(Group):
    """A config, and the folder of its run.

    Args:
      config: File with the run's config; it is Python, and is executed (required unless
        --workdir already holds a run).
      workdir: Folder of the run; defaults to runs/<name of the config>.
      trust: Execute the Python file that a run names as its task.
    """

    config: str | None = None
    workdir: str | None = None
    trust: bool = False
    overrides: Overrides = Overrides()

    @functools.cached_property
    def value(self) -> RunConfig:
        """The config of the file, or of the run in the folder, overridden."""
        config = None
        if self.config:
            config = config_files.load(self.config)
        elif self.workdir:
            for name, text in self.overrides:
                if name == "config.task.name":  # the run may have that task
                    tasks.of_name(text)
            folder = folders.Folder(checks.as_path(self.workdir))
            config = folders.read_config(folder, trust=self.trust)
        if config is None:
            raise checks.ConfigError(
                "--config=... is missing.\n"
                f"It is one of {', '.join(config_files.available())}, or your own."
            )
        return config_files.override(config, self.overrides)

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the run."""
        return pathlib.Path(
            self.workdir or f"runs/{pathlib.Path(self.config or '').stem}"
        )

    def ready(self) -> None:
        """Reads the config, which may have mistakes."""
        _ = self.value


@dataclasses.dataclass(frozen=True)
class Pictures(Group):
    """Flags of pictures.

    Args:
      format: Formats of pictures, as png,svg,pdf.
      dark: Draw pictures on a dark background.
    """

    format: Sequence[str] = ("png",)
    dark: bool = False

    def ready(self) -> None:
        """Sets the style, and refuses formats that matplotlib does not have."""
        if self.dark and canvas.is_possible():
            canvas.dark()
        with checks.user_mistakes():
            if not canvas.formats_of([word for word in self.format if word]):
                raise ValueError("formats must name one at least, such as png.")


@dataclasses.dataclass(frozen=True)
class Cache(Group):
    """Flags of the cache of compiled programs.

    Args:
      compilation_cache: Folder that keeps compiled programs for the next start; empty
        for none.
    """

    compilation_cache: str = os.path.join(_CACHE, "mha_haiku", "compiled")

    def ready(self) -> None:
        """Makes jax keep compiled programs there."""
        folder = self.compilation_cache
        if not folder:
            return
        try:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"No compilation cache in {folder}: {error.strerror}."
            print(told, file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", folder)
        # By default jax stores programs that took a second to compile; most take less.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass(frozen=True)
class Processes(Group):
    """The processes that run a command together; see `devices.cluster.join`.

    Args:
      distributed: Run with other processes, as on a cluster.
      coordinator: host:port of process 0; if left out, from Slurm, Open MPI or the TPU
        pod.
      num_processes: Number of processes; if left out, the cluster's.
      process_id: Index of this process; if left out, the cluster's.
    """

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def ready(self) -> None:
        """Connects to the other processes."""
        arguments = self.coordinator, self.num_processes, self.process_id
        if self.distributed or any(x is not None for x in arguments):
            cluster.join(*arguments)

"""The `Bench` that every study takes: a run with its devices, data and metrics.

B batch, N examples, T positions.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from mha_haiku.core import attention, checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.showing import drawing, tables
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import configuration, files, folders, progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("loss", "accuracy", "exact_match", "drift")
ABLATION_VALUES = ("zero", "mean", "resample")

_BATCH_POSITIONS = 2**12  # of all examples in a batch
_MOST_EXAMPLES = 2**31 - 1  # an index is an int32


def silent(iterable: Any, **_: Any) -> Any:
    """Returns an iterable as it is: the progress that shows none."""
    return iterable


@dataclasses.dataclass(frozen=True)
class Bench:
    """A trained run, and what studies need to measure it."""

    run: folders.Run  # `placed` spreads it over devices
    folder: folders.Folder = folders.Folder(Path())
    progress: Callable[..., Iterator] = progress.over  # wraps an iterable
    # What `once` has made; benches made from one another share it.
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, workdir: str | os.PathLike, step: int | None = None) -> "Bench":
        """Loads the bench of a run."""
        run = folders.load_run(workdir, step)
        return cls(run, folders.Folder(checks.as_path(workdir)))

    @property
    def title(self) -> str:
        """The run, task and step: "two_heads (reverse), step 300"."""
        name, task = self.folder.root.resolve().name, self.run.task.name
        task = "" if name == task else f" ({task})"
        return f"{name}{task}, step {self.run.step}"

    def compact(self) -> "Bench":
        """Scans the layers of the bench's model, where they are many and alike."""
        if self.run.config.model.num_layers <= heads.running.FEW_LAYERS:
            return self
        run = self.run.compact()
        model = self.once("compact", lambda: run.model)
        return self.with_run(run._replace(model=model))

    def with_run(self, run: folders.Run) -> "Bench":
        """Replaces the run of the bench, for instance by a pruned one."""
        return dataclasses.replace(self, run=run)

    def looped(self) -> "Bench":
        """Unstacks the layers of the bench's model, so that each can be reached."""
        return self.with_run(self.run.looped())

    def placed(
        self,
        available: Sequence[jax.Device] | None = None,
        *,
        length: int | None = None,
    ) -> "Bench":
        """Spreads model and parameters over devices; None: over all.

        Heads and positions are split as the config says, if the number of devices
        allows; else each device has the whole model and a part of the examples. These
        have `length` positions; None: as the task says.
        """
        run = self.run
        length = run.task.sequence_length if length is None else length
        available = list(available or jax.devices())
        if len(available) == 1:
            return self
        wanted = run.config.replace(devices=dict(data=None))
        split = {x: getattr(wanted.devices, x) for x in ("heads", "sequence")}
        try:
            configuration.check_devices(wanted, len(available))
            configuration.check_sequence(wanted, length)
        except ConfigError:
            split = {"heads": 1, "sequence": 1}
        mesh = devices.make_mesh(available, **split)
        shared = devices.Sharded(mesh)
        model = folders.make_model(run.config, run.task, shared)
        params = shared.put_state(run.params)
        return self.with_run(run._replace(model=model, params=params, placement=shared))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Calls `make` once for the run's model and a key."""
        key = self.run.model, self.run.placement, key
        if key not in self.programs:
            self.programs[key] = make()
        return self.programs[key]

    def program(self, function: Callable) -> Callable:
        """Compiles the function; its results are on all devices."""
        placement = self.run.placement
        if placement is None:
            return jax.jit(function)
        return placement.program(function, num_scalars=0, returns_state=False)

    def whole_batch(self, count: int) -> int:
        """Rounds `count` up, so that devices can split as many examples."""
        placement = self.run.placement
        parts = 1 if placement is None else placement.mesh.shape["data"]
        return -(-count // parts) * parts

    def spread(self, example: tasks.Example) -> tasks.Example:
        """Splits a batch (of `whole_batch` size) over devices; in a program."""
        placement = self.run.placement
        return example if placement is None else placement.spread(example)

    def gathered(self, tree: Any) -> Any:
        """Gathers arrays on every device; in a program."""
        placement = self.run.placement
        return tree if placement is None else placement.gathered(tree)

    def observed(
        self,
        params: Any,
        example: tasks.Example,
        function: Callable[[attention.AttentionMap, str], Any],
        layers: Sequence[int],
    ) -> tuple[models.Output, list[Any]]:
        """Computes the output on a batch, and a function of the maps of some layers.

        Inside a program. The function, of a map and the kind of its layer, runs where
        the map is made, so that no map outlives its layer.
        """
        run = self.run
        parts = models.heads_of_layers(run.config.model)
        if len(layers) == len(parts):
            at = heads.running.by_kind(function, run.model)
        else:
            at = {
                f"{parts[i].path}/map": functools.partial(function, kind=parts[i].kind)
                for i in layers
            }
        output, found = heads.running.look(run.model, params, example, at)
        return output, [found[f"{parts[i].path}/map"] for i in layers]

    def held_out(self, indices: Sequence[int]) -> tasks.Example:
        """Makes the held-out examples of these indices, split over devices."""
        # Runs of several seeds may share a model, and so its programs.
        key = ("held_out", self.run.config.seed, id(self.run.task))
        data, make = self.once(key, self._held_out)
        indices = np.asarray(indices, np.int32)
        if self.run.placement is not None:
            indices = self.run.placement.put(indices)
        return make(data, indices)

    def _held_out(self):
        run = self.run
        data = run.task.held_out_data

        def make(data, indices):
            return self.spread(
                evaluation.held_out_batch(run.task, run.config.seed, data, indices)
            )

        placed = data if run.placement is None else run.placement.put(data)
        return placed, jax.jit(make)

    def batch_size(self, examples: int, positions: int = _BATCH_POSITIONS) -> int:
        """Finds how many of `examples` fit a batch of at most so many positions."""
        with checks.user_mistakes():
            checks.integer_in("examples", examples, 1, _MOST_EXAMPLES)
        task = self.run.task
        most = max(1, positions // max(task.sequence_length, task.target_length or 0))
        return self.whole_batch(min(examples, most))

    def batches(self, examples: int, *, name: str = "") -> "Batches":
        """Groups held-out examples in whole batches; with a name they show a bar."""
        return Batches(self, examples, self.batch_size(examples), name)

    def measured(
        self, examples: int, *, metric: str | None = None, name: str = ""
    ) -> heads.Measured:
        """Turns the run into the subject that measures of heads take.

        Args:
          examples: The number of held-out examples, rounded up to whole batches.
          metric: "loss", "accuracy" for the share of wrong answers, "exact_match" for
            the share of examples with any, or "drift"; None: the first of the task.
          name: Name of the progress bar; "": no bar.
        """
        run, metric = self.run, self.metric(metric)
        batches = self.batches(examples, name=name)
        if metric == "drift":
            return heads.measured_by_drift(run.model, run.params, batches)
        function = {
            "loss": heads.metrics.loss,
            "accuracy": heads.metrics.mistakes(run.task.correct),
            "exact_match": heads.metrics.failures(run.task.correct),
        }[metric]
        return heads.Measured(run.model, function, run.params, batches)

    def metric(self, name: str | None = None) -> str:
        """Finds the name of a metric that the task has; None: the task's first."""
        task = self.run.task
        own = (*task.metrics, *(["exact_match"] if task.counts_exact else []))
        with checks.user_mistakes():
            checks.choice("metric", name or own[0], METRICS)
        if name and name not in own:
            raise ConfigError(
                f"metric must be {' or '.join(own)} for the task {task.name}, which "
                f"has no {'whole answers' if 'loss' in own else 'targets'}, got "
                f"{name!r}."
            )
        return name or own[0]

    def ablation_value(self, name: str, examples: int) -> heads.AblationValue:
        """Returns an ablation value by its name; a mean is over that many examples."""
        with checks.user_mistakes():
            checks.choice("ablation_value", name, ABLATION_VALUES)
        if name == "mean":
            batches = self.batches(examples, name="means of heads")
            return heads.ablation_values.mean(self.run.model, self.run.params, batches)
        return getattr(heads.ablation_values, name)

    def observations(
        self,
        observe: Callable[[Any, tasks.Example], Any],
        indices: Sequence[int],
        *,
        batch_size: int,
        name: str,
        examples_at: Callable[[Sequence[int]], tasks.Example] | None = None,
    ) -> Iterator[Any]:
        """Yields the results of a program on examples, per batch, on the host.

        Args:
          observe: A `program` of parameters and a batch; its arrays are `[B, ...]`.
          indices: The indices of the examples.
          batch_size: The size of all batches: the last is filled up by repeating its
            last example, and the repetitions are dropped from the result.
          name: Name of the progress bar.
          examples_at: A function from indices to a batch; None: `held_out`.
        """
        examples_at = examples_at or self.held_out
        starts = range(0, len(indices), batch_size)
        for start in self.progress(starts, name=name, unit="batch"):
            batch = list(indices[start : start + batch_size])
            filled = batch + batch[-1:] * (batch_size - len(batch))
            results = jax.device_get(observe(self.run.params, examples_at(filled)))
            yield jax.tree.map(operator.itemgetter(slice(len(batch))), results)


def rows_of(batch: tasks.Example) -> list[tasks.Example]:
    """Splits a batch on the host into its examples."""
    count = len(batch.inputs)
    return [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(count)]


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Fills rows of tokens up with 0, `[B, T]`, and counts their lengths, `[B]`."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, into in zip(rows, tokens, strict=True):
        into[: len(row)] = row
    return tokens, lengths


def command(script: str, root: str | os.PathLike) -> str:
    """Writes the command line of a script for the run in a folder, for a message."""
    # With `scripts/run`, if the user came by it, who may have no other environment.
    root = Path(root)
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    runner = os.environ.get("MHA_HAIKU_RUN", "")
    return f"{runner} {checks.command(script)} --workdir={root}".strip()


class Result(Protocol):
    """What a study found: a table, and a picture of it."""

    file_name: str  # without a suffix
    picture: Callable[[], "Figure"]  # draws it

    def table(self) -> tables.Table:
        """Returns the numbers in rows."""


def write(
    result: Result, folder: str | os.PathLike, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Writes the table of a result as .csv and its pictures; returns their paths."""
    path = files.write(Path(folder) / f"{result.file_name}.csv", result.table().csv())
    return [path, *write_pictures(path, result.picture, formats)]


def write_pictures(
    path: Path, picture: Callable[[], "Figure"], formats: Sequence[str]
) -> list[Path]:
    """Draws a picture in each format, with its suffix; none without matplotlib."""
    if not drawing.is_possible():
        return []
    return [
        files.write(path.with_suffix(f".{kind}"), drawing.content(picture, kind))
        for kind in formats
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Batches of held-out examples that can be iterated over more than once."""

    bench: Bench
    examples: int  # at least
    size: int
    name: str = ""  # of the progress bar; "": there is none

    def __len__(self) -> int:
        return -(-self.examples // self.size)

    def __iter__(self) -> Iterator[tasks.Example]:
        numbers = range(len(self))
        if self.name:
            numbers = self.bench.progress(numbers, name=self.name, unit="batch")
        for i in numbers:
            yield self.bench.held_out(range(i * self.size, (i + 1) * self.size))

"""A flight recorder for any train step: statistics of its heads, every few steps."""

import collections
import contextlib
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mha_haiku.core import attention, checks, sites
from mha_haiku.core.sites import traces
from mha_haiku.lab.statistics import summary
from mha_haiku.records import Heads, timelines
from mha_haiku.records.heads import Layer
from mha_haiku.showing import timelines as pages

_logger = logging.getLogger("mha_haiku")
STATISTICS = "max_score", "entropy", "first_token", "largest_weight", "padding"
_AGAIN = "rematted_computation"  # what jax.checkpoint runs again, for the gradient
_PAGE_GROWTH = 1.1  # of the steps from page to page, as all of them are drawn in each
_MOST_PROGRAMS = 8  # of one monitor: for other shapes the oldest is compiled again
_TABLE, _ALARMS = "timeline.csv", "alarms.csv"
_PADDING = {"padding": ("padding", "attention on padding")}
_MEANINGS = {x.name: f"{x.label}, {x.unit}" for x in attention.STATISTICS.values()}


class Monitor:
    """A train step that also records what the heads of its model do.

    It returns what the step returns. In the first step, and every `every` steps after
    it, another compiled program takes the step and measures its attention maps; in the
    others the step itself runs. The model may be anything that `mh.look` sees maps in,
    with gradients, `jit`, `scan`, `remat`, `pmap` and `shard_map` around it; but in a
    `jax.checkpoint` that is differentiated maps of `mh.attend` itself are not seen.

    Numbers are of all examples of a step: means, or the largest where that is the
    statistic. Alarms, such as "layer 3, head 5: entropy fell below 0.05 nats at step
    1,850", are logged as warnings.

    Args:
      function: A train step, compiled or not, of arrays and other arguments.
      every: Steps between records.
      out: A folder for `timeline.csv` and `alarms.csv`, to which each record is
        appended, and `index.html`, a page of them. It may be missing.
      statistics: Names of statistics, and functions of an `AttentionMap` to numbers
        `[..., H]`, which are called by their own names.
      padding: A function of the step's arguments that returns `[B, S]` booleans, true
        where a position is padding. Maps of these sizes then have the number "padding",
        the attention there, and do not count padding as queries.
      log: A function of numbers by name, such as "entropy/3.5", and the step, such as
        `wandb.log`.
      at: Patterns of the maps to measure, as for `mh.look`.
      first_step: Steps taken before, of a training that resumes: the table continues
        from there.

    Attributes:
      step: The number of steps taken before the next call.
      heads: The numbers of the last record.
      alarms: What has gone wrong so far, in words.

    Raises:
      ConfigError: If a file cannot be written, or has other columns.
      ValueError: If there is no such statistic; from the step, if it has no map.

    Example:
      >>> def loss(w, x):
      ...     heads = (x @ w)[:, :, None]
      ...     return mh.attend(heads, heads, heads)[0].var()
      ...
      >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x))
      >>> step = mh.monitor(step, every=2)
      >>> w, x = jnp.eye(3), jnp.ones((4, 5, 3))
      >>> for _ in range(3):
      ...     w = step(w, x)
      ...
      >>> step.heads.step, step.heads["entropy"].mean.round(2)  # log 5
      (2, array([[1.61]]))
    """

    def __init__(
        self,
        function: Callable,
        *,
        every: int = 50,
        out: str | os.PathLike | None = None,
        statistics: Sequence[str | Callable] = STATISTICS,
        padding: Callable[..., Any] | None = None,
        log: Callable[[dict[str, float], int], Any] | None = None,
        at: str | Iterable[str] = "*/map",
        first_step: int = 0,
    ):
        functools.update_wrapper(self, function)
        self._function, self._padding, self._log = function, padding, log
        self._every = checks.positive_integer("every", every)
        self.step = checks.non_negative_integer("first_step", first_step)
        self._at = [at] if isinstance(at, str) else [*at]
        self._statistics = {str(getattr(x, "__name__", x)): x for x in statistics}
        for name in (x for x in statistics if isinstance(x, str)):
            checks.choice("statistics", name, [*attention.STATISTICS, "padding"])
        self._program = functools.lru_cache(_MOST_PROGRAMS)(self._compiled)
        self._records = collections.deque(maxlen=timelines.LOOKS_BACK)
        self.alarms: list[str] = []
        self._raised, self._next_page = set(), 0.0
        self._folder = None
        if out is not None and jax.process_index() == 0:
            self._folder = checks.as_path(out)
            header = ",".join([timelines.KEYS, *self._statistics])
            _open(self._folder / _TABLE, header, self.step)
            _open(self._folder / _ALARMS, "step,alarm", self.step)
            weakref.finalize(self, _write_page, self._folder)  # the whole training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step; returns what the function returns."""
        number, self.step = self.step, self.step + 1
        if number % self._every:
            return self._function(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        # Numbers are traced, as `jax.jit` does, unless the function needs them.
        kinds = int, float, complex, np.generic
        traced = [jnp.asarray(x) if isinstance(x, kinds) else x for x in leaves]
        with contextlib.suppress(TypeError, ValueError):
            leaves, program = traced, self._program(tree, _types(traced))
        program = self._program(tree, _types(leaves))
        output, changed, numbers = program([x for x in leaves if sites.is_array(x)])
        _update((args, kwargs), tree, leaves, changed)
        self._record(number, self._heads(number, numbers))
        return output

    def _compiled(self, tree: Any, types: tuple) -> Callable:
        args, kwargs = jax.tree.unflatten(tree, types)

        def with_changes(*args: Any, **kwargs: Any) -> tuple[Any, list]:
            before = jax.tree.leaves((args, kwargs))
            output = self._function(*args, **kwargs)
            after = jax.tree.leaves((args, kwargs))
            pairs = zip(before, after, strict=True)
            return output, [None if x is y else y for x, y in pairs]

        closed, _, _, whole = traces.trace(with_changes, args, kwargs)
        step, jaxpr = core.jaxpr_as_fun(closed), closed.jaxpr
        flags = [(x.invars, x.params.get("donated_invars", ())) for x in jaxpr.eqns]
        inputs = {x for invars, are in flags for x in itertools.compress(invars, are)}
        donated = [i for i, x in enumerate(jaxpr.invars) if x in inputs]
        layers: list[str] = []

        def observed(*arrays: jax.Array) -> tuple[Any, list]:
            rest = iter(arrays)
            filled = [next(rest) if sites.is_array(x) else x for x in types]
            args, kwargs = jax.tree.unflatten(tree, filled)
            padding = self._padding and self._padding(*args, **kwargs)
            read = functools.partial(self._read, padding)
            output, numbers = sites.look(step, dict.fromkeys(self._at, read))(*arrays)
            numbers = {x: y for x, y in numbers.items() if _AGAIN not in x}
            # Not returned as a dict, which programs sort: layer 10 before layer 2.
            layers[:] = [name.removesuffix("/map") for name in numbers]
            return output, [_of_heads(*measured) for measured in numbers.values()]

        program = jax.jit(observed, donate_argnums=donated)

        def run(arrays: list) -> tuple[Any, list, dict[str, dict]]:
            outputs, numbers = program(*arrays)
            return *whole(outputs), dict(zip(layers, numbers, strict=True))

        return run

    def _read(
        self, padding: Any, map_: attention.AttentionMap
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        *batch, _, num_queries, num_keys = map_.shape
        options = {}
        if padding is not None and padding.shape == (*batch, num_keys):
            options["positions"] = padding
            if num_queries == num_keys:
                options["counted"] = ~padding
        statistics = map_.statistics(**options)
        values = {**statistics.values, "padding": statistics.chosen_positions}
        values |= {x: y(map_) for x, y in self._statistics.items() if callable(y)}
        values = {x: y for x in self._statistics if (y := values.get(x)) is not None}
        return values, statistics.values["num_queries"]

    def _heads(self, step: int, numbers: dict[str, dict[str, jax.Array]]) -> Heads:
        rows = [*jax.device_get(numbers).values()]
        heads = [range(next(iter(row.values())).size) for row in rows]
        functions = [x for x, y in self._statistics.items() if callable(y)]
        names = {x: (x, x) for x in functions} | _PADDING
        columns = summary(rows, heads, names=names)
        layers = tuple(
            Layer.of_model("", i, i, row)._replace(name=name)
            for i, (name, row) in enumerate(zip(numbers, heads, strict=True))
        )
        return Heads(f"Heads at step {step:,}", layers, columns, step=step)

    def _record(self, step: int, heads: Heads) -> None:
        self.heads = heads
        self._records.append(heads)
        fresh = [*timelines.alarms(self._records, self._raised)]
        self.alarms += fresh
        for text in fresh:
            _logger.warning(text)
        if self._log is not None:
            logged = {
                f"{name}/{i}.{h}": float(column.mean[i, h])
                for name, column in heads.columns.items()
                for i, layer in enumerate(heads.layers)
                for h in range(len(layer.heads))
            }
            self._log(logged, step)
        if self._folder is not None:
            rows = timelines.rows(heads, self._statistics)
            alarms = "".join(f'{step},"{x}"\n' for x in fresh)
            for name, text in ((_TABLE, rows), (_ALARMS, alarms)):
                with (self._folder / name).open("ab", buffering=0) as file:
                    file.write(text.encode())  # at once, for those who read meanwhile
            if step >= self._next_page:
                self._next_page = _PAGE_GROWTH * step
                _write_page(self._folder)


monitor = Monitor  # it is called as a function


def _types(leaves: list) -> tuple:
    return tuple(jax.typeof(x) if sites.is_array(x) else x for x in leaves)


def _of_heads(values: dict[str, jax.Array], counts: jax.Array) -> dict[str, jax.Array]:
    """Combines numbers `[..., H]` of examples, devices and turns to `[1, H]`."""
    counted, axes = counts > 0, tuple(range(counts.ndim - 1))

    def combined(name: str, value: jax.Array) -> jax.Array:
        statistic = attention.STATISTICS.get(name)
        if statistic is not None and statistic.is_largest:
            return jnp.where(counted, value, -jnp.inf).max(axes)
        return jnp.where(counted, value, 0).sum(axes) / counted.sum(axes)

    return {name: combined(name, value)[None] for name, value in values.items()}


def _update(objects: Any, tree: Any, leaves: list, changed: list) -> None:
    """Writes what a step has changed in place, in modules of Flax's NNX."""
    if any(x is not None for x in changed):
        from flax import nnx

        new = [x if y is None else y for x, y in zip(leaves, changed, strict=True)]
        is_module = lambda x: isinstance(x, nnx.Pytree)  # noqa: E731
        before = jax.tree.leaves(objects, is_leaf=is_module)
        after = jax.tree.leaves(jax.tree.unflatten(tree, new), is_leaf=is_module)
        for module, other in zip(before, after, strict=True):
            if is_module(module):
                nnx.update(module, nnx.state(other))


def _open(path: Path, header: str, first_step: int) -> None:
    """Begins a CSV file, with the rows that it has of steps before the first."""
    before = [header]
    if first_step and path.exists():
        # A row that a kill cut off has no end.
        before = checks.text_of(path, path).rpartition("\n")[0].splitlines()
    if before[:1] != [header]:
        raise checks.ConfigError(f"{path} must begin with {header}.")
    rows = [x for x in before[1:] if int(x.partition(",")[0]) < first_step]
    checks.write_file(path, "\n".join([header, *rows, ""]))


def _write_page(folder: Path) -> None:
    if (folder / _TABLE).exists():  # when the process ends, it may be gone
        table, alarms = ((folder / x).read_text() for x in (_TABLE, _ALARMS))
        title = f"{folder.resolve().parent.name}: heads while it trains"
        page = pages.render(table, alarms, _MEANINGS, title)
        checks.write_file(folder / "index.html", page)

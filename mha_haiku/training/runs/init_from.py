"""`config.init_from`: a run that starts from the parameters of another one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import forward
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, folders

Params = Mapping[str, Mapping[str, Any]]

# Fields of config.model in which a run may differ from the run that it starts from: the
# parameters mean the same.
_FREE = tuple(
    f"config.model.{field}"
    for field in (
        "family",
        "dropout_rate",
        "precision",
        "rematerialize",
        "scan_layers",
        "embedding.max_length",
        "embedding.rotary_period",
        "embedding.frequencies",
        "attention.window",
        "attention.temperature",
        "attention.implementation",
        "output.",
    )
)
_MOST_SHOWN = 3


class Start(NamedTuple):
    """The run to start from."""

    path: str  # `config.init_from`
    run: folders.Run  # with looped layers
    kept: tasks.Kept | None  # its tokenizer, for any text

    def __str__(self) -> str:
        return f"Embeddings and layers are from {self.path}, step {self.run.step}."


def load(config: configuration.RunConfig) -> Start:
    """Loads the run that `config.init_from` names."""
    path = config.init_from
    run, kept = folders.load_with_data(path)
    run = run.looped()
    tokenizer, other = (
        getattr(x.data, "tokenizer", None) for x in (config, run.config)
    )
    has, name = None, run.config.task.name
    if kept is not None and other is None and config.task.name != name:
        has = f"only tokens of the task {name!r}"
    elif tokenizer != other:
        has = f"config.data.tokenizer {other!r}" if other else "no tokenizer"
        has += f", and this run has {repr(tokenizer) if tokenizer else 'none'}"
    if has is not None:
        raise ConfigError(
            "config.init_from must be a run with the same kind of tokens; "
            f"{path} has {has}."
        )
    return Start(path, run, kept and kept._replace(text=None))


def params(
    source: Start, config: configuration.RunConfig, task: tasks.Task, new: Params
) -> Params:
    """Chooses the parameters to start with: of `source`, or of a `new` model.

    Embeddings and layers are copied; the logits are copied if they have the same
    classes, and are new otherwise. A table of tokens may have more or fewer rows than
    the other run's table, as for [MASK] or [CLS]: with the same tokenizer, the rows of
    its tokens come first.
    """
    is_scanned = config.model.scan_layers
    own = dict(models.unstacked(new) if is_scanned else new)
    its = dict(source.run.params)
    same_classes = _classes(task) == _classes(source.run.task)
    for module in forward.OUTPUT_MODULES:
        shapes = [jax.tree.map(np.shape, x.get(module)) for x in (own, its)]
        if not same_classes or shapes[0] != shapes[1]:
            its.pop(module, None)
    fresh = [name for name in forward.OUTPUT_MODULES if name in own and name not in its]
    if source.kept is not None and {"embedding"} <= set(own) & set(its):
        its["embedding"] = _with_rows_of(its["embedding"], own["embedding"])
    _check_alike(source, config, own, its, fresh)
    taken = {name: own[name] if name in fresh else its[name] for name in own}
    return models.stacked(taken) if is_scanned else taken


def _classes(task: tasks.Task) -> list[str]:
    return [task.class_label(c) for c in range(task.num_classes)]


def _shapes(params: Params, left_out: list[str]) -> dict[str, tuple[int, ...]]:
    return {
        f"{module} {name}": np.shape(x)
        for module, leaves in params.items()
        for name, x in leaves.items()
        if module not in left_out
    }


def _with_rows_of(
    its: dict[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Makes tables of the size of `own`: the rows of `its`, then of `own`."""
    widths, other = ({k: np.shape(x)[1:] for k, x in y.items()} for y in (own, its))
    if widths != other:
        return its
    return {
        name: np.concatenate([its[name][: len(x)], x[len(its[name]) :]])
        for name, x in own.items()
    }


def _check_alike(
    source: Start,
    config: configuration.RunConfig,
    own: Params,
    its: Params,
    fresh: list[str],
) -> None:
    here, there = (_shapes(params, fresh) for params in (own, its))
    differ = [
        f"{name} ({_size(there.get(name))} there, {_size(here.get(name))} here)"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    there, here = ({"model": x.model.to_json()} for x in (source.run.config, config))
    changed = configuration.difference(there, here)
    changed = [line for line in changed if not line.startswith(_FREE)]
    if differ or changed:
        what = checks.listed(differ, _MOST_SHOWN) or "what its parameters mean"
        raise ConfigError(
            f"config.init_from must be a run of the same model; {source.path} differs "
            f"in {what}.\nFields there and here: "
            f"{checks.listed(changed, _MOST_SHOWN) or 'the same'}."
        )


def _size(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " x ".join(map(str, shape)) or "a number"

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
        "scan_layers",
        "embedding.max_length",
        "embedding.rotary_period",
        "embedding.frequencies",
        "attention.window",
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
    return Start(path, run, kept and tasks.Kept(kept.tokenizer))


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
    new = dict(models.unstacked(new) if is_scanned else new)
    old = dict(source.run.params)
    labels = [
        [x.class_label(c) for c in range(x.num_classes)]
        for x in (task, source.run.task)
    ]
    for module in forward.OUTPUT_MODULES:
        shapes = [jax.tree.map(np.shape, x.get(module)) for x in (new, old)]
        if module in new and (labels[0] != labels[1] or shapes[0] != shapes[1]):
            old[module] = new[module]
    if source.kept is not None and {"embedding"} <= set(new) & set(old):
        old["embedding"] = _resized(old["embedding"], new["embedding"])
    _check_alike(source, config, new, old)
    start = {name: old[name] for name in new}
    return models.stacked(start) if is_scanned else start


def _resized(
    old: dict[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Makes tables of the size of `new`: the rows of `old`, then of `new`."""
    widths, others = ({k: np.shape(x)[1:] for k, x in y.items()} for y in (new, old))
    if widths != others:
        return old
    return {
        name: np.concatenate([old[name][: len(x)], x[len(old[name]) :]])
        for name, x in new.items()
    }


def _check_alike(
    source: Start, config: configuration.RunConfig, new: Params, old: Params
) -> None:
    here, there = (
        {
            f"{x} {y}": np.shape(z)
            for x, leaves in params.items()
            for y, z in leaves.items()
        }
        for params in (new, old)
    )
    logits = tuple(forward.OUTPUT_MODULES)
    differ = [
        f"{name} ({there.get(name)} there and {here.get(name)} here)"
        for name in here | there
        if here.get(name) != there.get(name) and name.split()[0] not in logits
    ]
    before, now = ({"model": x.model.to_json()} for x in (source.run.config, config))
    changed = configuration.difference(before, now)
    changed = [line for line in changed if not line.startswith(_FREE)]
    if differ or changed:
        what = checks.listed(differ, _MOST_SHOWN) or "what its parameters mean"
        raise ConfigError(
            f"config.init_from must be a run of the same model; {source.path} differs "
            f"in {what}.\nFields there and here: "
            f"{checks.listed(changed, _MOST_SHOWN) or 'the same'}."
        )

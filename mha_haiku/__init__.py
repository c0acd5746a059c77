"""Multi-head attention for JAX and Haiku: train it, inspect it, take it apart.

Attention returns its values and a map, which costs nothing until it is used:

>>> import jax
>>> import mha_haiku as mh
>>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
>>> values, attention_map = mh.attend(query, key, value, mask=mh.masks.causal())
>>> values.shape  # [B, T, H, V]: batch, positions, heads, value size
(2, 5, 4, 8)
>>> attention_map.weights().shape  # [B, H, T, S]
(2, 4, 5, 5)
>>> attention_map.statistics().entropy.shape  # nats, [B, H]
(2, 4)

`MultiHeadAttention`, `EncoderLayer`, `Encoder`, `DecoderLayer`, `Decoder` and
`FeedForward` are Haiku modules that return maps too. `models` builds whole models from
a config's section, `tasks` has data to train them on, `runs` trains them, `heads` and
`studies` measure which heads matter, and `rasp` makes models whose important heads are
known. `look` and `edit` read and change the values inside any JAX function, `interop`
converts models of other libraries. `load` opens a run or pretrained weights, `train`
makes a run, and `wrap` takes any function; all return a `Subject` that answers
questions about its heads. `show` makes a page and `plot` a figure. `help(mh.masks)` and
similar calls describe the modules.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mha_haiku.core import display as _display

if TYPE_CHECKING:
    from mha_haiku import interop, subjects
    from mha_haiku.core import attention, fields, masks, models, modules, positions
    from mha_haiku.core.attention import AttentionMap, attend
    from mha_haiku.core.modules import (
        Decoder,
        DecoderLayer,
        Encoder,
        EncoderLayer,
        FeedForward,
        MultiHeadAttention,
    )
    from mha_haiku.core.sites import blockwise, edit, look, site, sites
    from mha_haiku.lab import heads, rasp
    from mha_haiku.records.map_set import MapSet
    from mha_haiku.subjects import Subject, load, train, verb, wrap
    from mha_haiku.subjects import verbs as studies
    from mha_haiku.subjects.monitors import monitor
    from mha_haiku.subjects.pictures import plot, show
    from mha_haiku.subjects.torch_calls import record
    from mha_haiku.training import devices, runs, tasks

__version__ = "0.3.0"  # setup.cfg reads it here

__all__ = [
    "AttentionMap",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "MapSet",
    "MultiHeadAttention",
    "Subject",
    "attend",
    "attention",
    "devices",
    "blockwise",
    "edit",
    "fields",
    "heads",
    "interop",
    "load",
    "look",
    "masks",
    "models",
    "modules",
    "monitor",
    "plot",
    "positions",
    "rasp",
    "record",
    "runs",
    "show",
    "site",
    "sites",
    "studies",
    "subjects",
    "tasks",
    "train",
    "verb",
    "wrap",
]

# Modules of names, which are imported on first use: JAX takes a second.
_PLACES = {
    **dict.fromkeys(("AttentionMap", "attend"), "core.attention"),
    **dict.fromkeys(
        (
            "Decoder",
            "DecoderLayer",
            "Encoder",
            "EncoderLayer",
            "FeedForward",
            "MultiHeadAttention",
        ),
        "core.modules",
    ),
    **dict.fromkeys(("blockwise", "edit", "look", "site", "sites"), "core.sites"),
    **dict.fromkeys(("Subject", "load", "train", "verb", "wrap"), "subjects"),
    **dict.fromkeys(("plot", "show"), "subjects.pictures"),
    "MapSet": "records.map_set",
    "attention": "core.attention",
    "devices": "training.devices",
    "fields": "core.fields",
    "heads": "lab.heads",
    "interop": "interop",
    "masks": "core.masks",
    "models": "core.models",
    "modules": "core.modules",
    "monitor": "subjects.monitors",
    "positions": "core.positions",
    "rasp": "lab.rasp",
    "record": "subjects.torch_calls",
    "runs": "training.runs",
    "studies": "subjects.verbs",
    "subjects": "subjects",
    "tasks": "training.tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES[name]
    module = importlib.import_module(f"{__name__}.{place}")
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]


def _html(value: Any) -> str:
    from mha_haiku.subjects import pictures

    return pictures.html(value)


def _save(value: Any, *arguments: Any) -> Any:
    from mha_haiku import subjects  # noqa: F401, makes itself known to it
    from mha_haiku.showing import result_files

    return result_files.save(value, *arguments)


def _later(name: str) -> Callable:
    """Returns a function that imports the real one when it is called."""
    return lambda value, **options: __getattr__(name)(value, **options)


_display.register(html=_html, show=_later("show"), plot=_later("plot"), save=_save)

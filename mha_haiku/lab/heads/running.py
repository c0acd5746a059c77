"""What the head measures look at: a model, its data, and a number per example.

B batch, T positions, P attention parts (layers of heads), H heads of a part.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models, sites
from mha_haiku.core.modules import anatomy
from mha_haiku.training import tasks

Array = jax.Array

# So many layers are compiled one by one: it takes seconds, and saves the scan.
FEW_LAYERS = 6

# From the logits of a batch and the batch itself to a number per example, `[B]`, the
# lower the better; negate an accuracy.
Metric = Callable[[Array, tasks.Example], Array]


class Measured(NamedTuple):
    """The subject of a measure: a model, its data, and a metric of the two."""

    model: models.Model  # of `models.build`, or any pure functions of these arguments
    metric: Metric  # how badly the model does; some measures differentiate it
    params: Any
    # All of one size, and to be iterated over more than once: a list, but no generator.
    # A `tqdm` around a list shows progress.
    batches: Iterable[tasks.Example]


def over(batches: Iterable[tasks.Example], function: Callable) -> list[Any]:
    """Runs a function on each batch; results are trees of host arrays."""
    check_batches(batches)
    results = [fetched(function(example)) for example in batches]
    if not results:
        raise ValueError("batches must not be empty.")
    return results


def check_batches(batches: Iterable[tasks.Example]) -> None:
    """Raises TypeError if batches can be iterated over only once."""
    if iter(batches) is batches:
        raise TypeError(
            "batches must be a list, or something else that can be gone through again, "
            f"got {type(batches).__name__}; list(batches) makes one."
        )


def compiled(function: Callable, *, compacts: bool = True) -> Callable:
    """Makes a function of a model and keywords that returns a compiled program.

    The decorated function takes the model, its parameters, a batch and other arrays,
    and by keyword what is known when compiling, such as a metric; its program takes
    all from the parameters on. Programs are kept, so that measuring again compiles
    nothing. Without `compacts` the function may call `compact` itself.
    """

    @functools.lru_cache(maxsize=8)
    def program(model, **known):
        @jax.jit
        def run(params, *given):
            own = compact(model, params) if compacts else (model, params)
            return function(*own, *given, **known)

        return run

    return program


def run(model: models.Model, params: Any, example: tasks.Example) -> Any:
    """Computes the model's `Output` on a batch, without dropout."""
    given = example.model_inputs()
    inputs = given.pop("inputs")  # by place: a model's function may name it otherwise
    return model.apply(params, None, inputs, **given, is_training=False)


def look(
    model: models.Model, params: Any, example: tasks.Example, at: Any, **options: bool
) -> tuple[Any, dict[str, Any]]:
    """Computes the model's `Output` on a batch, and the values at sites, by name.

    `at` and the options are as in `sites.look`. Sites of an encoder come first, sites
    of cross-attention last: in this order attention parts are counted.
    """
    looked = sites.look(functools.partial(run, model), at, **options)
    output, found = looked(params, example)
    names = sorted(found, key=lambda name: _ORDER.index(kind_of(name)))
    return output, collections.OrderedDict((name, found[name]) for name in names)


def run_edited(
    model: models.Model, params: Any, example: tasks.Example, edits: Any
) -> Any:
    """Computes the model's `Output` on a batch with the edits of `sites.edit`."""
    return sites.edit(functools.partial(run, model), edits)(params, example)


_ORDER = ("encoder", "", "decoder", "cross")


def kind_of(name: str) -> str:
    """Finds the kind of attention of a site; "" where there is one kind.

    A single stack of layers is called encoder too, which the order does not mind.
    """
    if name.startswith("decoder/"):
        return "cross" if "/cross_attention" in name else "decoder"
    return "encoder" if name.startswith("encoder/") else ""


def compact(model: models.Model, params: Any) -> tuple[models.Model, Any]:
    """Returns a model that scans its layers, if many are alike, and parameters."""
    if model.scanned is None:
        return model, params
    is_deep = any(f"layer_{FEW_LAYERS}/" in module for module in params)
    return (model.scanned, models.stacked(params)) if is_deep else (model, params)


def is_scanned(model: models.Model, params: Any) -> bool:
    """Checks whether parameters are stacked, as scanned layers have them."""
    return model.config is not None and any(map(anatomy.is_stacked, params))


def kinds_of(model: models.Model) -> list[str]:
    """Lists the kind of each attention part; [] where there is one kind."""
    if model.config is None or model.config.family != "encoder_decoder":
        return []
    return [part.kind for part in models.heads_of_layers(model.config)]


def label(kinds: Sequence[str], layer: int) -> str:
    """Labels an attention part: "cross 0", or "layer 3" without kinds."""
    if not kinds:
        return f"layer {layer}"
    return f"{kinds[layer]} {layer - list(kinds).index(kinds[layer])}"


def queries(example: tasks.Example, kind: str) -> tuple[Array, Array | None]:
    """Takes the inputs at the queries of maps of a kind, and the valid lengths.

    Tokens `[B, T]` or features `[B, T, D]`, and `[B]`; None: all are valid.
    """
    if kind in ("decoder", "cross"):
        return example.decoder_inputs, example.decoder_lengths
    return example.inputs, example.lengths


def tokens(example: tasks.Example, kind: str) -> Array | None:
    """Takes the tokens `[B, T]` at queries and keys of maps of a kind.

    None where there are features, or where queries and keys are of different texts.
    """
    own, _ = queries(example, kind)
    is_tokens = jnp.issubdtype(own.dtype, jnp.integer)
    return own if is_tokens and kind != "cross" else None


def key_lengths(example: tasks.Example, kind: str) -> Array | None:
    """Returns the numbers `[B]` of valid keys of maps of a kind; None: all are."""
    return example.decoder_lengths if kind == "decoder" else example.lengths


def valid(size: int, example: tasks.Example, kind: str) -> Array:
    """Marks which of `size` queries of maps of a kind are valid, `[B, T]`."""
    _, lengths = queries(example, kind)
    if lengths is None:
        return jnp.ones((len(example.inputs), size), bool)
    return jnp.arange(size)[None] < jnp.asarray(lengths)[:, None]


def exists(counts: Sequence[int]) -> np.ndarray:
    """Marks the heads that exist, `[P, H]` booleans, from the number in each part."""
    return np.arange(max(counts))[None] < np.array(counts)[:, None]


def num_heads(model: models.Model, params: Any, example: tasks.Example) -> list[int]:
    """Counts the heads of each attention part."""
    if model.config is not None:
        return [len(part.names) for part in models.heads_of_layers(model.config)]
    _, found = jax.eval_shape(
        lambda params, x: look(model, params, x, ["*/heads"]), params, example
    )
    return [x.shape[-2] for x in found.values()]


def by_kind(
    function: Callable[[Any, str], Any], model: models.Model
) -> dict[str, Callable]:
    """Returns the `at` of `look` that calls `function(map, kind=...)` of each map.

    The kind is one of `models.KINDS`, or "" in models of one kind.
    """
    if not kinds_of(model):
        return {"*/map": functools.partial(function, kind="")}
    return {
        "decoder/*/cross_attention/map": functools.partial(function, kind="cross"),
        "decoder/*/map": functools.partial(function, kind="decoder"),
        "*/map": functools.partial(function, kind="encoder"),
    }


def fetched(tree: Any) -> Any:
    """Brings arrays to the host, gathered where several processes share them."""
    if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)

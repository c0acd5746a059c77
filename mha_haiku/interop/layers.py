"""Parameters of single modules, from and to other libraries.

D model width, H heads, G key/value heads, K query/key and V value size per head, F
hidden units. Our parameters are Haiku's, `{"attention/query": {"w": ..., "b": ...}}`,
of a `MultiHeadAttention` at the path `name`; another library's parameters are a mapping
of arrays under the names that the library gives them, and it is not imported. There and
back is the same bit for bit. A parameter that is missing, unknown, or of a shape that
does not fit is a ValueError.

What our module does without parameters (another score or temperature, a sink of a
given number, weights without a denominator) is not seen here: another library computes
plain softmax attention.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.modules import anatomy
from mha_haiku.interop.families import changes, tables

Params = dict[str, dict[str, np.ndarray]]
Flat = dict[str, np.ndarray]  # by full name
Table = tuple[tables.Row, ...]  # ours are names below the module

_NAME = "multi_head_attention"  # what Haiku calls a MultiHeadAttention without a name
_LAYER_NAME = "encoder_layer"
_PROJECTIONS = "query", "key", "value"
_OF_OURS_ALONE = "/sinks", "/head_gate/w", "/score", "/smear"  # parameters

_EQUINOX = (
    *tables.linear("query", "query_proj"),
    *tables.linear("key", "key_proj"),
    *tables.linear("value", "value_proj"),
    *tables.linear("linear", "output_proj"),
)
_IN_FLAX = {"query": "query", "key": "key", "value": "value", "linear": "out"}
_FLAX = tuple(
    tables.row(f"{ours}/{leaf}", f"{theirs}.{their_leaf}")
    for ours, theirs in _IN_FLAX.items()
    for leaf, their_leaf in (("w", "kernel"), ("b", "bias"))
)
_WEIGHTS, _BIASES = (tuple(f"{part}/{leaf}" for part in _PROJECTIONS) for leaf in "wb")
_TORCH = (
    tables.Row(
        _WEIGHTS, ("in_proj_weight",), changes.chain(changes.transposed, changes.thirds)
    ),
    tables.Row(_BIASES, ("in_proj_bias",), changes.thirds),
    *tables.linear("linear", "out_proj"),
)
# Where queries, keys and values have other widths (kdim, vdim).
_TORCH_OF_WIDTHS = (
    tables.row("query/w", "q_proj_weight", changes.transposed),
    tables.row("key/w", "k_proj_weight", changes.transposed),
    tables.row("value/w", "v_proj_weight", changes.transposed),
    *_TORCH[1:],
)
_TORCH_LAYER = (
    *(row.below("attention/", "self_attn.") for row in _TORCH),
    *tables.linear("feed_forward/hidden", "linear1"),
    *tables.linear("feed_forward/output", "linear2"),
    *tables.norm("norm_1", "norm1"),
    *tables.norm("norm_2", "norm2"),
)


def from_haiku(
    params: Mapping[str, Mapping[str, Any]], path: str = _NAME, *, name: str = _NAME
) -> Params:
    """Renames the parameters of the `hk.MultiHeadAttention` at a path to `name`.

    Both modules name and shape them alike, so that it serves for the way back too.

    Raises:
      ValueError: If there is no such module, or its parameters do not fit.
    """
    # Haiku's names are ours: the left column of any table lists them.
    own = _checked(_flat(params, "params", separator="/"), path, _EQUINOX)
    return _nested(own, name)


def from_torch(
    state_dict: Mapping[str, Any], *, prefix: str = "", name: str | None = None
) -> Params:
    """Converts torch's state dict to a `MultiHeadAttention` or an `EncoderLayer`.

    Args:
      state_dict: The state of `torch.nn.MultiheadAttention`, or of
        `torch.nn.TransformerEncoderLayer`, whose equal is `EncoderLayer(...,
        norm_position="post")` (`"pre"` for `norm_first=True`) with the activation
        `jax.nn.relu` in its `FeedForward`, unless torch was given another.
      prefix: What the names begin with, as `encoder.layers.0.`; others are left out.
      name: The module's path; None: "multi_head_attention" or "encoder_layer".

    Raises:
      ValueError: If an array is missing, unknown or does not fit.
    """
    flat = {
        key.removeprefix(prefix): array
        for key, array in _flat(state_dict, "state_dict").items()
        if key.startswith(prefix)
    }
    if any(key.startswith("self_attn.") for key in flat):
        table, name = _TORCH_LAYER, name or _LAYER_NAME
    else:
        table = _TORCH_OF_WIDTHS if "q_proj_weight" in flat else _TORCH
    return _nested(_read("state_dict", flat, table, prefix), name or _NAME)


def to_torch(
    params: Mapping[str, Mapping[str, Any]], name: str | None = None
) -> dict[str, np.ndarray]:
    """Makes the state dict of a `torch.nn.MultiheadAttention` or encoder layer.

    `torch.from_numpy` makes tensors of its arrays. Where queries, keys and values are
    of one width they are one `in_proj_weight`, as in torch. `name` is as in
    `from_torch`.

    Raises:
      ValueError: If torch has no such module: heads whose sizes do not make up the
        width D, fewer key/value heads, norms of queries and keys.
    """
    flat = _flat(params, "params", separator="/")
    if name is None:
        is_layer = any(key.startswith(f"{_LAYER_NAME}/") for key in flat)
        name = _LAYER_NAME if is_layer else _NAME
    is_layer = f"{name}/attention/query/w" in flat
    table, scope = (_TORCH_LAYER, "attention/") if is_layer else (_TORCH, "")
    own = _checked(flat, name, table)
    weights = [own[f"{scope}{part}/w"] for part in (*_PROJECTIONS, "linear")]
    *projections, linear = (weight.shape for weight in weights)
    width = linear[-1]
    if any(shape[-1] != width for shape in projections) or linear[0] != width:
        raise ValueError(
            "params must have, for torch, heads whose sizes make up the width of the "
            f"output: query/w, key/w and value/w [D, {width}] and linear/w [{width}, "
            f"{width}]; got shapes {', '.join(map(str, (*projections, linear)))}."
        )
    if len(set(projections)) > 1:
        table = _TORCH_OF_WIDTHS
    return _written(own, table)


def from_flax(params: Mapping[str, Any], *, name: str = _NAME) -> Params:
    """Builds the parameters of a `MultiHeadAttention` from Flax parameters.

    `params` come from `flax.linen.MultiHeadDotProductAttention`
    (`variables["params"]`) or `flax.nnx.MultiHeadAttention`
    (`nnx.to_pure_dict(nnx.state(module, nnx.Param))`): kernels `[D, H, K]` and `[H, V,
    D]`. The norms of `normalize_qk`, which subtract the mean, are unknown.

    Raises:
      ValueError: If an array is missing, unknown or does not fit.
    """
    flat = _flat(params, "params")
    for (ours,), (theirs,), *_ in _FLAX:
        axis = anatomy.axis_of(*ours.split("/"))
        if theirs in flat and axis is not None:
            flat[theirs] = _joined(theirs, flat[theirs], axis)
    return _nested(_read("params", flat, _FLAX), name)


def to_flax(
    params: Mapping[str, Mapping[str, Any]],
    num_heads: int,
    *,
    num_key_value_heads: int | None = None,
    name: str = _NAME,
) -> dict[str, dict[str, np.ndarray]]:
    """Converts parameters to an attention of Flax, linen or nnx.

    Args:
      params: Parameters that include a `MultiHeadAttention`.
      num_heads: H.
      num_key_value_heads: G; H if left out, as it must be for linen.
      name: The module's path in `params`.

    Returns:
      `{"query": {"kernel": [D, H, K], "bias": [H, K]}, ..., "out": ...}`.

    Raises:
      ValueError: If there is no such module, or Flax has none of its parameters or of
        so many heads.
    """
    checks.positive_integer("num_heads", num_heads)
    counts = {
        anatomy.HEADS: num_heads,
        anatomy.KEY_VALUE_HEADS: num_key_value_heads or num_heads,
    }
    own = _checked(_flat(params, "params", separator="/"), name, _FLAX)
    for ours, array in own.items():
        axis = anatomy.axis_of(*ours.split("/"))
        if axis is not None:
            own[ours] = _split(f"{name}/{ours}", array, axis, counts)
    return _nested(_written(own, _FLAX), separator=".")


def from_equinox(module: Any, *, name: str = _NAME) -> Params:
    """Builds the parameters of a `MultiHeadAttention` from an Equinox module.

    `module` is an `equinox.nn.MultiheadAttention`, or a mapping of its arrays by name.

    Raises:
      ValueError: If an array is missing, unknown or does not fit.
    """
    return _nested(_read("module", _flat(module, "module"), _EQUINOX), name)


def to_equinox(
    params: Mapping[str, Mapping[str, Any]], module: Any, *, name: str = _NAME
) -> Any:
    """Replaces the parameters of an attention of Equinox.

    Args:
      params: Parameters that include a `MultiHeadAttention`.
      module: An `equinox.nn.MultiheadAttention` of the same sizes and biases.
      name: The attention's path in `params`.

    Raises:
      ValueError: If there is no such module, or it is not of the sizes of `module`.
    """
    own = _checked(_flat(params, "params", separator="/"), name, _EQUINOX)
    written = _written(own, _EQUINOX)
    there = {key: array.shape for key, array in _flat(module, "module").items()}
    found = {key: array.shape for key, array in written.items()}
    for key in sorted(there | found):
        if there.get(key) != found.get(key):
            raise ValueError(
                f"module must have {key} of shape {found.get(key, 'none')} as params "
                f"have it, got {there.get(key, 'none')}."
            )

    def replaced(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return written.get(name, leaf)

    return jax.tree_util.tree_map_with_path(replaced, module)


def _flat(tree: Any, argument: str, *, separator: str = ".") -> Flat:
    """Collects copies of the arrays of a tree by their full names."""
    # Of objects, such as modules of Equinox, only arrays count; in mappings all does.
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not isinstance(tree, Mapping):
        leaves = [(path, leaf) for path, leaf in leaves if hasattr(leaf, "shape")]
    flat = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=separator)
        try:
            flat[name] = np.asarray(leaf).copy()
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{argument} must hold arrays that NumPy can read, got {name}: {error}"
            ) from error
    if not flat:
        raise ValueError(f"{argument} must hold arrays, got {type(tree).__name__}.")
    return flat


def _read(argument: str, flat: Flat, table: Table, prefix: str = "") -> Flat:
    unknown = {prefix + name for name in flat}
    unknown -= {prefix + row.theirs[0] for row in table}
    names = {ours: prefix + row.theirs[0] for row in table for ours in row.ours}
    own = {}
    for row in table:
        array = flat.get(row.theirs[0])
        if array is None:
            continue
        if len(row.ours) == 3 and (not array.ndim or len(array) % 3):
            raise ValueError(
                f"{argument} must have {prefix}{row.theirs[0]} of three equal parts, "
                f"got shape {array.shape}."
            )
        parts = map(np.ascontiguousarray, row.change.to_ours([array], None))
        own |= zip(row.ours, parts, strict=True)
    _check(argument, own, unknown, names)
    return own


def _written(own: Flat, table: Table) -> Flat:
    written = {}
    for row in table:
        if row.ours[0] in own:
            (array,) = row.change.to_theirs([own[ours] for ours in row.ours], None)
            written[row.theirs[0]] = np.ascontiguousarray(array)
    return written


def _checked(flat: Flat, path: str, table: Table) -> Flat:
    """Returns the parameters below a path, all of which a table must know."""
    own = {
        name.removeprefix(f"{path}/"): array
        for name, array in flat.items()
        if name.startswith(f"{path}/")
    }
    if not own:
        modules = {name.rpartition("/")[0].rpartition("/")[0] for name in flat}
        raise ValueError(
            f"params must have a module {path!r}, and have none below it."
            f"{checks.nearest(path, sorted(modules))}"
        )
    names = {ours: f"{path}/{ours}" for row in table for ours in row.ours}
    _check("params", own, {f"{path}/{name}" for name in set(own) - set(names)}, names)
    return own


def _check(
    argument: str, own: Flat, unknown: set[str], names: Mapping[str, str]
) -> None:
    """Raises ValueError unless the parameters make up a module."""
    # `names` maps all our names to the caller's. Biases may be missing: all of query,
    # key and value, and both of a feed-forward part.
    if unknown:
        hint = ""
        if any(name.endswith(_OF_OURS_ALONE) for name in unknown):
            hint = (
                " Sinks, gates, additive scores and smeared keys are of our module "
                "alone; interop.save writes whole models with them."
            )
        raise ValueError(
            f"{argument} has what the module has not: {', '.join(sorted(unknown))}."
            f"{hint}"
        )
    missing = [ours for ours in names if ours not in own and not ours.endswith("/b")]
    for group in (("query/b", "key/b", "value/b"), ("hidden/b", "output/b")):
        biases = [ours for ours in names if ours.endswith(group)]
        if any(ours in own for ours in biases):
            missing += [ours for ours in biases if ours not in own]
    if missing:
        missing = dict.fromkeys(names[ours] for ours in missing)
        raise ValueError(f"{argument} must have {', '.join(missing)}, and has not.")

    weights = {ours: x for ours, x in own.items() if ours.endswith("/w")}
    for ours, weight in weights.items():
        if weight.ndim != 2:
            raise ValueError(
                f"{argument} must have a matrix {names[ours]}, got shape "
                f"{weight.shape}."
            )
    scope = "attention/" if "attention/query/w" in own else ""
    parts = [f"{scope}{part}/w" for part in (*_PROJECTIONS, "linear")]
    query, key, value, linear = (weights[part].shape for part in parts)
    # Of H and G heads these are H K, G K, G V and H V.
    if query[-1] * value[-1] != key[-1] * linear[0] or query[-1] % key[-1]:
        raise ValueError(
            f"{argument} must have {', '.join(names[part] for part in parts)} of the "
            f"same heads, got, as [in, out], {query}, {key}, {value} and {linear}."
        )
    wanted = {f"{ours[:-1]}b": x.shape[-1:] for ours, x in weights.items()}
    if scope:  # an encoder layer
        width, hidden = linear[-1], weights["feed_forward/hidden/w"].shape[-1]
        wanted |= {part: (width, own[part].shape[-1]) for part in parts[:3]}
        wanted |= {
            f"norm_{i}/{x}": (width,) for i in (1, 2) for x in ("scale", "offset")
        }
        wanted["feed_forward/hidden/w"] = width, hidden
        wanted["feed_forward/output/w"] = hidden, width
    for ours, shape in wanted.items():
        if ours in own and own[ours].shape != shape:
            raise ValueError(
                f"{argument} must have {names[ours]} that makes shape {shape} of "
                f"ours, as its other weights say; got {own[ours].shape}."
            )


def _joined(name: str, array: np.ndarray, axis: anatomy.Axis) -> np.ndarray:
    """Merges the axis of heads into the axis of features."""
    ndim = 2 if name.endswith(".kernel") else 1
    if array.ndim != ndim + 1:
        raise ValueError(
            f"params must have {name} with an axis of heads, {ndim + 1} axes in all, "
            f"got shape {array.shape}."
        )
    place = array.ndim + axis.place
    *before, heads, size = array.shape[: place + 1]
    return array.reshape(*before, heads * size, *array.shape[place + 1 :])


def _split(
    name: str, array: np.ndarray, axis: anatomy.Axis, counts: dict[str, int]
) -> np.ndarray:
    """Splits heads off into an axis of their own."""
    place, count = array.ndim + axis.place, counts[axis.holds]
    if array.shape[place] % count:
        raise ValueError(
            f"params must have {name} of {count} {axis.holds} along axis {place}, got "
            f"shape {array.shape}."
        )
    shape = array.shape
    return array.reshape(*shape[:place], count, -1, *shape[place + 1 :])


def _nested(own: Flat, path: str = "", *, separator: str = "/") -> Params:
    params = {}
    for name, array in own.items():
        module, _, leaf = name.rpartition(separator)
        module = f"{path}/{module}" if path else module
        params.setdefault(module, {})[leaf] = array
    return params

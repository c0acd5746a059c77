"""Parameters of single modules, from and to other libraries.

D model width, H heads, G key/value heads, K query/key and V value size per head, F
hidden units. Parameters of ours are Haiku's, `{"attention/query": {"w": ..., "b":
...}}`; those of others are mappings of arrays under the names that their library gives
them. Values are moved, never computed with: there and back is the same bit for bit.
What our module does without parameters (another score or temperature, a sink of a
given number, weights without a denominator) is not moved and not seen here: with its
parameters another library computes plain softmax attention. No other library is
imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.modules import anatomy

Params = dict[str, dict[str, np.ndarray]]
Flat = dict[str, np.ndarray]  # by full name

_NAME = "multi_head_attention"  # what Haiku calls a MultiHeadAttention without a name
_LAYER_NAME = "encoder_layer"
_PROJECTIONS = "query", "key", "value"
_OF_OURS_ALONE = "/sinks", "/head_gate/w", "/score", "/smear"  # parameters


class _Entry(NamedTuple):
    """Where a parameter of ours stands in another library."""

    name: str  # its name there
    # Whether it is a matrix `[out, in]` there; ours are `[in, out]`.
    is_transposed: bool = False
    # Which of three parts of that parameter it is; None: all of it.
    third: int | None = None


def _linears(
    names: Mapping[str, str], weight: str = "weight", is_transposed: bool = True
) -> dict[str, _Entry]:
    """Returns the entries of linear maps, from our names and the beginnings of theirs.

    By the names of our parameters below the module, as in all tables.
    """
    entries = {}
    for ours, theirs in names.items():
        entries[f"{ours}/w"] = _Entry(f"{theirs}{weight}", is_transposed)
        entries[f"{ours}/b"] = _Entry(f"{theirs}bias")
    return entries


_HAIKU = {
    f"{part}/{leaf}": _Entry(f"{part}/{leaf}")
    for part in (*_PROJECTIONS, "linear")
    for leaf in ("w", "b")
}
_EQUINOX = _linears(
    {
        "query": "query_proj.",
        "key": "key_proj.",
        "value": "value_proj.",
        "linear": "output_proj.",
    }
)
_FLAX = _linears(
    {"query": "query.", "key": "key.", "value": "value.", "linear": "out."},
    "kernel",
    False,
)
_TORCH = {
    **{
        f"{part}/w": _Entry("in_proj_weight", True, i)
        for i, part in enumerate(_PROJECTIONS)
    },
    **{
        f"{part}/b": _Entry("in_proj_bias", third=i)
        for i, part in enumerate(_PROJECTIONS)
    },
    **_linears({"linear": "out_proj."}),
}
# Where queries, keys and values have other widths (kdim, vdim).
_TORCH_OF_WIDTHS = _TORCH | {
    f"{part}/w": _Entry(f"{part[0]}_proj_weight", True) for part in _PROJECTIONS
}
_TORCH_LAYER = {
    **{
        f"attention/{ours}": entry._replace(name=f"self_attn.{entry.name}")
        for ours, entry in _TORCH.items()
    },
    **_linears({"feed_forward/hidden": "linear1.", "feed_forward/output": "linear2."}),
    **{
        f"norm_{i}/{ours}": _Entry(f"norm{i}.{theirs}")
        for i in (1, 2)
        for ours, theirs in (("scale", "weight"), ("offset", "bias"))
    },
}


def from_haiku(
    params: Mapping[str, Mapping[str, Any]], path: str = _NAME, *, name: str = _NAME
) -> Params:
    """Returns the parameters of one `hk.MultiHeadAttention` under another name.

    Both modules name and shape them alike, so that it serves for the way back too. The
    attention's path in `params`, those of a whole Haiku model, becomes `name`.

    Raises:
      ValueError: If a parameter is missing, unknown, or of a shape that does not fit.
    """
    own = _checked(_flat(params, "params", separator="/"), path, _HAIKU)
    return _nested(own, name)


def from_torch(
    state_dict: Mapping[str, Any], *, prefix: str = "", name: str | None = None
) -> Params:
    """Returns the parameters of a `MultiHeadAttention` or an `EncoderLayer`.

    Args:
      state_dict: Of `torch.nn.MultiheadAttention`, or of
        `torch.nn.TransformerEncoderLayer`, whose equal is `EncoderLayer(...,
        norm_position="post")` (`"pre"` for `norm_first=True`) with the activation
        `jax.nn.relu` in its `FeedForward`, unless torch was given another.
      prefix: What the names begin with, as `encoder.layers.0.`; others are left out.
      name: The module's path; None: "multi_head_attention" or "encoder_layer".

    Raises:
      ValueError: If a parameter is missing, unknown, or of a shape that does not fit.
    """
    flat = _flat(state_dict, "state_dict")
    below = {key.removeprefix(prefix) for key in flat if key.startswith(prefix)}
    if any(key.startswith("self_attn.") for key in below):
        table, name = _TORCH_LAYER, name or _LAYER_NAME
    else:
        table = _TORCH_OF_WIDTHS if "q_proj_weight" in below else _TORCH
    return _nested(_read("state_dict", flat, table, prefix=prefix), name or _NAME)


def to_torch(
    params: Mapping[str, Mapping[str, Any]], name: str | None = None
) -> dict[str, np.ndarray]:
    """Returns the state dict of a `torch.nn.MultiheadAttention` or encoder layer.

    Args:
      params: Parameters that hold those of a `MultiHeadAttention` or `EncoderLayer`.
      name: The module's path in them; None: as in `from_torch`.

    Returns:
      Arrays by torch's names; `torch.from_numpy` makes tensors of them. Where queries,
      keys and values are of one width they are one `in_proj_weight`, as in torch.

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
    """Returns the parameters of a `MultiHeadAttention`.

    Args:
      params: Of `flax.linen.MultiHeadDotProductAttention` (`variables["params"]`), or
        of `flax.nnx.MultiHeadAttention` (`nnx.to_pure_dict(nnx.state(module,
        nnx.Param))`): kernels `[D, H, K]` and `[H, V, D]`.
      name: The module's path.

    Raises:
      ValueError: If a parameter is missing, unknown (as the norms of `normalize_qk`,
        which subtract the mean), or of a shape that does not fit.
    """
    flat = _flat(params, "params")
    ours = {entry.name: ours for ours, entry in _FLAX.items()}
    for name_there, array in flat.items():
        if name_there in ours:
            module, leaf = ours[name_there].split("/")
            axis = anatomy.axis_of(module, leaf)
            if axis is not None:
                ndim = {"w": 2, "b": 1}[leaf]
                flat[name_there] = _joined(name_there, array, axis, ndim)
    return _nested(_read("params", flat, _FLAX), name)


def to_flax(
    params: Mapping[str, Mapping[str, Any]],
    num_heads: int,
    *,
    num_key_value_heads: int | None = None,
    name: str = _NAME,
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the parameters of an attention of Flax, linen's or nnx's.

    Args:
      params: Parameters that hold those of a `MultiHeadAttention`, at the path `name`.
      num_heads: H.
      num_key_value_heads: G; H if left out, as it must be for linen.
      name: The module's path.

    Returns:
      `{"query": {"kernel": [D, H, K], "bias": [H, K]}, ..., "out": ...}`.

    Raises:
      ValueError: If a parameter is missing, unknown, or does not hold H heads.
    """
    checks.positive_integer("num_heads", num_heads)
    counts = {
        anatomy.HEADS: num_heads,
        anatomy.KEY_VALUE_HEADS: num_key_value_heads or num_heads,
    }
    own = _checked(_flat(params, "params", separator="/"), name, _FLAX)
    split = {}
    for ours, array in own.items():
        axis = anatomy.axis_of(*ours.split("/"))
        split[ours] = (
            array if axis is None else _split(f"{name}/{ours}", array, axis, counts)
        )
    result = {}
    for key, array in _written(split, _FLAX).items():
        module, _, leaf = key.rpartition(".")
        result.setdefault(module, {})[leaf] = array
    return result


def from_equinox(module: Any, *, name: str = _NAME) -> Params:
    """Returns the parameters of a `MultiHeadAttention`.

    Args:
      module: An `equinox.nn.MultiheadAttention`, or a mapping of its arrays by name.
      name: The module's path.

    Raises:
      ValueError: If a parameter is missing, unknown, or of a shape that does not fit.
    """
    return _nested(_read("module", _flat(module, "module"), _EQUINOX), name)


def to_equinox(
    params: Mapping[str, Mapping[str, Any]], module: Any, *, name: str = _NAME
) -> Any:
    """Returns an attention of Equinox with other parameters.

    Args:
      params: Parameters that hold those of a `MultiHeadAttention`.
      module: An `equinox.nn.MultiheadAttention` of these sizes and biases.
      name: The attention's path in `params`.

    Raises:
      ValueError: If names or shapes of the two differ.
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
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: written.get(_full_name(path), leaf), module
    )


def _flat(tree: Any, argument: str, *, separator: str = ".") -> Flat:
    """Returns the arrays of a tree by their full names, copied.

    Of objects, such as modules of Equinox, only arrays count; in mappings all does.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not isinstance(tree, Mapping):
        leaves = [(path, leaf) for path, leaf in leaves if hasattr(leaf, "shape")]
    flat = {}
    for path, leaf in leaves:
        name = _full_name(path, separator)
        try:
            flat[name] = np.asarray(leaf).copy()
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{argument} must hold arrays that NumPy can read, got {name}: {error}"
            ) from error
    if not flat:
        raise ValueError(f"{argument} must hold arrays, got {type(tree).__name__}.")
    return flat


def _full_name(path: Sequence[Any], separator: str = ".") -> str:
    """Returns a name such as `query_proj.weight` from a path in a tree."""
    keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    return separator.join(map(str, keys))


def _read(argument: str, flat: Flat, table: dict[str, _Entry], prefix: str = ""):
    """Returns parameters by our names, from those of another library."""
    given = {
        name.removeprefix(prefix): array
        for name, array in flat.items()
        if name.startswith(prefix)
    }
    theirs = {entry.name for entry in table.values()}
    names = {ours: entry.name for ours, entry in table.items() if entry.name in given}
    unknown = sorted(prefix + name for name in set(given) - theirs)
    _check_names(argument, table, names, unknown, lambda x: prefix + table[x].name)
    own = {}
    for ours, name in names.items():
        array, entry = given[name], table[ours]
        if entry.third is not None:
            if not array.ndim or len(array) % 3:
                raise ValueError(
                    f"{argument} must have {prefix}{name} of three equal parts, got "
                    f"shape {array.shape}."
                )
            array = np.split(array, 3)[entry.third]
        if entry.is_transposed:
            array = array.T
        own[ours] = np.ascontiguousarray(array)
    _check_fit(argument, own, lambda ours: prefix + names[ours])
    return own


def _written(own: Flat, table: dict[str, _Entry]) -> Flat:
    """Returns parameters by the names of another library, from ours."""
    parts = {}
    for ours, entry in table.items():
        if ours in own:
            array = own[ours].T if entry.is_transposed else own[ours]
            parts.setdefault(entry.name, []).append(array)
    return {
        name: np.concatenate(x) if x[1:] else x[0].copy() for name, x in parts.items()
    }


def _checked(flat: Flat, path: str, table: dict[str, _Entry]) -> Flat:
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
    full = f"{path}/{{}}".format
    unknown = sorted(full(name) for name in set(own) - set(table))
    _check_names("params", table, own, unknown, full)
    _check_fit("params", own, full)
    return own


def _check_names(
    argument: str,
    table: dict[str, _Entry],
    own: Mapping[str, Any],
    unknown: Sequence[str],
    full_name: Callable[[str], str],
) -> None:
    """Raises ValueError unless all that is there is known, and all that must be there.

    Biases may be missing: those of query, key and value together, as those of the two
    maps of a feed-forward part.
    """
    if unknown:
        options = [name for name in unknown if name.endswith(_OF_OURS_ALONE)]
        hint = ""
        if options:
            hint = (
                " Sinks, gates, additive scores and smeared keys are of our module "
                "alone; interop.save writes whole models with them."
            )
        raise ValueError(
            f"{argument} has what the module has not: {', '.join(unknown)}.{hint}"
        )
    missing = [ours for ours in table if ours not in own and not ours.endswith("/b")]
    for group in (("query/b", "key/b", "value/b"), ("hidden/b", "output/b")):
        biases = [ours for ours in table if ours.endswith(group)]
        if any(ours in own for ours in biases):
            missing += [ours for ours in biases if ours not in own]
    if missing:
        names = dict.fromkeys(map(full_name, missing))
        raise ValueError(f"{argument} must have {', '.join(names)}, and has not.")


def _check_fit(argument: str, own: Flat, full_name: Callable[[str], str]) -> None:
    """Raises ValueError where shapes do not make up a module."""

    def check(ours: str, shape: tuple[int, ...], why: str) -> None:
        if ours in own and own[ours].shape != shape:
            raise ValueError(
                f"{argument} must have {full_name(ours)} that makes shape {shape} of "
                f"ours, {why}; got {own[ours].shape}."
            )

    weights = {ours: x for ours, x in own.items() if ours.endswith("/w")}
    for ours, weight in weights.items():
        if weight.ndim != 2:
            raise ValueError(
                f"{argument} must have a matrix {full_name(ours)}, got shape "
                f"{weight.shape}."
            )
        check(f"{ours[:-1]}b", weight.shape[-1:], f"as {full_name(ours)} says")
    scope = "attention/" if "attention/query/w" in own else ""
    query, key, value, linear = (
        weights[f"{scope}{part}/w"].shape for part in (*_PROJECTIONS, "linear")
    )
    # Of H and G heads these are H K, G K, G V and H V.
    if query[-1] * value[-1] != key[-1] * linear[0] or query[-1] % key[-1]:
        names = [full_name(f"{scope}{part}/w") for part in (*_PROJECTIONS, "linear")]
        raise ValueError(
            f"{argument} must have {', '.join(names)} of the same heads, got, as "
            f"[in, out], {query}, {key}, {value} and {linear}."
        )
    if scope:
        width = (linear[-1],)
        for part, shape in zip(_PROJECTIONS, (query, key, value), strict=True):
            check(f"attention/{part}/w", (*width, shape[-1]), "the width and heads")
        for part in ("norm_1", "norm_2"):
            for leaf in ("scale", "offset"):
                check(f"{part}/{leaf}", width, "the width")
        hidden = weights["feed_forward/hidden/w"].shape
        check("feed_forward/hidden/w", (*width, hidden[-1]), "the width and F")
        check("feed_forward/output/w", (hidden[-1], *width), "F and the width")


def _joined(name: str, array: np.ndarray, axis: anatomy.Axis, ndim: int) -> np.ndarray:
    """Returns an array whose heads have an axis of their own, without it."""
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
    """Returns an array whose heads have an axis of their own."""
    place, count = array.ndim + axis.place, counts[axis.holds]
    if array.shape[place] % count:
        raise ValueError(
            f"params must have {name} of {count} {axis.holds} along axis {place}, got "
            f"shape {array.shape}."
        )
    shape = array.shape
    return array.reshape(*shape[:place], count, -1, *shape[place + 1 :])


def _nested(own: Flat, path: str) -> Params:
    """Returns Haiku's parameters of a module, from names below it."""
    params = {}
    for name, array in own.items():
        module, _, leaf = name.rpartition("/")
        params.setdefault(f"{path}/{module}", {})[leaf] = array
    return params

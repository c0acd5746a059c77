"""Modules of Flax (NNX, Linen) and Equinox as functions, with sites named after parts.

Neither library is imported: a module comes from one that is.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# What a call takes in training, by the names that it may have; else the opposite.
_MODES = dict.fromkeys(("train", "training", "is_training"), True)
_MODES |= {"deterministic": False, "inference": False}
_Parts = tuple[Any, list[str], Callable]  # parameters, what is not trained, a call


def convert(module: Any) -> tuple[Callable, Any, list[str]] | None:
    """Converts such a module, or `jax.vmap` of one of Equinox; None of anything else.

    Returns a function of parameters and inputs `[B, ...]`, by keyword `rng` in training
    only, the parameters, and the names of arrays that are not trained. A module of
    Equinox takes one example. ValueError if a module of Linen is not bound.
    """
    module = inspect.unwrap(module)
    of = {"flax.nnx": _of_nnx, "flax.linen": _of_linen, "equinox": _of_equinox}
    kinds = {x: getattr(sys.modules.get(x), "Module", ()) for x in of}
    library = next((x for x, kind in kinds.items() if isinstance(module, kind)), None)
    if library is None:
        return None
    params, fixed, call = of[library](module)
    arguments = inspect.signature(module).parameters
    modes = {x: mode for x, mode in _MODES.items() if x in arguments}

    def function(params: Any, inputs: Any, *, rng: Any = None, **options: Any) -> Any:
        options = {x: mode is (rng is not None) for x, mode in modes.items()} | options
        return call(params, inputs, rng, **options)

    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
    key = inspect.Parameter("rng", inspect.Parameter.KEYWORD_ONLY, default=None)
    others = [x for x in arguments.values() if x.name not in ("rng", "rngs", "key")]
    parameters = sorted([first, *others, key], key=lambda x: x.kind)
    function.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    function.__name__ = type(module).__name__
    return function, params, fixed


def _of_nnx(module: Any) -> _Parts:
    nnx = sys.modules["flax.nnx"]
    module = nnx.clone(module)
    _name_parts(module, nnx.Module)
    module.train()
    training, _ = nnx.split(module)
    module.eval()
    evaluation, state = nnx.split(module)

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        def value(x: Any) -> Any:
            return rng if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

        params = params if rng is None else jax.tree.map(value, params)
        values = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(values, params)
        graph = evaluation if rng is None else training
        return nnx.merge(graph, values)(inputs, **options)

    leaves = nnx.to_flat_state(state)
    fixed = [".".join(map(str, x)) for x, y in leaves if not isinstance(y, nnx.Param)]
    return nnx.to_pure_dict(state), fixed, call


def _of_linen(module: Any) -> _Parts:
    if module.scope is None:
        name = type(module).__name__
        raise ValueError(f"function must be a bound {name}, module.bind(variables).")
    module, variables = module.unbind()

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        options["rngs"] = {} if rng is None else {"dropout": rng}
        # Means over batches are computed anew, and not kept.
        return module.apply(params, inputs, **options, mutable=True)[0]

    others = {x: y for x, y in variables.items() if x != "params"}
    paths = [path for path, _ in jax.tree.leaves_with_path(others)]
    fixed = [jax.tree_util.keystr(x, simple=True, separator=".") for x in paths]
    return variables, fixed, call


def _of_equinox(module: Any) -> _Parts:
    equinox: Any = sys.modules["equinox"]
    takes_key = "key" in inspect.signature(module).parameters
    params = equinox.nn.inference_mode(module)  # a copy
    _name_parts(params, equinox.Module)

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        if rng is not None and takes_key:
            params = equinox.nn.inference_mode(params, value=False)
            options["key"] = jax.random.split(rng, len(inputs))
        return jax.vmap(lambda x, options: params(x, **options))(inputs, options)

    return params, [], call


def _name_parts(module: Any, kind: type, before: str = "") -> None:
    """Makes inner modules enter scopes, by subclasses, which survive a flattening.

    A list computes nothing: its name is joined with the names of its items.
    """
    is_leaf = lambda x: x is not module and isinstance(x, kind)  # noqa: E731
    for path, part in jax.tree.leaves_with_path(module, is_leaf=is_leaf):
        if isinstance(part, kind) and "scope" not in vars(type(part)):
            name = before + jax.tree_util.keystr(path, simple=True, separator="_")
            _name_parts(part, kind, "" if callable(part) else f"{name}_")
            if callable(part):
                object.__setattr__(part, "__class__", _scoped(type(part), name))


def _scoped(kind: Any, name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return kind.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "scope": name}
    return type(kind)(kind.__name__, (kind,), names)

"""Modules of Flax (NNX, Linen) and Equinox as functions, with sites named after parts.

Neither library is imported: a module comes from one that is.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# What a call takes in training, by the names that it may have; else the opposite.
_MODES = {"deterministic": False, "inference": False}
_MODES |= dict.fromkeys(("train", "training", "is_training"), True)


class JaxModule(NamedTuple):
    """A module of Flax or Equinox as a function."""

    # Of params and inputs `[B, ...]`, by keyword `rng`, in training only, and other
    # arguments of the module.
    function: Callable[..., Any]
    params: Any
    fixed: tuple[str, ...] = ()  # the names of arrays that are no parameters

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.function.__name__


def is_module(value: Any) -> bool:
    """Checks whether a value is such a module, or `jax.vmap` of one of Equinox."""
    return _converter(value) is not None


def convert(module: Any, params: Any = None) -> JaxModule:
    """Converts a module to a function; a module of Equinox takes one example.

    Raises:
      ValueError: If parameters are given to a module that has its own, or a module of
        Linen has none.
    """
    converter = _converter(module)
    assert converter is not None  # `is_module` has said so
    if params is not None and converter is not _of_linen:
        raise ValueError(
            f"params must be None for a {type(module).__name__}, which has its own, "
            f"got {type(params).__name__}; a tokenizer is given by tokenizer=."
        )
    return converter(module, params)


def _converter(value: Any) -> Callable[[Any, Any], JaxModule] | None:
    for library, name, converter in (
        ("flax.nnx", "Module", _of_nnx),
        ("flax.linen", "Module", _of_linen),
        ("equinox", "Module", _of_equinox),
    ):
        kind = getattr(sys.modules.get(library), name, None)
        bare = inspect.unwrap(value) if library == "equinox" else value
        if kind is not None and isinstance(bare, kind):
            return converter
    return None


def _function(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function with the name and the arguments of a module."""
    given = list(inspect.signature(module).parameters.values())
    modes = [x.name for x in given if x.name in _MODES]

    def function(params: Any, inputs: Any, *, rng: Any = None, **options: Any) -> Any:
        for name in modes:
            options.setdefault(name, _MODES[name] is (rng is not None))
        return call(params, inputs, rng, **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    others = [x for x in given[1:] if x.name not in ("rng", "rngs", "key")]
    others = [x if x.kind is x.VAR_KEYWORD else x.replace(kind=keyword) for x in others]
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        for name in ("params", given[0].name if given else "inputs")
    ]
    rng = inspect.Parameter("rng", keyword, default=None)
    parameters = [*first, rng, *sorted(others, key=lambda x: x.kind)]
    function.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    function.__name__ = type(module).__name__
    return function


def _of_nnx(module: Any, _: Any) -> JaxModule:
    nnx = sys.modules["flax.nnx"]
    module = nnx.clone(module)
    for path, part in list(nnx.iter_modules(module)):
        if path and callable(part):
            # A list of modules computes nothing: its name is joined with its items'.
            start = next(i for i, x in enumerate(path[::-1]) if isinstance(x, str))
            name = "_".join(map(str, path[-1 - start :]))
            object.__setattr__(part, "__class__", _scoped(type(part), name))
    module.train()
    training, _ = nnx.split(module)
    module.eval()
    evaluation, state = nnx.split(module)
    leaves = nnx.to_flat_state(state)
    fixed = [".".join(map(str, x)) for x, y in leaves if not isinstance(y, nnx.Param)]

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        if rng is not None:  # the keys of its streams
            params = jax.tree.map(
                lambda x: jax.random.fold_in(rng, 0) if _is_key(x) else x, params
            )
        values = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(values, params)
        graph = evaluation if rng is None else training
        return nnx.merge(graph, values)(inputs, **options)

    params = nnx.to_pure_dict(state)
    return JaxModule(_function(module, call), params, tuple(fixed))


def _of_linen(module: Any, variables: Any) -> JaxModule:
    if variables is None:
        if module.scope is None:
            raise ValueError(
                f"function must be a bound module, {type(module).__name__}"
                "(...).bind(variables), or params= must be its variables."
            )
        module, variables = module.unbind()

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        if rng is None:
            return module.apply(params, inputs, **options)
        # Means over batches are computed anew, and not kept.
        others = [name for name in params if name != "params"]
        options |= {"rngs": {"dropout": rng}, "mutable": others}
        return module.apply(params, inputs, **options)[0]

    others = {x: y for x, y in variables.items() if x != "params"}
    paths = [path for path, _ in jax.tree.leaves_with_path(others)]
    fixed = [jax.tree_util.keystr(x, simple=True, separator=".") for x in paths]
    return JaxModule(_function(module, call), variables, tuple(fixed))


def _of_equinox(module: Any, _: Any) -> JaxModule:
    equinox: Any = sys.modules["equinox"]
    module = inspect.unwrap(module)
    takes_key = "key" in inspect.signature(module).parameters

    def call(params: Any, inputs: Any, rng: Any, **options: Any) -> Any:
        if rng is None or not takes_key:
            return jax.vmap(lambda x, options: params(x, **options))(inputs, options)
        params = equinox.nn.inference_mode(params, value=False)
        keys = jax.random.split(rng, len(inputs))
        run = lambda x, key, options: params(x, key=key, **options)  # noqa: E731
        return jax.vmap(run)(inputs, keys, options)

    params = _with_names(equinox.nn.inference_mode(module), "", {}, equinox.Module)
    return JaxModule(_function(module, call), params)


def _with_names(value: Any, name: str, copies: dict[int, Any], kind: type) -> Any:
    """Copies a tree of modules of Equinox; the parts of the copy enter scopes."""
    if isinstance(value, kind):
        if id(value) not in copies:
            has_call = name and callable(value)
            of = _scoped(type(value), name) if has_call else type(value)
            copies[id(value)] = copy = object.__new__(of)
            for field, x in vars(value).items():
                inner = field if has_call or not name else f"{name}_{field}"
                object.__setattr__(copy, field, _with_names(x, inner, copies, kind))
        return copies[id(value)]
    if isinstance(value, dict):
        pairs = value.items()
        return {x: _with_names(y, f"{name}_{x}", copies, kind) for x, y in pairs}
    if type(value) in (list, tuple):
        pairs = enumerate(value)
        return type(value)(
            _with_names(y, f"{name}_{x}", copies, kind) for x, y in pairs
        )
    return value


def _scoped(kind: Any, name: str) -> Any:
    """Makes a subclass whose call is in a scope; it survives being rebuilt."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return super(subclass, self).__call__(*args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__}
    subclass = type(kind)(kind.__name__, (kind,), names)
    return subclass


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)

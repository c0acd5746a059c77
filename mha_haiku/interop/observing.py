"""Attention maps of any Haiku model that uses `hk.MultiHeadAttention`, as it is.

`B...` batch axes, T query positions, S key positions, H heads, V value size per head, L
layers that are scanned. `observe` stands between the methods of a model's modules: it
sees what `hk.MultiHeadAttention` projects and attends to, makes the map of that, and
intervenes before the last linear map.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku import attention, checks, display, modules
from mha_haiku.interop import carrying
from mha_haiku.modules import intervention

Array = jax.Array

_OWN = modules.MultiHeadAttention, modules.NoAttention
_PROJECTED = "query", "key", "value"


class Observed(NamedTuple):
    """What an observed function returns.

    Attributes:
      output: What the function returns by itself.
      maps: The attention map of each module, by the module's path, as in the names of
        its parameters: `{"transformer/layer_0/attention": AttentionMap}`. A module that
        is called n times has a map of each call, `path#0` to `path#n-1`.
    """

    output: Any
    maps: dict[str, attention.AttentionMap]

    def __repr__(self) -> str:
        return display.record(self)


class Seen(NamedTuple):
    """What is seen of a call.

    Attributes:
      attention_map: Its map.
      difference: How far the values that the map gives are from those that the module
        used, as a share of the largest. Rows where every key is masked do not count.
    """

    attention_map: attention.AttentionMap
    difference: Array


def observe(transformed: Any, *, example: Sequence | None = None) -> Callable:
    """Returns a function that also returns the attention maps of a Haiku model.

    The model stays as it is: maps are made of what each `hk.MultiHeadAttention`, or
    `MultiHeadAttention` of ours, projects and attends to. Maps that are not read cost
    nothing under jit. Where every key is masked `hk.MultiHeadAttention` attends to all
    keys equally, masked ones too; the map has zeros there.

    Maps of layers under `hk.scan`, `hk.map` or `hk.layer_stack` are stacked, of shape
    `(L, B..., H, T, S)`; axes of `hk.vmap` are the first of `B...`; `hk.remat` changes
    nothing. Attention inside of other transformations in the model (`hk.cond`,
    `hk.while_loop`, `jax.jit`, `jax.grad`) is refused. Around the function there may be
    any. It must be traced anew: what was compiled before cannot be observed.

    Args:
      transformed: What `hk.transform` or `hk.transform_with_state` returns, or a
        function like its `apply`, not compiled.
      example: Arguments `(params, rng, ...)` on which the values that maps give are
        compared with those that the model uses. Needed where a subclass of
        `hk.MultiHeadAttention` has projections or a call of its own.

    Returns:
      A function of the arguments of `apply`, and of `interventions`: by module path, or
      by `path#i` for the call i alone, a `modules.Interventions`, whose fields are as
      for a call of the module, behind an axis L where layers are scanned. It returns an
      `Observed`; of `hk.transform_with_state` the `output` is output and state.

    Raises:
      TypeError: If `transformed` is no such function.
      ValueError: If on the example a map gives other values than the model uses. The
        returned function raises it if there is no attention, if interventions do not
        fit, or if an attention cannot be observed.

    Source: https://dm-haiku.readthedocs.io/en/latest/api.html#intercept-methods.
    """
    run = gathering(transformed, example=example)

    def observed(*args, interventions=None, **kwargs):
        output, gathered = run(interventions, *args, **kwargs)
        maps = {path: each.content.attention_map for path, each in gathered.items()}
        return Observed(output, maps)

    return observed


def gathering(transformed: Any, *, example: Sequence | None) -> Callable:
    """Returns what `observe` does, but with `Seen` in place of maps, and as gathered.

    Args:
      transformed: See `observe`.
      example: See `observe`.

    Returns:
      A function of interventions and the arguments of `apply`.
    """
    apply = getattr(transformed, "apply", transformed)
    if not callable(apply):
        raise TypeError(
            "transformed must be what hk.transform returns, or a function like its "
            f"apply, got {type(transformed).__name__}."
        )
    verified = frozenset() if example is None else _verified(apply, example)

    def run(interventions, *args, **kwargs):
        return _gathered(apply, args, kwargs, interventions, verified)[:2]

    return run


def _gathered(
    apply: Callable,
    args: Sequence,
    kwargs: Mapping[str, Any],
    interventions: Mapping[str, modules.Interventions] | None,
    verified: frozenset | None,
) -> tuple[Any, dict[str, carrying.Gathered], set]:
    """Returns a function's output, what was seen, and paths and their classes.

    Args:
      apply: The function.
      args: Its arguments; the first are the parameters.
      kwargs: Its keyword arguments.
      interventions: See `observe`.
      verified: Paths and classes whose maps are known to be right; None: all pass.
    """
    if interventions is not None and not isinstance(interventions, Mapping):
        raise TypeError(
            "interventions must be a dict of modules.Interventions by module path, "
            f"got {type(interventions).__name__}."
        )
    interventions = dict(interventions or {})
    params = args[0] if args else kwargs.get("params")
    harvest = carrying.Harvest(params, with_indices=bool(interventions))
    watch = _Watch(harvest, interventions, verified)
    with harvest.open(), hk.intercept_methods(watch):
        output = apply(*args, **kwargs)
    gathered = harvest.scope.gathered
    if not gathered:
        raise ValueError(
            "the function must call hk.MultiHeadAttention or "
            "mha_haiku.MultiHeadAttention, and none was seen; in a function that was "
            "compiled before none can be."
        )
    for name in interventions:
        if name not in watch.used:
            paths = sorted({call.path for call in gathered})
            nearest = checks.nearest(name, paths)
            raise ValueError(
                f"interventions has {name!r}, and there is no such attention or call; "
                f"the paths are {', '.join(paths)}.{nearest}"
            )
    several = {call.path for call in gathered if call.number}
    named = {
        f"{call.path}#{call.number}" if call.path in several else call.path: each
        for call, each in gathered.items()
    }
    return output, named, watch.classes


class _Frame:
    """A call of an attention that is running.

    Attributes:
      module: The attention.
      call: Its path, and which call of it this is.
      mask: What it is masked by, or None.
      parts: The outputs of its linear maps by name, and "values", what enters the last.
      is_seen: Whether something was gathered of it.
    """

    def __init__(self, module: hk.Module, call: carrying.Call, mask: Any):
        self.module = module
        self.call = call
        self.mask = mask
        self.parts = {}
        self.is_seen = False

    def heads(self, x: Array) -> Array:
        """Returns `[..., H, V]` from `[..., H V]`."""
        return x.reshape(*x.shape[:-1], self.module.num_heads, -1)


class _Watch:
    """The interceptor of methods.

    Attributes:
      used: The names of interventions that took place.
      classes: Paths with the classes of their modules.
    """

    def __init__(self, harvest, interventions, verified):
        self.used = set()
        self.classes = set()
        self._harvest = harvest
        self._interventions = interventions
        self._verified = verified
        self._frames = []

    def __call__(self, next_f, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__":
            return next_f(*args, **kwargs)
        if isinstance(module, (hk.MultiHeadAttention, *_OWN)):
            return self._attend(next_f, args, kwargs, context)
        if self._frames and isinstance(module, hk.Linear):
            owner, _, part = module.module_name.rpartition("/")
            if owner == self._frames[-1].module.module_name:
                return self._project(part, next_f, args, kwargs)
        return next_f(*args, **kwargs)

    def _attend(self, next_f, args, kwargs, context):
        """Calls an attention and gathers its map.

        A subclass that calls its parent comes here twice. What the parent gathers of
        itself then counts for it.
        """
        module, frames = context.module, self._frames
        outer = frames[-1] if frames and frames[-1].module is module else None
        if outer is None:
            path = self._harvest.path(module)
            if self._harvest.is_opaque():
                raise ValueError(
                    f"the attention at {path!r} is inside of a transformation of JAX "
                    "that observe cannot see into, such as hk.cond, hk.while_loop, "
                    "jax.jit or jax.grad; hk.scan, hk.map, hk.layer_stack, hk.vmap and "
                    "hk.remat it can."
                )
            call = self._harvest.call(path)
        elif outer.is_seen:
            call = self._harvest.call(outer.call.path)  # called its parent again
        else:
            call = outer.call
        given = inspect.signature(context.orig_method).bind(*args, **kwargs).arguments
        frame = _Frame(module, call, given.get("mask"))
        frames.append(frame)
        try:
            output = next_f(*args, **kwargs)
        finally:
            frames.pop()
        if not frame.is_seen:
            self._gather(frame, output, context.orig_class)
        if outer is not None:
            outer.is_seen = True
        if not frame.is_seen:
            raise ValueError(
                f"the attention at {call.path!r} cannot be observed: "
                f"{type(module).__name__} has no linear maps named query, key, value "
                "and linear that give its heads, or returns no map."
            )
        return output

    def _project(self, part, next_f, args, kwargs):
        """Calls a linear map of an attention; before the last one it intervenes."""
        frame = self._frames[-1]
        if part == "linear":
            frame.parts["values"] = values = frame.heads(args[0])
            args = (self._intervened(frame, values).reshape(args[0].shape), *args[1:])
        output = frame.parts[part] = next_f(*args, **kwargs)
        return output

    def _gather(self, frame, output, orig_class):
        """Gathers the map of a call, if it can be made."""
        module, path = frame.module, frame.call.path
        if isinstance(module, _OWN):
            is_map = isinstance(output, tuple) and len(output) == 2
            if is_map and isinstance(output[1], attention.AttentionMap):
                self._use(frame.call)
                frame.is_seen = True
                self._harvest.gather(frame.call, Seen(output[1], jnp.zeros(())))
            return
        if not {*_PROJECTED, "values"} <= set(frame.parts):
            return
        own = _overridden(type(module))
        if orig_class is not hk.MultiHeadAttention:
            own = ("__call__", *own)
        if own and self._verified is not None:
            if (path, type(module)) not in self._verified:
                raise ValueError(
                    f"the attention at {path!r} is a {type(module).__name__} with "
                    f"{' and '.join(own)} of its own, so that its map may not be what "
                    "it does; observe(..., example=(params, rng, ...)) compares the "
                    "two, and raises where they differ."
                )
        self.classes.add((path, type(module)))
        frame.is_seen = True
        with self._harvest.paused():
            self._harvest.gather(frame.call, _seen(frame))

    def _intervened(self, frame, values):
        """Returns `[B..., T, H, V]` after the interventions on a call."""
        for name in self._use(frame.call):
            try:
                given = self._here(intervention.checked(self._interventions[name]))
                values = intervention.gated_heads(values, given)
            except (TypeError, ValueError) as error:
                raise type(error)(f"interventions[{name!r}]: {error}") from error
        return values

    def _use(self, call) -> list[str]:
        """Returns the names by which interventions are given for a call."""
        names = call.path, f"{call.path}#{call.number}"
        used = [name for name in names if name in self._interventions]
        self.used.update(used)
        return used

    def _here(self, given):
        """Returns interventions as the body of scans and vmaps needs them."""
        scope = self._harvest.scope
        fields = {}
        for name, own_axes in (("heads", 1), ("replacement", 2)):
            x = getattr(given, name)
            if x is None:
                continue
            x = _taken(name, jnp.asarray(x), scope.scans, "the L scanned layers")
            if x.ndim > own_axes:  # else it is shared by the examples
                x = _taken(name, x, scope.batches, "the examples of hk.vmap")
            fields[name] = x
        return modules.Interventions(
            units=given.units, units_of=given.units_of, **fields
        )


def _taken(name, x, axes, what) -> Array:
    """Returns the part of an array of the step and example that are running."""
    sizes = tuple(axis.size for axis in axes)
    if x.shape[: len(sizes)] != sizes:
        raise ValueError(
            f"interventions.{name} must begin with the axes of {what}, of shape "
            f"{sizes}, got {x.shape}."
        )
    for axis in axes:
        x = x[axis.index]
    return x


def _overridden(kind: type) -> tuple[str, ...]:
    """Returns the methods from which a subclass makes its projections by itself.

    What it calls is known otherwise: a subclass may do things before and after.
    """
    return tuple(
        name
        for name, member in vars(hk.MultiHeadAttention).items()
        if callable(member)
        and not name.startswith("__")
        and getattr(kind, name) is not member
    )


def _seen(frame) -> Seen:
    """Returns the map of a call of `hk.MultiHeadAttention`."""
    mask = frame.mask
    try:
        values, attention_map = attention.attend(
            *(frame.heads(frame.parts[part]) for part in _PROJECTED),
            # Any number that is not 0 means "may attend" there.
            mask=None if mask is None else jnp.asarray(mask) != 0,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the attention at {frame.call.path!r} cannot be observed: {error}"
        ) from error
    used = frame.parts["values"]
    if values.shape != used.shape:
        raise ValueError(
            f"the attention at {frame.call.path!r} cannot be observed: its values have "
            f"shape {used.shape}, those of a map {values.shape}."
        )
    sees = jnp.swapaxes(attention_map.logsumexp > -jnp.inf, -1, -2)[..., None]
    dtype = jnp.promote_types(used.dtype, jnp.float32)
    used, values = used.astype(dtype), values.astype(dtype)
    error = jnp.where(sees, jnp.abs(values - used), 0).max(initial=0)
    largest = jnp.where(sees, jnp.abs(used), 0).max(initial=0)
    return Seen(attention_map, error / jnp.where(largest > 0, largest, 1))


def _verified(apply: Callable, example: Sequence) -> frozenset:
    """Returns the paths and classes whose maps are right on an example.

    Raises:
      ValueError: If one is not.
    """
    leaves, structure = jax.tree.flatten(tuple(example))
    is_array = [hasattr(leaf, "shape") for leaf in leaves]
    classes, tolerances = set(), {}  # filled while `differences` is traced

    @jax.jit
    def differences(arrays):
        arrays = iter(arrays)
        own = [
            next(arrays) if varies else leaf
            for leaf, varies in zip(leaves, is_array, strict=True)
        ]
        args = jax.tree.unflatten(structure, own)
        _, gathered, found = _gathered(apply, args, {}, None, None)
        classes.update(found)
        for path, each in gathered.items():
            epsilon = jnp.finfo(each.content.attention_map.query.dtype).eps
            tolerances[path] = math.sqrt(epsilon)
        return {path: each.content.difference.max() for path, each in gathered.items()}

    arrays = [x for x, varies in zip(leaves, is_array, strict=True) if varies]
    for path, difference in jax.device_get(differences(arrays)).items():
        if not difference <= tolerances[path]:  # NaN, too
            raise ValueError(
                f"the map of {path!r} is not what the module does: the values that it "
                f"gives differ from those that the module uses by {difference:.2g} of "
                f"the largest, and by rounding by {tolerances[path]:.1g} at most."
            )
    return frozenset(classes)

"""Carries what is gathered inside of a function out of the transformations in it.

What an interceptor of Haiku's methods sees inside of `lax.scan`, `jax.vmap` or
`jax.checkpoint` belongs to that transformation, and cannot be used after it. While a
`Harvest` is open, these three also return what was gathered in their bodies: so do
`hk.scan`, `hk.layer_stack`, `hk.vmap` and `hk.remat`, which call them. Of what stays
opaque (`cond`, `while_loop`, `jit`, `grad`, ...) a harvest knows that it is inside.

L steps of a scan, B... axes of vmap and of the arrays themselves.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import haiku as hk
import jax
import jax.extend.core
import jax.numpy as jnp

Array = jax.Array

_PATCHING = threading.RLock()  # jax's functions are shared by all threads
_NUMBERS = itertools.count()


class Axis(NamedTuple):
    """An axis that a transformation adds to what is gathered inside.

    Attributes:
      size: Its size.
      index: Which step or example is running, a traced integer; None: not asked for.
    """

    size: int
    index: Array | None


class Call(NamedTuple):
    """A call of a module: its path, and how many calls of the path came before."""

    path: str
    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gathered:
    """What was gathered of a call.

    Attributes:
      content: A tree of arrays `[L..., B..., ...]`.
      num_scans: The number of axes `L...`.
    """

    content: Any
    num_scans: int = dataclasses.field(default=0, metadata={"static": True})


@dataclasses.dataclass
class Scope:
    """The body of one transformation, or the whole function.

    Attributes:
      names: The full name of the module that owns each parameter, by the parameter's
        `id`: inside of `hk.layer_stack` modules have names without what stands before.
      gathered: What was gathered so far.
      counts: How often each path was called so far.
      scans: The axes of the scans around, from the outermost.
      batches: The axes of the vmaps around, from the outermost.
      trace: What JAX is tracing, to be compared.
    """

    names: dict[int, str]
    gathered: dict[Call, Gathered] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    scans: tuple[Axis, ...] = ()
    batches: tuple[Axis, ...] = ()
    trace: Any = dataclasses.field(default_factory=lambda: _trace())


class Harvest:
    """What is gathered while one function runs or is traced.

    Attributes:
      scope: Where the function is.
    """

    def __init__(self, params: Any, *, with_indices: bool):
        """Initialises the harvest.

        Args:
          params: Those of the function: `{module: {name: array}}`.
          with_indices: Whether axes have an index.
        """
        names = {}
        if isinstance(params, Mapping):
            for module, leaves in params.items():
                names |= {id(leaf): module for leaf in jax.tree.leaves(leaves)}
        self.scope = Scope(names)
        self._with_indices = with_indices
        self._thread = None  # in which it is open

    def path(self, module: hk.Module) -> str:
        """Returns the module's full name, by which its parameters are found."""
        own = module.module_name
        for name, leaf in module.params_dict().items():
            full = self.scope.names.get(id(leaf), "")
            inner = name.rpartition("/")[0]
            if full.endswith(f"/{inner}"):
                return full.removesuffix(inner) + own
        return own

    def call(self, path: str) -> Call:
        """Counts and returns a call of a path."""
        number = self.scope.counts.get(path, 0)
        self.scope.counts[path] = number + 1
        return Call(path, number)

    def gather(self, call: Call, content: Any) -> None:
        """Keeps a tree of arrays of a call."""
        self.scope.gathered[call] = Gathered(content)

    def is_opaque(self) -> bool:
        """Returns whether arrays from here cannot be carried out."""
        return self.scope.trace != _trace()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While open, transformations carry out what is gathered inside."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_PATCHING)
            for owner, name, wrap in (
                (jax.lax, "scan", self._scan),
                (jax, "vmap", self._vmap),
                (jax, "checkpoint", self._checkpoint),
                (jax, "remat", self._checkpoint),
            ):
                # Of another harvest that is open around this one, if there is any.
                plain = getattr(owner, name)
                wrapped = functools.wraps(plain)(functools.partial(wrap, plain))
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While paused, transformations are what they were."""
        thread, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = thread

    def _is_open(self) -> bool:
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def _inside(self, given: Any, own: Any, **axes) -> Iterator[Scope]:
        """The scope of a body, to which `given` from outside is known as `own`."""
        outer = self.scope
        names = dict(outer.names)
        for leaf, inner in zip(
            jax.tree.leaves(given), jax.tree.leaves(own), strict=True
        ):
            if id(leaf) in outer.names:
                names[id(inner)] = outer.names[id(leaf)]
        # A body may be traced twice, so its counts start from those around it.
        axes = {"scans": outer.scans, "batches": outer.batches} | axes
        self.scope = Scope(names, counts=dict(outer.counts), **axes)
        try:
            yield self.scope
        finally:
            self.scope = outer

    def _merge(self, gathered: dict[Call, Gathered]) -> None:
        """Adds to the scope what a body gathered."""
        for call, each in gathered.items():
            self.scope.gathered[call] = each
            count = self.scope.counts.get(call.path, 0)
            self.scope.counts[call.path] = max(count, call.number + 1)

    def _scan(self, scan, f, init, xs=None, length=None, *args, **kwargs):
        leaves = jax.tree.leaves(xs)
        if not self._is_open() or (length is None and not leaves):
            return scan(f, init, xs, length, *args, **kwargs)
        size = len(leaves[0]) if length is None else length
        indices = jnp.arange(size) if self._with_indices else None

        @functools.wraps(f)
        def body(carry, x):
            x, index = x
            scans = (*self.scope.scans, Axis(size, index))
            with self._inside(xs, x, scans=scans) as scope:
                carry, y = f(carry, x)
            return carry, (y, scope.gathered)

        carry, (ys, gathered) = scan(body, init, (xs, indices), length, *args, **kwargs)
        self._merge(
            {
                call: dataclasses.replace(each, num_scans=each.num_scans + 1)
                for call, each in gathered.items()
            }
        )
        return carry, ys

    def _vmap(self, vmap, fun, in_axes=0, out_axes=0, axis_name=None, *rest, **options):
        plain = vmap(fun, in_axes, out_axes, axis_name, *rest, **options)

        @functools.wraps(plain)
        def mapped(*args, **kwargs):
            if not self._is_open():
                return plain(*args, **kwargs)
            # By its name a body learns which example it runs, and of how many.
            name = f"observed {next(_NUMBERS)}" if axis_name is None else axis_name

            @functools.wraps(fun)
            def body(*own, **own_kwargs):
                index = jax.lax.axis_index(name) if self._with_indices else None
                batches = (*self.scope.batches, Axis(jax.lax.axis_size(name), index))
                given = args, kwargs
                with self._inside(given, (own, own_kwargs), batches=batches) as scope:
                    output = fun(*own, **own_kwargs)
                return output, scope.gathered

            own_vmap = vmap(body, in_axes, (out_axes, 0), name, *rest, **options)
            output, gathered = own_vmap(*args, **kwargs)
            self._merge({call: _behind(each) for call, each in gathered.items()})
            return output

        return mapped

    def _checkpoint(self, checkpoint, fun=None, **options):
        if fun is None:  # a decorator with options
            return functools.partial(self._checkpoint, checkpoint, **options)
        plain = checkpoint(fun, **options)

        @functools.wraps(plain)
        def again(*args, **kwargs):
            if not self._is_open():
                return plain(*args, **kwargs)

            @functools.wraps(fun)
            def body(*own, **own_kwargs):
                given = args, kwargs
                with self._inside(given, (own, own_kwargs)) as scope:
                    output = fun(*own, **own_kwargs)
                return output, scope.gathered

            output, gathered = checkpoint(body, **options)(*args, **kwargs)
            self._merge(gathered)
            return output

        return again


def _behind(each: Gathered) -> Gathered:
    """Returns arrays `[L..., B, ...]` from `[B, L..., ...]`."""
    move = functools.partial(jnp.moveaxis, source=0, destination=each.num_scans)
    return dataclasses.replace(each, content=jax.tree.map(move, each.content))


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="haiku")

"""Compares a PyTorch module with its copy in JAX: outputs, maps and gradients.

B batch, T positions.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, sites
from mha_haiku.core.site_primitive import mark_parameters
from mha_haiku.interop.torch_modules import conversion, environment
from mha_haiku.records import Result

# Parameters times positions, up to which a call is compared, and its gradients are.
MOST, MOST_WITH_GRADIENTS = 2**36, 2**34

# The largest difference, as a share of an array's largest number, by bits of the dtype.
_TOLERANCES = {16: 3e-2, 32: 1e-4, 64: 1e-4}
_OF_GRADIENTS = 10  # times as much
_SMALLEST = 1e-2  # of all gradients: smaller ones are rounding, as of biases of keys
_FELT = 16  # times what rounded parameters change in torch is no difference
_HIDDEN = 1e30  # and more stands for infinity
_MOST_SLOPES = 2**22  # numbers of parameters whose gradients are compared
_FIRST = "output"  # the logits, or else the first output
_OPTIONS = {"_attn_implementation": "attention", "_experts_implementation": "experts"}

Arrays = dict[str, np.ndarray]


class Row(NamedTuple):
    """A part of the comparison."""

    part: str
    verdict: str  # "equal", "differs", "not compared"; "" of a note
    difference: float  # the largest, as a share of the largest number; NaN without one
    note: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Certificate(Result):
    """A PyTorch module compared with its copy in JAX, in one call.

    Example:
      >>> subject.check("The cat sat.")  # doctest: +SKIP
      GPT2LMHeadModel, input_ids (1, 4): what is shown is what torch computes
        outputs    equal    3.1e-07  logits
        maps       equal    1.9e-07  weights times values are the heads, 12 layers
        gradients  equal    8.0e-07  of 148 parameters
        copy                         attention: eager, not sdpa; no cache
        layers                       each has a map
    """

    name: str  # of the module's class
    call: str  # the names and shapes of its inputs
    lines: tuple[Row, ...]
    file_name = "certificate"

    @property
    def verdict(self) -> str:
        """One of "differs", "equal" and "not compared"."""
        verdicts = [row.verdict for row in self.lines]
        return next((x for x in ("differs", "equal") if x in verdicts), "not compared")

    @property
    def title(self) -> str:
        """The module, the call and the verdict."""
        said = {
            "equal": "what is shown is what torch computes",
            "differs": "what is shown is NOT what torch computes",
        }
        verdict = said.get(self.verdict, "not compared with torch")
        return f"{self.name}, {self.call}: {verdict}"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each part of the comparison."""
        return [row._asdict() for row in self.lines]

    def text(self, count: int | None = None) -> str:
        """Writes the title, and a line for each part."""
        lines = [self.title]
        for part, verdict, difference, note in self.lines:
            number = "" if math.isnan(difference) else f"{difference:.1e}"
            lines.append(f"  {part:<9}  {verdict:<12}  {number:<7}  {note}")
        return "\n".join(lines)

    __repr__ = text


class Certifier:
    """Compares a module with its copy, once for each kind of call."""

    def __init__(self, module: conversion.TorchModule, *, is_strict: bool):
        self.module, self.is_strict = module, is_strict
        self.found: dict[str, Certificate] = {}

    def __repr__(self) -> str:
        verdicts = collections.Counter(x.verdict for x in self.found.values())
        said = (f"{x} {y} time{'s' * (y > 1)}" for x, y in verdicts.items())
        return f"torch: {', '.join(said) or 'not yet compared'}"

    def see(
        self, inputs: Mapping[str, Any], counted: Iterable[Any], *, always: bool = False
    ) -> Certificate:
        """Compares both on inputs of the function, if none of their kind were compared.

        Args:
          inputs: By the function's keywords; None where there are none.
          counted: `[B, T]` booleans of each side: which inputs are no padding.
          always: Whether to compare anyway, whatever it costs.

        Raises:
          ValueError: If they differ, and the certifier is strict.
        """
        given = {name: np.asarray(x) for name, x in inputs.items() if x is not None}
        # Sizes of as many bits are of a kind.
        kinds = (
            (x, y.dtype.kind, *map(int.bit_length, y.shape)) for x, y in given.items()
        )
        key = repr(sorted(kinds))
        if always or key not in self.found:
            call = _Call(self.module, given, list(map(np.asarray, counted)))
            self.found[key] = call.certificate(always=always)
        found = self.found[key]
        if self.is_strict and found.verdict == "differs":
            way_out = "mh.wrap(..., check=False) goes on all the same."
            raise ValueError(f"{found.text()}\n{way_out}")
        return found


class _Call(NamedTuple):
    """A call of a module and of its copy."""

    module: conversion.TorchModule
    inputs: Arrays  # by the function's keywords
    counted: list[np.ndarray]

    def certificate(self, *, always: bool) -> Certificate:
        args, given = self.arguments()
        arrays = dict(zip(self.module.names, args, strict=False)) | given
        shapes = (f"{x} {np.shape(y)}" for x, y in arrays.items() if np.ndim(y))
        lines = tuple(self.lines(always=always))
        return Certificate(self.module.name, ", ".join(shapes), lines)

    def lines(self, *, always: bool) -> Iterator[Row]:
        inputs = self.inputs["inputs"]
        count = sum(x.size for x in self.module.params.values())
        size = count * len(inputs) * max(inputs.shape[1:] or (1,))
        if not always and size > MOST:
            limit = f"more than {MOST:.0e} parameters x positions; check() compares it"
            yield _note("outputs", limit)
            return
        has_slopes = always or size <= MOST_WITH_GRADIENTS
        try:
            wanted, slopes = self.by_torch(has_slopes)
        except Exception as error:  # of somebody's module, on these inputs
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield _note("outputs", f"torch raises {reason}")
            return
        outputs, heads = self.looked()
        worst = self.worst(outputs, wanted)
        of_slopes = self.worst(self.slopes(slopes), slopes, floor=_SMALLEST)
        limit, limit_of_slopes = self.tolerance, _OF_GRADIENTS * self.tolerance
        if worst[0] > limit or of_slopes[0] > limit_of_slopes:
            again, _ = self.by_torch()
            if self.worst(again, wanted)[0] > limit:
                yield _note("outputs", "torch differs from itself: it is random")
                yield from self.facts(heads)
                return
            noisy, noisy_slopes = self.by_torch(has_slopes, noise=1)
            felt = self.worst(noisy, wanted)[0]
            limit = max(limit, _FELT * felt)
            felt = self.worst(noisy_slopes, slopes, floor=_SMALLEST)[0]
            limit_of_slopes = max(limit_of_slopes, _FELT * felt)
        note = checks.listed([*wanted])
        if worst[0] > limit:
            note = f"{worst[1]}; the first site that differs: {self.first_site()}"
        yield _row("outputs", worst[0], limit, note)
        parts = [x.rpartition("/")[0] for x in heads if x.endswith("map")]
        if parts:
            of_maps = max((_of_map(heads, x), x) for x in parts)
            note = f"weights times values are the heads, {len(parts)} layers"
            note = (
                note if of_maps[0] <= self.tolerance else f"of heads, at {of_maps[1]}"
            )
            yield _row("maps", of_maps[0], self.tolerance, note)
        if slopes:
            note = f"of {len(slopes)} parameters"
            if of_slopes[0] > limit_of_slopes:
                note = f"the last parameter whose gradient differs: {of_slopes[1]}"
            yield _row("gradients", of_slopes[0], limit_of_slopes, note)
        else:
            reason = f"more than {MOST_WITH_GRADIENTS:.0e} parameters x positions"
            yield _note("gradients", "torch gives none" if has_slopes else reason)
        yield from self.facts(parts)

    # --- Both runs

    def split(self) -> tuple[np.ndarray, Arrays]:
        others = {x: y for x, y in self.inputs.items() if x != "inputs"}
        return self.inputs["inputs"], others

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        inputs, given = self.split()
        return self.module.pair.arguments(inputs, **given)

    def by_torch(
        self,
        has_slopes: bool = False,
        *,
        noise: float = 0,
        watch: Callable[[str, Any], None] | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Computes the outputs, and the slopes of a random sum of the first one.

        Parameters are rounded `noise` times more.
        """
        import torch  # pyright: ignore[reportMissingImports]

        module = self.module.pair.original
        parameters = {x: y.detach() for x, y in module.named_parameters()}
        floats = {x: y for x, y in parameters.items() if y.is_floating_point()}
        like = next(iter(floats.values()), torch.ones(()))

        def tensor(x: Any) -> Any:
            if not isinstance(x, np.ndarray | jax.Array):
                return x
            x = np.asarray(x)
            if x.dtype.kind not in "iu":
                x = torch.as_tensor(
                    np.array(x, bool if x.dtype == bool else np.float32)
                )
                return x.to(
                    like.device, x.dtype if x.dtype == torch.bool else like.dtype
                )
            return torch.as_tensor(x.astype(np.int64), device=like.device)

        args, given = jax.tree.map(tensor, self.arguments())
        buffers = {x: y.clone() for x, y in module.named_buffers()}
        # Numbers that are drawn here are not missing elsewhere.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(has_slopes):
            for name, x in floats.items():
                if noise:
                    rounding = noise * torch.finfo(x.dtype).eps * torch.randn_like(x)
                    parameters[name] = x * (1 + rounding)
            leaves = [
                parameters[name].requires_grad_()
                for name in _some(floats)
                if has_slopes
            ]
            with _watched(module, watch):
                output = torch.func.functional_call(
                    module, parameters | buffers, args, given
                )
            found, slopes = _tensors(output), {}
            first = found.get(_FIRST)
            if has_slopes and first is not None and first.requires_grad:
                weights = torch.as_tensor(self.weights(first.shape), device=like.device)
                total = (first.float() * weights).sum()
                of_leaves = torch.autograd.grad(total, leaves, allow_unused=True)
                slopes = {
                    name: torch.zeros_like(x) if slope is None else slope
                    for name, x, slope in zip(
                        _some(floats), leaves, of_leaves, strict=True
                    )
                }
        return jax.tree.map(_array, found), jax.tree.map(_array, slopes)

    def run(self, params: Any, inputs: Any, given: Any, *, read: Any) -> Any:
        function = functools.partial(self.module.pair.run, read=read)
        return sites.blockwise(function)(mark_parameters(params), inputs, **given)

    def looked(self) -> tuple[Arrays, dict[str, Any]]:
        """Computes the outputs of the copy, and its maps, values and heads."""
        run = functools.partial(self.run, read=_tensors)
        looked = sites.look(run, ["*/map", "*/value", "*/heads"], strict=False)
        outputs, heads = looked(self.module.params, *self.split())
        return jax.tree.map(_array, outputs), heads

    def slopes(self, names: Iterable[str]) -> Arrays:
        """Computes slopes as `by_torch` does, of the copy, by some parameters."""
        params, split = self.module.params, self.split()

        def total(chosen: Any) -> jax.Array:
            first = self.run(params | chosen, *split, read=conversion.first_of)
            return (first.astype(jnp.float32) * self.weights(first.shape)).sum()

        chosen = {name: params[name] for name in names}
        return jax.tree.map(_array, jax.grad(total)(chosen)) if chosen else {}

    def first_site(self) -> str:
        """Names the first module, in the order of torch's run, whose output differs."""
        wanted: Arrays = {}
        self.by_torch(watch=lambda name, x: wanted.update({name: _array(x)}))

        def seen(*args: Any) -> dict[str, Any]:
            values: dict[str, Any] = {}
            in_jax = environment.environment().t2j_iso
            watch = lambda name, x: values.update({name: in_jax(x)})  # noqa: E731
            with _watched(self.module.pair.copy, watch):
                self.run(*args, read=lambda output: None)
            return values

        found = jax.tree.map(_array, jax.jit(seen)(self.module.params, *self.split()))
        for name, x in wanted.items():
            if self.worst(found, {name: x})[0] > self.tolerance:
                return name.partition("#")[0]
        return "none of its modules, but what it makes of them"

    # --- Comparison

    @property
    def tolerance(self) -> float:
        params = self.module.params.values()
        floats = (x.dtype for x in params if jnp.issubdtype(x.dtype, jnp.floating))
        return _TOLERANCES[max(16, min((8 * x.itemsize for x in floats), default=32))]

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        """Makes random numbers, 0 at padding."""
        numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        return numbers * self.counts(shape)

    def counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Marks the numbers of an array that are not of padding."""
        marks = np.ones((1,) * len(shape), bool)
        for counted in self.counted:
            for rows in (counted, counted.ravel()):
                if tuple(shape[: rows.ndim]) == rows.shape:
                    marks &= rows.reshape(*rows.shape, *(1,) * (len(shape) - rows.ndim))
        return marks

    def worst(
        self, found: Mapping[str, Any], wanted: Arrays, *, floor: float = 0
    ) -> tuple[float, str]:
        """Finds the largest difference, as a share of the array's largest number.

        An array's largest number counts as at least the share `floor` of all.
        """
        scales = {name: _scale(x) for name, x in wanted.items()}
        least = max(1e-30, floor * max(scales.values(), default=0))
        differences = [
            (self.difference(found[x], y) / max(scales[x], least), x)
            for x, y in wanted.items()
            if x in found
        ]
        return max(differences, default=(0.0, ""))

    def difference(self, found: np.ndarray, wanted: np.ndarray) -> float:
        if found.shape != wanted.shape:
            return math.inf
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        far = np.abs(np.where(same | ~self.counts(wanted.shape), 0, found - wanted))
        return float(np.nan_to_num(far, nan=np.inf).max(initial=0))

    # --- What else is said

    def facts(self, parts: Iterable[str]) -> Iterator[Row]:
        yield Row("copy", "", math.nan, "; ".join(self.changes()))
        yield Row("layers", "", math.nan, "; ".join(self.without_maps([*parts])))

    def changes(self) -> list[str]:
        """Says what the copy does otherwise than the module."""
        pair, changes = self.module.pair, {}
        both = zip(pair.original.modules(), pair.copy.modules(), strict=True)
        for modules in both:
            configs = [getattr(x, "config", None) for x in modules]
            for name, what in _OPTIONS.items():
                before, after = (getattr(x, name, None) for x in configs)
                if before != after:
                    changes[f"{what}: {after}, not {before}"] = None
        _, given = self.arguments()
        cache = ["no cache"] if given.get("use_cache") is False else []
        return [*changes, *cache] or ["nothing is changed"]

    def without_maps(self, parts: list[str]) -> list[str]:
        """Says which layers have no map, and what they have in place of attention."""
        said = []
        for name, part in self.module.pair.original.named_modules():
            children = dict(part.named_children())
            if not (children and all(map(str.isdigit, children))):
                continue
            inside = {x: f"{_site(f'{name}.{x}')}/" for x in children}
            has = {
                x: any(f"{y}/".startswith(inside[x]) for y in parts) for x in children
            }
            without = [x for x in children if not has[x]]
            if not without or not any(has.values()):
                continue
            names = {
                y for x in children if has[x] for y, _ in children[x].named_children()
            }
            others = {
                f"{y} ({type(z).__name__})": None
                for x in without
                for y, z in children[x].named_children()
                if y not in names
            }
            why = checks.listed([*others]) if others else "no softmax"
            said.append(f"{_site(name)} {', '.join(without)}: {why}")
        return said or ["each has a map" if parts else "no attention is recognized"]


def _note(part: str, reason: str) -> Row:
    return Row(part, "not compared", math.nan, reason)


def _row(part: str, difference: float, limit: float, note: str) -> Row:
    verdict = "equal" if difference <= limit else "differs"
    return Row(part, verdict, difference, note)


def _some(parameters: Mapping[str, Any]) -> list[str]:
    """Lists the first parameter, and of the others the smallest ones."""
    first, *others = parameters or [""]
    sizes = {name: math.prod(parameters[name].shape) for name in others}
    order = sorted(others, key=sizes.__getitem__)
    total = np.cumsum([sizes[name] for name in order])
    kept = {first, *order[: np.searchsorted(total, _MOST_SLOPES)]}
    return [name for name in parameters if name in kept]


def _of_map(heads: Mapping[str, Any], part: str) -> float:
    """Computes the difference of weights times values and heads."""
    map_, value, found = (
        heads[f"{part}/{x}".removeprefix("/")] for x in ("map", "value", "heads")
    )
    far = jnp.abs(map_.apply(value) - found)
    return float(
        jnp.where(jnp.isnan(found), 0, far).max() / max(_scale(_array(found)), 1e-30)
    )


def _tensors(output: Any) -> dict[str, Any]:
    """Names the tensors of a module's result; its first output comes first."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

    first = conversion.first_of(output)
    leaves, _ = _pytree.tree_flatten_with_path(output)
    found = {_FIRST: first} | {
        _pytree.keystr(path): x for path, x in leaves if x is not first
    }
    return {x: y for x, y in found.items() if isinstance(y, torch.Tensor)}


def _array(x: Any) -> np.ndarray:
    """Copies a tensor or an array to the host, floats as float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() else x
    is_float = (
        jnp.issubdtype(x.dtype, jnp.floating) if isinstance(x, jax.Array) else False
    )
    return np.array(x, np.float32 if is_float else None)


def _scale(x: np.ndarray) -> float:
    """Finds the largest number that is none of a hidden place; 1 of integers."""
    if x.dtype.kind != "f":
        return 1.0
    sizes = np.abs(np.nan_to_num(x, nan=0, posinf=0, neginf=0))
    return float(np.where(sizes < _HIDDEN, sizes, 0).max(initial=0))


def _site(name: str) -> str:
    """Makes the path of sites of a module's name."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"_\1", name).replace(".", "/")


@contextlib.contextmanager
def _watched(module: Any, watch: Callable[[str, Any], None] | None) -> Iterator[None]:
    """Shows the floats of each inner module's output, as `site#call name`."""
    calls = collections.Counter()

    def hook(name: str, output: Any) -> None:
        calls[name] += 1
        for key, x in _tensors(output).items():
            if x.is_floating_point():
                watch(f"{_site(name)}#{calls[name]} {key}", x)

    hooks = [
        part.register_forward_hook(lambda _, __, output, name=name: hook(name, output))
        for name, part in module.named_modules()
        if watch and name
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()

"""Compares a PyTorch module with its copy in JAX: outputs, maps and gradients.

B batch, T positions.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, sites
from mha_haiku.core.site_primitive import mark_parameters
from mha_haiku.interop.torch_modules import conversion
from mha_haiku.records import Result

# Parameters times positions, up to which a call is compared, and its gradients are.
MOST, MOST_WITH_GRADIENTS = 2**36, 2**31

# The largest difference, as a share of an array's largest number, by bytes of a number.
_TOLERANCES = {2: 3e-2, 4: 1e-4, 8: 1e-4}
_OF_GRADIENTS = 10  # times as much
_SMALLEST = 1e-2  # of all gradients: smaller ones are rounding, as of biases of keys
_FELT = 16  # times what rounded parameters change in torch is no difference
_HIDDEN = 1e30  # and more stands for infinity
_FIRST = "output"  # the logits, or else the first output

_Arrays = dict[str, np.ndarray]


class Row(NamedTuple):
    """A part of a comparison."""

    part: str
    verdict: str  # "equal", "differs", "not compared"; "" of a remark
    note: str
    difference: float = math.nan  # the largest, as a share of the largest number

    def __str__(self) -> str:
        number = "" if math.isnan(self.difference) else f"{self.difference:.1e}"
        return f"  {self.part:<9}  {self.verdict:<12}  {number:<7}  {self.note}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Certificate(Result):
    """A PyTorch module compared with its copy in JAX, in one call.

    Its text:

        Function, tokens (2, 5): what is shown is what torch computes
          outputs    equal         7.9e-08  output
          maps       equal         0.0e+00  weights times values are the heads, 1 layer
          gradients  equal         3.1e-07  5 parameters
          copy                              nothing is changed
          layers                            each has a map
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
        shown = "what is shown is {}what torch computes"
        said = {"equal": shown.format(""), "differs": shown.format("NOT ")}
        verdict = said.get(self.verdict, "not compared with torch")
        return f"{self.name}, {self.call}: {verdict}"

    def rows(self) -> list[dict[str, Any]]:
        """Lists a row for each part of the comparison."""
        return [row._asdict() for row in self.lines]

    def text(self, count: int | None = None) -> str:
        """Writes the title, and a line for each part."""
        return "\n".join([self.title, *map(str, self.lines)])

    __repr__ = text


class Certifier:
    """Compares a module with its copy, once for each kind of call."""

    def __init__(self, module: conversion.TorchModule, *, is_strict: bool):
        self.module, self.is_strict = module, is_strict
        self.found: dict[Any, Certificate] = {}

    def __repr__(self) -> str:
        verdicts = collections.Counter(x.verdict for x in self.found.values())
        said = (f"{x} in {y} call{'s' * (y > 1)}" for x, y in verdicts.items())
        return f"torch: {', '.join(said) or 'not yet compared'}"

    def see(
        self, inputs: Mapping[str, Any], counted: Sequence[Any], *, always: bool = False
    ) -> Certificate:
        """Compares both on inputs of the function, if none of their kind were compared.

        Args:
          inputs: By the function's keywords; None where there are none.
          counted: `[B, T]` booleans of each side: which inputs are no padding.
          always: Whether to compare anyway, whatever it costs.

        Raises:
          ValueError: If they differ, and the certifier is strict.
        """
        given = {name: np.asanyarray(x) for name, x in inputs.items() if x is not None}
        key = frozenset(  # sizes of as many bits are of a kind
            (x, y.dtype.kind, *map(int.bit_length, y.shape)) for x, y in given.items()
        )
        if always or key not in self.found:
            call = _Call(self.module, given, list(map(np.asarray, counted)))
            args, by_name = call.arguments()
            arrays = dict(zip(self.module.names, args, strict=False)) | by_name
            shapes = (f"{x} {np.shape(y)}" for x, y in arrays.items() if np.ndim(y))
            lines = tuple(call.lines(always=always))
            name = self.module.name
            self.found[key] = Certificate(name, ", ".join(shapes), lines)
        found = self.found[key]
        if self.is_strict and found.verdict == "differs":
            raise ValueError(
                f"{found.text()}\nmh.wrap(..., check=False) goes on all the same."
            )
        return found


class _Call(NamedTuple):
    """A call of a module and of its copy."""

    module: conversion.TorchModule
    inputs: _Arrays  # by the function's keywords
    counted: list[np.ndarray]

    def lines(self, *, always: bool) -> Iterator[Row]:
        shape = self.inputs["inputs"].shape
        count = sum(x.size for x in self.module.params.values())
        size = count * shape[0] * max(shape[1:], default=1)
        if not always and size > MOST:
            limit = f"more than {MOST:.0e} parameters x positions; check() compares it"
            yield Row("outputs", "not compared", limit)
            return
        has_slopes = always or size <= MOST_WITH_GRADIENTS
        try:
            wanted, slopes = self.by_torch(has_slopes)
        except Exception as error:  # of somebody's module, on these inputs
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield Row("outputs", "not compared", f"torch raises {reason}")
            return
        outputs, heads = self.looked()
        parts = [x.rpartition("/")[0] for x in heads if x.endswith("map")]
        changes = self.differences(outputs, wanted)
        of_slopes = self.differences(self.slopes(slopes), slopes, floor=_SMALLEST)
        limits = [self.tolerance, _OF_GRADIENTS * self.tolerance]
        if _most(changes) > limits[0] or _most(of_slopes) > limits[1]:
            if _most(self.differences(self.by_torch(seed=1)[0], wanted)) > limits[0]:
                note = "torch differs from itself: it is random"
                yield Row("outputs", "not compared", note)
                yield from self.facts(parts)
                return
            rounded = self.by_torch(has_slopes, is_rounded=True)
            felt = self.differences(rounded[0], wanted)
            slopes_felt = self.differences(rounded[1], slopes, floor=_SMALLEST)
            limits = [
                max(x, _FELT * _most(y))
                for x, y in zip(limits, (felt, slopes_felt), strict=True)
            ]
        note = checks.listed([*changes])
        if _most(changes) > limits[0]:
            name = next(x for x, y in changes.items() if y > limits[0])
            note = f"{name}; the first site that differs: {self.first_site()}"
        yield _row("outputs", changes, limits[0], note)
        if parts:
            of_maps = {x: _of_map(heads, x) for x in parts}
            layers = f"{len(parts)} layer{'s' * (len(parts) > 1)}"
            note = f"weights times values are the heads, {layers}"
            if _most(of_maps) > self.tolerance:
                worst = max(of_maps, key=of_maps.__getitem__)
                note = f"weights times values are not the heads of {worst}"
            yield _row("maps", of_maps, self.tolerance, note)
        note = f"{len(slopes)} parameters"
        if not slopes:
            limit = f"more than {MOST_WITH_GRADIENTS:.0e} parameters x positions"
            note = "torch gives none" if has_slopes else limit
            yield Row("gradients", "not compared", note)
        else:
            far = [x for x, y in of_slopes.items() if y > limits[1]]
            note = f"those after {far[-1]} are equal" if far else note
            yield _row("gradients", of_slopes, limits[1], note)
        yield from self.facts(parts)

    # --- Both runs

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        return self.module.pair.arguments(**self.inputs)

    def by_torch(
        self,
        has_slopes: bool = False,
        *,
        is_rounded: bool = False,
        seed: int = 0,
        watch: Callable[[str, Any], None] | None = None,
    ) -> tuple[_Arrays, _Arrays]:
        """Computes the outputs, and the gradients of a random sum of the first one.

        Parameters may have noise, as large as their rounding.
        """
        import torch  # pyright: ignore[reportMissingImports]
        from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

        module = self.module.pair.original
        params = {x: y.detach() for x, y in module.named_parameters()}
        floats = {x: y for x, y in params.items() if y.is_floating_point()}
        like = next(iter(floats.values()), torch.ones(()))

        def tensor(x: Any) -> Any:
            if not isinstance(x, np.ndarray | jax.Array):
                return x
            kind = np.asarray(x).dtype.kind
            dtype = {"b": torch.bool, "i": torch.long, "u": torch.long}.get(kind)
            x = np.array(x, None if dtype else np.float32)
            return torch.as_tensor(x, device=like.device).to(dtype or like.dtype)

        args, given = _pytree.tree_map(tensor, self.arguments())
        buffers = {x: y.clone() for x, y in module.named_buffers()}
        # A user's random numbers stay those that they were.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(has_slopes):
            for name, x in floats.items():
                if is_rounded:
                    x = x * (1 + torch.finfo(x.dtype).eps * torch.randn_like(x))
                floats[name] = x.requires_grad_(has_slopes)
            torch.manual_seed(seed)
            with _watched(module, watch):
                output = torch.func.functional_call(
                    module, params | floats | buffers, args, given
                )
            found, slopes = _tensors(output), {}
            first = found.get(_FIRST)
            if has_slopes and first is not None and first.requires_grad:
                weights = torch.as_tensor(self.weights(first.shape), device=like.device)
                slopes = torch.autograd.grad(
                    (first.float() * weights).sum(),
                    [*floats.values()],
                    allow_unused=True,
                    materialize_grads=True,
                )
                slopes = dict(zip(floats, slopes, strict=True))
        # In their order, which a tree would lose.
        found, slopes = ({x: _array(y) for x, y in z.items()} for z in (found, slopes))
        return found, slopes

    def run(self, params: Any, inputs: _Arrays, *, read: Callable) -> Any:
        function = functools.partial(self.module.pair.run, read=read)
        return sites.blockwise(function)(mark_parameters(params), **inputs)

    def looked(self) -> tuple[_Arrays, dict[str, Any]]:
        """Computes the outputs of the copy, and its maps, values and heads."""
        run = functools.partial(self.run, read=_tensors)
        looked = sites.look(run, ["*/map", "*/value", "*/heads"], strict=False)
        outputs, heads = looked(self.module.params, self.inputs)
        return jax.tree.map(_array, outputs), heads

    def slopes(self, names: Mapping[str, Any]) -> _Arrays:
        """Computes gradients as `by_torch` does, of the copy, by some parameters."""
        params = self.module.params

        def total(chosen: Any) -> jax.Array:
            first = self.run(params | chosen, self.inputs, read=conversion.first_of)
            return (first.astype(jnp.float32) * self.weights(first.shape)).sum()

        chosen = {name: params[name] for name in names}
        return jax.tree.map(_array, jax.grad(total)(chosen)) if chosen else {}

    def first_site(self) -> str:
        """Names the first module, in the order of torch's run, whose output differs."""
        wanted: _Arrays = {}
        self.by_torch(watch=lambda name, x: wanted.update({name: _array(x)}))

        def seen(*args: Any) -> Any:
            values: dict[str, Any] = {}
            watch = lambda name, x: values.update({name: x})  # noqa: E731
            with _watched(self.module.pair.copy, watch):
                return self.run(*args, read=lambda output: values)

        found = jax.tree.map(_array, jax.jit(seen)(self.module.params, self.inputs))
        far = self.differences(found, wanted).items()
        names = (x.partition("#")[0] for x, y in far if y > self.tolerance)
        return next(names, "none of its modules, but what it makes of them")

    # --- Comparison

    @property
    def tolerance(self) -> float:
        params = self.module.params.values()
        floats = (x.dtype for x in params if jnp.issubdtype(x.dtype, jnp.floating))
        return max((_TOLERANCES[x.itemsize] for x in floats), default=_TOLERANCES[4])

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        """Makes random numbers, 0 at padding."""
        numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        return numbers * self.counts(shape)

    def counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Marks what is of no padding, where an array has positions in front."""
        marks = np.ones((1,) * len(shape), bool)
        for counted in self.counted:
            for rows in (counted, counted.ravel()):
                if tuple(shape[: rows.ndim]) == rows.shape:
                    later = (1,) * (len(shape) - rows.ndim)
                    marks = marks & rows.reshape(*rows.shape, *later)
        return marks

    def differences(
        self, found: Mapping[str, Any], wanted: _Arrays, *, floor: float = 0
    ) -> dict[str, float]:
        """Finds the largest differences, as shares of the arrays' largest numbers.

        An array's largest number counts as at least the share `floor` of all.
        """
        scales = {name: _scale(x) for name, x in wanted.items()}
        least = max(1e-30, floor * max(scales.values(), default=0))
        return {
            name: _far(found[name], x, self.counts(x.shape)) / max(scales[name], least)
            for name, x in wanted.items()
            if name in found
        }

    # --- Remarks

    def facts(self, parts: Sequence[str]) -> Iterator[Row]:
        """Says what the copy changed, and which layers have no map, and why."""
        original, copy, _, _ = self.module.pair
        changes, lacking = {}, []
        has_experts = any("Experts" in type(x).__name__ for x in original.modules())
        for both in zip(original.modules(), copy.modules(), strict=True):
            for what in ("attn", "experts")[: 1 + has_experts]:
                before, after = (
                    getattr(getattr(x, "config", None), f"_{what}_implementation", None)
                    for x in both
                )
                if before != after:
                    changes[f"{what} {after}, not {before}"] = None
        _, given = self.arguments()
        changes |= {"no cache": None} if given.get("use_cache") is False else {}
        yield Row("copy", "", "; ".join(changes) or "nothing is changed")
        for name, part in original.named_modules():
            layers = dict(part.named_children())
            has = {
                x: any(f"{y}/".startswith(f"{_site(f'{name}.{x}')}/") for y in parts)
                for x in layers
                if x.isdigit()
            }
            is_inside = any(map(str.isdigit, name.split(".")))  # of a layer
            if any(has.values()) and not all(has.values()) and not is_inside:
                lacking.append(f"{_site(name)} {_without(layers, has)}")
        whole = "each has a map" if parts else "no attention is recognized"
        yield Row("layers", "", "; ".join(lacking) or whole)


def _without(layers: Mapping[str, Any], has: Mapping[str, bool]) -> str:
    """Lists the layers without a map, and their parts that no layer with a map has."""
    inside = {x: dict(layers[x].named_children()) for x in has}
    usual = {y for x, parts in inside.items() if has[x] for y in parts}
    others = {
        f"{name} ({type(part).__name__})": None
        for x, parts in inside.items()
        for name, part in parts.items()
        if not has[x] and name not in usual
    }
    why = checks.listed([*others]) if others else "no softmax"
    return f"{', '.join(x for x in has if not has[x])} without attention: {why}"


def _most(differences: Mapping[str, float]) -> float:
    return max(differences.values(), default=0)


def _row(part: str, differences: Mapping[str, float], limit: float, note: str) -> Row:
    worst = _most(differences)
    return Row(part, "equal" if worst <= limit else "differs", note, worst)


def _of_map(heads: Mapping[str, Any], part: str) -> float:
    """Finds the difference of weights times values and heads."""
    names = (f"{part}/{x}".removeprefix("/") for x in ("map", "value", "heads"))
    attention_map, value, found = (heads.get(x) for x in names)
    assert attention_map is not None
    # Sites of our own attention have their values in the map.
    outputs = attention_map.outputs() if value is None else attention_map.apply(value)
    products, found = _array(outputs), _array(found)
    return _far(products, found, np.ones((), bool)) / max(_scale(found), 1e-30)


def _far(found: np.ndarray, wanted: np.ndarray, counts: np.ndarray) -> float:
    if found.shape != wanted.shape:
        return math.inf
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted)) | ~counts
    with np.errstate(invalid="ignore"):  # infinities of one sign
        far = np.abs(np.subtract(found, wanted, dtype=np.float64))
    return float(np.nan_to_num(np.where(same, 0, far), nan=np.inf).max(initial=0))


def _scale(x: np.ndarray) -> float:
    """Finds the largest number that hides nothing; 1 of integers."""
    sizes = np.abs(np.nan_to_num(x, posinf=0, neginf=0))
    is_float = x.dtype.kind == "f"
    return float(sizes.max(initial=0, where=sizes < _HIDDEN)) if is_float else 1.0


def _array(x: Any) -> np.ndarray:
    """Copies a tensor or an array to the host, floats as float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return np.array(x.float() if x.is_floating_point() else x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return np.array(x, np.float32 if is_float else None)


def _tensors(output: Any) -> dict[str, Any]:
    """Names the tensors of a module's result; its first output comes first."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

    first = conversion.first_of(output)
    others, _ = _pytree.tree_flatten_with_path(output)
    others = {_pytree.keystr(path): x for path, x in others if x is not first}
    found = {_FIRST: first} | others
    return {x: y for x, y in found.items() if isinstance(y, torch.Tensor)}


def _site(name: str) -> str:
    """Makes the path of the sites of a module."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"_\1", name).replace(".", "/")


@contextlib.contextmanager
def _watched(module: Any, watch: Callable[[str, Any], None] | None) -> Iterator[None]:
    """Watches the floats of inner modules' outputs, by the name `site#call output`."""
    calls, hooks = collections.Counter(), []

    def seen(name: str, part: Any, inputs: Any, output: Any) -> None:
        calls[name] += 1
        for key, x in _tensors(output).items():
            if watch and x.is_floating_point():
                watch(f"{_site(name)}#{calls[name]} {key}", x)

    for name, part in module.named_modules():
        if watch and name:
            hook = functools.partial(seen, name)
            hooks.append(part.register_forward_hook(hook))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

"""Compares a PyTorch module with its copy in JAX: outputs, maps and gradients.

B batch, T positions.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
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
    ) -> Certificate | None:
        """Compares both on inputs of the function, if none of their kind were compared.

        Without `always`, only a strict certifier compares, and outside of `jax.jit`.

        Args:
          inputs: By the function's keywords; None where there are none.
          counted: `[B, T]` booleans of each side: which inputs are no padding.
          always: Whether to compare anyway, whatever it costs.

        Raises:
          ValueError: If they differ, and the certifier is strict.
        """
        given = {name: x for name, x in inputs.items() if x is not None}
        is_traced = any(isinstance(x, jax.core.Tracer) for x in given.values())
        if is_traced or not (always or self.is_strict):
            return None
        given = {name: np.asanyarray(x) for name, x in given.items()}
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
            expected = self.by_torch(has_slopes)
        except Exception as error:  # of somebody's module, on these inputs
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield Row("outputs", "not compared", f"torch raises {reason}")
            return
        outputs, heads = self.looked()
        parts = [x.rpartition("/")[0] for x in heads if x.endswith("map")]
        outputs, slopes = self.far((outputs, self.slopes(expected[1])), expected)
        limits = [self.tolerance, _OF_GRADIENTS * self.tolerance]
        if _most(outputs) > limits[0] or _most(slopes) > limits[1]:
            felt = self.far(self.by_torch(has_slopes, again=True), expected)
            limits = [
                max(x, _FELT * _most(y)) for x, y in zip(limits, felt, strict=True)
            ]
            is_inside = _most(outputs) <= limits[0] and _most(slopes) <= limits[1]
            if is_inside and _most(felt[0]) > self.tolerance:
                note = "torch differs from itself: it is random"
                yield Row("outputs", "not compared", note)
                yield from self.facts(parts)
                return
        note = checks.listed([*outputs])
        if _most(outputs) > limits[0]:
            name = next(x for x, y in outputs.items() if y > limits[0])
            note = f"{name}; the first site that differs: {self.first_site()}"
        yield _row("outputs", outputs, limits[0], note)
        if parts:
            of_maps = {x: _of_map(heads, x) for x in parts}
            note = f"weights times values are the heads, {len(parts)} layers"
            if _most(of_maps) > self.tolerance:
                worst = max(of_maps, key=of_maps.__getitem__)
                note = f"weights times values are not the heads of {worst}"
            yield _row("maps", of_maps, self.tolerance, note)
        if slopes:
            far = [x for x, y in slopes.items() if y > limits[1]]
            note = f"those after {far[-1]} are equal" if far else ""
            yield _row("gradients", slopes, limits[1], note)
        else:
            limit = f"more than {MOST_WITH_GRADIENTS:.0e} parameters x positions"
            note = "torch gives none" if has_slopes else limit
            yield Row("gradients", "not compared", note)
        yield from self.facts(parts)

    # --- Both runs

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        return self.module.pair.arguments(**self.inputs)

    def by_torch(
        self,
        has_slopes: bool = False,
        *,
        again: bool = False,
        watch: Callable[[str, Any], None] | None = None,
    ) -> tuple[_Arrays, _Arrays]:
        """Computes the outputs, and the gradients of a random sum of the first one.

        `again` draws other random numbers, and adds noise to parameters, as large as
        their rounding.
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
            dtypes = {"b": torch.bool, "f": like.dtype}
            array = _array(x)
            dtype = dtypes.get(array.dtype.kind, torch.long)
            return torch.as_tensor(array).to(like.device, dtype)

        args, given = _pytree.tree_map(tensor, self.arguments())
        buffers = {x: y.clone() for x, y in module.named_buffers()}
        # A user's random numbers stay those that they were.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(has_slopes):
            torch.manual_seed(again)
            for name, x in floats.items():
                if again:
                    x = x * (1 + torch.finfo(x.dtype).eps * torch.randn_like(x))
                floats[name] = x.requires_grad_(has_slopes)
            with _watched(module, watch):
                output = torch.func.functional_call(
                    module, params | floats | buffers, args, given
                )
            outputs, slopes = conversion.tensors_of(output), []
            first = outputs.get(conversion.FIRST)
            if has_slopes and first is not None and first.requires_grad:
                weights = torch.as_tensor(self.weights(first.shape), device=like.device)
                slopes = torch.autograd.grad(
                    (first.float() * weights).sum(),
                    [*floats.values()],
                    allow_unused=True,
                    materialize_grads=True,
                )
        # Slopes may be missing. In their order, which a tree would lose.
        pairs = outputs.items(), zip(floats, slopes, strict=False)
        outputs, slopes = ({x: _array(y) for x, y in z} for z in pairs)
        return outputs, slopes

    def run(self, params: Any, inputs: _Arrays, *, read: Callable | None = None) -> Any:
        function = functools.partial(self.module.pair.run, read=read)
        return sites.blockwise(function)(mark_parameters(params), **inputs)

    def looked(self) -> tuple[_Arrays, dict[str, Any]]:
        """Computes the outputs of the copy, and its maps, values and heads."""
        looked = sites.look(self.run, ["*/map", "*/value", "*/heads"], strict=False)
        outputs, heads = looked(self.module.params, self.inputs)
        return jax.tree.map(_array, outputs), heads

    def slopes(self, names: Mapping[str, Any]) -> _Arrays:
        """Computes gradients as `by_torch` does, of the copy, by some parameters."""
        params = self.module.params

        def total(chosen: Any) -> jax.Array:
            first = self.run(params | chosen, self.inputs)[conversion.FIRST]
            return (first.astype(jnp.float32) * self.weights(first.shape)).sum()

        chosen = {name: params[name] for name in names}
        return jax.tree.map(_array, jax.grad(total)(chosen)) if chosen else {}

    def first_site(self) -> str:
        """Names the first module, in the order of torch's run, whose output differs."""
        expected: _Arrays = {}
        self.by_torch(watch=lambda name, x: expected.update({name: _array(x)}))

        def seen(*args: Any) -> Any:
            values: dict[str, Any] = {}
            watch = lambda name, x: values.update({name: x})  # noqa: E731
            with _watched(self.module.pair.copy, watch):
                return self.run(*args, read=lambda output: values)

        results = jax.tree.map(_array, jax.jit(seen)(self.module.params, self.inputs))
        far = self.differences(results, expected).items()
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

    def far(
        self, results: tuple[_Arrays, _Arrays], expected: tuple[_Arrays, _Arrays]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Finds the differences of outputs, and of gradients."""
        (outputs, slopes), (like, like_slopes) = results, expected
        return self.differences(outputs, like), self.differences(
            slopes, like_slopes, floor=_SMALLEST
        )

    def differences(
        self, results: Mapping[str, Any], expected: _Arrays, *, floor: float = 0
    ) -> dict[str, float]:
        """Finds the largest differences, as shares of the arrays' largest numbers.

        An array's largest number counts as at least the share `floor` of all.
        """
        scales = {name: _scale(x) for name, x in expected.items()}
        least = max(1e-30, floor * max(scales.values(), default=0))
        return {
            name: _far(results[name], x, self.counts(x.shape))
            / max(scales[name], least)
            for name, x in expected.items()
            if name in results
        }

    # --- Remarks

    def facts(self, parts: Sequence[str]) -> Iterator[Row]:
        """Says what the copy changed, and which layers have no map, and why."""
        changes = "; ".join(self.module.pair.changes)
        yield Row("copy", "", changes or "nothing is changed")
        lacking = []
        for name, part in self.module.pair.original.named_modules():
            inside = {
                number: [f"{x} ({type(y).__name__})" for x, y in layer.named_children()]
                for number, layer in part.named_children()
                if number.isdigit()
            }
            bare, usual = list(inside), []
            for number in inside:
                path = f"{conversion.site_of(f'{name}.{number}')}/"
                if any(f"{x}/".startswith(path) for x in parts):
                    bare.remove(number)
                    usual += inside[number]
            is_layer = any(map(str.isdigit, name.split(".")))
            if bare and usual and not is_layer:
                others = [x for y in bare for x in inside[y] if x not in usual]
                why = (
                    checks.listed([*dict.fromkeys(others)]) if others else "no softmax"
                )
                numbers = f"{conversion.site_of(name)} {', '.join(bare)}"
                lacking.append(f"{numbers} without attention: {why}")
        whole = "each has a map" if parts else "no attention is recognized"
        yield Row("layers", "", "; ".join(lacking) or whole)


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


@contextlib.contextmanager
def _watched(module: Any, watch: Callable[[str, Any], None] | None) -> Iterator[None]:
    """Watches the floats of inner modules' outputs, by the name `site#call output`."""
    calls, hooks = collections.Counter(), []

    def seen(name: str, part: Any, inputs: Any, output: Any) -> None:
        calls[name] += 1
        for key, x in conversion.tensors_of(output).items():
            if watch and x.is_floating_point():
                watch(f"{conversion.site_of(name)}#{calls[name]} {key}", x)

    for name, part in module.named_modules():
        if watch and name:
            hook = functools.partial(seen, name)
            hooks.append(part.register_forward_hook(hook))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

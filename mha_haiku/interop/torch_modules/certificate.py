"""Compares a PyTorch module with its copy in JAX: outputs, maps and gradients.

B batch, T positions.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_TIMES = {"gradients": 10}  # as much
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
          maps       equal         0.0e+00  weights times values, and heads, of layer
          gradients  equal         3.1e-07  embed.weight, first.weight and first.bias
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
        negation = "NOT " if self.verdict == "differs" else ""
        verdict = f"what is shown is {negation}what torch computes"
        if self.verdict == "not compared":
            verdict = "not compared with torch"
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
        counts = (f"{x} in {y} call{'s' * (y > 1)}" for x, y in verdicts.items())
        return f"torch: {', '.join(counts) or 'not yet compared'}"

    def see(
        self, inputs: Mapping[str, Any], counted: Sequence[Any], *, always: bool = False
    ) -> Certificate | None:
        """Compares both on inputs of the function, by keyword; `counted` is no padding.

        Without `always` only a strict certifier compares, outside of `jax.jit`, up to a
        size, and once for each kind of inputs. It raises ValueError if they differ.
        """
        kwargs = {name: x for name, x in inputs.items() if x is not None}
        arrays = *kwargs.values(), jnp.zeros(())  # traced wherever anything is
        is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if is_traced or not (always or self.is_strict):
            return None
        kwargs = {name: np.asanyarray(x) for name, x in kwargs.items()}
        key = frozenset(  # sizes of as many bits are of a kind
            (x, y.dtype.kind, *map(int.bit_length, y.shape)) for x, y in kwargs.items()
        )
        if always or key not in self.found:
            names = {"inputs": self.module.names[0]}
            shapes = (
                f"{names.get(x, x)} {y.shape}" for x, y in kwargs.items() if y.ndim
            )
            call = _Call(self.module, kwargs, list(map(np.asarray, counted)))
            lines, name = tuple(call.lines(always=always)), self.module.name
            self.found[key] = Certificate(name, ", ".join(shapes), lines)
        certificate = self.found[key]
        if self.is_strict and certificate.verdict == "differs":
            raise ValueError(
                f"{certificate.text()}\nmh.wrap(..., check=False) goes on all the same."
            )
        return certificate


class _Call(NamedTuple):
    """A call of a module and of its copy."""

    module: conversion.TorchModule
    inputs: _Arrays  # by the function's keywords
    counted: list[np.ndarray]

    def lines(self, *, always: bool) -> Iterator[Row]:
        batch, *shape = self.inputs["inputs"].shape
        count = sum(x.size for x in self.module.params.values())
        size = count * batch * max(shape, default=1)
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
        results, products = self.by_copy(expected["gradients"])
        far = self.differences(results, expected | {"maps": products})
        limits = {x: _TIMES.get(x, 1) * self.tolerance for x in far}
        if any(_most(far[x]) > limits[x] for x in expected):
            felt = self.differences(self.by_torch(has_slopes, again=True), expected)
            limits |= {x: max(limits[x], _FELT * _most(y)) for x, y in felt.items()}
            is_inside = all(_most(far[x]) <= limits[x] for x in expected)
            if is_inside and _most(felt["outputs"]) > self.tolerance:
                far, note = {}, "torch differs from itself: it is random"
                yield Row("outputs", "not compared", note)
        for part, differences in far.items():
            beyond = [x for x, y in differences.items() if y > limits[part]]
            note = checks.listed(beyond or [*differences])
            if part == "maps":
                note = f"weights times values, and heads, of {note}"
            elif beyond and part == "gradients":
                note = f"those after {beyond[-1]} are equal"
            elif beyond:
                note = f"{note}; the first site that differs: {self.first_site()}"
            verdict = "differs" if beyond else "equal"
            if differences:
                yield Row(part, verdict, note, _most(differences))
        if far and not far["gradients"]:
            note = (
                f"none, or more than {MOST_WITH_GRADIENTS:.0e} parameters x positions"
            )
            yield Row("gradients", "not compared", note)
        yield from self.facts(products)

    # --- Both runs

    def by_torch(
        self,
        has_slopes: bool = False,
        *,
        again: bool = False,
        watch: Callable[[str, Any], None] | None = None,
    ) -> dict[str, _Arrays]:
        """Computes the outputs, and the gradients of a random sum of the first one.

        `again` draws other random numbers, and adds noise to parameters, as large as
        their rounding.
        """
        import torch  # pyright: ignore[reportMissingImports]
        from torch.utils import _pytree  # pyright: ignore[reportMissingImports]

        module = self.module.original
        params = {x: y.detach() for x, y in module.named_parameters()}
        floats = {x: y for x, y in params.items() if y.is_floating_point()}
        state = params | {x: y.clone() for x, y in module.named_buffers()}
        like = next(iter(floats.values()), torch.ones(()))

        def tensor(x: Any) -> Any:
            if not isinstance(x, np.ndarray | jax.Array):
                return x
            kinds, x = {"b": torch.bool, "f": like.dtype}, _array(x)
            return torch.as_tensor(x).to(
                like.device, kinds.get(x.dtype.kind, torch.long)
            )

        args, kwargs = _pytree.tree_map(tensor, self.module.arguments(**self.inputs))
        # A user's random numbers stay those that they were.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(has_slopes):
            torch.manual_seed(again)
            for name, x in floats.items():
                if again:
                    x = x * (1 + torch.finfo(x.dtype).eps * torch.randn_like(x))
                floats[name] = x.requires_grad_(has_slopes)
            with _watched(module, watch):
                output = torch.func.functional_call(
                    module, state | floats, args, kwargs
                )
            outputs, slopes = conversion.tensors_of(output), []
            first = outputs.get(conversion.FIRST)
            if has_slopes and first is not None and first.requires_grad:
                weights = torch.as_tensor(self.weights(first.shape), device=like.device)
                total, inputs = (first.float() * weights).sum(), [*floats.values()]
                options: Any = dict(allow_unused=True, materialize_grads=True)
                slopes = torch.autograd.grad(total, inputs, **options)
        return {  # in their order, which a tree would lose; there may be no slopes
            "outputs": {x: _array(y) for x, y in outputs.items()},
            "gradients": {x: _array(y) for x, y in zip(floats, slopes, strict=False)},
        }

    def run(self, params: Any, inputs: _Arrays, **read: Callable) -> Any:
        function = functools.partial(self.module.run, **read)
        return sites.blockwise(function)(mark_parameters(params), **inputs)

    def by_copy(self, names: Mapping[str, Any]) -> tuple[dict[str, _Arrays], _Arrays]:
        """Computes the same of the copy, and heads; and weights times values.

        Gradients are by the parameters of these names.
        """
        params = self.module.params
        looked = sites.look(self.run, ["*/map", "*/value", "*/heads"], strict=False)
        outputs, maps = looked(params, self.inputs)
        heads, products = {}, {}
        for name, attention_map in maps.items():
            part, _, kind = name.rpartition("/")
            path = name.removesuffix("map")
            if kind == "map":
                heads[part] = maps[f"{path}heads"]
                value = maps.get(f"{path}value", attention_map.value)
                products[part] = attention_map.apply(value)

        def total(trainable: Any) -> jax.Array:
            first = self.run(params | trainable, self.inputs)[conversion.FIRST]
            return (first.astype(jnp.float32) * self.weights(first.shape)).sum()

        trainable = {name: params[name] for name in names}
        slopes = jax.grad(total)(trainable) if trainable else {}
        results = {"outputs": outputs, "maps": heads, "gradients": slopes}
        return jax.tree.map(_array, (results, products))

    def first_site(self) -> str:
        """Names the first module, in the order of torch's run, whose output differs."""
        expected: _Arrays = {}
        self.by_torch(watch=lambda name, x: expected.update({name: _array(x)}))

        def seen(*args: Any) -> Any:
            values: dict[str, Any] = {}
            with _watched(self.module.copy, values.__setitem__):
                return self.run(*args, read=lambda output: values)

        results = jax.tree.map(_array, jax.jit(seen)(self.module.params, self.inputs))
        far = self.differences({"sites": results}, {"sites": expected})["sites"]
        names = (x.partition("#")[0] for x, y in far.items() if y > self.tolerance)
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
        for rows in (y for x in self.counted for y in (x, x.ravel())):
            if tuple(shape[: rows.ndim]) == rows.shape:
                later = (1,) * (len(shape) - rows.ndim)
                marks = marks & rows.reshape(*rows.shape, *later)
        return marks

    def differences(
        self, results: dict[str, _Arrays], expected: dict[str, _Arrays]
    ) -> dict[str, dict[str, float]]:
        """Finds the largest differences, as shares of the arrays' largest numbers."""

        def far(part: str) -> Iterator[tuple[str, float]]:
            scales = {name: _scale(x) for name, x in expected[part].items()}
            floor = _SMALLEST if part == "gradients" else 0
            least = max(1e-30, floor * max(scales.values(), default=0))
            for name, x in expected[part].items():
                if name in results[part]:
                    far = _far(results[part][name], x, self.counts(x.shape))
                    yield name, far / max(scales[name], least)

        return {part: dict(far(part)) for part in expected}

    # --- Remarks

    def facts(self, parts: Iterable[str]) -> Iterator[Row]:
        """Says what the copy changed, and which layers have no map, and why."""
        changes = "; ".join(self.module.changes)
        yield Row("copy", "", changes or "nothing is changed")
        lacking = []
        for name, part in self.module.original.named_modules():
            inside = {
                number: [f"{x} ({type(y).__name__})" for x, y in layer.named_children()]
                for number, layer in part.named_children()
                if number.isdigit()
            }
            has_map = []
            for number in inside:
                path = f"{conversion.site_of(f'{name}.{number}')}/"
                has_map += [number] * any(f"{x}/".startswith(path) for x in parts)
            usual = {x for number in has_map for x in inside[number]}
            bare = [x for x in inside if x not in has_map]
            if bare and has_map and not any(map(str.isdigit, name.split("."))):
                others = [x for y in bare for x in inside[y] if x not in usual]
                why = checks.listed([*dict.fromkeys(others)]) or "no softmax"
                numbers = f"{conversion.site_of(name)} {', '.join(bare)}"
                lacking.append(f"{numbers} without attention: {why}")
        whole = "each has a map" if parts else "no attention is recognized"
        yield Row("layers", "", "; ".join(lacking) or whole)


def _most(differences: Mapping[str, float]) -> float:
    return max(differences.values(), default=0)


def _far(ours: np.ndarray, theirs: np.ndarray, counts: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)) | ~counts
    with np.errstate(invalid="ignore"):  # infinities of one sign
        far = np.abs(np.subtract(ours, theirs, dtype=np.float64))
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
def _watched(module: Any, watch: Any) -> Iterator[None]:
    """Watches the floats of inner modules' outputs, by the name `site#call output`."""
    from torch.nn import modules  # pyright: ignore[reportMissingImports]

    names = {part: conversion.site_of(name) for name, part in module.named_modules()}
    calls = collections.Counter()

    def seen(part: Any, inputs: Any, output: Any) -> None:
        name = names.get(part)
        calls[name] += 1
        for key, x in conversion.tensors_of(output).items() if name and watch else ():
            if x.is_floating_point():
                watch(f"{name}#{calls[name]} {key}", x)

    with modules.module.register_module_forward_hook(seen):
        yield

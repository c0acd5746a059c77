"""Checks and measures the package on a GPU, in one run of at most eight minutes.

Run: python scripts/on_gpu.py --out=on_gpu
     python scripts/on_gpu.py --cpu --out=on_gpu  (the same in small, on a CPU)

Checks attention of every implementation against the formula in float64 NumPy, maps and
their statistics, a run of configs/reverse.py, and a PyTorch module whose parameters are
on the GPU. Then measures attention next to jax.nn.dot_product_attention (cuDNN and XLA)
and PyTorch's scaled_dot_product_attention, statistics, training steps, and ablations of
GPT-2's smallest size with random weights. Nothing is downloaded. Torch and transformers
may be missing: what needs them fails then, and the rest runs.

Every part is a process with its own time limit, so that none can stop the others:
checks run together, measurements alone. Writes on_gpu.json, on_gpu.md (a table for
benchmarks/measured.md) and four pages. Exits with 1 if a part or a check failed.
"""

import concurrent.futures
import contextlib
import functools
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# The scripts use each other and experiments/, neither of which is installed.
_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_REPOSITORY))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import mha_haiku as mh  # noqa: E402
from mha_haiku import commands  # noqa: E402
from mha_haiku.commands import config_files  # noqa: E402
from mha_haiku.core import checks  # noqa: E402

_PACKAGES = "jax jaxlib dm-haiku optax torch torchax transformers numpy".split()
_QUERY_GPU = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
_SECONDS = 10  # of a measurement; rounds end earlier then
_PART = "--one-part"  # in front of the arguments of a part's process
_LOG_CHARACTERS = 3000  # of a failed part, in the report


class Place(NamedTuple):
    """Where a part writes, and whether it is a small one on the CPU."""

    out: pathlib.Path
    lines: pathlib.Path
    is_small: bool

    def write(self, **record: Any) -> None:
        """Appends a record, which is kept even if the part is stopped later."""
        with self.lines.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def check(self, name: str, actual: Any, expected: Any, tolerance: float) -> None:
        """Records the largest error as a share of the largest expected number."""
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        largest = np.abs(expected).max(initial=0) or 1.0
        if actual.shape != expected.shape:
            error = math.inf
        else:
            error = float(np.abs(actual - expected).max(initial=0) / largest)
        self.write(check=name, error=error, tolerance=tolerance)

    def save(self, name: str, subject: Any, **options: Any) -> None:
        """Saves a page, and checks that it is a whole one."""
        path = self.out / f"{name}.html"
        mh.show(subject, **options).save(path)
        text = path.read_text()
        is_whole = text.rstrip().endswith("</html>")
        self.check(f"page {name}", is_whole, True, 0)

    def measure(
        self,
        name: str,
        calls: Mapping[str, Callable[[], Any]],
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> None:
        """Times calls in turn; `wait` gets what the last one of a sample returns."""
        rounds, least = (2, 0.0) if self.is_small else (15, 0.05)
        repeats, failures = {}, {}
        for contender, call in list(calls.items()):
            try:
                wait(call())
                start = time.perf_counter()
                wait(call())
                once = max(time.perf_counter() - start, 1e-6)
            except Exception as error:
                failures[contender] = f"{type(error).__name__}: {error}"[:300]
            else:
                repeats[contender] = max(1, min(100, int(least / once)))
        times: dict[str, list[float]] = {contender: [] for contender in repeats}
        end = time.perf_counter() + _SECONDS
        for taken in range(rounds):
            if taken >= 2 and time.perf_counter() > end:
                break
            for contender, count in repeats.items():
                start = time.perf_counter()
                for _ in range(count):
                    result = calls[contender]()
                wait(result)
                seconds = (time.perf_counter() - start) / count
                times[contender].append(1000 * seconds)
        for contender, milliseconds in times.items():
            self.write(measure=name, contender=contender, milliseconds=milliseconds)
        for contender, failure in failures.items():
            self.write(measure=name, contender=contender, failed=failure)


# --- checks ---------------------------------------------------------------------------

_B, _H, _G, _K = 2, 4, 2, 64  # examples, heads, key heads, size per head


def _formula(query, key, value, cotangent, allowed, bias=0.0, cap=None, sink=None):
    """Returns values, logsumexp, weights and gradients, float64."""
    query, key, value, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent)
    )
    groups = query.shape[2] // key.shape[2]
    repeated_key, repeated_value = (np.repeat(x, groups, 2) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * np.einsum("bthk,bshk->bhts", query, repeated_key)
    slope = np.ones(1)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
        slope = 1 - (scores / cap) ** 2
    scores = np.where(allowed, scores + bias, -np.inf)
    extra = -np.inf if sink is None else np.asarray(sink, np.float64)[:, None, None]
    largest = np.maximum(scores.max(-1, keepdims=True), extra)
    largest = np.where(np.isfinite(largest), largest, 0)
    masses = np.exp(scores - largest)
    total = masses.sum(-1, keepdims=True) + np.exp(extra - largest)
    weights = masses / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        logsumexp = (np.log(total) + largest)[..., 0]
    values = np.einsum("bhts,bshv->bthv", weights, repeated_value)
    slopes = np.einsum("bthv,bshv->bhts", cotangent, repeated_value)
    mean = (weights * slopes).sum(-1, keepdims=True)
    slopes = scale * slope * weights * (slopes - mean)

    def of_groups(x):
        return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)

    gradients = (
        np.einsum("bhts,bshk->bthk", slopes, repeated_key),
        of_groups(np.einsum("bhts,bthk->bshk", slopes, query)),
        of_groups(np.einsum("bhts,bthv->bshv", weights, cotangent)),
    )
    return values, logsumexp, weights, gradients


def _masks(T) -> Iterator[tuple[str, mh.masks.Mask | None, np.ndarray]]:
    """Yields names, masks, and by pair of positions what they allow, `[B, H, T, T]`."""
    masks, generator = mh.masks, np.random.default_rng(1)
    t, s = np.arange(T)[:, None], np.arange(T)[None, :]
    lengths, queries = np.array([2 * T // 3, 0]), np.array([T - 3, T])
    ids = np.sort(generator.integers(0, 4, (_B, T)), -1)
    per_query = generator.integers(0, T, (_B, T))
    dense = generator.random((_B, _H, T, T)) < 0.3
    dense[:, :, 5] = False
    before = s < lengths[:, None, None, None]
    yield "full", None, t >= 0
    yield "causal", masks.causal(), s <= t
    yield "padding", masks.padding(lengths), before
    yield "causal & padding", masks.causal() & masks.padding(lengths), before & (s <= t)
    yield "dense", masks.dense(dense), dense
    yield "window", masks.window(9, 0), (s <= t) & (s >= t - 9)
    yield "window, both sides", masks.window(9, 4), (s <= t + 4) & (s >= t - 9)
    both = before & (t < queries[:, None, None, None])
    yield "padding of both", masks.padding(lengths, queries), both
    rows = s < per_query[:, None, :, None]
    yield "lengths per query", masks.valid_lens(per_query), rows
    yield "prefix", masks.prefix(lengths), before | (s <= t)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    yield "segments", masks.segments(ids), same
    yield "dilated", masks.dilated(3) & masks.causal(), ((t - s) % 3 == 0) & (s <= t)
    near = (abs(t - s) <= 2) | (t == 7) | (s == 7)
    yield "global", masks.window(2, 2) | masks.global_tokens([7]), near
    yield "function", masks.where(lambda t, s: s % 4 <= t % 5), s % 4 <= t % 5
    yield "complement", ~masks.causal(), s > t


def _attention_cases(T):
    """Yields names, options of `attend`, what is allowed, and terms of the formula."""
    for name, mask, allowed in _masks(T):
        yield name, {"mask": mask}, allowed, {}
    generator = np.random.default_rng(2)
    causal, allowed = mh.masks.causal(), np.tri(T, dtype=bool)
    bias = generator.standard_normal((_B, _H, T, T)).astype(np.float32)
    sink = generator.standard_normal(_H).astype(np.float32)
    yield "bias", {"mask": causal, "bias": bias}, allowed, {"bias": bias}
    capped = mh.attention.dot_product(soft_cap=2.0)
    yield "soft cap", {"mask": causal, "score": capped}, allowed, {"cap": 2.0}
    normalizer = mh.attention.sink(jnp.asarray(sink))
    options = {"mask": causal, "normalizer": normalizer}
    yield "sink", options, allowed, {"sink": sink}


# Name: dtype, precision of products in float32, tolerance of values and gradients.
_PRECISIONS = {
    "float32": ("float32", "highest", 1e-4),
    "bfloat16": ("bfloat16", None, 2.5e-2),
    "float32, default precision": ("float32", None, 1e-2),
}


def check_attention(place: Place, implementation: str) -> None:
    """Checks values, logsumexp and gradients under all kinds of masks."""
    T = 32 if place.is_small else 160
    cases = list(_attention_cases(T))[:: 7 if place.is_small else 1]
    precisions = dict(_PRECISIONS)
    if implementation == "fused":  # whose kernels take no float32 on GPUs
        precisions = {"bfloat16": _PRECISIONS["bfloat16"]}
    waiting = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for precision, (dtype, products, tolerance) in precisions.items():
            arrays = [x.astype(dtype) for x in _arrays(T)]
            for name, options, allowed, terms in cases:
                title = f"attention, {implementation}, {precision}: {name}"
                program = jax.jit(_with_gradients(implementation, T, options))
                try:
                    with jax.default_matmul_precision(products):
                        lowered = program.lower(*arrays)
                except ValueError as error:
                    place.write(check=title, refused=str(error)[:300])
                    continue
                # Compilers run together, in threads; Python's part does not.
                compiled = pool.submit(lowered.compile)
                expected = functools.partial(_formula, *arrays, allowed, **terms)
                waiting.append((title, tolerance, arrays, compiled, expected))
        for title, tolerance, arrays, compiled, expected in waiting:
            try:
                output, logsumexp, pulled = compiled.result()(*arrays)
                logsumexp = np.maximum(logsumexp, -1e4)  # -inf where nothing is seen
            except Exception as error:
                place.write(check=title, error=math.inf, failed=str(error)[:300])
                continue
            values, log_sums, _, gradients = expected()
            seen = log_sums > -np.inf
            place.check(f"{title}, values", output, values, tolerance)
            place.check(
                f"{title}, logsumexp",
                np.where(seen, logsumexp, logsumexp > -1e4),
                np.where(seen, log_sums, 0),
                tolerance,
            )
            for letter, actual, gradient in zip("qkv", pulled, gradients, strict=True):
                place.check(f"{title}, d{letter}", actual, gradient, tolerance)


def _with_gradients(implementation, T, options):
    """Makes the function of arrays and a cotangent to all that is checked."""
    if implementation == "blockwise":  # several tiles, the last ones cut
        implementation = mh.attention.Blockwise(rows=T // 3, columns=T // 4)

    def values(*arrays):
        output, attention_map = mh.attend(
            *arrays, implementation=implementation, **options
        )
        return output, attention_map.logsumexp

    def both(query, key, value, cotangent):
        output, pull, logsumexp = jax.vjp(values, query, key, value, has_aux=True)
        return output, logsumexp, pull(cotangent)

    return both


def _arrays(T, K=_K, dtype=jnp.float32):
    """Draws query, key, value and a cotangent."""
    heads = (_H, _G, _G, _H)
    return [
        jax.random.normal(jax.random.key(i), (_B, T, count, K), dtype)
        for i, count in enumerate(heads)
    ]


def check_maps(place: Place) -> None:
    """Checks maps and their statistics; saves the page of a map."""
    T = 48 if place.is_small else 1500
    lengths = np.array([2 * T // 3, T])
    mask = mh.masks.causal() & mh.masks.padding(lengths)
    allowed = np.tri(T, dtype=bool) & (np.arange(T) < lengths[:, None, None, None])
    for precision, (dtype, products, tolerance) in _PRECISIONS.items():
        arrays = [x.astype(dtype) for x in _arrays(T)]
        weights = _formula(*arrays, allowed)[2]

        def observed(query, key, value):
            attention_map = mh.attend(query, key, value, mask=mask)[1]
            top = attention_map.top(3)
            numbers = attention_map.statistics(pooled=(8, 8))
            return attention_map, attention_map.weights(), top.weights, numbers

        with jax.default_matmul_precision(products):
            attention_map, actual, top, numbers = jax.jit(observed)(*arrays[:3])
        title = f"maps, {precision}"
        place.check(f"{title}: weights", actual, weights, tolerance)
        place.check(f"{title}: rows", actual.sum(-1), weights.sum(-1), tolerance)
        largest = np.sort(weights, -1)[..., :-4:-1]
        place.check(f"{title}: three largest", top, largest, tolerance)
        distance = abs(np.arange(T)[:, None] - np.arange(T))
        logs = np.log(np.where(weights > 0, weights, 1))
        expected = {
            "entropy": -(weights * logs).sum(-1).mean(-1),
            "largest_weight": weights.max(-1).mean(-1),
            "distance": (weights * distance).sum(-1).mean(-1),
            "first_position": weights[..., 0].mean(-1),
            "received": weights.sum(-2),
        }
        for name, numbers_expected in expected.items():
            number = getattr(numbers, name)
            place.check(f"{title}: {name}", number, numbers_expected, tolerance)
        if precision == "float32":
            place.save("map", attention_map)


def check_run(place: Place) -> None:
    """Trains configs/reverse.py; checks what it learned, and saves its page."""
    config = config_files.load(str(_REPOSITORY / "configs/reverse.py"))
    with tempfile.TemporaryDirectory() as folder:
        steps = 20 if place.is_small else None
        subject = mh.train(config, folder, steps=steps)
        summary = json.loads((pathlib.Path(folder) / "summary.json").read_text())
        place.write(note="a run of reverse", summary=summary)
        weights = subject.maps("3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3")[0].weights()
        diagonal = np.asarray(weights)[..., ::-1].diagonal(0, -2, -1).mean()
        loss = summary["metrics"]["held_out_loss"]
        if place.is_small:
            place.check("reverse: loss is finite", math.isfinite(loss), True, 0)
        else:
            place.check("reverse: held-out loss", loss, 0.0, 0.01)
            place.check("reverse: weights of the antidiagonal", diagonal, 1.0, 0.1)
        place.save("run", folder)


def check_torch(place: Place) -> None:
    """Checks a wrapped GPT-2 of transformers, whose parameters are on the GPU."""
    import torch

    from scripts.benchmarks.contenders import causal_models

    size, device = "tiny", "cpu" if place.is_small else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    module = causal_models.of_transformers(size).to(device)
    module.set_attn_implementation("eager")
    tokens = causal_models.tokens(size, 2, 48)
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=device, dtype=torch.long)
        theirs = module(ids, output_attentions=True)
    logits, attentions = (
        np.stack([each.float().cpu().numpy() for each in x])
        for x in ([theirs.logits], theirs.attentions)
    )
    with jax.default_matmul_precision("highest"):
        subject = mh.wrap(module, examples=[tokens])
        place.check("torch: logits", subject.logits(tokens), logits[0], 1e-4)
        maps = subject.maps(tokens)
        ours = [np.asarray(maps[i].weights()) for i in range(len(attentions))]
        place.check("torch: weights of all layers", np.stack(ours), attentions, 1e-4)
        without = subject.ablated((0, 1)).logits(tokens)
    changed = float(np.abs(np.asarray(without) - logits[0]).max())
    place.check("torch: ablation changes logits", 1e-4 < changed < np.inf, True, 0)
    where = next(module.parameters()).device.type
    place.check("torch: the module stays there", where == device, True, 0)
    place.save("torch", maps)


# --- measurements ---------------------------------------------------------------------


def _attention_sizes(place):
    """Yields titles, shapes `[B, T, H, K]`, dtypes and whether with the gradient."""
    shapes = {2048: (16, 2048, 16, 64), 8192: (1, 8192, 16, 64)}
    for length, shape in shapes.items():
        for dtype in ("bfloat16", "float32"):
            for with_gradient in (False, True):
                direction = "forward and backward" if with_gradient else "forward"
                if place.is_small:
                    shape = (1, length // 64, 2, 16)
                title = f"{shape[0]} x {shape[2]} heads, {length}, causal, {dtype}"
                yield f"{title}, {direction}", shape, dtype, with_gradient


def measure_attention(place: Place) -> None:
    """Measures attention next to JAX's, which compiles while others do."""
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    mask = mh.masks.causal()
    contenders: dict[str, Callable] = {
        "mha_haiku": lambda *x: mh.attend(*x, mask=mask)[0],
        "mha_haiku, blockwise": lambda *x: mh.attend(
            *x, mask=mask, implementation="blockwise"
        )[0],
        "jax.nn, XLA": functools.partial(theirs, implementation="xla"),
        "jax.nn, cuDNN": functools.partial(theirs, implementation="cudnn"),
    }
    for title, shape, dtype, with_gradient in _attention_sizes(place):
        arrays = [
            jax.random.normal(jax.random.key(i), shape, dtype)
            for i in range(3 + with_gradient)
        ]

        def compiled(function, arrays=arrays, with_gradient=with_gradient):
            def both(query, key, value, cotangent):
                output, pull = jax.vjp(function, query, key, value)
                return output, pull(cotangent)

            program = jax.jit(both if with_gradient else function)
            return program.lower(*arrays).compile()

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = {
                name: pool.submit(compiled, function)
                for name, function in contenders.items()
                if dtype == "bfloat16" or name != "jax.nn, cuDNN"
            }

        def called(program, arrays=arrays):
            # `result` raises here what the compiler refused, and `measure` records it.
            return program.result()(*arrays)

        place.measure(
            title,
            {name: functools.partial(called, each) for name, each in waiting.items()},
        )


def measure_torch_attention(place: Place) -> None:
    """Measures PyTorch's attention; float32 products as JAX does them, in TF32."""
    import torch

    device = "cpu" if place.is_small else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    attend = torch.nn.functional.scaled_dot_product_attention
    for title, (B, T, H, K), dtype, with_gradient in _attention_sizes(place):
        arrays = [
            torch.randn(B, H, T, K, device=device, dtype=getattr(torch, dtype))
            for _ in range(4)
        ]
        inputs = [x.requires_grad_(with_gradient) for x in arrays[:3]]

        def call(inputs=inputs, cotangent=arrays[3], with_gradient=with_gradient):
            output = attend(*inputs, is_causal=True)
            if with_gradient:
                torch.autograd.grad(output, inputs, cotangent)

        place.measure(title, {"PyTorch": call}, _torch_wait(device))


def measure_statistics(place: Place) -> None:
    """Measures statistics next to the forward pass alone and to whole weights."""
    from scripts.benchmarks.contenders import map_statistics, sizes

    uses = {"statistics": "with all statistics", "forward": "forward alone"}
    for length in (2048, 32768):
        core = sizes.CoreSize(length // (64 if place.is_small else 1), 8)
        if length == 2048:
            uses = uses | {"materialized": "all from whole weights"}
        else:
            uses.pop("materialized", None)
        title = f"8 heads, {length}, causal, float32, statistics"
        programs = {
            name: map_statistics.prepare(use, 1, core._asdict()).run
            for use, name in uses.items()
        }
        place.measure(title, programs)


def measure_training(place: Place) -> None:
    """Measures training steps: a small model next to Haiku's, and GPT-2's size."""
    import optax

    from scripts.benchmarks.contenders import causal_models, ours, plain_haiku

    case, steps = ("reverse", 4) if place.is_small else ("length_64", 100)
    programs = {
        "mha_haiku": ours.prepare(case, steps),
        "Haiku and optax": plain_haiku.prepare(case, steps),
    }

    def run(program):
        program.reset()
        program.run()

    title = f"{steps} training steps of 2 layers, width 128, 64 tokens"
    place.measure(title, {k: functools.partial(run, v) for k, v in programs.items()})

    title, size, tokens = _gpt2_batch(place)
    model, params = causal_models.ours(size)
    optimizer = optax.adamw(1e-4)

    def loss_of(params, tokens):
        logits = model.apply(params, None, tokens, is_training=False).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return losses.mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    carry = params, jax.jit(optimizer.init)(params)

    def call():
        nonlocal carry
        *carry, loss = step(*carry, tokens)
        return loss

    place.measure(title, {"mha_haiku": call})


def _gpt2_batch(place):
    """Returns a title, a size of `causal_models.SIZES` and tokens."""
    from scripts.benchmarks.contenders import causal_models

    size, batch, length = ("tiny", 2, 16) if place.is_small else ("whole", 8, 1024)
    title = f"a training step of GPT-2 small, {batch} x {length} tokens, float32"
    return title, size, causal_models.tokens(size, batch, length)


def measure_torch_training(place: Place) -> None:
    """Measures a training step of transformers' GPT-2 with fused AdamW, in TF32."""
    import torch

    from scripts.benchmarks.contenders import causal_models

    title, size, tokens = _gpt2_batch(place)
    device = "cpu" if place.is_small else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    model = causal_models.of_transformers(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.tensor(tokens, device=device, dtype=torch.long)

    def call():
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()

    place.measure(title, {"PyTorch": call}, _torch_wait(device))


def _torch_wait(device):
    """Makes a function that waits for a GPU; on the CPU calls have ended already."""
    import torch

    return lambda _: torch.cuda.synchronize() if device == "cuda" else None


def measure_ablations(place: Place) -> None:
    """Measures ablations of all heads of GPT-2's size; saves their page."""
    from scripts.benchmarks.contenders import causal_models, lab_ours

    size, batch, length = ("tiny", 2, 16) if place.is_small else ("whole", 8, 64)
    count = causal_models.SIZES[size].num_heads
    model, params = causal_models.ours(size)
    tokens = causal_models.tokens(size, batch, length)
    ones = np.ones(tokens.shape, np.float32)
    example = mh.tasks.Example(tokens, np.roll(tokens, -1, 1), ones)
    of = mh.heads.Measured(model, mh.heads.metrics.loss, params, [example])
    forward = lab_ours.prepare("forward", size, batch, length, calls=count)
    title = f"GPT-2 small, {batch} x {length} tokens, float32"
    calls = {
        f"{count} single ablations": lambda: mh.heads.ablation(of),
        f"{count} forward passes": forward.run,
    }
    place.measure(title, calls)
    place.save("importance", mh.heads.ablation(of))


# --- the run --------------------------------------------------------------------------


class Part(NamedTuple):
    """A process of the run."""

    run: Callable[[Place], None]
    limit: float  # seconds


_CHECKS = {
    f"attention_{name}": Part(
        functools.partial(check_attention, implementation=name), 150
    )
    for name in ("dense", "formula", "blockwise", "fused", "auto")
} | {
    "maps": Part(check_maps, 120),
    "run": Part(check_run, 120),
    "torch": Part(check_torch, 150),
}
_MEASUREMENTS = {
    "measure_attention": Part(measure_attention, 120),
    "measure_torch_attention": Part(measure_torch_attention, 45),
    "measure_statistics": Part(measure_statistics, 60),
    "measure_ablations": Part(measure_ablations, 80),
    "measure_training": Part(measure_training, 80),
    "measure_torch_training": Part(measure_torch_training, 45),
}
_PARTS = _CHECKS | _MEASUREMENTS


def main(*, out: str, cpu: bool = False, limit: int = 420, parts: str = "") -> int:
    """Runs all parts, and writes the report.

    Args:
      out: Folder of the report and the pages.
      cpu: Run everything in small on a CPU.
      limit: Seconds for all parts together.
      parts: Names of parts, with commas between; all if left out.
    """
    names = parts.split(",") if parts else list(_PARTS)
    with checks.user_mistakes():
        for name in names:
            checks.choice("--parts", name, _PARTS)
    folder, end = pathlib.Path(out).resolve(), time.monotonic() + limit
    folder.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, folder=folder, is_small=cpu, end=end)
    workers = min(len(_CHECKS), os.cpu_count() or 1)
    outcomes, versions = [], _versions()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        together = pool.map(run, [name for name in names if name in _CHECKS])
        alone = (run(name) for name in names if name in _MEASUREMENTS)
        for outcome in itertools.chain(together, alone):
            outcomes.append(outcome)
            is_right = _report(folder, versions, outcomes)  # as far as it is
    print((folder / "on_gpu.md").read_text())
    return 0 if is_right else 1


def _report(folder, versions, outcomes) -> bool:
    """Writes both reports, and returns whether all is right."""
    records = [record for outcome in outcomes for record in outcome["records"]]
    parts = [{k: v for k, v in o.items() if k != "records"} for o in outcomes]
    failed = [r for r in records if "check" in r and not _is_right(r)]
    report = {"versions": versions, "parts": parts, "records": records}
    (folder / "on_gpu.json").write_text(json.dumps(report, indent=1))
    summary = _summary(versions, parts, records, failed)
    (folder / "on_gpu.md").write_text(summary)
    return not failed and all(part["ended"] == "done" for part in parts)


def _run(name: str, folder: pathlib.Path, is_small: bool, end: float) -> dict[str, Any]:
    """Runs a part in a process, and returns how it ended and what it recorded."""
    start = time.monotonic()
    seconds = min(_PARTS[name].limit, end - start)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if is_small:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as scratch:
        lines, log = pathlib.Path(scratch, "records"), pathlib.Path(scratch, "log")
        lines.touch()
        call = [
            sys.executable,
            __file__,
            _PART,
            name,
            folder,
            lines,
            str(int(is_small)),
        ]
        with log.open("w") as told:
            process = subprocess.Popen(
                call,
                env=environment,
                cwd=_REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
            try:
                status = process.wait(max(seconds, 0))
                ended = "done" if status == 0 else f"exit status {status}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = f"stopped after {seconds:.0f} s"
        records = [json.loads(line) for line in lines.read_text().splitlines()]
        outcome = {"part": name, "ended": ended, "seconds": time.monotonic() - start}
        if ended != "done":
            outcome["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    print(f"{name}: {ended}, {outcome['seconds']:.0f} s", flush=True)
    return outcome | {"records": records}


def _run_part(name: str, folder: str, lines: str, is_small: str) -> None:
    """Is what the process of a part does."""
    place = Place(pathlib.Path(folder), pathlib.Path(lines), bool(int(is_small)))
    if not place.is_small and jax.default_backend() == "cpu":
        sys.exit("JAX found no GPU; --cpu runs everything in small on a CPU.")
    _PARTS[name].run(place)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(_QUERY_GPU, capture_output=True, text=True, timeout=20)
        versions["GPU"] = told.stdout.strip() or "none"
    return versions


def _is_right(record: dict[str, Any]) -> bool:
    return "refused" in record or record["error"] <= record["tolerance"]


def _summary(versions, outcomes, records, failed) -> str:
    """Returns the report as Markdown: what failed, and a table of times."""
    done = [r for r in records if "check" in r]
    refused = [r for r in done if "refused" in r]
    lines = [
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        f"{len(done)} checks: {len(failed)} failed, {len(refused)} were refused.",
        "",
    ]
    for r in failed:
        told = r.get("failed", f"error {r['error']:.2g} above {r['tolerance']:g}")
        lines.append(f"- failed: {r['check']}: {told}")
    lines += [f"- refused: {r['check']}: {r['refused']}" for r in refused]
    lines += [
        f"- {o['part']}: {o['ended']}\n\n```\n{o['log']}\n```\n"
        for o in outcomes
        if o["ended"] != "done"
    ]
    measured: dict[str, dict[str, dict]] = {}
    for r in records:
        if "measure" in r:
            measured.setdefault(r["measure"], {})[r["contender"]] = r
    lines += ["", "| case | | compared with | ratio of times |", "|---|---|---|---|"]
    for title, contenders in measured.items():
        (name, first), *others = contenders.items()
        ours = f"{name}: {_time(first)}"
        rows = [(f"{name}: {_time(other)}", other) for name, other in others]
        for told, other in rows or [("", {})]:
            lines.append(f"| {title} | {ours} | {told} | {_ratio(first, other)} |")
    return "\n".join(lines) + "\n"


def _time(record: dict[str, Any]) -> str:
    if "failed" in record:
        return record["failed"].partition("\n")[0][:80].replace("|", "/")
    return f"{statistics.median(record['milliseconds']):.3g} ms"


def _ratio(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns the median ratio and its quartiles; samples are paired by round."""
    if not ("milliseconds" in first and "milliseconds" in other):
        return ""
    pairs = zip(first["milliseconds"], other["milliseconds"], strict=False)
    low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    if sys.argv[1:2] == [_PART]:
        _run_part(*sys.argv[2:])
    else:
        sys.exit(run(sys.argv))

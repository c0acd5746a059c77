"""Checks and measures the package on a GPU, in one run of at most eight minutes.

Run: python scripts/on_gpu.py --out=on_gpu
     python scripts/on_gpu.py --out=on_gpu --cpu  (the same in small, on a CPU)

Attention, maps, a run and a PyTorch module on the GPU are checked against float64;
attention, statistics, ablations and a training step are timed next to jax.nn and
PyTorch. It downloads nothing and needs torch and transformers. Every part is a process
with a time limit, so that none can stop the others: checks run together, measurements
alone. Writes on_gpu.json, on_gpu.md (a table for benchmarks/measured.md) and four
pages. Exits with 1 if a part or a check failed.
"""

import concurrent.futures
import functools
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The scripts use each other and experiments/, neither of which is installed.
_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_REPOSITORY))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import mha_haiku as mh  # noqa: E402
from mha_haiku import commands  # noqa: E402
from scripts.benchmarks.contenders import (  # noqa: E402
    causal_models,
    lab_ours,
    map_statistics,
    sizes,
)

_PACKAGES = "jax jaxlib dm-haiku optax torch torchax transformers numpy".split()
_NAMES = {"tiny": "a model of 2 layers, width 24", "whole": "GPT-2 small"}
_LIMIT = 450  # seconds of all parts together
_B, _H, _G, _K = 2, 4, 2, 64  # examples, heads, key heads, size per head
# Name: dtype, precision of products in float32, tolerance of values and gradients.
_PRECISIONS = {
    "float32": ("float32", "highest", 1e-4),
    "bfloat16": ("bfloat16", None, 2.5e-2),
    "float32, default precision": ("float32", None, 1e-2),
}


class Report(NamedTuple):
    """Where the process of a part writes, and whether it is a small one on the CPU."""

    folder: pathlib.Path
    name: str  # of the part
    is_small: bool

    def device(self) -> str:
        """Returns PyTorch's name of the device."""
        return "cpu" if self.is_small else "cuda"

    def write(self, **record: Any) -> None:
        """Appends a record, which is kept even if the part is stopped later."""
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def check(self, name: str, actual: Any, expected: Any, tolerance: float) -> None:
        """Records the largest error as a share of the largest expected number."""
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        error, largest = math.inf, np.abs(expected).max(initial=0) or 1.0
        if actual.shape == expected.shape:
            error = float(np.abs(actual - expected).max(initial=0) / largest)
        is_right = error <= tolerance  # which no NaN is
        self.write(check=name, error=error, is_right=is_right)

    def save(self, name: str, subject: Any) -> None:
        """Saves a page, and checks that it is a whole one."""
        path = self.folder / f"{name}.html"
        mh.show(subject).save(path)
        is_whole = path.read_text().rstrip().endswith("</html>")
        self.check(f"page {name}", is_whole, True, 0)

    def measure(self, name: str, calls: Mapping[str, Callable[[], Any]]) -> None:
        """Times calls in turn, for at most 15 rounds or about 10 seconds."""
        counts, times = {}, {contender: [] for contender in calls}
        for contender, call in calls.items():
            self._seconds(call, 1)  # compiles
            seconds = self._seconds(call, 1)
            least = 0 if self.is_small else 0.05
            counts[contender] = min(100, 1 + int(least / seconds))
        end = time.perf_counter() + 10
        for i in range(2 if self.is_small else 15):
            if i < 2 or time.perf_counter() < end:
                for contender, call in calls.items():
                    seconds = self._seconds(call, counts[contender])
                    times[contender].append(1000 * seconds)
        for contender, milliseconds in times.items():
            self.write(measure=name, contender=contender, milliseconds=milliseconds)

    def _seconds(self, call, count) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        if "torch" in sys.modules and not self.is_small:
            sys.modules["torch"].cuda.synchronize()
        return (time.perf_counter() - start) / count


# --- checks ---------------------------------------------------------------------------


@jax.jit
def _formula(query, key, value, cotangent, allowed, bias, cap, sink):
    """Returns values, logsumexp, weights and gradients of the textbook's formula."""

    def attend(query, key, value):
        groups = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
        scores = jnp.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
        scores = cap * jnp.tanh(scores / cap) + bias
        masses = jnp.where(allowed, jnp.exp(scores), 0)  # of float64: none overflows
        total = masses.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None])
        weights = masses / jnp.where(total > 0, total, 1)
        values = jnp.einsum("bhts,bshv->bthv", weights, value)
        return values, (jnp.log(total)[..., 0], weights)

    values, pull, aux = jax.vjp(attend, query, key, value, has_aux=True)
    return values, *aux, pull(cotangent)


def _expected(arrays, mask, bias=0.0, cap=1e5, sink=-np.inf) -> Any:
    """Returns `_formula` of arrays `[B, T, H, K]`, in float64."""
    T = arrays[0].shape[1]
    allowed = np.asarray(mask.array(T, T))  # of `[T, T]`, with examples, and heads
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
    numbers = *arrays, allowed, bias, cap, np.broadcast_to(sink, _H)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = [x if x is allowed else np.asarray(x, np.float64) for x in numbers]
        return jax.device_get(_formula(*wide))


def _attention_cases(T: int) -> dict[str, tuple[dict, dict]]:
    """Returns options of `attend`, and what the formula has to know beside the mask."""
    masks, generator = mh.masks, np.random.default_rng(1)
    causal, lengths = masks.causal(), np.array([2 * T // 3, 0])
    dense = generator.random((_B, _H, T, T)) < 0.3
    dense[:, :, 5] = False  # a query that sees nothing
    every = {
        "full": masks.full(),
        "causal": causal,
        "padding": masks.padding(lengths),
        "causal & padding": causal & masks.padding(lengths),
        "dense": masks.dense(dense),
        "window": masks.window(9, 0),
        "window, both sides": masks.window(9, 4),
        "padding of both": masks.padding(lengths, np.array([T - 3, T])),
        "prefix": causal | masks.padding(lengths),
        "segments": masks.segments(np.sort(generator.integers(0, 4, (_B, T)), -1)),
        "dilated": masks.where(lambda t, s: (t - s) % 3 == 0) & causal,
        "global": masks.window(2, 2) | masks.where(lambda t, s: (t == 7) | (s == 7)),
        "function": masks.where(lambda t, s: s % 4 <= t % 5),
        "complement": ~causal,
    }
    bias = generator.standard_normal((_B, _H, T, T)).astype(np.float32)
    sink = generator.standard_normal(_H).astype(np.float32)
    capped = mh.attention.dot_product(soft_cap=2.0)
    normalizer = mh.attention.sink(jnp.asarray(sink))
    return {name: ({"mask": mask}, {}) for name, mask in every.items()} | {
        "bias": ({"mask": causal, "bias": bias}, {"bias": bias}),
        "soft cap": ({"mask": causal, "score": capped}, {"cap": 2.0}),
        "sink": ({"mask": causal, "normalizer": normalizer}, {"sink": sink}),
    }


def _arrays(T: int, dtype: str) -> list[jax.Array]:
    """Draws query, key, value and a cotangent."""
    keys, counts = jax.random.split(jax.random.key(0), 4), (_H, _G, _G, _H)
    shapes = [(_B, T, count, _K) for count in counts]
    return [jax.random.normal(*x, dtype) for x in zip(keys, shapes, strict=True)]


def check_attention(report: Report, name: str) -> None:
    """Checks values, logsumexp and gradients of an implementation, under all masks."""
    T = 32 if report.is_small else 160
    cut = mh.attention.Blockwise(rows=T // 3, columns=T // 4)  # the last tiles are cut
    implementation = cut if name == "blockwise" else name

    def check(title, options, terms, dtype, products, tolerance):
        def attend(*arrays):
            values, found = mh.attend(*arrays, implementation=implementation, **options)
            return values, found.logsumexp

        def both(*arrays):
            values, pull, logs = jax.vjp(attend, *arrays[:3], has_aux=True)
            return values, logs, *pull(arrays[3])

        arrays = _arrays(T, dtype)
        try:
            with jax.default_matmul_precision(products):
                results = jax.jit(both)(*arrays)
        except ValueError as error:
            report.write(check=title, is_right=name == "fused", refused=str(error))
            return
        values, logs, _, gradients = _expected(arrays, options["mask"], **terms)
        expected = values, np.maximum(logs, -99), *gradients  # -inf: nothing is seen
        kinds = ("values", "logsumexp", "dq", "dk", "dv")
        for kind, actual, right in zip(kinds, results, expected, strict=True):
            actual = np.maximum(np.asarray(actual, np.float64), -99)
            report.check(f"{title}, {kind}", actual, right, tolerance)

    cases = list(_attention_cases(T).items())[:: 9 if report.is_small else 1]
    precisions = dict(_PRECISIONS)
    if name == "fused":  # whose kernels take no float32 on GPUs
        precisions = {"bfloat16": precisions["bfloat16"]}
    elif report.is_small:
        precisions = {"float32": precisions["float32"]}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # compilers run together
        waiting = [
            pool.submit(check, f"{name}, {title}: {case}", *options, *precision)
            for case, options in cases
            for title, precision in precisions.items()
        ]
    for each in waiting:
        each.result()


def check_maps(report: Report) -> None:
    """Checks maps and their statistics; saves the page of a map."""
    T = 48 if report.is_small else 1024
    mask = mh.masks.causal() & mh.masks.padding(np.array([2 * T // 3, T]))
    distance = abs(np.arange(T)[:, None] - np.arange(T))

    @jax.jit
    def observed(query, key, value):
        attention_map = mh.attend(query, key, value, mask=mask)[1]
        return attention_map, attention_map.weights(), attention_map.statistics()

    for title, (dtype, products, tolerance) in _PRECISIONS.items():
        arrays = _arrays(T, dtype)
        weights = _expected(arrays, mask)[2]
        with jax.default_matmul_precision(products):
            attention_map, actual, numbers = observed(*arrays[:3])
        logs = np.log(np.where(weights > 0, weights, 1))
        expected = {
            "entropy": -(weights * logs).sum(-1).mean(-1),
            "largest_weight": weights.max(-1).mean(-1),
            "distance": (weights * distance).sum(-1).mean(-1),
            "first_token": weights[..., 0].mean(-1),
            "received": weights.sum(-2),
        }
        report.check(f"maps, {title}: weights", actual, weights, tolerance)
        for name, right in expected.items():
            actual = getattr(numbers, name)
            report.check(f"maps, {title}: {name}", actual, right, tolerance)
        if title == "float32":
            report.save("map", attention_map)


def check_run(report: Report) -> None:
    """Trains configs/reverse.py; checks what it learned, and saves its page."""
    with tempfile.TemporaryDirectory() as folder:
        steps = 20 if report.is_small else None
        subject = mh.train(mh.runs.default_config("reverse"), folder, steps=steps)
        summary = json.loads((pathlib.Path(folder) / "summary.json").read_text())
        loss = summary["metrics"]["held_out_loss"]
        report.check("reverse: loss", loss, 0, 5.0 if report.is_small else 0.01)
        weights = subject.maps("3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3")[0].weights()
        diagonal = np.asarray(weights)[..., ::-1].diagonal(0, -2, -1).mean()
        report.check("reverse: looks back", diagonal, 1, 1 if report.is_small else 0.1)
        report.save("run", folder)


def check_torch(report: Report) -> None:
    """Checks a wrapped GPT-2 of transformers, whose parameters are on the GPU."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    module = causal_models.of_transformers("tiny").to(report.device())
    module.set_attn_implementation("eager")
    tokens = causal_models.tokens("tiny", 2, 48)
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=report.device(), dtype=torch.long)
        theirs = module(ids, output_attentions=True)
    logits = theirs.logits.float().cpu().numpy()
    with jax.default_matmul_precision("highest"):
        subject = mh.wrap(module, examples=[tokens])
        maps, without = subject.maps(tokens), subject.ablated((0, 1)).logits(tokens)
        report.check("torch: logits", subject.logits(tokens), logits, 1e-4)
    for i, weights in enumerate(theirs.attentions):
        weights = weights.float().cpu().numpy()
        report.check(f"torch: weights of layer {i}", maps[i].weights(), weights, 1e-4)
    changed = float(np.abs(np.asarray(without) - logits).max())
    report.check("torch: ablation changes logits", 1e-4 < changed < np.inf, True, 0)
    report.save("torch", maps)


# --- measurements ---------------------------------------------------------------------


def measure_attention(report: Report, length: int) -> None:
    """Measures attention next to JAX's and PyTorch's, whose float32 is TF32 here."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)

    def ours(*arrays, implementation="auto"):
        options = {"mask": mh.masks.causal(), "implementation": implementation}
        return mh.attend(*arrays, **options)[0]

    def of_torch(*arrays):
        return torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)

    def of_torch_with_gradient(tensors, grad):
        torch.autograd.grad(of_torch(*tensors), tensors, grad)

    contenders = {
        "mha_haiku": ours,
        "mha_haiku, blockwise": functools.partial(ours, implementation="blockwise"),
        "jax.nn, XLA": functools.partial(theirs, implementation="xla"),
        "jax.nn, cuDNN": functools.partial(theirs, implementation="cudnn"),
    }
    B = 16 if length == 2048 and not report.is_small else 1
    T, H, K = (length // 64, 2, 16) if report.is_small else (length, 16, 64)
    for dtype in ("bfloat16", "float32"):
        keys = jax.random.split(jax.random.key(0), 4)
        *inputs, cotangent = (jax.random.normal(x, (B, T, H, K), dtype) for x in keys)
        options = {"device": report.device(), "dtype": getattr(torch, dtype)}
        *tensors, grad = (torch.randn(B, H, T, K, **options) for _ in range(4))
        tensors = [x.requires_grad_() for x in tensors]
        forward, both = {}, {}
        for name, function in contenders.items():
            if name != "jax.nn, cuDNN" or (not report.is_small and dtype == "bfloat16"):
                gradient = jax.jit(functools.partial(_with_gradient, function))
                forward[name] = functools.partial(jax.jit(function), *inputs)
                both[name] = functools.partial(gradient, cotangent, *inputs)
        forward["PyTorch"] = functools.partial(torch.no_grad()(of_torch), *tensors)
        both["PyTorch"] = functools.partial(of_torch_with_gradient, tensors, grad)
        title = f"{B} x {H} heads, {T}, causal, {dtype}, forward"
        report.measure(title, forward)
        report.measure(f"{title} and backward", both)


def _with_gradient(function, cotangent, *arrays):
    values, pull = jax.vjp(function, *arrays)
    return values, pull(cotangent)


def measure_statistics(report: Report) -> None:
    """Measures statistics next to the forward pass alone."""
    uses = {"statistics": "with all statistics", "forward": "forward alone"}
    for length in (512, 1024) if report.is_small else (2048, 32768):
        core = sizes.CoreSize(length, 8)._asdict()
        calls = {
            name: map_statistics.prepare(use, 1, core).run for use, name in uses.items()
        }
        report.measure(f"8 heads, {length}, causal, float32, statistics", calls)


def measure_ablations(report: Report) -> None:
    """Measures ablations of all heads of GPT-2's size; saves their page."""
    size, batch, length = ("tiny", 2, 16) if report.is_small else ("whole", 8, 64)
    count = causal_models.SIZES[size].num_heads
    of = lab_ours.measured(size, batch, length)
    forward = lab_ours.prepare("forward", size, batch, length, calls=count)
    calls = {
        f"{count} single ablations": lambda: mh.heads.ablation(of),
        f"{count} forward passes": forward.run,
    }
    report.measure(f"{_NAMES[size]}, {batch} x {length} tokens, float32", calls)
    report.save("importance", mh.heads.ablation(of))


def measure_training(report: Report) -> None:
    """Measures a training step of GPT-2's size next to transformers', in TF32."""
    import optax
    import torch

    size, batch, length = ("tiny", 2, 16) if report.is_small else ("whole", 8, 1024)
    tokens = causal_models.tokens(size, batch, length)
    model, params = causal_models.ours(size)
    adam = optax.adamw(1e-4)

    def loss_of(params):
        logits = model.apply(params, None, tokens, is_training=False).logits[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = adam.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    carry = params, adam.init(params)

    def ours():
        nonlocal carry
        carry = step(*carry)
        return carry

    torch.backends.cuda.matmul.allow_tf32 = True
    network = causal_models.of_transformers(size).to(report.device())
    fused = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    ids = torch.tensor(tokens, device=report.device(), dtype=torch.long)

    def theirs():
        fused.zero_grad()
        network(ids, labels=ids, use_cache=False).loss.backward()
        fused.step()

    title = f"a training step of {_NAMES[size]}, {batch} x {length} tokens, float32"
    report.measure(title, {"mha_haiku": ours, "PyTorch": theirs})


# --- the run --------------------------------------------------------------------------

# Name: function of a report, and its limit in seconds; checks come first.
_PARTS: dict[str, tuple[Callable[[Report], None], float]] = {
    f"attention_{x}": (functools.partial(check_attention, name=x), 180)
    for x in ("dense", "formula", "blockwise", "fused", "auto")
} | {
    "maps": (check_maps, 240),
    "run": (check_run, 150),
    "torch": (check_torch, 150),
    "measure_2048": (functools.partial(measure_attention, length=2048), 100),
    "measure_8192": (functools.partial(measure_attention, length=8192), 100),
    "measure_statistics": (measure_statistics, 60),
    "measure_ablations": (measure_ablations, 80),
    "measure_training": (measure_training, 80),
}


def main(*, out: str, cpu: bool = False) -> int:
    """Runs all parts, and writes the report.

    Args:
      out: Folder of the report and the pages.
      cpu: Run everything in small on a CPU.
    """
    folder, end = pathlib.Path(out).resolve(), time.monotonic() + _LIMIT
    folder.mkdir(parents=True, exist_ok=True)
    there = {x.name: x.version for x in importlib.metadata.distributions()}
    versions = {name: there[name] for name in _PACKAGES if name in there}
    run = functools.partial(_run, folder=folder, is_small=cpu, end=end)
    parts, measurements = [], [x for x in _PARTS if x.startswith("measure")]
    checks = [x for x in _PARTS if x not in measurements]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in itertools.chain(pool.map(run, checks), map(run, measurements)):
            parts.append(part)  # written as far as it is, in case the run is stopped
            text = json.dumps({"versions": versions, "parts": parts}, indent=1)
            (folder / "on_gpu.json").write_text(text)
            (folder / "on_gpu.md").write_text(_summary(versions, parts))
    print((folder / "on_gpu.md").read_text())
    return int(any("failed" in _outcome(part) for part in parts))


def _run(name: str, folder: pathlib.Path, is_small: bool, end: float) -> dict[str, Any]:
    """Runs a part in a process, and returns how it ended and what it recorded."""
    start = time.monotonic()
    seconds = max(0.0, min(_PARTS[name][1], end - start))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if is_small:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    (path := folder / f"{name}.jsonl").write_text("")
    call = f"from scripts import on_gpu; on_gpu.run_part({str(folder)!r}, {name!r}, "
    command = [sys.executable, "-c", f"{call}{is_small})"]
    options = {"cwd": _REPOSITORY, "env": environment, "timeout": seconds}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
        ended = f"failed: {done.stderr[-3000:]}" if done.returncode else "done"
    except subprocess.TimeoutExpired:
        ended = f"failed: stopped after {seconds:.0f} s"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    print(f"{name}: {ended}, {time.monotonic() - start:.0f} s", flush=True)
    return {"part": name, "ended": ended, "records": records}


def run_part(folder: str, name: str, is_small: bool) -> None:
    """Runs a part in this process, which has no other task."""
    if not is_small and jax.default_backend() == "cpu":
        sys.exit("JAX found no GPU; --cpu runs everything in small on a CPU.")
    report = Report(pathlib.Path(folder), name, is_small)
    report.write(device=jax.devices()[0].device_kind)
    _PARTS[name][0](report)


def _outcome(part: dict[str, Any]) -> str:
    wrong = [r["check"] for r in part["records"] if not r.get("is_right", True)]
    count = sum("check" in r for r in part["records"])
    failed = f"; failed: {', '.join(wrong)}" if wrong else ""
    return f"{part['part']}: {part['ended']}, {count} checks{failed}"


def _summary(versions: dict[str, str], parts: list[dict[str, Any]]) -> str:
    """Returns the report as Markdown: what failed, and a table of times."""
    records = [record for part in parts for record in part["records"]]
    device = " ".join({r["device"] for r in records if "device" in r})
    lines = [f"{device}, {', '.join(map(' '.join, versions.items()))}.", ""]
    lines += [f"- {_outcome(part)}" for part in parts]
    refused = [r["check"].split(": ")[1] for r in records if "refused" in r]
    lines += [f'- "fused" refuses: {", ".join(refused)}', ""]
    lines += ["| case | | compared with | ratio of times |", "|---|---|---|---|"]
    first: dict[str, Any] = {}
    for record in (r for r in records if "measure" in r):
        title, other = record["measure"], record["milliseconds"]
        said = f"{record['contender']}: {statistics.median(other):.3g} ms"
        if title not in first:
            first[title] = record["milliseconds"], said
            continue
        ours, called = first[title]
        ratios = [x / y for x, y in zip(ours, other, strict=True)]  # of a round
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(f"| {title} | {called} | {said} | {ratio} |")
    return "\n".join(lines) + "\n"


# Takes argv; returns the exit status.
run = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))

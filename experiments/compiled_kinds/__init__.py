"""Kinds of compiled models that are harder to interpret, with known heads and edges.

A kind is a function of the arguments of `compile` that returns a `Compiled`, registered
in `KINDS` by the decorator `_offered`. Whatever it changes, the circuit is the
program's, and all answers to `CHECKED` random inputs are right (99 percent for
`trained`).

D width of the stream, d of the compressed one, H heads.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mha_haiku.core import models, sites
from mha_haiku.core.modules import anatomy
from mha_haiku.lab.rasp import compiler, language, layout
from mha_haiku.lab.rasp.compiler import Compiled
from mha_haiku.lab.rasp.language import Condition, Head, Map, Program, Selector
from mha_haiku.training import losses, tasks

KINDS: dict[str, Callable[..., Compiled]] = {}
CHECKED = 256  # inputs

_MARGIN = 0.02  # nats, the mean loss at which training stops
_ROUNDS, _STEPS = 30, 100  # of training; answers are checked after each round
_BATCH, _POOL = 64, 1024  # examples of a step, and in total
_ADAM = optax.adam(optax.exponential_decay(3e-3, 500, 0.75))


def _offered(make: Callable[..., Compiled]) -> Callable[..., Compiled]:
    KINDS[make.__name__] = make
    return make


@_offered
def plain(program: Program, *, seed: int = 0, **options: Any) -> Compiled:
    """Compiles the program with `compile`, and checks the answers."""
    return _checked(compiler.compile(program, seed=seed, **options), seed)


@_offered
def redundant(program: Program, **options: Any) -> Compiled:
    """Duplicates each head that copies; the output of either one is enough.

    Ablating one changes no answer; ablating both does. If they disagree, as when one is
    patched, both values are read.

    Raises:
      ValueError: If no head copies, or a layer has too few heads.
    """
    return plain(doubled(program, is_backup=False), **options)


@_offered
def backup(program: Program, **options: Any) -> Compiled:
    """Like `redundant`, but the second head is read only if the first writes nothing.

    So changing only the second head changes no answer.

    Source: Wang et al. 2022, section 3.4, https://arxiv.org/abs/2211.00593.
    """
    return plain(doubled(program, is_backup=True), **options)


@_offered
def decoys(program: Program, *, seed: int = 0, **options: Any) -> Compiled:
    """Adds heads that attend and read values like the program's, but write nothing.

    Each head of the program gets one, as long as its layer has other heads.
    """
    known = compiler.compile(program, seed=seed, **options)
    generator = np.random.default_rng(seed)
    for layer in range(known.config.num_layers):
        is_real = known.is_real[layer]
        heads, free = np.flatnonzero(is_real), np.flatnonzero(~is_real)
        others = dict(zip(heads, generator.permutation(free), strict=False))
        for axis, view in _by_head(known, known.params, layer):
            for head, other in others.items():
                view[other] = 0 if axis.is_read else view[head]
    return _checked(known, seed)


@_offered
def noisy(program: Program, *, seed: int = 0, **options: Any) -> Compiled:
    """Adds normal noise to all weights: the most that leaves all answers right.

    The standard deviation, the same for all arrays, is found in factors of 1.5.

    Raises:
      ValueError: If any noise causes mistakes.
    """
    known = compiler.compile(program, seed=seed, **options)
    example = known.examples(CHECKED, seed=seed)
    for scale in 1.5 ** -np.arange(24.0):
        generator = np.random.default_rng(seed)

        def noised(
            x: np.ndarray,
            scale: float = scale,
            generator: np.random.Generator = generator,
        ):
            return np.float32(x + scale * generator.standard_normal(x.shape))

        result = dataclasses.replace(known, params=jax.tree.map(noised, known.params))
        if right(result, example) == 1:
            return result
    raise ValueError(f"{program.name} makes mistakes with any noise in its weights.")


@_offered
def superposed(
    program: Program, *, seed: int = 0, width: float = 0.75, **options: Any
) -> Compiled:
    """Compresses the stream to `width` times what the program needs, by training.

    Everything written to the stream goes through a projection, `[D, d]`, and everything
    read from it through the transpose. The projection is trained, starting from the
    principal components of the stream.

    Raises:
      ValueError: If training does not make all answers right.

    Source: Lindner et al. 2023, section 4, https://arxiv.org/abs/2301.05062.
    """
    known = compiler.compile(program, seed=seed, **options)
    size = max(1, round(width * compiler.sizes(program).model_size))
    config = known.config.replace(model_size=size)
    num_tokens = len(known.params["embedding"]["embeddings"])
    num_classes = len(known.params["logits"]["b"])
    model, _ = compiler.built(config, num_tokens, num_classes)
    inputs = known.examples(CHECKED, seed=seed).inputs
    apply = functools.partial(known.model.apply, is_training=False)
    look = jax.jit(sites.look(apply, ["layer_*/stream*"]))
    _, streams = look(known.params, None, inputs)
    streams = [np.reshape(x, (-1, x.shape[-1])) for x in streams.values()]
    _, _, components = np.linalg.svd(np.concatenate(streams), full_matrices=False)
    compressed = dataclasses.replace(known, config=config, model=model)
    start = np.float32(components[:size].T)
    return _trained(compressed, start, _projected, known.params, seed=seed, least=1.0)


@_offered
def trained(
    program: Program, *, seed: int = 0, noise: float = 1e-4, **options: Any
) -> Compiled:
    """Trains the other heads around the fixed circuit until answers are right again.

    At the start the noise that they write is doubled until a tenth of the answers are
    wrong.

    Raises:
      ValueError: If training does not make 99 percent of the answers right.
    """
    share = 1.0
    while share > 0.9:
        known = compiler.compile(program, seed=seed, noise=noise, **options)
        share, noise = right(known, known.examples(CHECKED, seed=seed)), 2 * noise
    is_free = jax.tree.map(np.zeros_like, known.params)
    for layer in range(known.config.num_layers):
        for _, view in _by_head(known, is_free, layer):
            view[:] = 1
            view[[head for i, head in known.heads if i == layer]] = 0
    params = known.params
    return _trained(known, params, _held, (params, is_free), seed=seed, least=0.99)


def _either(is_backup: bool, places: layout.Layout, part: Map, writes: dict):
    """Yields two hidden units for each step from 0 to 1, from codes of 1/2 to 3/4."""
    first, second = map(places.read, part.inputs)
    reads = [first + second]
    if is_backup:  # twice the first outweighs the second
        reads = [first, second - 2 * first.sum(1, keepdims=True)]
    for codes in reads:
        for code, value in zip(codes.T, places.domain(part), strict=True):
            yield 4 * code, -2.0, writes[value]
            yield 4 * code, -3.0, -writes[value]


def doubled(program: Program, *, is_backup: bool) -> Program:
    """Duplicates the heads of a program that copy: a model needs only one of two.

    With `is_backup` the second of two counts only where the first is None; else both
    count, and two different values give two codes at once.

    Raises:
      ValueError: If no head copies.
    """

    @functools.cache
    def of(part: language.Sequence):
        if isinstance(part, Map):
            return dataclasses.replace(part, inputs=tuple(map(of, part.inputs)))
        if not isinstance(part, Head):
            return part
        conditions = part.selector.conditions
        selector = Selector(
            tuple(
                Condition(of(keys), of(queries), f) for keys, queries, f in conditions
            ),
            tuple(map(of, part.selector.orders)),
        )
        values = None if part.values is None else of(part.values)
        head = dataclasses.replace(part, selector=selector, values=values)
        if head.values is None:
            return head
        pair = head, dataclasses.replace(head)
        units = functools.partial(_either, is_backup)
        return Map(lambda one, _: one, pair, units)

    result = dataclasses.replace(program, output=of(program.output))
    if not any(getattr(part, "units", None) for part in layout.parts(result.output)):
        raise ValueError(f"{program.name} has no head that copies.")
    return result


def right(compiled: Compiled, example: tasks.Example) -> float:
    """Computes the share of right answers of a model on a batch."""
    return float(_quality(compiled.model)(compiled.params, example)[1])


@functools.lru_cache(maxsize=64)
def _quality(model: Any) -> Callable:
    """Compiles a function of parameters and a batch: mean loss, accuracy."""

    @jax.jit
    def quality(params: Any, example: tasks.Example):
        logits = model.apply(params, None, example.inputs, is_training=False).logits
        cross_entropies = losses.cross_entropy(logits, example.targets)
        both = cross_entropies, logits.argmax(-1) == example.targets
        return [(x * example.weights).sum() / example.weights.sum() for x in both]

    return quality


def _checked(compiled: Compiled, seed: int) -> Compiled:
    """Checks that a model makes no mistake, or raises ValueError."""
    share = right(compiled, compiled.examples(CHECKED, seed=seed))
    if share < 1:
        raise ValueError(
            f"{compiled.program.name} answers only {share:.2%} of {CHECKED} inputs "
            "right: less noise or other sizes may help."
        )
    return compiled


def _trained(
    compiled: Compiled,
    x: Any,
    params_of: Callable[[Any, Any], Any],
    given: Any,
    *,
    seed: int,
    least: float,
) -> Compiled:
    """Trains `x` in `params_of(x, given)` until `least` of the answers are right."""
    advance = _rounds(compiled.model, params_of)
    pool = compiled.examples(_POOL, seed=1000 + seed)
    checked = compiled.examples(CHECKED, seed=seed)
    state = x, _ADAM.init(x)
    for i in range(_ROUNDS):
        state = advance(*state, given, pool, jax.random.key(seed * _ROUNDS + i))
        params = jax.device_get(params_of(state[0], given))
        loss, share = _quality(compiled.model)(params, checked)
        if share >= least and loss < _MARGIN:
            return dataclasses.replace(compiled, params=params)
        if i > _ROUNDS // 3 and share < 0.9:
            break  # no model this far behind has ever recovered
    raise ValueError(
        f"{compiled.program.name} was not learned in {(i + 1) * _STEPS} steps: "
        f"{share:.2%} of answers are right, and the loss is {loss:.2g} nats."
    )


@functools.lru_cache(maxsize=64)
def _rounds(model: models.Model, params_of: Callable[[Any, Any], Any]) -> Callable:
    """Compiles a function that trains `_STEPS` steps."""
    quality = _quality(model)

    @jax.jit
    def advance(
        x: Any, state: optax.OptState, given: Any, pool: tasks.Example, rng: jax.Array
    ):
        def step(carry: tuple[Any, optax.OptState], rng: jax.Array):
            x, state = carry
            rows = jax.random.randint(rng, (_BATCH,), 0, _POOL)
            example = jax.tree.map(lambda leaf: leaf[rows], pool)
            slopes = jax.grad(lambda x: quality(params_of(x, given), example)[0])(x)
            updates, state = _ADAM.update(slopes, state, x)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(step, (x, state), jax.random.split(rng, _STEPS))[0]

    return advance


def _held(x: Any, given: tuple[Any, Any]) -> Any:
    """Uses the parameters `x` where they are free, and the old ones elsewhere."""
    params, is_free = given
    return jax.tree.map(
        lambda x, y, free: jnp.where(free > 0, x, y), x, params, is_free
    )


def _projected(projection: jax.Array, params: Mapping[str, Mapping[str, Any]]):
    """Compresses the parameters of a model's stream by a projection `[D, d]`."""

    def of(module: str, name: str, x: jax.Array | np.ndarray):
        if module.endswith(("embedding", "positions", "linear", "output")):
            return x @ projection
        return projection.T @ x if name == "w" else x

    return {m: {n: of(m, n, x) for n, x in p.items()} for m, p in params.items()}


def _by_head(
    compiled: Compiled, params: dict[str, dict[str, np.ndarray]], layer: int
) -> Iterator[tuple[anatomy.Axis, np.ndarray]]:
    """Yields each parameter of a layer's heads, as a view whose first axis is H."""
    num_heads = compiled.config.attention.num_heads
    for module, leaves in params.items():
        for name, x in leaves.items():
            axis = anatomy.axis_of(module, name)
            if f"/layer_{layer}/attention/" in module and axis is not None:
                view = np.moveaxis(x, axis.place, 0)
                yield axis, view.reshape(num_heads, -1, *view.shape[1:])


def auroc(values: np.ndarray, is_real: np.ndarray) -> float:
    """Computes the probability that a real head or edge is ranked above another.

    Ties count half. Larger values are more important, NaN where there is no head.

    Raises:
      ValueError: If all heads or edges are real, or none are.

    Source: Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747.
    """
    exists = ~np.isnan(values)
    positive, negative = values[exists & is_real], values[exists & ~is_real]
    if not positive.size or not negative.size:
        raise ValueError("is_real must have both True and False.")
    above = np.sign(positive[:, None] - negative[None])
    return float((above.mean() + 1) / 2)

"""Tests whether attention shows which inputs matter: roll-out against replacement.

Dimensions: N examples, T positions, L layers. An example asks for the answer at one
position. The effect of an input is the change in the probability of the right answer
when another token replaces it: the task's mask token if it has one, else random other
tokens. A measure is good if it ranks the inputs of an example like their effects.

Source: Abnar and Zuidema 2020, section 2, https://arxiv.org/abs/2005.00928.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab.heads import flow, running
from mha_haiku.lab.heads.rollout import rollout as rolled_out
from mha_haiku.records import Result, means
from mha_haiku.records.tables import Column, Table
from mha_haiku.showing import curves
from mha_haiku.subjects import computing, example_rows
from mha_haiku.subjects.subject import Subject, refuse, verb
from mha_haiku.training import evaluation, stepping, tasks

Array = jax.Array

# Table 1 of the source: a transformer of 6 layers that predicts the number of verbs. To
# be compared only with the run of configs/papers/rollout.py.
PUBLISHED = {
    "raw": (0.69, 0.10, -0.11, -0.09, 0.20, 0.29),
    "roll-out": (0.32, 0.38, 0.51, 0.62, 0.70, 0.71),
    "flow": (0.32, 0.44, 0.70, 0.70, 0.71, 0.70),
}
_MEASURES = ("raw", "roll-out", "flow")
_FLOW_EXAMPLES = 32
_NAME = "blanking inputs out"  # of the progress bar
_BATCH_POSITIONS = 2**16  # in a batch, over examples and replaced inputs
# Folded into the key of held-out examples, into which they fold their indices: no
# example has this index, so questions are drawn independently of the examples.
_QUESTIONS = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Study(Result):
    """Spearman's rank correlations of measures with the effect of the inputs."""

    title: str  # the run, its step, and what means are over
    # `[N, L]` float64 by the measure's name: the correlation with the absolute changes
    # of probability, for the measure over the first 1 to L layers. NaN where all inputs
    # are equal. Flow is of fewer examples.
    changes: dict[str, np.ndarray]
    # The same with the signed fall of the probability: an input that misleads ranks
    # below one without effect.
    drops: dict[str, np.ndarray]
    published: Mapping[str, Sequence[float]]  # of a paper for the same model and data
    file_name = "rollout"

    def table(self) -> Table:
        """Returns a row per measure and layer, which counts from 1."""
        shown = "{:.2f} ± {:.2f}"
        drop = ("drop_correlation", "drop_standard_error")
        columns = [
            Column("measure"),
            Column("layer"),
            Column("with the change", "", shown, ("correlation", "standard_error")),
            Column("with the drop", "", shown, drop),
            Column("examples"),
            Column("published"),
        ]
        drops = summary(self.drops)
        rows = [
            {
                "measure": name,
                "layer": i + 1,
                "with the change": tuple(map(float, numbers)),
                "with the drop": tuple(map(float, drops[name][i])),
                "examples": len(self.changes[name]),
                "published": dict(enumerate(self.published.get(name, ()))).get(i),
            }
            for name, layers in summary(self.changes).items()
            for i, numbers in enumerate(layers)
        ]
        return Table(columns, rows, num_keys=2)

    def text(self) -> str:
        """Writes the table as text, and the verdict below it."""
        return f"{self.table().text()}\n\n{self.verdict()}"

    def verdict(self) -> str:
        """Returns a sentence: does roll-out rank inputs better than raw attention?

        It compares the last layers, with absolute changes and with drops. A difference
        counts if it is at least two standard errors of the paired differences.
        """
        lines = []
        if self.published:
            first, last = (self.published[name][-1] for name in ("roll-out", "raw"))
            lines.append(f"Published: roll-out {first}, raw attention {last}.")
        for what, correlations in (
            ("the size of the change", self.changes),
            ("the drop", self.drops),
        ):
            rolled, raw = (correlations[name][:, -1] for name in ("roll-out", "raw"))
            difference = means.mean(rolled - raw)
            error = means.standard_error(rolled - raw)
            if self.published:
                said = (
                    "the same order" if difference > 2 * error else "NOT the same order"
                )
            elif abs(difference) > 2 * error:
                said = (
                    f"{'roll-out' if difference > 0 else 'raw attention'} ranks better"
                )
            else:
                said = "no difference"
            lines.append(
                f"With {what}: roll-out {means.mean(rolled):.2f}, raw attention "
                f"{means.mean(raw):.2f} in the last layer, difference {difference:.3f} "
                f"± {error:.3f}: {said}."
            )
        return "\n".join(lines)

    @property
    def picture(self) -> functools.partial:
        """Draws the correlations by layer."""
        drawn, found = curves.rollout, summary(self.changes)
        return functools.partial(drawn, found, self.published, title=self.title)


@verb
def rollout(
    subject: Subject,
    examples: int | Any = 256,
    *,
    flow_examples: int | None = None,
    draws: int = 8,
    published: Mapping[str, Sequence[float]] | None = None,
) -> Study:
    """Compares roll-out and raw attention with the effect of replacing inputs.

    Masked inputs, padding and, in causal models, inputs after the position of the
    answer are not ranked.

    The answer to a text is the next token, at a random position. For an encoder it is a
    hidden token, or the model's answer if it has no mask. A subject without a task has
    no vocabulary, so other tokens of the examples replace an input.

    Args:
      subject: The model.
      examples: Number of held-out examples, of which N have a target that counts; or
        inputs, such as texts.
      flow_examples: Number of examples for which flow, which is slow, is computed.
        Defaults to 32, or all if there are fewer.
      draws: The number of random tokens over which changes are averaged.
      published: Numbers to compare with, if the run is a paper's: `PUBLISHED`.

    Raises:
      ValueError: If the model has no logits at positions, two stacks of layers, or
        inputs that are no tokens.
    """
    _check(subject)
    config = subject.model.config
    predicts_next = config is None or config.family == "causal"
    batches = computing.batches_given(subject, examples, targets=predicts_next)
    kind = "held-out " if batches is None else ""
    if batches is not None:
        batches = _with_answers(subject, batches)
    count = examples if batches is None else sum(len(x.inputs) for x in batches)
    with checks.user_mistakes():
        if flow_examples is None:
            flow_examples = min(_FLOW_EXAMPLES, count)
        checks.integer_in("flow_examples", flow_examples, 1, count)
        checks.positive_integer("draws", draws)
    found = [
        effect
        for batch in _effects(subject, batches, count, draws)
        for effect in _each(batch)
    ]
    _add_flows(subject, found[:flow_examples])
    asks = [effect for effect in found if effect["asks"]]
    if not asks:
        raise ConfigError(f"In {count} {kind}examples no target counts.")

    def correlations(of: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
        found = {name: [] for name in _MEASURES}
        for x in asks:
            for name, scores in x["measures"].items():
                found[name].append(_correlations(scores, of(x["drop"]), x["counted"]))
        return {name: np.array(rows) for name, rows in found.items()}

    title = f"{subject.title}: means over {len(asks)} {kind}examples"
    changes, drops = correlations(np.abs), correlations(np.asarray)
    return Study(title, changes, drops, published or {})


def summary(correlations: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns means over examples and their standard errors, `[L, 2]` by name."""
    return {
        name: np.stack([means.mean(x), means.standard_error(x)], axis=-1)
        for name, x in correlations.items()
    }


def _check(subject: Subject) -> None:
    config, task = subject.model.config, subject.task
    if subject.codec.has_decoder or (
        config is not None and config.family == "encoder_decoder"
    ):
        raise ConfigError(
            "A study of roll-out needs a model of one stack of layers, got an "
            "encoder_decoder.\nFor the encoder alone there is "
            "mha_haiku.heads.rollout(output.maps.encoder, rows)."
        )
    if config is not None and config.attention.gate != "none":
        raise ConfigError(
            "A study of roll-out needs attention whose heads have no gates, got "
            f"config.model.attention.gate = {config.attention.gate!r}."
        )
    if config is None or task is None:
        return
    is_whole = config.family == "set_classifier" or config.output.pool is not None
    if task.num_tokens is None or is_whole or "loss" not in task.metrics:
        raise ConfigError(
            "A study of roll-out needs a task with tokens and an answer at positions, "
            f"got {task.name}."
        )


def _with_answers(
    subject: Subject, batches: Sequence[tasks.Example]
) -> list[tasks.Example]:
    """Adds targets, on the host, to batches without targets.

    If the task has a mask, a token at a random position of each example is hidden,
    unless there are masks already; else the target is the model's answer.
    """
    generator = np.random.default_rng(_seed(subject))
    run = jax.jit(functools.partial(running.run, subject.model))
    mask = getattr(subject.task, "mask_token", None)
    encoder = getattr(subject.task, "encoder", None)
    special = () if encoder is None else (*encoder.before, *encoder.after)
    answered = []
    for batch in batches:
        if _is_answered(subject, batch):
            answered.append(batch)
            continue
        original = np.array(batch.inputs)
        tokens = original.copy()
        valid = np.asarray(running.valid(tokens.shape[1], batch, ""))
        if mask is not None:
            can_hide = valid & ~np.isin(tokens, special)
            for row in np.flatnonzero(can_hide.any(1) & ~(tokens == mask).any(1)):
                tokens[row, generator.choice(np.flatnonzero(can_hide[row]))] = mask
        batch = batch._replace(inputs=tokens, weights=valid.astype(np.float32))
        answers = np.asarray(run(subject.params, batch).logits.argmax(-1))
        targets = np.where(tokens == original, answers, original).astype(np.int32)
        answered.append(batch._replace(targets=targets))
    return answered


def _is_answered(subject: Subject, batch: tasks.Example) -> bool:
    """Checks whether targets count; raises ValueError if there is no answer."""
    shape, dtype = np.shape(batch.inputs), jnp.result_type(batch.inputs)
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.integer):
        refuse(subject, "rollout", "does not read tokens, which others could replace")
    run = functools.partial(running.run, subject.model)
    logits = jax.eval_shape(run, subject.params, batch).logits
    if logits is None:
        refuse(subject, "rollout", "gives no logits")
    if logits.shape[:-1] != shape:
        refuse(subject, "rollout", "gives no answer at each position")
    asked = np.asarray(batch.targets)[np.asarray(batch.weights) > 0]
    return asked.size > 0 and asked.max() < logits.shape[-1]


def _effects(
    subject: Any, batches: Any, count: int, draws: int
) -> Iterator[dict[str, Any]]:
    """Yields the results of `effects` on batches, or on held-out ones, on the host."""
    task = subject.task
    if task is None:  # there is no other vocabulary
        stand_ins = np.unique(np.concatenate([np.ravel(x.inputs) for x in batches]))
        if len(stand_ins) < 2:
            raise ValueError("examples must have two different tokens at least.")
    else:
        stand_ins = _stand_ins(task)
    program = jax.jit(functools.partial(effects, subject, stand_ins, draws))
    if task is not None and batches is None:
        batch_size = _BATCH_POSITIONS // task.sequence_length**2
        data, seed = jax.device_put(task.held_out_data), _seed(subject)

        @jax.jit
        def of_indices(data: Any, indices: Array) -> tuple[tasks.Example, Array]:
            return evaluation.held_out_batch(task, seed, data, indices), indices

        yield from computing.observations(
            subject,
            program,
            range(count),
            batch_size=max(1, min(count, batch_size)),
            name=_NAME,
            examples_at=lambda indices: of_indices(data, np.array(indices, "i4")),
        )
        return
    first = 0
    for batch in subject.progress(batches, name=_NAME, unit="batch"):
        indices = np.arange(first, first + len(batch.inputs))
        first += len(indices)
        yield jax.device_get(program(subject.params, (batch, indices)))


def _each(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits the results of `effects`; `example` stays a batch, of one example."""
    of_all = {name: x for name, x in batch.items() if name != "example"}
    for n in range(len(batch["row"])):
        example = example_rows.taken(batch["example"], slice(n, n + 1))
        yield jax.tree.map(operator.itemgetter(n), of_all) | {"example": example}


def _seed(subject: Subject) -> int:
    return 0 if subject.config is None else subject.config.seed


def _add_flows(subject: Subject, found: Sequence[dict[str, Any]]):
    """Adds the flows `[L, T]` to the measures of examples."""
    make_maps = jax.jit(functools.partial(_maps, subject))
    for effect in subject.progress(found, name="flow", unit="example"):
        maps = make_maps(subject.params, effect["example"])
        row = int(effect["row"])
        flows = [flow(maps[: i + 1], row)[0, 0] for i in range(len(maps))]
        effect["measures"]["flow"] = np.array(flows)


def _maps(
    subject: Subject, params: Any, example: tasks.Example
) -> Sequence[attention.AttentionMap]:
    """Computes the map of each layer; of a function those that are found."""
    if subject.model.config is not None:
        return running.run(subject.model, params, example).maps
    _, found = running.look(subject.model, params, example, ["*/map"])
    return tuple(found.values())


def _correlations(
    scores: np.ndarray, importance: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    """Returns Spearman's correlations of `[L, T]` scores with `[T]`, if `counted`."""
    from scipy import stats

    if counted.sum() < 2:
        return np.full(len(scores), np.nan)
    ranks = stats.rankdata(np.vstack([scores, importance])[:, counted], axis=-1)
    with np.errstate(invalid="ignore"):  # NaN where all ranks are the same
        return np.corrcoef(ranks)[-1, :-1]


def effects(
    subject: Subject,
    stand_ins: np.ndarray,
    draws: int,
    params: Any,
    batch: tuple[tasks.Example, Array],
) -> dict[str, Any]:
    """Computes the effect of each input, and the measures, of indexed examples.

    Under jit. Returns `example`; `row [N]`, the position of the answer; `asks [N]`,
    whether there is one; `counted [N, T]`, the inputs to rank; `drop [N, T]`; and
    `measures`, `[N, L, T]` by name, for the first 1 to L layers.
    """
    example, indices = batch
    key = stepping.stream(_seed(subject), "held_out")
    key = jax.random.fold_in(key, np.uint32(_QUESTIONS))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
    question = functools.partial(_question, subject.task)
    # Keywords of a function need no axis of examples.
    row, asks = jax.vmap(question)(keys, example._replace(others=None))
    blanks = jax.vmap(functools.partial(_blanks, stand_ins, draws))(
        keys, example.inputs
    )
    maps, rows = _maps(subject, params, example), row[:, None]
    raw = [rolled_out([layer], rows, residual=0.0) for layer in maps]
    measures = {"raw": raw, "roll-out": rolled_out(maps, rows, per_layer=True)}
    measures = {
        name: jnp.moveaxis(jnp.asarray(x)[:, :, 0], 0, 1)
        for name, x in measures.items()
    }
    counted = _counted(subject, example, row)
    if subject.model.config is None:  # its attention shows whether it is causal
        counted &= measures["roll-out"][:, -1] > 0
    return {
        "example": example,
        "row": row,
        "asks": asks,
        "counted": counted,
        "drop": drops(subject, params, example, row, jnp.swapaxes(blanks, 0, 1)),
        "measures": measures,
    }


def drops(
    subject: Subject, params: Any, example: tasks.Example, row: Array, blanks: Array
) -> Array:
    """Measures how much the probability of the right answer falls without each input.

    That is `[N, T]`, the mean over draws. The answers are at the positions `row [N]`,
    and `blanks [draws, N, T]` replace the inputs one by one.
    """
    positions = jnp.arange(example.inputs.shape[1])

    def probability(inputs: Array | np.ndarray) -> Array:
        replaced = example._replace(inputs=inputs)
        logits = running.run(subject.model, params, replaced).logits
        places = jnp.arange(len(row)), row, example.targets[jnp.arange(len(row)), row]
        return jnp.exp(jax.nn.log_softmax(logits)[places])

    def per_draw(blanks: Array) -> Array:
        def without(s: Array) -> Array:
            at = positions[None] == s
            return probability(jnp.where(at, blanks, example.inputs))

        return jax.lax.map(without, positions)

    blanked = jax.lax.map(per_draw, blanks).mean(0)  # [T, N]
    return (probability(example.inputs)[None] - blanked).T


def _question(task: Any, key: Array, example: tasks.Example) -> tuple[Array, Any]:
    """Returns a random position whose target counts, and whether there is one."""
    asked = example.weights > 0
    if hasattr(task, "mask_token"):
        asked &= example.inputs == task.mask_token
    chance = jax.random.uniform(jax.random.fold_in(key, 0), asked.shape)
    return jnp.argmax(jnp.where(asked, chance, -1)), asked.any()


def _stand_ins(task: Any) -> np.ndarray:
    """Returns the tokens that replace others, sorted: only the mask if there is one."""
    if hasattr(task, "mask_token"):
        return np.array([task.mask_token], np.int32)
    return np.arange(task.num_tokens, dtype=np.int32)


def _blanks(
    stand_ins: Array | np.ndarray, draws: int, key: Array, inputs: Array | np.ndarray
) -> Array:
    """Returns the tokens that replace each input, `[draws, T]`."""
    count, stand_ins = len(stand_ins), jnp.asarray(stand_ins)
    if count == 1:
        return jnp.full((1, *inputs.shape), stand_ins[0], inputs.dtype)
    # A shift of 1 to count - 1, modulo count, is uniform over other tokens.
    shape = (draws, *inputs.shape)
    shift = jax.random.randint(jax.random.fold_in(key, 1), shape, 1, count)
    places = jnp.searchsorted(stand_ins, inputs)
    return stand_ins[(places[None] + shift) % count].astype(inputs.dtype)


def _counted(subject: Any, example: tasks.Example, row: Array) -> Array:
    """Returns which inputs are ranked, `[N, T]`."""
    positions = jnp.arange(example.inputs.shape[1])[None]
    counted = running.valid(example.inputs.shape[1], example, "")
    if hasattr(subject.task, "mask_token"):
        counted &= example.inputs != subject.task.mask_token
    config = subject.model.config
    if config is not None and config.family == "causal":
        counted &= positions <= row[:, None]
    return counted

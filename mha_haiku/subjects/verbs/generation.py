"""Text generation: a model continues prompts, or answers sources.

B texts decoded together, t tokens of a prompt or source, n tokens of the written text,
T positions of the training's examples, C classes.
"""

import codecs
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, models, modules
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import decoding
from mha_haiku.lab.heads import running
from mha_haiku.subjects import (
    computing,
    conversion,
    encoding,
    example_rows,
    imported_runs,
)
from mha_haiku.subjects.subject import RunSubject, Subject, check_task, refuse, verb
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, folders

_logger = logging.getLogger("mha_haiku")

TOKENS = 200  # of a text by default
_ANEW = 32  # the same for a function
TEMPERATURE = 0.8  # of texts that continue a prompt
CHUNK = 4  # tokens of a stream that come at a time, after the first
BATCH = 64  # texts decoded together
_MOST_TOKENS = 2**20
_MOST_WIDTH = 2**10
_TOLERANCE = 1e-3  # of logits at a position, whatever comes after it

Strategy = decoding.Greedy | decoding.Sampled | decoding.Beam


class Text(NamedTuple):
    """One text that a run wrote."""

    given: str  # the prompt, or the source
    text: str  # what was written
    given_tokens: np.ndarray  # `[t]` int32
    tokens: np.ndarray  # `[n]` int32, of what was written, without the end token
    is_ended: bool  # by the end token; otherwise there was no more room

    def record(self) -> dict[str, Any]:
        """Converts the text to JSON values."""
        lists = self.given_tokens.tolist(), self.tokens.tolist()
        return self._replace(given_tokens=lists[0], tokens=lists[1])._asdict()


def given(config: configuration.RunConfig) -> str | None:
    """Tells whether a run writes from a "prompt" or a "source"; None if it cannot."""
    model, task = config.model, config.task.name
    if model.family == "encoder_decoder":
        return "source"
    is_writer = model.family == "causal" and tasks.of_name(task).continues
    return "prompt" if is_writer and model.output.logits else None


def check_given(subject: RunSubject, kind: str) -> None:
    """Raises ConfigError if a run does not write from a "prompt" or "source"."""
    own, family = given(subject.config), subject.config.model.family
    if own is None:
        why = f"is of family {family!r}, which writes no text"
        if family == "causal":
            name = subject.task.name
            why = f"has the task {name!r}, whose targets are no next tokens"
        raise ConfigError(
            f"{subject.name} {why}.\nA causal model of a text takes a prompt, "
            "an encoder_decoder takes a source."
        )
    if own != kind:
        raise ConfigError(
            f"{subject.name} is of family {family!r}, which takes a {own}, not a "
            f"{kind}: give --{own}=... or --{own}s=FILE."
        )


def strategy(
    kind: str,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
) -> Strategy:
    """Makes the strategy to choose tokens.

    Args:
      kind: "prompt" or "source".
      temperature: Sampling temperature; 0 is greedy. Default: 0.8 for prompts, 0 for
        sources.
      top_k: Sample from this many of the likeliest tokens.
      top_p: Sample from the likeliest tokens of this probability.
      beam: Width of a beam search, instead of sampling.
      length_penalty: Power of the length by which a beam search divides scores;
        default: 0.
    """
    with checks.user_mistakes():
        cuts = {"top_k": top_k, "top_p": top_p}
        if beam is not None:
            checks.integer_in("beam", beam, 1, _MOST_WIDTH)
            drawn = {"temperature": temperature, **cuts}
            _refuse_others("beam, which draws no tokens", drawn)
            return decoding.Beam(beam, float(length_penalty or 0))
        if length_penalty is not None:
            raise ValueError("length_penalty needs a beam search: give beam=4, say.")
        if temperature is None:
            is_greedy = kind == "source" and top_k is None and top_p is None
            temperature = 0.0 if is_greedy else TEMPERATURE
        sampled = decoding.Sampled(float(temperature), top_k, top_p)
        if temperature:
            return sampled
        _refuse_others("temperature 0, which takes the likeliest token", cuts)
    return decoding.Greedy()


@verb
def generate(
    subject: Subject,
    prompt: str,
    *,
    tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> str:
    """Continues a prompt, or answers a source, with at most `tokens`.

    The default is 200 tokens, or as many as the model has room for; for a function at
    most 32, as every token takes a run over the whole text. Options are as in
    `strategy`: `temperature`, `top_k`, `top_p`, `beam` and `length_penalty`.

    Raises:
      ValueError: If the model continues no text, the prompt cannot be encoded or
        leaves no room, the options contradict themselves, or logits of a function are
        not finite, as past the end of a table of positions.
    """
    if subject.model.config is None:
        how = strategy("prompt", **options)
        if tokens is not None:
            checks.positive_integer("tokens", tokens)
        return _continued(subject, prompt, how, tokens, seed)
    subject = check_task(subject, "generate")
    kind = given(subject.config)
    if kind is None:
        refuse(subject, "generate", "does not continue a text")
    how = strategy(kind, **options)
    (text,) = write(job(subject, kind, [prompt], how, tokens=tokens, seed=seed))
    return text.text


class Job(NamedTuple):
    """Texts to write, checked and encoded."""

    subject: RunSubject  # with a model for texts of this length
    given: tuple[str, ...]  # B prompts or sources
    given_tokens: tuple[np.ndarray, ...]  # B arrays `[t]` int32
    tokens: int  # n, maximum number of written tokens
    strategy: Strategy
    seed: int

    @property
    def kind(self) -> str:
        """The kind of the given texts: "prompt" or "source"."""
        return given(self.subject.config) or ""

    def record(self, text: Text) -> dict[str, Any]:
        """Converts a text of the job, and the job's options, to JSON values."""
        name = type(self.strategy).__name__.lower()
        how = {"strategy": name, **dataclasses.asdict(self.strategy), "seed": self.seed}
        return {"step": self.subject.step, **how, **text.record()}


def job(
    subject: RunSubject,
    kind: str,
    texts: Sequence[str],
    strategy: Strategy,
    *,
    tokens: int | None = None,
    seed: int = 0,
) -> Job:
    """Checks and encodes prompts or sources, as `kind` says.

    `tokens` defaults to `TOKENS`, or to the positions that the model has; for sources
    to the length of the task's targets.
    """
    check_given(subject, kind)
    task = subject.task
    encode = task.prompt if kind == "prompt" else task.encode
    most, encoded = task.sequence_length, []
    for text in texts:
        try:
            if not text:
                raise ConfigError("it must not be empty.")
            encoded.append(np.asarray(encode(text), np.int32))
            if kind == "source" and (length := len(encoded[-1])) > most:
                raise ConfigError(
                    f"it must be of at most {most} tokens, as the longest of the "
                    f"model's training, got {length}."
                )
        except ConfigError as error:
            raise ConfigError(f"{kind} {checks.shown(text)}: {error}") from None
    if kind == "prompt":
        subject, tokens = _with_room(subject, max(map(len, encoded)), tokens)
    else:
        tokens = _room_of_answers(subject, tokens)
    if isinstance(strategy, decoding.Sampled) and strategy.top_k is not None:
        with checks.user_mistakes():
            checks.integer_in("top_k", strategy.top_k, 1, task.num_classes)
    return Job(subject, tuple(texts), tuple(encoded), tokens, strategy, seed)


def stream(job: Job, tokens: list[int]) -> Iterator[str]:
    """Yields the text of a job of one prompt in parts, as they come; not of a beam.

    Its tokens, the end token too, are appended to `tokens`, for `text_of`.
    """
    task = job.subject.task
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for (token,) in decoding.stream(
        job.subject.model,
        job.subject.params,
        job.given_tokens[0][np.newaxis],
        strategy=job.strategy,
        max_length=len(job.given_tokens[0]) + job.tokens,
        end_token=task.end_token,
        key=_key(job, 0),
        chunk=CHUNK,
    ):
        tokens.append(int(token))
        if int(token) == task.end_token:
            break
        yield utf8.decode(task.piece(int(token)))
    yield utf8.decode(b"", final=True)


def write(job: Job, *, name: str = "") -> Iterator[Text]:
    """Yields the texts in order; with a name it shows a progress bar."""
    subject, is_prompt = job.subject, job.kind == "prompt"
    task = subject.task
    given_tokens, given_lengths = conversion.padded(job.given_tokens)
    longest = given_tokens.shape[1] if is_prompt else 1
    if not is_prompt:  # one shape for all sources
        room = task.sequence_length - given_tokens.shape[1]
        given_tokens = np.pad(given_tokens, ((0, 0), (0, room)))

    def generate(params: Any, places: np.ndarray):
        rows, lengths = given_tokens[places], given_lengths[places]
        own: dict[str, Any] = {"prompts": rows, "lengths": lengths}
        if not is_prompt:
            begun = np.full((len(rows), 1), task.start_token, np.int32)
            own = {"prompts": begun, "source": rows, "source_lengths": lengths}
        found = decoding.generate(
            subject.model,
            params,
            **own,
            strategy=job.strategy,
            max_length=longest + job.tokens,
            end_token=task.end_token,
            key=_key(job, places[0]),
        )
        return places, found.tokens, found.lengths

    if not name:
        subject = subject.replace(progress=computing.silent)
    for batch in computing.observations(
        subject,
        generate,
        range(len(job.given)),
        batch_size=min(len(job.given), BATCH),
        name=name,
        examples_at=np.array,
    ):
        for i, tokens, length in zip(*batch, strict=True):
            yield text_of(job, i, tokens[given_lengths[i] if is_prompt else 1 : length])


def of_held_out(
    subject: RunSubject,
    indices: Sequence[int],
    strategy: Strategy,
    *,
    tokens: int | None = None,
    most: int = TOKENS,
    seed: int = 0,
) -> tuple[Job, tasks.Example]:
    """Makes the job to write from held-out examples, and takes the examples.

    A source is answered with at most `tokens` tokens. Of a text the first half is the
    prompt, and prompt and continuation have at most `most` tokens.
    """
    task = subject.task
    examples = jax.device_get(computing.held_out(subject, indices))
    if given(subject.config) == "source":
        pairs = zip(examples.inputs, examples.lengths, strict=True)
        rows = tuple(row[:length] for row, length in pairs)
        texts = list(map(task.question, conversion.rows_of(examples)))
        tokens = _room_of_answers(subject, tokens)
    else:
        half = task.sequence_length // 2
        rows = tuple(row[: max(1, min(half, most))] for row in examples.inputs)
        texts = [encoding.text_of(task, row) for row in rows]
        tokens = max(1, min(task.sequence_length - half, most))
    return Job(subject, tuple(texts), rows, tokens, strategy, seed), examples


def example(job: Job, texts: Sequence[Text]) -> tasks.Example:
    """Makes a batch of examples from texts, with the written tokens as targets."""
    task: Any = job.subject.task  # with a start and an end token, where it answers
    if job.kind == "prompt":
        rows = [np.concatenate([text.given_tokens, text.tokens]) for text in texts]
        read, lengths = conversion.padded(rows)
        return tasks.Example(read, read, np.zeros(read.shape, "f4"), lengths)
    end = [task.end_token]
    read, lengths = conversion.padded([text.given_tokens for text in texts])
    targets, decoder_lengths = conversion.padded(
        [np.append(text.tokens, end[: text.is_ended]) for text in texts]
    )
    decoder_inputs = np.pad(targets, ((0, 0), (1, 0)), constant_values=task.start_token)
    weights = np.arange(targets.shape[1]) < decoder_lengths[:, None]
    return tasks.Example(
        read,
        targets,
        weights.astype(np.float32),
        lengths,
        decoder_inputs[:, :-1],
        decoder_lengths,
    )


def _key(job: Job, start: int | np.integer) -> jax.Array:
    """Derives the random key of the batch that begins with a text."""
    return jax.random.fold_in(jax.random.key(job.seed), start)


def text_of(job: Job, i: int, written: Sequence[int] | np.ndarray) -> Text:
    """Makes text i from its tokens, cut before the end token."""
    task, written = job.subject.task, written[: job.tokens]
    tokens = np.array(task.until_end(written), np.int32)
    return Text(
        job.given[i],
        encoding.text_of(task, tokens) if job.kind == "prompt" else task.answer(tokens),
        job.given_tokens[i],
        tokens,
        len(tokens) < len(written),
    )


def _with_room(
    subject: RunSubject, prompt: int, tokens: int | None
) -> tuple[RunSubject, int]:
    """Finds the subject and number of tokens for texts that continue prompts."""
    # A model has not learned distances beyond its training length: past it the held-out
    # loss of configs/text_lm.py rises from 1.2 to 3.2 within 256 tokens, about a
    # unigram's loss. If a token sees only the T - 1 before it, the loss stays at 1.2.
    trained = subject.task.sequence_length
    most = imported_runs.most_positions(subject.config)
    wanted = _count(prompt, tokens, TOKENS, most)
    if most is not None or prompt + wanted <= trained:
        return subject, wanted
    if modules.POSITION_SCHEMES[subject.config.model.embedding.positions].embed:
        _logger.warning(
            f"{prompt + wanted} tokens are more than the {trained} of the model's "
            "training: its behavior past these is untrained."
        )
        return subject, wanted
    return _windowed(subject, trained - 1), wanted


def _count(prompt: int, tokens: int | None, usual: int, most: int | None) -> int:
    """Finds the number of tokens after a prompt, by default `usual` or what is left.

    The model has `most` positions, or any number.
    """
    name, room = "tokens", _MOST_TOKENS
    if most is not None:
        name = f"tokens, after a prompt of {prompt} and with {most} positions,"
        room = most - prompt
        if room < 1:
            raise ConfigError(
                f"prompt must be of at most {most - 1} tokens, as the model has {most} "
                f"positions, got {prompt}."
            )
    with checks.user_mistakes():
        wanted = min(usual, room) if tokens is None else tokens
        return checks.integer_in(name, wanted, 1, room)


def _windowed(subject: RunSubject, reach: int) -> RunSubject:
    """Limits the model of a subject to `reach` positions before the current one."""
    windows = [
        reach if window is None else min(window, reach)
        for window in models.windows(subject.config.model)
    ]
    window = windows if len(set(windows)) > 1 else windows[0]
    config = subject.config.replace(model=dict(attention=dict(window=window)))

    def make():
        model = folders.make_model(config.model, subject.task, subject.placement)
        return model.edited(*subject.model.edits)

    model = computing.once(subject, f"window {windows}", make)
    return subject.replace(config=config, model=model)


def _room_of_answers(subject: RunSubject, tokens: int | None) -> int:
    """Finds the number of tokens of an answer; the start token takes a position."""
    most = imported_runs.most_positions(subject.config) or _MOST_TOKENS
    with checks.user_mistakes():
        wanted = subject.task.target_length if tokens is None else tokens
        return checks.integer_in("tokens", wanted, 1, most)


def _refuse_others(name: str, others: Mapping[str, Any]) -> None:
    both = [other for other, value in others.items() if value is not None]
    if both:
        raise ValueError(f"{both[0]} must be left out with {name}.")


def _continued(
    subject: Subject, prompt: str, strategy: Strategy, tokens: int | None, seed: int
) -> str:
    """Continues a prompt without a cache: each token takes a run over all of them."""
    if isinstance(strategy, decoding.Beam):
        refuse(subject, "a beam search", "keeps no cache of what it has read")
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a text, got {type(prompt).__name__}.")
    written = np.asarray(subject.codec.prompt(prompt), np.int32).tolist()
    if not written:
        raise ValueError("prompt must have at least one token, got none.")
    start, key = len(written), jax.random.key(seed)
    tokens = _count(start, tokens, _ANEW, subject.codec.max_length)
    subject.codec.check(example_rows.example(np.array([written])))
    room = start + tokens if _is_causal(subject, written) else None
    for i in range(tokens):
        keys = jax.random.fold_in(key, i)[None]
        logits = _logits(subject, written, room)
        # Those of tokens that are never written may be -inf.
        if not np.isfinite(logits.max()):
            size = room or len(written)
            raise ValueError(
                f"tokens must be as many as the model has positions for, got {tokens}: "
                f"in a row of {size} the logits at position {len(written) - 1} are not "
                "finite."
            )
        token = int(strategy.choose(logits, keys)[0])
        if token == subject.codec.end_token:
            break
        written.append(token)
    return subject.codec.decode(written[start:])


def _is_causal(subject: Subject, tokens: Sequence[int]) -> bool:
    """Checks that a token after a text changes no logit of the text."""
    alone, followed = (_logits(subject, tokens, len(tokens) + i) for i in range(2))
    size = 1 + jnp.abs(jnp.where(jnp.isfinite(alone), alone, 0)).max()
    change = jnp.where(alone == followed, 0, jnp.abs(alone - followed))  # both -inf
    return bool(change.max() < _TOLERANCE * size)


def _logits(subject: Subject, tokens: Sequence[int], room: int | None) -> jax.Array:
    """Computes the logits `[1, C]` of the token after a text, padded to a length."""

    def at(params: Any, row: jax.Array, place: jax.Array) -> jax.Array:
        example = example_rows.example(row)
        logits = running.run(subject.model, params, example).logits
        return logits[:, place] if logits.ndim == 3 else logits

    program = computing.once(subject, "logits at a place", lambda: jax.jit(at))
    row = np.zeros((1, room or len(tokens)), np.int32)
    row[0, : len(tokens)] = tokens
    return program(subject.params, row, len(tokens) - 1)

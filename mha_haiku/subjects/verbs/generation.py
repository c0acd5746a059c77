"""Text generation: a model continues prompts, or answers sources.

B texts decoded together, T positions of the training's examples, C classes.
"""

import codecs
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, modules
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import decoding
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects import computation, conversion, example_rows, imported_runs
from mha_haiku.subjects.subject import RunSubject, Subject, check_task, refuse, verb
from mha_haiku.training.runs import configuration, folders
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

_TOKENS = 200  # of a text by default
_TOKENS_OF_FUNCTION = 32  # the same for a function
_TEMPERATURE = 0.8  # of texts that continue a prompt
_CHUNK = 4  # tokens that come at a time, after the first
_MOST_TOKENS = 2**20
_TOLERANCE = 1e-3  # of logits at a position, whatever comes after it


@verb
def generate(
    subject: Subject,
    prompt: str | Sequence[str],
    *,
    tokens: int | None = None,
    seed: int = 0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> str | list[str]:
    """Continues a prompt, or answers a source; several are a list.

    Args:
      prompt: Text that a causal model continues, or an encoder-decoder answers; or a
        list of texts.
      tokens: Maximum length. Defaults to 200, or as many as the model has room for;
        after a source to the task's longest target; for a function to 32, as every
        token takes a run over the whole text.
      seed: Seed of the samples.
      temperature: Sampling temperature; 0 takes the likeliest token. Defaults to 0.8
        for prompts, 0 for sources.
      top_k: Sample from this many of the likeliest tokens.
      top_p: Sample from the likeliest tokens of this probability.

    Raises:
      ValueError: If the model continues no text, the prompt cannot be encoded or
        leaves no room, or logits of a function are not finite, as past the end of a
        table of positions.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    parts = list(stream(subject, prompts, tokens=tokens, seed=seed, **options))
    texts = list(map("".join, zip(*parts, strict=True)))
    return texts[0] if isinstance(prompt, str) else texts


def stream(
    subject: Subject,
    prompts: Sequence[str],
    *,
    tokens: int | None,
    seed: int,
    **options: Any,
) -> Iterator[list[str]]:
    """Yields how each of B texts continues; arguments as in `generate`.

    Parts are whole characters, of a function the whole text at once.
    """
    is_list = isinstance(prompts, (list, tuple)) and len(prompts) > 0
    if not (is_list and all(isinstance(prompt, str) for prompt in prompts)):
        got = checks.shown(prompts)
        raise TypeError(f"prompt must be a text or a list of texts, got {got}.")
    if subject.model.config is None:
        kind = "source" if subject.codec.has_decoder else "prompt"
        strategy = _strategy(kind, **options)
        return iter([[_continued(subject, x, strategy, tokens, seed) for x in prompts]])
    subject = check_task(subject, "generate")
    kind, task = _kind(subject), subject.task
    strategy = _strategy(kind, **options)
    if strategy.top_k is not None:
        checks.integer_in("top_k", strategy.top_k, 1, task.num_classes)
    encode = task.prompt if kind == "prompt" else task.encode
    encoded = [np.asarray(encode(prompt), np.int32) for prompt in prompts]
    most = imported_runs.most_positions(subject.config)
    if kind == "source":  # the start token takes a position
        tokens = _count(0, tokens, task.target_length or 1, most)
    else:
        longest = max(map(len, encoded))
        tokens = _count(longest, tokens, _TOKENS, most)
        if most is None:
            subject = _with_room(subject, longest + tokens)
    return _decoded(subject, kind, encoded, strategy, tokens, seed)


def _decoded(
    subject: RunSubject,
    kind: str,
    encoded: Sequence[np.ndarray],
    strategy: decoding.Sampled,
    tokens: int,
    seed: int,
) -> Iterator[list[str]]:
    """Yields the parts of B texts after encoded prompts or sources."""
    task: Any = subject.task  # with a start token, where it answers
    rows, lengths = tokenization.padded(encoded, dtype=np.int32)
    longest = rows.shape[1] if kind == "prompt" else 1
    inputs: dict[str, Any] = {"prompts": rows, "lengths": lengths}
    if kind == "source":  # of one shape for all sources, so that one program is made
        room = task.sequence_length - rows.shape[1]
        rows = np.pad(rows, ((0, 0), (0, room)))
        starts = np.full((len(rows), 1), task.start_token, np.int32)
        inputs = {"prompts": starts, "source": rows, "source_lengths": lengths}
    utf8 = [codecs.getincrementaldecoder("utf-8")("replace") for _ in encoded]
    is_open = np.ones(len(encoded), bool)
    steps = decoding.stream(
        subject.model,
        subject.params,
        **inputs,
        strategy=strategy,
        max_length=longest + tokens,
        end_tokens=task.end_tokens,
        key=jax.random.key(seed),
        chunk=_CHUNK,
    )
    for i, written in enumerate(steps):
        # After a shorter prompt there is more room than `tokens`.
        is_open &= ~np.isin(written, task.end_tokens) & (i < tokens)
        if not is_open.any():
            break
        pieces = [
            of_text.decode(task.piece(int(token))) if is_going else ""
            for of_text, token, is_going in zip(utf8, written, is_open, strict=True)
        ]
        if i == 0 and kind == "source":  # a label has a space before it
            pieces = [piece.removeprefix(" ") for piece in pieces]
        yield pieces
    yield [of_text.decode(b"", final=True) for of_text in utf8]


def _kind(subject: RunSubject) -> str:
    """Finds whether a run continues a "prompt" or answers a "source"."""
    model, task = subject.config.model, subject.task
    if model.family == "encoder_decoder":
        return "source"
    if model.family == "causal" and task.continues and model.output.logits:
        return "prompt"
    what = f"{task.name!r} with a model of family {model.family!r}"
    refuse(subject, "generate", f"has the task {what}, which writes no text")


def _strategy(
    kind: str,
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> decoding.Sampled:
    """Makes the strategy to choose tokens after a "prompt" or "source"."""
    if temperature is None:
        is_greedy = kind == "source" and top_k is None and top_p is None
        temperature = 0.0 if is_greedy else _TEMPERATURE
    return decoding.Sampled(float(temperature), top_k, top_p)


def _count(prompt: int, tokens: int | None, usual: int, most: int | None) -> int:
    """Finds the number of tokens after a prompt, by default `usual` or what is left.

    The model has `most` positions, or any number.
    """
    room = _MOST_TOKENS if most is None else most - prompt
    if room < 1:
        raise ConfigError(
            f"prompt must be of fewer tokens than the {most} positions of the model, "
            f"got {prompt}."
        )
    count = min(usual, room) if tokens is None else tokens
    return checks.integer_in(f"tokens after a prompt of {prompt}", count, 1, room)


def _with_room(subject: RunSubject, size: int) -> RunSubject:
    """Returns the subject, with windows where a text exceeds the training's length."""
    # A model has not learned distances beyond its training length: past it the held-out
    # loss of configs/text_lm.py rises from 1.2 to 3.2 within 256 tokens, about a
    # unigram's loss. If a token sees only the T - 1 before it, the loss stays at 1.2.
    trained = subject.task.sequence_length
    if size <= trained:
        return subject
    if modules.POSITION_SCHEMES[subject.config.model.embedding.positions].embed:
        _logger.warning(
            f"{size} tokens are more than the {trained} of the model's training: its "
            "behavior past these is untrained."
        )
        return subject
    window = subject.config.model.attention.window
    window = trained - 1 if window is None else min(window, trained - 1)
    config: configuration.RunConfig = subject.config.replace(
        model=dict(attention=dict(window=window))
    )

    def make():
        model = folders.make_model(config.model, subject.task, subject.placement)
        return model.edited(*subject.model.edits)

    model = computation.once(subject, f"window {window}", make)
    return subject.replace(config=config, model=model)


def _continued(
    subject: Subject,
    prompt: str,
    strategy: decoding.Sampled,
    tokens: int | None,
    seed: int,
) -> str:
    """Continues a prompt without a cache: each token takes a run over all of them."""
    codec = subject.codec
    written: list[Any] = np.asarray(codec.prompt(prompt), np.int32).tolist()
    source = None
    if codec.has_decoder:
        source, written = np.asarray([codec.encode(prompt)], np.int32), [codec.start]
    if not written:
        raise ValueError("prompt must have at least one token, got none.")
    start, key = len(written), jax.random.key(seed)
    tokens = _count(start, tokens, _TOKENS_OF_FUNCTION, codec.max_length)
    row = np.array([written])
    conversion.batch_of(subject, row if source is None else (source, row))
    room = start + tokens if _is_causal(subject, written, source) else None
    for i in range(tokens):
        logits = _logits(subject, written, room, source)
        # Those of tokens that are never written may be -inf.
        if not np.isfinite(logits.max()):
            raise ValueError(
                f"tokens must be as many as the model has positions for, got {tokens}: "
                f"the logits after {len(written)} tokens are not finite."
            )
        token = int(strategy.choose(logits, jax.random.fold_in(key, i)[None])[0])
        if token in codec.end_tokens:
            break
        written.append(token)
    return codec.decode(written[start:])


def _is_causal(subject: Subject, tokens: Sequence[int], source: Any) -> bool:
    """Checks that a token after a text changes no logit of the text."""
    alone, followed = (
        _logits(subject, tokens, len(tokens) + i, source) for i in range(2)
    )
    size = 1 + jnp.abs(jnp.where(jnp.isfinite(alone), alone, 0)).max()
    change = jnp.where(alone == followed, 0, jnp.abs(alone - followed))  # both -inf
    return bool(change.max() < _TOLERANCE * size)


def _logits(
    subject: Subject, tokens: Sequence[int], room: int | None, source: Any
) -> jax.Array:
    """Computes the logits `[1, C]` of the token after a text, padded to a length.

    With a source, a decoder reads the text.
    """

    def at(params: Any, example: Any, place: jax.Array) -> jax.Array:
        logits = model_runs.run(subject.model, params, example).logits
        # A function may return those after the last position alone, `[B, C]`.
        return logits[:, place] if logits.ndim == 3 else logits

    program = computation.once(subject, "logits at a place", lambda: jax.jit(at))
    row = np.zeros((1, room or len(tokens)), np.int32)
    row[0, : len(tokens)] = tokens
    example = example_rows.example(row if source is None else source)
    if source is not None:
        example = example._replace(decoder_inputs=row)
    return program(subject.params, subject.codec.bound(example), len(tokens) - 1)

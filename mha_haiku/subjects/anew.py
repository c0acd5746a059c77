"""Text generation without a cache: each token takes a run over the whole text.

T tokens, C classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core.models import decoding
from mha_haiku.lab.heads import running
from mha_haiku.subjects import inputs, programs
from mha_haiku.subjects.subject import Subject, refuse

_TOLERANCE = 1e-3  # of logits at a position, whatever comes after it


def continued(
    subject: Subject,
    prompt: str,
    strategy: decoding.Greedy | decoding.Sampled | decoding.Beam,
    tokens: int,
    seed: int,
) -> str:
    """Continues a prompt by at most `tokens`, until the tokenizer's end token."""
    if isinstance(strategy, decoding.Beam):
        refuse(subject, "a beam search", "keeps no cache of what it has read")
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a text, got {type(prompt).__name__}.")
    written = np.asarray(subject.codec.prompt(prompt), np.int32).tolist()
    if not written:
        raise ValueError("prompt must have at least one token, got none.")
    start, key = len(written), jax.random.key(seed)
    room = start + tokens if _is_causal(subject, written) else None
    for i in range(tokens):
        keys = jax.random.fold_in(key, i)[None]
        token = int(strategy.choose(_logits(subject, written, room), keys)[0])
        if token == subject.codec.end_token:
            break
        written.append(token)
    return subject.codec.decode(written[start:])


def _is_causal(subject, tokens) -> bool:
    """Checks that a token after a text changes no logit of the text."""
    alone, followed = (_logits(subject, tokens, len(tokens) + i) for i in range(2))
    size = 1 + jnp.abs(alone).max()
    return bool(jnp.abs(alone - followed).max() < _TOLERANCE * size)


def _logits(subject, tokens, room: int | None) -> jax.Array:
    """Computes the logits `[1, C]` of the token after a text, padded to a length."""

    def at(params, row, place):
        example = inputs.example(row)
        return running.run(subject.model, params, example).logits[:, place]

    program = programs.once(subject, "logits at a place", lambda: jax.jit(at))
    row = np.zeros((1, room or len(tokens)), np.int32)
    row[0, : len(tokens)] = tokens
    return program(subject.params, row, len(tokens) - 1)

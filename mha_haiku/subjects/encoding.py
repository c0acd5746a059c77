"""Texts to tokens and back, by a task or a tokenizer, and what else a model reads."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.interop import torch_modules
from mha_haiku.training import tasks
from mha_haiku.training.tasks import tokenization


def _refuse(needed: str, inputs: Any) -> Any:
    raise ValueError(
        f"{needed}, got {inputs!r}: the model has no tokenizer.\n"
        "mh.wrap(function, params, tokenizer=...) gives it one."
    )


_no_encode = functools.partial(_refuse, "inputs must be arrays")
_no_decode = functools.partial(_refuse, "tokens cannot be decoded")
_no_answer = functools.partial(_refuse, "an answer must be the number of a token")


class Codec(NamedTuple):
    """Text to tokens and back, or only arrays; and what else a model reads."""

    encode: Callable[[str], Any] = _no_encode  # to `[T]` integers
    decode: Callable[[Sequence[int]], str] = _no_decode
    label: Callable[[int], str] = str  # of one token
    prompt: Callable[[str], Any] = _no_answer  # without special tokens that end a text
    alone: Callable[[str], Any] = _no_answer  # without any special tokens
    tokenizer: Any = None  # to save, where no task has it
    end_tokens: tuple[int, ...] = ()  # those that end a text
    # Of a wrapped model, the keywords of its inputs: the first one present counts.
    names: tuple[str, ...] = ("inputs",)
    has_decoder: bool = False
    start: int | None = None  # the token in front of what a decoder writes
    max_length: int | None = None  # of inputs, where it is known
    num_tokens: tuple[int | None, int | None] = None, None  # of inputs, of the decoder
    knows_lengths: bool = False  # whether it can be told the lengths of padded inputs
    parameters: tuple[str, ...] = ()  # the arguments that a wrapped function names
    padding: int | None = None  # the token that a decoder reads where no label counts
    predicts_next: bool = True  # whether labels are shifted by one, as in causal models
    takes_labels: bool = False  # whether a module computes a loss of its own from them
    fixed: tuple[str, ...] = ()  # names of arrays that are not trained, such as buffers
    mask: int | None = None  # the token that hides another
    special: tuple[int, ...] = ()  # tokens that are not hidden, such as [CLS]
    mask_probability: float = 0.0  # share of tokens to hide and predict
    image_tokens: tuple[int, ...] = ()  # in whose places a module puts pictures
    # Where a PyTorch module reads values of inputs; None for another model.
    reads: list[str] | None = None

    def bound(self, batch: tasks.Example) -> tasks.Example:
        """Makes inputs constants of programs of a PyTorch module that reads them.

        So are integers that do not fit 32 bits.
        """
        if self.reads is None:
            return batch
        names = ("inputs", "lengths", "decoder_inputs", "decoder_lengths", "others")
        arrays = {name: getattr(batch, name) for name in names}
        return batch._replace(**torch_modules.bound(arrays, every=bool(self.reads)))

    def with_image(self, text: str, image: Any) -> dict[str, np.ndarray]:
        """Makes the inputs of a text with a picture, by a processor of transformers.

        The picture is a path, of PIL, or an array `[H, W, 3]`. It is in front, unless
        the text names its place as the processor has it: "<image>".
        """
        read: Any = self.tokenizer
        if not hasattr(read, "image_processor"):
            raise ValueError(
                "image= needs a processor: mh.wrap(module, tokenizer=...).\n"
                'Or give a mapping: {"input_ids": ..., "pixel_values": ...}.'
            )

        def inputs(text: str) -> dict[str, np.ndarray]:
            options = {"return_tensors": "pt", "images": _picture(image)}
            result = dict(read(text=text, **options))
            result.pop("labels", None)  # of PaliGemma, which count nowhere
            return {name: np.asarray(x) for name, x in result.items()}

        try:
            encoded = inputs(text)
            if np.isin(encoded["input_ids"], self.image_tokens).any():
                return encoded
        except ValueError:  # of some processors, where no place is named
            pass
        start, end = (getattr(read, f"vision_{x}_token", "") for x in ("start", "end"))
        return inputs(f"{start}{read.image_token}{end}{text}")

    def check(self, batch: tasks.Example) -> None:
        """Raises ValueError if a wrapped model has no row for a token or position."""
        tokens = batch.inputs, batch.decoder_inputs
        lengths = batch.lengths, batch.decoder_lengths
        names = "inputs", "decoder_inputs"
        for name, x, own, count in zip(
            names, tokens, lengths, self.num_tokens, strict=True
        ):
            if x is None:
                continue
            most = self.max_length
            if most is not None and x.shape[1] > most:
                raise ValueError(
                    f"{name} must be of at most {most} tokens, as the model has {most} "
                    f"positions, got {x.shape[1]}."
                )
            if count is not None and np.issubdtype(x.dtype, np.integer):
                is_image = np.isin(x, self.image_tokens)  # which need no row
                models.check_rows(name, np.where(is_image, 0, x), count, own)


def of_task(task: tasks.Task) -> Codec:
    """Makes the codec of a task."""
    if task.num_tokens is None:
        return Codec()

    own = getattr(task, "encoder", None)
    encoder, alone = own or task, task.prompt
    if own is not None:
        alone = functools.partial(tokenization.encoded, own)

    def decode(tokens: Sequence[int]) -> str:
        return _without_added_space(text_of(task, tokens), tokens, encoder.encode)

    return Codec(task.encode, decode, task.token_label, task.prompt, alone)


def of_tokenizer(tokenizer: Any) -> Codec:
    """Makes the codec of a tokenizer of `tokenizers`, `transformers`, ...; or None.

    Of a processor of transformers, texts are read by its tokenizer.
    Of our tokenizers, as `interop.load` returns one, special tokens go around a text.
    """
    if tokenizer is None:
        return Codec()
    if isinstance(tokenizer, tokenization.Tokenizer):
        return _of_ours(tokenizer)
    if hasattr(tokenizer, "image_processor"):
        return of_tokenizer(tokenizer.tokenizer)._replace(tokenizer=tokenizer)
    for name in ("encode", "decode"):
        if not callable(getattr(tokenizer, name, None)):
            raise TypeError(
                "tokenizer must have encode(text) and decode(tokens), got "
                f"{type(tokenizer).__name__}, which has no {name}."
            )

    def encode(text: str, **options: bool) -> np.ndarray:
        tokens = tokenizer.encode(text, **options)
        return np.asarray(getattr(tokens, "ids", tokens), np.int32)

    def alone(text: str) -> np.ndarray:
        try:
            return encode(text, add_special_tokens=False)
        except TypeError:  # it knows no such option
            return encode(text)

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode([int(token) for token in tokens])

    end = getattr(tokenizer, "eos_token_id", None)
    ends = () if end is None else (int(end),)
    label = lambda token: decode([token])  # noqa: E731
    codec = Codec(encode, decode, label, encode, alone, tokenizer, ends)
    special = tuple(getattr(tokenizer, "all_special_ids", ()))
    mask = getattr(tokenizer, "mask_token_id", None)
    return codec._replace(mask=mask, special=special)


def _of_ours(tokenizer: tokenization.Tokenizer) -> Codec:
    def prompt(text: str) -> np.ndarray:
        tokenizer.check_known(text)
        return np.array([*tokenizer.before, *tokenizer.encode(text)], np.int32)

    def encode(text: str) -> np.ndarray:
        around = tokenizer.before, tokenizer.encode(text), tokenizer.after
        return np.concatenate([np.array(part, np.int32) for part in around])

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(tokens)
        return _without_added_space(text, tokens, tokenizer.encode)

    alone = functools.partial(tokenization.encoded, tokenizer)
    codec = Codec(encode, decode, tokenizer.label, prompt, alone, tokenizer)
    ends, special = tokenizer.end_tokens, (*tokenizer.before, *tokenizer.after)
    return codec._replace(end_tokens=ends, mask=tokenizer.mask, special=special)


def _without_added_space(
    text: str, tokens: Sequence[int], encode: Callable[[str], np.ndarray]
) -> str:
    """Drops a space that a label has before a first word, but not one of the text."""
    tokens = list(map(int, tokens))

    def has_tokens(text: str) -> bool:
        try:
            return encode(text)[: len(tokens)].tolist() == tokens
        except ValueError:  # of a task that does not read what it writes
            return False

    stripped = text.removeprefix(" ")
    is_own = stripped != text and not has_tokens(stripped) and has_tokens(text)
    return text if is_own else stripped


def _picture(image: Any) -> Any:
    """Opens a picture, as PIL has it; floats are from 0 to 1."""
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        image = Image.open(image)
    if not isinstance(image, Image.Image):
        array = np.asarray(image)
        is_share = array.dtype.kind == "f"
        image = Image.fromarray(np.uint8(np.round(255 * array) if is_share else array))
    return image.convert("RGB")


def one_token(codec: Codec, token: Any) -> int:
    """Reads a token from its number or from a text of one token."""
    if not isinstance(token, str):
        return checks.non_negative_integer("an answer", token)
    tokens = np.asarray(codec.alone(token)).tolist()
    if len(tokens) != 1:
        raise ValueError(
            f"an answer must be a text of one token, got {token!r}, which has "
            f"{len(tokens)}: {[codec.label(x) for x in tokens]}."
        )
    return tokens[0]


def text_of(task: tasks.Task, tokens: Sequence[int] | np.ndarray) -> str:
    """Decodes the text that tokens of a causal model's task add to a prompt."""
    pieces = b"".join(task.piece(int(token)) for token in tokens)
    return pieces.decode("utf-8", errors="replace")

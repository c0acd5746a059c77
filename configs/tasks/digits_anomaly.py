"""Find the one image of a different digit in a set of handwritten digits."""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling

_NUM_DIGITS = 10
_SIDE = 8
_NUM_PIXELS = _SIDE**2
_LARGEST_PIXEL = 16
_LARGEST_SET = 64
_MOST_IMAGES = 183  # of any one digit, in both parts together


class Images(NamedTuple):
    """Images sorted by digit: digit d has `counts[d]` of them, from `starts[d]` on."""

    pixels: np.ndarray  # [N, 64] float32 in [0, 1]
    starts: np.ndarray  # [10] int32
    counts: np.ndarray  # [10] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsAnomaly(base.Task):
    """Find the image of another digit among T different images.

    A set task: the target is the position of the odd one, and the order of the images
    is random. The digits, the images and the position are uniform. Images are
    scikit-learn's 1,797 of 8 x 8 pixels, scaled to [0, 1]. Example, T = 10, by the
    digit of each image:

        inputs   7 7 7 3 7 7 7 7 7 7
        target   3

    The last images of each digit are held out: no set mixes images of both parts.

    Metric: accuracy, the share of sets whose odd image has the largest logit.
    Chance: accuracy 1 / T, loss log T nats.
    """

    name: ClassVar[str] = "digits_anomaly"
    num_tokens: ClassVar[None] = None
    feature_size: ClassVar[int] = _NUM_PIXELS
    num_classes: ClassVar[int] = 1
    model_defaults = {"family": "set_classifier"}
    sequence_length: int = fields.field(
        10, "images in a set", fields.integer(3, _LARGEST_SET)
    )
    held_out_fraction: float = fields.field(
        0.2, "share of the images of each digit to evaluate on", checks.fraction
    )

    def __post_init__(self):
        super().__post_init__()
        counts, count = (x.counts.min() for x in self._split), self.sequence_length
        what = f"{count} images of each digit"
        fraction = self.held_out_fraction
        base.check_parts("held_out_fraction", fraction, *counts, what, count)

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        size = self.sequence_length
        return {"accuracy": 1 / size, "loss": math.log(size)}

    def example(self, key: jax.Array, data: Images) -> base.Example:
        pixels, starts, counts = jax.tree.map(jnp.asarray, data)
        random = sampling.words(key, 4 + _MOST_IMAGES)
        usual = sampling.integers(random[0], _NUM_DIGITS)
        shift = 1 + sampling.integers(random[1], _NUM_DIGITS - 1)
        odd = (usual + shift) % _NUM_DIGITS
        odd_image = starts[odd] + sampling.integers(random[2], counts[odd])
        position = sampling.integers(random[3], self.sequence_length)
        images = starts[usual] + sampling.distinct(
            random[4:], self.sequence_length, counts[usual]
        )
        is_odd = jnp.arange(self.sequence_length) == position
        return base.Example(
            inputs=pixels[jnp.where(is_odd, odd_image, images)],
            targets=position,
            weights=base.all_count(position),
        )

    def labels(self, example: base.Example) -> list[str]:
        """Lists the digit of each image; "?" for any other image."""
        inputs = np.asarray(example.inputs, np.float32)
        return [self._digits.get(image.tobytes(), "?") for image in inputs]

    def images(self, example: base.Example) -> np.ndarray:
        pixels = np.round(255 * np.asarray(example.inputs, np.float32))
        return pixels.astype(np.uint8).reshape(-1, _SIDE, _SIDE)

    def class_label(self, c: int) -> str:
        return f"image {c}"

    def encode(self, text: str) -> np.ndarray:
        raise checks.ConfigError(
            f"text must be left out for {self.name}, whose inputs are images; "
            f"got {text!r}."
        )

    @functools.cached_property
    def _split(self) -> tuple[Images, Images]:
        pixels, digits = _load()
        counts = np.bincount(digits, minlength=_NUM_DIGITS)
        num_held_out = np.round(counts * self.held_out_fraction).astype(np.int64)
        # Each image's index among the images of its digit; images are sorted by digit.
        rank = np.arange(len(digits)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_held_out = rank >= (counts - num_held_out)[digits]

        def part(chosen):
            sizes = np.bincount(digits[chosen], minlength=_NUM_DIGITS).astype(np.int32)
            starts = (np.cumsum(sizes) - sizes).astype(np.int32)
            return Images(pixels[chosen], starts, sizes)

        return part(~is_held_out), part(is_held_out)

    @functools.cached_property
    def _digits(self) -> dict[bytes, str]:
        named = zip(*_load(), strict=True)
        return {image.tobytes(): str(digit) for image, digit in named}


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Loads the pixels `[N, 64]` and digits `[N]` of all images, sorted by digit."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = np.argsort(digits.target, kind="stable")
    pixels = digits.data[order].astype(np.float32) / _LARGEST_PIXEL
    return pixels, digits.target[order]

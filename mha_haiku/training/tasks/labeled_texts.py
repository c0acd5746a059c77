"""Predict the label of a whole text, from a table of texts and labels."""

import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, text_tasks

_COLUMNS = ("text", "label")
_CLS = "[CLS]"
_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledTexts(text_tasks.TextTask):
    """The target is the label of the whole text.

    Inputs are [CLS] and the tokens of a text, cut or padded to T. Example, T = 8, with
    the labels "call" and "arithmetic" and a token for each character:

        inputs   [CLS] f ( a ) + b 0
        target   arithmetic
        lengths  7

    The model's logits are of the first position or of the mean of all
    (`config.model.output.pool` = "first" or "mean"). If the tokenizer has special
    tokens, they go around the text; otherwise [CLS] is the token after the tokenizer's
    tokens, where `masked_language_model` has its mask: a model that starts from such a
    run reads the label where it used to fill in a blank.

    The sha256 of a text decides whether it is held out: equal texts are in the same
    part.

    Metric: accuracy, the share of texts with the right label. It is compared with a bag
    of words, see `bag_of_words`.
    """

    name: ClassVar[str] = "labeled_texts"
    labels_whole: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 64}
    baseline_name = "bag of words"
    path: str = fields.field(
        "",
        "a CSV or TSV file with the columns text and label",
        section="data",
        is_path=True,
    )
    held_out_fraction: float = fields.field(
        0.1, "share of the texts to evaluate on", checks.fraction, section="data"
    )

    @functools.cached_property
    def _rows(self) -> list[tuple[str, str]]:
        return read_table(self.path)

    @functools.cached_property
    def _text(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(json.dumps(self._rows).encode()).hexdigest()
        labels = sorted({label for _, label in self._rows})
        return {"name": self.path, "sha256": sha256, "labels": labels}

    @functools.cached_property
    def texts(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """The texts of both parts, each with the number of its label."""
        labels = self._text["labels"]
        if len(labels) < 2:
            raise checks.ConfigError(
                f"path must have texts of at least 2 labels, got {self.path!r}, where "
                f"all have the label {labels[0]!r}."
            )
        parts: tuple[list, list] = [], []
        for each, label in self._rows:
            part = parts[sampling.is_held_out(each, self.held_out_fraction)]
            part.append((each, labels.index(label)))
        train, held_out = map(len, parts)
        fraction = self.held_out_fraction
        base.check_parts("held_out_fraction", fraction, train, held_out, "texts")
        return parts

    @property
    def _training_text(self) -> str:
        return "\n".join(each for each, _ in self.texts[0])

    def _parts(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        _ = self.encoder  # so that its errors show now
        return self.texts

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens before a text: the tokenizer's special tokens, or [CLS]."""
        return self.encoder.before or (self.encoder.num_tokens,)

    @property
    def num_tokens(self) -> int:
        """Number of the tokenizer's tokens, plus one for [CLS] if it has none."""
        return max(self.encoder.num_tokens, 1 + max(self.before))

    @property
    def num_classes(self) -> int:
        return len(self._labels)

    @functools.cached_property
    def train_data(self) -> base.Example:
        return self._encoded(self._split[0])

    @functools.cached_property
    def held_out_data(self) -> base.Example:
        return self._encoded(self._split[1])

    def _encoded(self, pairs: Sequence[tuple[str, int]]) -> base.Example:
        texts, labels = zip(*pairs, strict=True)
        tokens, lengths = self.padded(texts)
        weights = np.ones(len(labels), np.float32)
        return base.Example(tokens, np.array(labels, np.int32), weights, lengths)

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        return bag_of_words(*self._split, self.num_classes)

    def token_label(self, token: int) -> str:
        is_own = token == self.encoder.num_tokens and not self.encoder.before
        return _CLS if is_own else self.encoder.label(token)

    def class_label(self, c: int) -> str:
        return self._labels[c]

    @property
    def _labels(self) -> list[str]:
        if self._kept is not None and self._kept.text is not None:
            return self._kept.text["labels"]
        return self._text["labels"]


def read_table(path: str) -> list[tuple[str, str]]:
    """Reads the texts and labels of a file, without spaces around them.

    The first line of the UTF-8 file names its columns, `text` and `label` among them:
    with tabs between the columns if that line has a tab (then quotes are characters
    like all others), else with commas.
    """
    if not path:
        raise checks.ConfigError(
            "path must be given: a CSV or TSV file with the columns text and label."
        )
    if os.path.isdir(os.path.expanduser(path)):
        raise checks.ConfigError(
            f"path must be a file, got {path!r}, which is a folder."
        )
    content = text_tasks.read(path)
    header = content.partition("\n")[0]
    has_tabs = "\t" in header
    reader = csv.reader(
        io.StringIO(content, newline=""),
        delimiter="\t" if has_tabs else ",",
        quoting=csv.QUOTE_NONE if has_tabs else csv.QUOTE_MINIMAL,
        strict=True,
    )
    pairs = []
    limit = csv.field_size_limit(max(len(content), csv.field_size_limit()))
    try:
        columns = [name.strip().lower() for name in next(reader)]
        missing = [name for name in _COLUMNS if name not in columns]
        if missing:
            raise checks.ConfigError(
                f"path must have a column {missing[0]!r}, got {path!r}, whose first "
                f"line is {header.strip()[:60]!r}.\nThe first line of such a file is "
                "text,label, or the two with a tab between them."
            )
        places = [columns.index(name) for name in _COLUMNS]
        for row in reader:
            if len(row) != len(columns) or not all(row[i].strip() for i in places):
                what = f"{len(row)} columns" if row else "nothing"
                if len(row) == len(columns):
                    what = "an empty text or label"
                raise checks.ConfigError(
                    f"path must have a text and a label in each line, got {path!r} "
                    f"with {what} in line {reader.line_num}, of {len(columns)} columns."
                )
            pairs.append(tuple(row[i].strip() for i in places))
    except csv.Error as error:
        raise checks.ConfigError(
            f"path must be CSV or TSV, got {path!r}: {error} in line {reader.line_num}."
        ) from error
    finally:
        csv.field_size_limit(limit)
    if not pairs:
        raise checks.ConfigError(f"path must have texts, got {path!r}: it has none.")
    return pairs


def bag_of_words(
    train: Sequence[tuple[str, int]], held_out: Sequence[tuple[str, int]], labels: int
) -> dict[str, float]:
    """Returns accuracy and loss (nats per text) of multinomial naive Bayes.

    Words are runs of letters, digits and underscores, in lower case. One is added to
    every count of the training texts; words that these lack are ignored.

    Source: McCallum and Nigam 1998, https://www.cs.cmu.edu/~knigam/papers/multinomial-aaaiws98.pdf.
    """
    counts = [Counter() for _ in range(labels)]
    for each, label in train:
        counts[label].update(_WORD.findall(each.lower()))
    places = {word: i for i, word in enumerate(dict.fromkeys(itertools.chain(*counts)))}
    table = np.array(
        [[label_counts[word] + 1.0 for label_counts in counts] for word in places]
    )
    of_words = np.log(table / table.sum(0))  # [words, labels]
    of_labels = np.bincount([label for _, label in train], minlength=labels) + 1
    of_labels = np.log(of_labels / of_labels.sum())
    right, loss = 0, 0.0
    for each, label in held_out:
        known = [places[x] for x in _WORD.findall(each.lower()) if x in places]
        scores = of_labels + of_words[known].sum(0)
        right += int(scores.argmax() == label)
        loss += np.logaddexp.reduce(scores) - scores[label]
    return {"accuracy": right / len(held_out), "loss": float(loss / len(held_out))}

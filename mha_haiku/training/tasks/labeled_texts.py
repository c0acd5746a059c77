"""Predict the label of a whole text, from pairs of texts and labels or their table."""

import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, text_tasks

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
    baseline_name = "bag of words"
    path: str = fields.field(
        "",
        "a file of CSV, TSV or JSON lines (.jsonl) with texts and labels",
        section="data",
        is_path=True,
    )
    held_out_fraction: float = fields.field(
        0.1, "share of the texts to evaluate on", checks.fraction, section="data"
    )

    sha256: str = fields.field("", "of texts from Python", section="data")

    @functools.cached_property
    def _rows(self) -> list[tuple[str, str]]:
        if not self.sha256:
            return read_table(self.path)
        return [tuple(x) for x in json.loads(self._arrays["rows"].tobytes())]

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
                f"texts must have at least 2 labels, got {labels}{self.path and ' in '}"
                f"{self.path}."
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
        return (self._kept.text or self._text)["labels"]


def of_pairs(pairs: Sequence[tuple[str, str]], **options: Any) -> LabeledTexts:
    """Makes the task of texts and labels; its examples are as long as the longest."""
    rows = np.frombuffer(json.dumps(pairs).encode(), np.uint8)
    kept = base.Kept(arrays={"rows": rows})
    options |= {"kept": kept, "sha256": base.digest(kept)}
    task = LabeledTexts(**options)
    longest = max(len(task.encoder.encode(text)) for text, _ in pairs)
    length = len(task.before) + longest + len(task.encoder.after)
    return LabeledTexts(sequence_length=length, **options)


def read_table(path: str, second: str = "label") -> list[tuple[str, str]]:
    """Reads pairs of a text and a `second` column, without spaces around; `rows_of`."""
    pairs = []
    for i, row in enumerate(rows_of(path), start=1):
        values = [row.get(name) for name in ("text", second)]
        pair = [str(x).strip() for x in values if isinstance(x, (str, int))]
        if len(pair) < 2 or not all(pair):
            raise checks.ConfigError(
                f"path must have text and {second} in each line, got {path!r} with "
                f"{checks.shown(row)} in row {i}."
            )
        pairs.append(tuple(pair))
    return pairs


def rows_of(path: str) -> list[dict[str, Any]]:
    """Reads the rows of a table by the names of its columns.

    A line of a `.jsonl` file is an object. Otherwise the first line of the UTF-8 file
    names its columns, with tabs between them if that line has a tab (then quotes are
    characters like all others), else with commas.
    """
    content = text_tasks.read_file(path)
    try:
        if path.endswith(".jsonl"):
            return [dict(json.loads(line)) for line in content.strip().split("\n")]
        has_tabs = "\t" in content.partition("\n")[0]
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if has_tabs else {}
        csv.field_size_limit(max(len(content), csv.field_size_limit()))
        file = io.StringIO(content, newline="")
        names, *lines = filter(None, csv.reader(file, strict=True, **options))
        names = [name.strip().lower() for name in names]
        return [dict(zip(names, line, strict=True)) for line in lines]
    except (TypeError, ValueError, csv.Error) as error:
        raise checks.ConfigError(f"path {path!r} is no table: {error}.") from error


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
        rows = [places[x] for x in _WORD.findall(each.lower()) if x in places]
        scores = of_labels + of_words[rows].sum(0)
        right += int(scores.argmax() == label)
        loss += np.logaddexp.reduce(scores) - scores[label]
    return {"accuracy": right / len(held_out), "loss": float(loss / len(held_out))}

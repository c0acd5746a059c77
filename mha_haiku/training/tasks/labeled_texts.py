"""Predict the label of a whole text, from pairs of texts and labels or their table."""

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling, text_tasks

_COLUMNS = ("text", "label")
_CLS = "[CLS]"
_FURTHER = "further columns"  # in a line that has more than the first one
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
        "a file of CSV, TSV or JSON lines (.jsonl) with texts and labels",
        section="data",
        is_path=True,
    )
    held_out_fraction: float = fields.field(
        0.1, "share of the texts to evaluate on", checks.fraction, section="data"
    )

    sha256: str = fields.field("", "of texts from Python", section="data")

    def __post_init__(self, kept: base.Kept | None):
        if self.sha256 and (kept is None or kept.arrays is None):
            raise checks.ConfigError(
                f"{self.name} needs texts that are given in Python, by "
                "tasks.from_examples; a config cannot hold them."
            )
        super().__post_init__(kept)

    def keep(self) -> base.Kept:
        arrays = self._kept.arrays if self.sha256 else None
        return super().keep()._replace(arrays=arrays)

    @functools.cached_property
    def _rows(self) -> list[tuple[str, str]]:
        if not self.sha256:
            return read_table(self.path)
        if base.digest(base.Kept(arrays=self._kept.arrays)) != self.sha256:
            raise checks.ConfigError(
                f"sha256 must match the data of {self.name}: the data has changed."
            )
        texts, labels = (_texts_of(self._kept.arrays, x) for x in _COLUMNS)
        return list(zip(texts, labels, strict=True))

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


def of_pairs(pairs: Sequence[tuple[str, str]], **options: Any) -> LabeledTexts:
    """Makes the task of texts and labels; its examples are as long as the longest."""
    arrays = {}
    for column, texts in zip(_COLUMNS, zip(*pairs, strict=True), strict=True):
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        arrays[column] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays[f"{column}_ends"] = np.cumsum(list(map(len, encoded)))
    options["sha256"] = base.digest(base.Kept(arrays=arrays))
    kept = base.Kept(arrays=arrays)
    task = LabeledTexts(kept=kept, **options)
    longest = max(len(task.encoder.encode(text)) for text, _ in pairs)
    length = len(task.before) + longest + len(task.encoder.after)
    return LabeledTexts(sequence_length=length, kept=kept, **options)


def _texts_of(arrays: Mapping[str, np.ndarray], column: str) -> list[str]:
    ends = arrays[f"{column}_ends"].tolist()
    content = arrays[column].tobytes()
    starts = [0, *ends[:-1]]
    return [
        content[start:end].decode(errors="surrogatepass")
        for start, end in zip(starts, ends, strict=True)
    ]


def read_table(path: str, second: str = "label") -> list[tuple[str, str]]:
    """Reads the texts of a file, each with a `second` column, without spaces around.

    A line of a `.jsonl` file is an object. Otherwise the first line of the UTF-8 file
    names its columns, with tabs between them if that line has a tab (then quotes are
    characters like all others), else with commas.
    """
    if not path or os.path.isdir(os.path.expanduser(path)):
        raise checks.ConfigError(
            f"path must be a file of texts and labels, got {path!r}."
        )
    pairs = []
    for line, row in _table(path, text_tasks.read(path)):
        values = [row.get(name) for name in ("text", second)]
        are_texts = all(isinstance(x, (str, int)) and str(x).strip() for x in values)
        if not are_texts or _FURTHER in row:
            raise checks.ConfigError(
                f"path must have text and {second} in each line, got {path!r} with "
                f"{checks.shown(row)} in line {line}."
            )
        pairs.append(tuple(str(x).strip() for x in values))
    if not pairs:
        raise checks.ConfigError(f"path must have texts, got {path!r}: it has none.")
    return pairs


def columns(path: str) -> list[str]:
    """Lists the columns of the first line of a table; see `read_table`."""
    return next((list(row) for _, row in _table(path, text_tasks.read(path))), [])


def _table(path: str, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the columns of each line of a table."""
    if path.endswith(".jsonl"):
        for i, line in enumerate(content.splitlines(), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield i, row if isinstance(row, dict) else {"line": line}
        return
    has_tabs = "\t" in content.partition("\n")[0]
    reader = csv.DictReader(
        io.StringIO(content, newline=""),
        delimiter="\t" if has_tabs else ",",
        quoting=csv.QUOTE_NONE if has_tabs else csv.QUOTE_MINIMAL,
        restkey=_FURTHER,
        strict=True,
    )
    limit = csv.field_size_limit(max(len(content), csv.field_size_limit()))
    try:
        for row in reader:
            yield reader.line_num, {str(x).strip().lower(): y for x, y in row.items()}
    except csv.Error as error:
        raise checks.ConfigError(
            f"path must be CSV or TSV, got {path!r}: {error} in line {reader.line_num}."
        ) from error
    finally:
        csv.field_size_limit(limit)


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

"""What the words of a text say about its label, whatever their order: naive Bayes.

W words of the training texts, C labels.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+")


def score(
    train: Sequence[tuple[str, int]], held_out: Sequence[tuple[str, int]], labels: int
) -> dict[str, float]:
    """Returns accuracy and loss (nats per text) of multinomial naive Bayes.

    Words are runs of letters, digits and underscores, in lower case. Counts of the
    training texts have one added to each; words that these lack are passed over.

    Source: McCallum and Nigam 1998, https://www.cs.cmu.edu/~knigam/papers/multinomial-aaaiws98.pdf.
    """
    places: dict[str, int] = {}
    counts = [Counter() for _ in range(labels)]
    for text, label in train:
        counts[label].update(_words(text))
    for own in counts:
        for word in own:
            places.setdefault(word, len(places))
    table = np.ones((len(places), labels))  # [W, C]
    for label, own in enumerate(counts):
        for word, count in own.items():
            table[places[word], label] += count
    of_words = np.log(table / table.sum(0))
    of_labels = np.bincount([label for _, label in train], minlength=labels) + 1
    of_labels = np.log(of_labels / of_labels.sum())
    right, loss = 0, 0.0
    for text, label in held_out:
        known = [places[word] for word in _words(text) if word in places]
        scores = of_labels + of_words[known].sum(0)
        right += int(scores.argmax() == label)
        loss += np.logaddexp.reduce(scores) - scores[label]
    return {"accuracy": right / len(held_out), "loss": float(loss / len(held_out))}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

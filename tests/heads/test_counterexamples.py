"""What each method misses, on the smallest compiled model on which it does.

One layer of four heads where heads are asked, two of three where edges are.
"""

import functools
import operator

import numpy as np
import pytest

from mha_haiku import heads, rasp

LENGTH = 3
NAMES = ("previous_token", "two_hops")


@functools.cache
def _made(kind, name="previous_token"):
    """Returns a compiled model and it as a subject; those of a name share a model."""
    program = rasp.PROGRAMS[name](length=LENGTH)
    if name == "previous_token":
        program = rasp.kinds.dataclasses.replace(program)
    doubled = rasp.kinds.doubled(program, is_backup=True)
    sizes = functools.reduce(operator.or_, map(rasp.sizes, (program, doubled)))
    known = rasp.KINDS[kind](program, num_heads=4, noise=1e-3, sizes=sizes)
    batches = [known.examples(8, seed=seed) for seed in (0, 1)]
    subject = heads.Measured(known.model, heads.metrics.loss, known.params, batches[:1])
    return known, subject, batches[1:]


def _real(known, values):
    return np.array([values[place] for place in known.heads])

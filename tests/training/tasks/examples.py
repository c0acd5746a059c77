"""Examples of tasks: batches on the host, and the worked examples of docstrings."""

import re

import jax
import numpy as np

from mha_haiku import tasks

SIZE = 4096
# One compilation per task and size of its data, whichever test asks for it.
DRAW = jax.jit(tasks.batch, static_argnums=0)


def sampled(task, *, seed=0, data=None, indices=None):
    """Draws 4,096 examples of a task, as NumPy arrays."""
    data = task.train_data if data is None else data
    indices = np.arange(SIZE, dtype=np.int32) if indices is None else indices
    return jax.tree.map(np.asarray, DRAW(task, jax.random.key(seed), data, indices))


def worked_example(task):
    """Returns inputs, targets and weights of a task's docstring."""
    row = re.compile(r"^ +(inputs|targets|weights) +(\S.*)$", re.MULTILINE)
    rows = dict(row.findall(type(task).__doc__))
    classes = {task.class_label(c): c for c in range(task.num_classes)}
    classes |= {str(c): c for c in range(task.num_classes)} | {".": 0}
    targets = [classes[word] for word in rows["targets"].split()]
    weights = [float(word) for word in rows["weights"].split()]
    return task.encode(rows["inputs"]), np.array(targets), np.array(weights)

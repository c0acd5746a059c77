"""Values that a model computes on inputs: logits, maps, sites, and the lens."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.core import sites as all_sites
from mha_haiku.interop import torch_modules
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.lab.text_maps import TextMaps
from mha_haiku.subjects import answers, conversion, example_rows, sides
from mha_haiku.subjects.subject import Subject, parts_of, refuse, verb
from mha_haiku.subjects.verbs import per_head


@verb
def logits(subject: Subject, inputs: Any) -> jax.Array:
    """Computes logits `[T, C]` of a text, or `[B, T, C]` of several.

    A model that pools positions gives `[C]`, or `[B, C]`.
    """
    batch, is_one = conversion.batch_of(subject, inputs)
    params_and_batch = subject.params, batch
    if subject.model.config is None:
        result = model_runs.logits(subject.model)(*params_and_batch)
    else:
        result = model_runs.run(subject.model, *params_and_batch).logits
    if result is None:
        refuse(subject, "logits", "gives no logits")
    return result[0] if is_one else result


@verb
def maps(subject: Subject, inputs: Any, *, why: int = 0) -> TextMaps:
    """Computes the attention map of each layer, with its tokens.

    For one text, the page explains the `why` largest weights of each query, which takes
    seconds.
    """
    checks.non_negative_integer("why", why)
    batch = (
        conversion.one(subject, inputs)
        if why
        else conversion.batch_of(subject, inputs)[0]
    )
    model_and_batch = subject.model, subject.params, batch
    # The last first, which may not be there.
    cells = [heads.why.cells(*model_and_batch, key=-n) for n in range(why, 0, -1)]
    if subject.model.config is None:
        result = model_runs.maps(subject.model)(subject.params, batch)
    else:
        result = model_runs.run(*model_and_batch).maps
    texts = sides.of_maps(subject, batch, result)
    return TextMaps(result, why=tuple(cells[::-1]), name=subject.name, **texts)


@verb
def look(subject: Subject, inputs: Any, at: Any) -> tuple[Any, dict[str, Any]]:
    """Runs the model; returns its `Output` and the values at sites; see `mh.look`."""
    batch, _ = conversion.batch_of(subject, inputs)
    run = functools.partial(model_runs.run, subject.model)
    return all_sites.look(run, at)(subject.params, batch)


@verb
def sites(subject: Subject, inputs: Any) -> all_sites.Sites:
    """Lists the sites of the model, with shapes; runs nothing."""
    batch, _ = conversion.batch_of(subject, inputs)
    run = functools.partial(model_runs.run, subject.model)
    return all_sites.sites(run, subject.params, batch)


@verb
def check(subject: Subject, inputs: Any = None) -> torch_modules.Certificate:
    """Compares a PyTorch module with its trace, whatever the size of the inputs.

    Outputs, gradients and, per layer, weights times values and heads. Verbs do so by
    themselves once for each kind of inputs, up to a size that the answer says. Inputs
    default to the first of the examples, or to eight tokens.

    Raises:
      ValueError: If they differ, unless the module was wrapped by `check=False`; or the
        subject is no PyTorch module.
    """
    if subject.certifier is None:
        refuse(subject, "check", "is no PyTorch module")
    if inputs is not None:
        batch = conversion.batch_of(subject.replace(certifier=None), inputs)[0]
    else:
        batch = [*(subject.batches or ()), example_rows.some_tokens(subject.codec)][0]
    return conversion.compared_with_torch(subject, batch, always=True)


@verb
def lens(subject: Subject, inputs: Any) -> answers.Lens:
    """Reads the model's answers to a text as if each layer were the last.

    If positions are pooled there is one answer.
    """
    batch = conversion.one(subject, inputs)
    rows = heads.logit_lens(subject.model, subject.params, batch)[:, 0]
    is_pooled = rows.ndim == 2
    rows = rows[:, None] if is_pooled else rows
    chances = np.asarray(jax.nn.softmax(rows))
    best = chances.argmax(-1)
    label = str if subject.task is None else subject.task.class_label
    are_tokens = not is_pooled and np.issubdtype(batch.inputs.dtype, np.integer)
    if subject.task is None and are_tokens and batch.inputs.max() < rows.shape[-1]:
        label = subject.codec.label  # the classes are the tokens
    texts = np.array([[label(c) for c in row] for row in best.tolist()])
    labels = () if is_pooled else conversion.labels(subject, batch)[0]
    (tokens,) = labels or [("",) * len(rows[0])]
    tokens = tokens[-len(rows[0]) :]  # a model may answer only at the end
    layers = tuple(part.layer for part in parts_of(subject, batch))
    layers = layers if len(layers) == len(rows) - 1 else ()
    return answers.Lens(tokens, texts, chances.max(-1), rows, layers)


@verb
def show(subject: Subject, inputs: Any = None, *, why: int = 0, **options: Any) -> Any:
    """Shows the page of `maps` of inputs, by default of held-out examples.

    It has the importance of heads for these inputs if that takes seconds.
    """
    if inputs is None and subject.task is not None:
        return display.show(subject, **options)
    if inputs is None:
        refuse(subject, "show", "has no task; give inputs")
    columns = per_head.quick_importance(subject, inputs)
    result = maps(subject, inputs, why=why)
    missing = (("importance", "subject.importance(examples=[text])"),)
    result = dataclasses.replace(result, missing=missing if columns is None else ())
    return dataclasses.replace(result, columns=columns or {}).show(**options)


@verb
def plot(subject: Subject, inputs: Any, **options: Any) -> Any:
    """Draws the maps of inputs; see `mh.plot`."""
    return maps(subject, inputs).plot(**options)

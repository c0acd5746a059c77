"""A Haiku model of somebody else as a `models.Model`, for all that `heads` measures.

`L...` axes of scanned layers, `B...` batch axes, H heads. Every attention that
`observe` sees is a layer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import checks, models, modules
from mha_haiku.interop import carrying, observing
from mha_haiku.modules import intervention

Array = jax.Array
Layers = list[tuple[str, tuple[int, ...]]]  # paths, and which of their scanned layers


def observed_model(
    transformed: Any,
    *,
    paths: Sequence[str] | None = None,
    example: Sequence | None = None,
) -> models.Model:
    """Returns a model, as `heads.Subject` takes it, of somebody else's Haiku function.

    Its layers are the attentions, in the order of their calls; scanned layers count one
    by one. It runs as a whole only: its `Output` has no `hidden`, and `start` and
    `is_training` are refused.

    Args:
      transformed: As in `observe`: a function of `(params, rng, inputs)`, and of
        `lengths=` where the examples have lengths, that returns the logits.
      paths: Which attentions count as layers, in this order; None: all.
      example: See `observe`.
    """
    run = observing.gathering(transformed, example=example)

    def kept(gathered):
        if paths is None:
            return gathered
        for path in paths:
            checks.choice("paths", path, gathered)
        return {path: gathered[path] for path in paths}

    def apply(
        params,
        rng,
        inputs,
        *,
        lengths=None,
        interventions=None,
        start=None,
        is_training=False,
    ):
        if start is not None or is_training:
            raise ValueError(
                "start and is_training must be left out for an observed model, which "
                "runs as a whole, and as its function says."
            )
        options = {} if lengths is None else {"lengths": lengths}

        def run_with(interventions):
            output, gathered = run(interventions, params, rng, inputs, **options)
            return output, kept(gathered)

        by_path = None
        if interventions is not None:
            _, shapes = jax.eval_shape(lambda: run_with(None))
            by_path = _by_path(interventions, shapes)
        logits, gathered = run_with(by_path)
        maps = [
            jax.tree.map(
                lambda leaf, i=i: leaf[i], gathered[path].content.attention_map
            )
            for path, i in _layers(gathered)
        ]
        return models.Output(logits, tuple(maps))

    return models.Model(getattr(transformed, "init", None), apply)


def _layers(gathered: dict[str, carrying.Gathered]) -> Layers:
    """Returns where each layer is."""
    return [
        (path, index)
        for path, each in gathered.items()
        for index in np.ndindex(each.content.attention_map.shape[: each.num_scans])
    ]


def _by_path(given: Any, gathered: dict[str, carrying.Gathered]) -> dict[str, Any]:
    """Returns interventions by path, from those of L layers."""
    layers = _layers(gathered)
    each = intervention.per_layer(intervention.checked(given), len(layers))
    by_path = {}
    for path, own in gathered.items():
        entries = [x for x, (name, _) in zip(each, layers, strict=True) if name == path]
        if own.num_scans:
            leading = own.content.attention_map.shape[: own.num_scans]
            by_path[path] = _stacked(entries, leading)
        else:
            (by_path[path],) = entries
    return by_path


def _stacked(
    entries: list[modules.Interventions], leading: tuple[int, ...]
) -> modules.Interventions:
    """Returns the interventions of scanned layers as one, with their axes in front.

    Layers that are left alone get open gates: one program stands for all.
    """

    def together(field, fill):
        arrays = [getattr(entry, field) for entry in entries]
        known = [x for x in arrays if x is not None]
        if not known:
            return None
        arrays = [jnp.full_like(known[0], fill) if x is None else x for x in arrays]
        stacked = jnp.stack([jnp.asarray(x) for x in arrays])
        return stacked.reshape(*leading, *stacked.shape[1:])

    return modules.Interventions(
        together("heads", 1),
        together("replacement", 0),
        together("units", 1),
        together("units_of", 0),
    )

"""The heads laboratory: which heads matter, what they do, and a model without the rest.

Pure functions of parameters, data and a metric that is handed in.
"""

from mha_haiku.heads import closing
from mha_haiku.heads.importance import (
    Importance,
    ablation,
    attribution,
    closed,
    gradient,
    statistic,
)
from mha_haiku.heads.pruning import gates, prune, prune_units, scaled
from mha_haiku.heads.subject import Metric, Subject, head_outputs

__all__ = [
    "Importance",
    "Metric",
    "Subject",
    "ablation",
    "attribution",
    "closed",
    "closing",
    "gates",
    "gradient",
    "head_outputs",
    "prune",
    "prune_units",
    "scaled",
    "statistic",
]

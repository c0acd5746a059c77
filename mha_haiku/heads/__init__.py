"""The heads laboratory: which heads matter, what they do, and a model without the rest.

Pure functions of parameters, data and a metric that is handed in.
"""

from mha_haiku.heads import closing, ground_truth, hard_concrete
from mha_haiku.heads.gates import Learned
from mha_haiku.heads.gates import learn as learn_gates
from mha_haiku.heads.importance import (
    Importance,
    ablation,
    attribution,
    closed,
    gradient,
    statistic,
)
from mha_haiku.heads.pruning import open_gates, prune, prune_units, scaled
from mha_haiku.heads.ranking import (
    Step,
    greedy_order,
    order,
    pairs,
    rank_correlation,
    rank_intervals,
)
from mha_haiku.heads.roles import MIXED, ROLES, Matching, Roles, match, roles
from mha_haiku.heads.subject import Metric, Subject, head_outputs

__all__ = [
    "Importance",
    "Learned",
    "MIXED",
    "Matching",
    "Metric",
    "ROLES",
    "Roles",
    "Step",
    "Subject",
    "ablation",
    "attribution",
    "closed",
    "closing",
    "gradient",
    "greedy_order",
    "ground_truth",
    "hard_concrete",
    "head_outputs",
    "learn_gates",
    "match",
    "open_gates",
    "order",
    "pairs",
    "prune",
    "prune_units",
    "rank_correlation",
    "rank_intervals",
    "roles",
    "scaled",
    "statistic",
]

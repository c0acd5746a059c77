"""The heads laboratory: which heads matter, what they do, and a model without the rest.

Pure functions of parameters, data and a metric that is handed in.
"""

from mha_haiku.heads import closing, ground_truth, hard_concrete, scoring
from mha_haiku.heads.closing import Closing
from mha_haiku.heads.flow import flow
from mha_haiku.heads.gates import Learned
from mha_haiku.heads.gates import learn as learn_gates
from mha_haiku.heads.gradient_rollout import gradient_rollout, output_gradients
from mha_haiku.heads.importance import (
    Importance,
    ablation,
    attribution,
    closed,
    gradient,
    statistic,
    unit_gradient,
)
from mha_haiku.heads.matching import Matching, match
from mha_haiku.heads.pruning import open_gates, prune, prune_units, scaled
from mha_haiku.heads.ranking import (
    Step,
    greedy_order,
    order,
    pairs,
    rank_correlation,
    rank_intervals,
)
from mha_haiku.heads.roles import MIXED, ROLES, Roles, roles
from mha_haiku.heads.rollout import rollout, rollout_dense, value_rollout
from mha_haiku.heads.subject import Metric, Subject, head_outputs

__all__ = [
    "Closing",
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
    "flow",
    "gradient",
    "gradient_rollout",
    "greedy_order",
    "ground_truth",
    "hard_concrete",
    "head_outputs",
    "learn_gates",
    "match",
    "open_gates",
    "order",
    "output_gradients",
    "pairs",
    "prune",
    "prune_units",
    "rank_correlation",
    "rank_intervals",
    "roles",
    "rollout",
    "rollout_dense",
    "scaled",
    "scoring",
    "statistic",
    "unit_gradient",
    "value_rollout",
]

"""Analysis of heads: which heads matter, what they do, and pruning of the others.

Pure functions of parameters, data and a metric.
"""

from mha_haiku.core import arguments
from mha_haiku.lab.heads import (
    ablation_values,
    alignment,
    circuits,
    drift,
    edits,
    graph,
    hard_concrete,
    metrics,
    why,
)
from mha_haiku.lab.heads.ablation_values import AblationValue
from mha_haiku.lab.heads.circuits import HeadWeights, weights
from mha_haiku.lab.heads.contributions import (
    Contributions,
    logit_attribution,
    logit_lens,
)
from mha_haiku.lab.heads.drift import mean_pooled, measured_by_drift
from mha_haiku.lab.heads.edge_measures import (
    EDGE_MEASURES,
    Circuit,
    circuit,
    edge_attribution,
    edge_patching,
    integrated_edge_attribution,
    strongest,
    with_edges,
)
from mha_haiku.lab.heads.head_circuits import (
    circuit_of_heads,
    path_patching,
    with_head_edges,
)
from mha_haiku.lab.heads.importance import (
    MEASURES,
    Measure,
    ablation,
    attribution,
    confidence,
    gated_metric,
    gradient,
)
from mha_haiku.lab.heads.model_runs import Measured, Metric
from mha_haiku.lab.heads.orders import Step, greedy_order, order
from mha_haiku.lab.heads.patching import Edges, Patched, activation_patching
from mha_haiku.lab.heads.pruning import open_gates, prune, scaled
from mha_haiku.lab.heads.roles import (
    NO_CLEAR_ROLE,
    ROLES,
    SCORES,
    role_evidence,
    role_of,
    roles,
    roles_of_evidence,
)
from mha_haiku.lab.heads.rollout import rollout
from mha_haiku.records import Column, Heads, means
from mha_haiku.records.ranks import rank_correlation, rank_intervals

__all__ = [
    "AblationValue",
    "Circuit",
    "Column",
    "Contributions",
    "EDGE_MEASURES",
    "Edges",
    "HeadWeights",
    "Heads",
    "MEASURES",
    "NO_CLEAR_ROLE",
    "Measure",
    "Metric",
    "Patched",
    "ROLES",
    "SCORES",
    "Step",
    "Measured",
    "ablation",
    "ablation_values",
    "activation_patching",
    "alignment",
    "attribution",
    "circuit",
    "circuits",
    "confidence",
    "drift",
    "measured_by_drift",
    "edge_attribution",
    "circuit_of_heads",
    "edge_patching",
    "with_head_edges",
    "edits",
    "gated_metric",
    "gradient",
    "graph",
    "greedy_order",
    "hard_concrete",
    "integrated_edge_attribution",
    "logit_attribution",
    "logit_lens",
    "mean_pooled",
    "means",
    "metrics",
    "open_gates",
    "order",
    "path_patching",
    "prune",
    "rank_correlation",
    "rank_intervals",
    "role_evidence",
    "role_of",
    "roles",
    "roles_of_evidence",
    "rollout",
    "scaled",
    "strongest",
    "weights",
    "why",
    "with_edges",
]

arguments.check_all(globals())

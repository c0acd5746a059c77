"""The roles of heads: their names, meanings and scores, for pages, tables and docs."""

from typing import NamedTuple


class Role(NamedTuple):
    """A role that a head can have."""

    threshold: float  # the smallest score of the role
    attends: str  # where its heads look, after "attends"
    label: str  # the score, in [0, 1], a mean over queries and examples
    limit: float = float("inf")  # the score must be below
    score: str | None = None  # the name of the score; defaults to the role's


_ENTROPY = "entropy, as a share of the largest possible"
ROLES = {
    # Only for cross-attention, if the task says where its rows should look.
    "aligned": Role(
        0.5,
        "where the task expects",
        "share of rows that have an aligned key whose largest weight is aligned",
    ),
    "previous_token": Role(0.5, "to the previous token", "mass on the token before"),
    "next_token": Role(0.5, "to the next token", "mass on the token after"),
    "own_position": Role(0.5, "from each token to itself", "mass on the diagonal"),
    "first_token": Role(0.5, "to the first token", "mass on position 0, a sink"),
    "separator": Role(0.5, "to separators", "mass on separators, such as [SEP]"),
    "on_image": Role(
        0.5, "to the picture", "mass of words on image tokens, of those that see one"
    ),
    "induction": Role(
        0.5,
        "to what followed the same token before",
        "mass on what followed the token before, of queries whose token has occurred",
    ),
    # Not where one of the roles of offsets -1, 0 and 1 above is reached.
    "positional": Role(
        0.9,
        "to a fixed distance",
        "share of queries with the largest weight at one offset",
    ),
    "anti_diagonal": Role(
        0.9,
        "in reverse order",
        "share of queries with the largest weight at one sum of both positions",
    ),
    # Only for cross-attention, between positions of two texts.
    "monotonic": Role(
        0.9,
        "in the order of the other text",
        "correlation, up or down, of a query's place and its largest weight's",
    ),
    "uniform": Role(0.95, "evenly to everything", _ENTROPY, score="relative_entropy"),
    "broad": Role(0.75, "broadly", _ENTROPY, limit=0.95, score="relative_entropy"),
}
NO_CLEAR_ROLE = "no_clear_role"

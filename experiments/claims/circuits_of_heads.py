"""One-layer attention-only heads copy, and K-composition makes induction."""

from typing import Any

import jax
import numpy as np

from experiments.claims import base
from mha_haiku.core import models
from mha_haiku.lab import heads
from mha_haiku.lab.heads import circuits
from mha_haiku.training import runs

_COPIES = 0.5  # the copying score from which on a head counts as copying
_LEARNED, _STEPS, _MOST_STEPS = 0.95, 500, 2000
_TEXT_STEPS = 800
_DRAWS = 64  # of random matrices


class CircuitsOfHeads(base.Claim):
    """Two models without feed-forward parts are analyzed by their weights only.

    The first has one layer of eight heads and is trained for 800 steps on byte-pair
    encoded text. A head copies if its OV circuit, from tokens to logits, has mostly
    positive eigenvalues: their sum is at least half of the sum of their absolute
    values. The second has two layers of four heads and is trained on repeated random
    tokens for 500 steps, which are doubled, up to 2,000, until its accuracy is 0.95.
    Its K-composition is compared with random matrices: the largest K-composition of all
    16 pairs of heads, minus the largest of 16 pairs of normal matrices of the same
    shapes in any of 64 draws. The pair with the largest K-composition is examined,
    whatever it attends to. If it makes induction, the second head looks for positions
    whose previous token is the current one (its QK circuit, through the OV circuit of
    the first head, matches tokens) and copies what it finds.

    The control is the same two models before training. The planted failure writes
    copying heads and one such pair into their random weights.
    """

    sentence = "One-layer heads copy, and K-composition of two makes induction"
    source = base.Source(
        paper="Elhage et al. 2021",
        place="sections on detecting copying behavior and on two-layer transformers",
        published=(
            "10 of 12 one-layer heads copy; K-composition of induction heads stands "
            "out from random matrices, and they have both scores near 1"
        ),
        link="https://transformer-circuits.pub/2021/framework/index.html",
    )
    control = "random weights"
    planted = "random weights with copying heads and a pair that makes induction"
    effect = (
        "share of one-layer heads that copy: {0}; the largest K-composition exceeds "
        "random matrices by {1}, and its pair of heads scores {2} for matching and {3} "
        "for copying"
    )
    would_change = (
        "A larger one-layer model, trained on more text: the paper's model has 12 "
        "heads of size 64, ours has 8 of size 8."
    )
    version = 2
    before = base.Before(
        "partly",
        "K-composition had to be 1.5 times the median of all pairs, a bound of ours "
        "that one pair in four can hardly meet. Now it is compared with random "
        "matrices, as in the paper, and the bound of copying heads is half of the "
        "paper's share.",
    )
    criteria = (
        base.Criterion(
            "share of one-layer heads that copy",
            "heads that copy, one layer",
            at_least=5 / 12,
            bound_from=base.HALF,
            published={"one-layer model": 10 / 12},
        ),
        base.Criterion(
            "largest K-composition minus K-composition of random matrices",
            lambda x: x["largest K-composition"] - x["random K-composition"],
            at_least=0.0,
            bound_from=base.PAPER,
        ),
        base.Criterion(
            "matching score of that pair of heads, through the first",
            "matching score of the pair",
            at_least=0.5,
            bound_from=base.HALF,
            published={"near 1": 1.0},
        ),
        base.Criterion(
            "copying score of the second head",
            "copying score of the pair",
            at_least=0.5,
            bound_from=base.HALF,
            published={"near 1": 1.0},
        ),
    )

    def configs(self, arm):
        text = runs.default_config("language_model").replace(
            data=dict(tokenizer="bpe"),
            model=dict(
                num_layers=1, attention=dict(num_heads=8), embedding=dict(max_length=64)
            ),
            training=dict(steps=_TEXT_STEPS, batch_size=32),
        )
        repeated = runs.default_config("induction").replace(
            model=dict(
                num_layers=2, attention=dict(num_heads=4), embedding=dict(max_length=32)
            ),
            training=dict(steps=_STEPS, batch_size=64),
        )
        return {
            name: config.replace(
                model=dict(
                    family="causal", model_size=64, feed_forward=dict(hidden_size=0)
                ),
                optimizer=dict(learning_rate=5e-3, warmup_steps=100),
                training=dict(
                    report_every=config.training.steps,
                    evaluate_every=config.training.steps,
                    checkpoint_every=config.training.steps,
                ),
            )
            for name, config in (("text", text), ("induction", repeated))
        }

    def measure(self, desk, seed, arm):
        configs = self.configs(arm)
        text = desk.train(configs["text"], seed)
        induction, _ = desk.train_until(
            configs["induction"],
            seed,
            lambda x: x.held_out["accuracy"] >= _LEARNED,
            most=_MOST_STEPS,
        )
        layers, ends = {}, {}
        for name, trained in (("text", text), ("induction", induction)):
            params, model = trained.params, trained.model
            if arm != "claim":
                tokens = np.zeros((1, trained.task.sequence_length), np.int32)
                params = model.init(jax.random.key(seed), tokens)
            embedding = np.float64(params["embedding"]["embeddings"])
            unembedding = folded_unembedding(params)
            count = min(len(embedding), unembedding.shape[1])
            ends[name] = embedding[:count], unembedding[:, :count]
            layers[name] = [
                folded_weights(model, params, layer)
                for layer in range(trained.config.model.num_layers)
            ]
        (only,), (first, second) = layers["text"], layers["induction"]
        if arm == base.PLANTED:
            only = copying(only, *ends["text"])
            second = inducing(first, second, *ends["induction"])
        scores = copying_score(only, *ends["text"])
        pairs = circuits.composition("k", first, second)
        one, other = np.unravel_index(pairs.argmax(), pairs.shape)
        earlier, later = _head(first, one), _head(second, other)
        embedding, unembedding = ends["induction"]
        return {
            "heads that copy, one layer": np.mean(scores >= _COPIES),
            "mean copying score, one layer": scores.mean(),
            "largest K-composition": pairs.max(),
            "random K-composition": random_composition(seed, first, second),
            "matching score of the pair": matching_score(
                later, embedding, earlier=earlier
            ),
            "copying score of the pair": copying_score(later, embedding, unembedding),
            "accuracy of induction": induction.held_out["accuracy"],
            "loss of text": text.held_out["loss"],
        }


def folded_weights(model: models.Model, params: Any, layer: int) -> heads.HeadWeights:
    """Returns the weights of a layer's heads with the layer norm before them folded in.

    Its scale, its offset and its subtraction of the mean are in the matrices and
    biases; only a factor per position remains of it.

    Source: Elhage et al. 2021, appendix on layer normalization.
    """
    matrix, offset = _norm_of(params[f"encoder/layer_{layer}/norm_1"])
    weights = heads.weights(model, params, layer)
    folded = {}
    for name in ("query", "key", "value"):
        w, b = getattr(weights, name), getattr(weights, f"{name}_bias")
        folded |= {name: matrix @ w, f"{name}_bias": b + offset @ w}
    return weights._replace(**folded)


def folded_unembedding(params: Any) -> np.ndarray:
    """Returns the map `[D, N]` from the last stream to logits, with the norm folded."""
    return _norm_of(params["encoder/norm"])[0] @ np.float64(params["logits"]["w"])


def _norm_of(leaves: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a layer norm, up to a factor per position, as a matrix and an offset."""
    scale, offset = (np.float64(leaves[name]) for name in ("scale", "offset"))
    return (np.eye(len(scale)) - 1 / len(scale)) * scale, offset


def copying_score(
    weights: heads.HeadWeights, embedding: np.ndarray, unembedding: np.ndarray
) -> np.ndarray:
    """Divides the sum of the OV circuit's eigenvalues by the sum of their magnitudes.

    In [-1, 1]: 1 if the head copies, -1 if it subtracts what it looks at, about 0 for
    random weights. The circuit goes from tokens to logits, through `embedding` `[N, D]`
    and `unembedding` `[D, N]`: a positive eigenvalue is a direction of tokens
    that makes the same tokens likelier. With weights of several heads the result has
    their leading axis.

    Raises:
      ValueError: If embedding and unembedding have different tokens.

    Source: Elhage et al. 2021, "Detecting copying behavior".
    """
    if embedding.shape != unembedding.shape[::-1]:
        raise ValueError(
            "embedding [N, D] and unembedding [D, N] must have the same tokens, "
            f"got shapes {embedding.shape} and {unembedding.shape}."
        )
    inner = unembedding @ embedding
    # A B and B A share their nonzero eigenvalues, and B A is V x V instead of N x N.
    return _positivity(weights.output @ inner @ weights.value)


def matching_score(
    weights: heads.HeadWeights,
    embedding: np.ndarray,
    *,
    earlier: heads.HeadWeights | None = None,
) -> np.ndarray:
    """Computes `copying_score` of the QK circuit: 1 if a head seeks equal tokens.

    `embedding` `[N, D]` has the tokens as both sides read them. With an earlier head,
    from a lower layer, keys are computed from what that head wrote: 1 if the head looks
    for positions at which the earlier head read the query's token, which is induction
    if that head looks one back.

    Source: Elhage et al. 2021, "Checking the mechanistic theory".
    """
    inner = embedding.T @ embedding
    if earlier is not None:  # keys are tokens, through the OV of the earlier head
        inner = _ov(earlier).mT @ inner
    # E Q K^T (E OV)^T has the same eigenvalues as K^T OV^T E^T E Q.
    return _positivity(weights.key.mT @ inner @ weights.query)


def random_composition(
    seed: int, first: heads.HeadWeights, second: heads.HeadWeights
) -> float:
    """Returns the largest K-composition of normal matrices in any of 64 draws.

    Readers of the residual stream have no mean over it, as after a folded layer norm.
    """
    generator = np.random.default_rng(seed)

    def drawn(weights):
        drawn = type(weights)(*(generator.normal(size=x.shape) for x in weights))
        return drawn._replace(
            **{
                name: matrix - matrix.mean(-2, keepdims=True)
                for name, matrix in drawn._asdict().items()
                if name in ("query", "key", "value")
            }
        )

    found = [
        circuits.composition("k", drawn(first), drawn(second)).max()
        for _ in range(_DRAWS)
    ]
    return float(np.max(found))


def copying(
    weights: heads.HeadWeights, embedding: np.ndarray, unembedding: np.ndarray
) -> heads.HeadWeights:
    """Returns heads whose outputs make the tokens that they read likelier.

    M is what they read, as a function of the logits; M^T M has positive eigenvalues.
    """
    return weights._replace(output=(unembedding @ embedding @ weights.value).mT)


def inducing(
    first: heads.HeadWeights,
    second: heads.HeadWeights,
    embedding: np.ndarray,
    unembedding: np.ndarray,
) -> heads.HeadWeights:
    """Returns the second layer with a head that looks for the first head's inputs."""
    query = second.query[0]
    read = _ov(_head(first, 0)).mT @ embedding.T @ embedding @ query
    key = np.concatenate([read[None], second.key[1:]])
    return copying(second._replace(key=key), embedding, unembedding)


def _ov(weights: heads.HeadWeights) -> np.ndarray:
    """Computes the OV circuit, `[D, D]`, from an attended vector to the output."""
    return weights.value @ weights.output


def _positivity(matrix: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvals(matrix)
    sizes = np.abs(values).sum(-1)
    return values.sum(-1).real / np.where(sizes > 0, sizes, 1)


def _head(weights, head):
    return type(weights)(*(x[head] for x in weights))

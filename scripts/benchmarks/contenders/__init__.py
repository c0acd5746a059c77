"""The contenders of the benchmarks: modules with a function `prepare`.

In training, and as attention modules, all have the same number of parameters and the
same sizes (`sizes.py`), written in the way that is usual and fast with their library.

`prepare` returns a `worker.Program`. Its arguments, unless a module documents others:

  case: "training", "forward" or "forward_and_backward".
  size: Steps or calls in a run.
  attention: Fields of `sizes.AttentionSize`, of the attention module.
  core: Fields of `sizes.CoreSize`, of attention without projections.
  model: A name of `causal_models.SIZES` or `pretrained_models.MODELS`.
  batch, length: Number of examples or texts, and of their tokens.
  steps: Tokens per text in a run.
"""

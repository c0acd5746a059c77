"""Who takes part in the benchmarks: modules with a `prepare` each.

In training, and of an attention module, all have the same number of parameters and the
same sizes (`sizes.py`), and do it in the way that is usual and fast with their library.

`prepare` returns a `worker.Program`. Its arguments, unless a module says otherwise:

  case: A name of `sizes.TRAINING_CASES`, "forward" or "forward_and_backward".
  size: Steps or calls in a run.
  attention: Fields of `sizes.AttentionSize`, of the attention module.
  core: Fields of `sizes.CoreSize`, of attention without projections.
  implementation: The implementation of `mha_haiku.attend`.
  model: A name of `causal_models.SIZES` or `pretrained_models.MODELS`.
  batch, length: Examples or texts, and the tokens of each.
  steps: Tokens of each text in a run.
"""

"""Who takes part in the benchmarks: a module per library, each a worker of a duel.

All build the same model with the same number of parameters from the same config, and
train it in the way that is usual and fast with their library.
"""

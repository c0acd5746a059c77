"""Who takes part in the benchmarks: modules with a `prepare` each.

All build the same model with the same number of parameters from the same config, and
train it in the way that is usual and fast with their library.
"""

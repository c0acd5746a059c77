"""Who takes part in the benchmarks: modules with a `prepare` each.

In training, and of an attention module, all have the same number of parameters and the
same sizes (`sizes.py`), and do it in the way that is usual and fast with their library.
"""

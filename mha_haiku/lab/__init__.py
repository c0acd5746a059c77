"""Analysis of heads: what they do and which ones matter; models with known circuits.

`maps` is the only maker of a `MapSet`. Runs are read in `subjects`, and pictures are
drawn in `showing`.
"""

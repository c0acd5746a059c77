"""Attention and its observations tile by tile, in O(T + S) memory.

Read `sweep` (the loops over heads, blocks of queries and tiles of keys), `blockwise`
(attention and its gradient), `fold` (the walk that runs any observation, and its
gradient) and `engine` (what the methods of `AttentionMap` call). The tricks:

1. Two-dimensional tiles are the fastest on the CPU: heads are taken one by one, or a
   few together if their tiles are small.
2. All tiles have the same size, so that one body is compiled for all. The last tile of
   a row starts earlier, and hides its overlap.
3. Tiles that are entirely visible run in a loop whose body has no mask; the others
   share a second loop, which skips them. Tiles that the mask rules out are in neither.
4. Masked scores are -inf, and running maxima begin at the lowest float, so that no
   `where` per score is needed (`inputs`). Observations get `HIDDEN` for the log of a
   weight of 0, which is finite; gradients use `_LOW` in its place.
5. A log weight is a score less the logsumexp, so the gradient of an observation takes
   two paths: to queries and keys here, and through the logsumexp into the gradient of
   the attention that computed it.
"""

"""Attention and its observations tile by tile, in O(T + S) memory."""

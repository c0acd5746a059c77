"""Checkpoints of a run: written as a whole, and verified when read."""

from mha_haiku.runs.checkpoints.store import Checkpoints, Elsewhere, SaveError

__all__ = ["Checkpoints", "Elsewhere", "SaveError"]

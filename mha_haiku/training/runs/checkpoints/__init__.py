"""Checkpoints of a run: written as a whole, and verified when read."""

from mha_haiku.training.runs.checkpoints.store import Checkpoints, Elsewhere, SaveError

__all__ = ["Checkpoints", "Elsewhere", "SaveError"]

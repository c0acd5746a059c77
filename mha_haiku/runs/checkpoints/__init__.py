"""Checkpoints of a run: committed as a whole, and proved whole when read."""

from mha_haiku.runs.checkpoints.store import Checkpoints, Elsewhere, SaveError

__all__ = ["Checkpoints", "Elsewhere", "SaveError"]

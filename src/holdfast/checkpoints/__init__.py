"""Checkpoints: every turn of a session as a version, stored at the cost of what it adds."""

from .changes import Heads
from .noun import CheckpointsNoun

__all__ = ["CheckpointsNoun", "Heads"]

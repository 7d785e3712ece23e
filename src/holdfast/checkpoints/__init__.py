"""Checkpoints: every turn of a session as a version, stored at the cost of what it adds."""

from .branching import RewindOps, copy_fork_point
from .heads import Heads
from .noun import CheckpointsNoun

__all__ = ["CheckpointsNoun", "Heads", "RewindOps", "copy_fork_point"]

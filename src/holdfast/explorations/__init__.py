"""What worlds and explorations keep in a store: checkpoints, the graph, and the log of actions."""

from .noun import ExplorationsNoun
from .rows import Journal, KeptCheckpoint, KeptState, KeptStep, KeptWorld

__all__ = [
    "ExplorationsNoun",
    "Journal",
    "KeptCheckpoint",
    "KeptState",
    "KeptStep",
    "KeptWorld",
]

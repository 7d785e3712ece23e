"""What worlds and explorations keep in a store: checkpoints, the graph, and the log of actions."""

from .noun import ExplorationsNoun
from .rows import (
    ExplorationInfo,
    Explorations,
    Journal,
    KeptCheckpoint,
    KeptState,
    KeptStep,
    KeptWorld,
    Totals,
)

__all__ = [
    "ExplorationInfo",
    "Explorations",
    "ExplorationsNoun",
    "Journal",
    "KeptCheckpoint",
    "KeptState",
    "KeptStep",
    "KeptWorld",
    "Totals",
]

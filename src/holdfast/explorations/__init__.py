"""What worlds and explorations keep in a store: checkpoints, the graph, and the log of actions."""

from .noun import ExplorationsNoun
from .rows import (
    Edge,
    ExplorationInfo,
    Explorations,
    Journal,
    KeptCheckpoint,
    KeptState,
    KeptStep,
    KeptWorld,
    Outline,
    Totals,
)

__all__ = [
    "Edge",
    "ExplorationInfo",
    "Explorations",
    "ExplorationsNoun",
    "Journal",
    "KeptCheckpoint",
    "KeptState",
    "KeptStep",
    "KeptWorld",
    "Outline",
    "Totals",
]

"""Shared state: one versioned document for a whole tree of sessions."""

from .handle import State
from .noun import StateNoun
from .records import (
    Entry,
    KeyDiff,
    StateConflict,
    StateDiff,
    StateEvent,
    StateSnapshot,
    StateSummary,
)

__all__ = [
    "Entry",
    "KeyDiff",
    "State",
    "StateConflict",
    "StateDiff",
    "StateEvent",
    "StateNoun",
    "StateSnapshot",
    "StateSummary",
]

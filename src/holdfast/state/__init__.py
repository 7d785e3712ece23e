"""Shared state: one versioned document for a whole tree of sessions."""

from .conflicts import StoreConflicts
from .handle import State
from .noun import StateNoun
from .prompt import resume_prompt
from .records import (
    Entry,
    KeyDiff,
    KeyRule,
    StateChange,
    StateConflict,
    StateDiff,
    StateEvent,
    StateSnapshot,
    StateSummary,
)
from .rules import Reducer

__all__ = [
    "Entry",
    "KeyDiff",
    "KeyRule",
    "Reducer",
    "State",
    "StateChange",
    "StateConflict",
    "StateDiff",
    "StateEvent",
    "StateNoun",
    "StateSnapshot",
    "StateSummary",
    "StoreConflicts",
    "resume_prompt",
]

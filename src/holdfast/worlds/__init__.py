"""Checkpoint whole worlds, roll them back in any order, and explore them."""

from .actions import Action, Outcome, Step, action
from .checkpoints import Checkpoint
from .conformance import check_system
from .context import Context
from .crashes import Crash, CrashExploration, explore_crashes
from .explore import explore
from .graph import State, StateGraph, Transition
from .invariants import Invariant, Violation, assert_holds, invariant
from .leftovers import Cleaned, clean
from .reports import write_report
from .reproduce import reproducer, write_reproducer
from .result import Exploration, Progress
from .strategies import Candidate, Strategy
from .system import Observation, System
from .systems.files import FileSystem
from .systems.holdfast import HoldfastSystem
from .systems.memory import MemorySystem
from .systems.services import ClockSystem, MailSystem, QueueSystem, StorageSystem
from .systems.sqlite import SqliteSystem
from .systems.sqlite_connection import SqliteConnectionSystem
from .worker import take_part
from .world import Leak, Recovery, World

__all__ = [
    "Action",
    "Candidate",
    "Checkpoint",
    "Cleaned",
    "ClockSystem",
    "Context",
    "Crash",
    "CrashExploration",
    "Exploration",
    "FileSystem",
    "HoldfastSystem",
    "Invariant",
    "Leak",
    "MailSystem",
    "MemorySystem",
    "Observation",
    "Outcome",
    "Progress",
    "QueueSystem",
    "Recovery",
    "SqliteConnectionSystem",
    "SqliteSystem",
    "State",
    "StateGraph",
    "Step",
    "StorageSystem",
    "Strategy",
    "System",
    "Transition",
    "Violation",
    "World",
    "action",
    "assert_holds",
    "check_system",
    "clean",
    "explore",
    "explore_crashes",
    "invariant",
    "reproducer",
    "take_part",
    "write_report",
    "write_reproducer",
]

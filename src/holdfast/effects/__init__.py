"""Effects: tool calls that happen once, with their intent durable before and outcome after."""

from .call_all import ToolUse
from .calls import Result
from .issued import Issued, Replay
from .ledger import Ledger
from .noun import EffectsNoun
from .ops import SessionEffects, StoreEffects
from .rows import Ticket
from .tools import Landed, NotLanded, Tool, Unknown, tool
from .undoing import Compensation, Rewound

__all__ = [
    "Compensation",
    "EffectsNoun",
    "Issued",
    "Landed",
    "Ledger",
    "NotLanded",
    "Replay",
    "Result",
    "Rewound",
    "SessionEffects",
    "StoreEffects",
    "Ticket",
    "Tool",
    "ToolUse",
    "Unknown",
    "tool",
]

"""Effects: tool calls that happen once, with their intent durable before and outcome after."""

from .handles import Issued, Replay, SessionEffects, StoreEffects
from .ledger import Ledger
from .noun import EffectsNoun
from .statements import Result, Ticket
from .tools import Landed, NotLanded, Tool, Unknown, tool
from .turns import ToolUse
from .undo import Compensation, Rewound

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

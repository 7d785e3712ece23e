"""Effects: tool calls that happen once, with their intent durable before and outcome after."""

from .call_all import ToolUse
from .calls import Result
from .handles import SessionEffects, StoreEffects
from .ledger import Ledger
from .manual import Issued, Replay
from .noun import EffectsNoun
from .statements import Ticket
from .tools import Landed, NotLanded, Tool, Unknown, tool
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

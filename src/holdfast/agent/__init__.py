"""A durable agent loop, to use or as an example."""

from .budget import Budget, Price, Usage
from .loop import Agent
from .models import Model, ModelError, Request, Response, ScriptedModel, ToolSpec, call
from .peers import Peer
from .plan import Plan, Postcondition, Step, read_plan
from .progress import (
    Answered,
    Asking,
    AttemptFailed,
    Called,
    Calling,
    Progress,
    Resumed,
    Saved,
    Stopped,
)
from .rules import Cadence, every
from .run import Outcome
from .transcript import (
    Block,
    Message,
    ReasoningBlock,
    TextBlock,
    ToolCall,
    ToolResult,
    legal,
    read_block,
    read_message,
    read_transcript,
)

__all__ = [
    "Agent",
    "Answered",
    "Asking",
    "AttemptFailed",
    "Block",
    "Budget",
    "Cadence",
    "Called",
    "Calling",
    "Message",
    "Model",
    "ModelError",
    "Outcome",
    "Peer",
    "Plan",
    "Postcondition",
    "Price",
    "Progress",
    "ReasoningBlock",
    "Request",
    "Response",
    "Resumed",
    "Saved",
    "ScriptedModel",
    "Step",
    "Stopped",
    "TextBlock",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "Usage",
    "call",
    "every",
    "legal",
    "read_block",
    "read_message",
    "read_plan",
    "read_transcript",
]

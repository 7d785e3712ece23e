"""Peers as tools: a model's call becomes an ask, and the answer of the peer its result."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..arguments import require_text, shown
from ..errors import InvalidArgument
from ..peers import Answer
from ..peers.asks import ASK_SECONDS, Timeout, require_timeout
from .models import ToolSpec

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
ASKS: Final = uuid.UUID("5f0c1c5e-8f57-4a0e-9d0e-3f6f6f9c2a11")
MESSAGE: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What the agent should do."}},
    "required": ["message"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another agent that a model may call as a tool; the arguments of the call are its input."""

    agent: str
    description: str
    name: str = ""
    """What the model calls it; the agent's name by default."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(MESSAGE))
    """A JSON schema of an object."""
    timeout_seconds: Timeout = ASK_SECONDS

    def __post_init__(self) -> None:
        require_text("agent", self.agent, 200)
        require_text("description", self.description, 10_000)
        if not self.name:
            object.__setattr__(self, "name", self.agent)
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"a model cannot call {shown(self.name)}: give a name of up to 64 letters, digits, "
                "- and _"
            )
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type") != "object":
            raise InvalidArgument("parameters must be a JSON schema of an object")
        require_timeout(self.timeout_seconds)

    @property
    def effect(self) -> str:
        """The kind of its effect, for `permit`: a peer may do anything."""
        return "mutate"

    @property
    def spec(self) -> ToolSpec:
        """Its description for the model."""
        parameters = dict(self.parameters)
        return ToolSpec(name=self.name, description=self.description, parameters=parameters)


def by_tool_name(peers: Sequence[Peer], tools: Mapping[str, Any]) -> dict[str, Peer]:
    """Return peers by the name that the model calls them by; no tool may have the same."""
    found: dict[str, Peer] = {}
    for peer in peers:
        if not isinstance(peer, Peer):
            raise InvalidArgument(f"a peer is a Peer(…), not {type(peer).__name__}")
        if peer.name in found or peer.name in tools:
            raise InvalidArgument(f"there are two tools named {shown(peer.name)}")
        found[peer.name] = peer
    return found


def ask_id(session_id: str, epoch: int, block_id: str) -> str:
    """Return the id of a call's ask: the same in every process, another in a fork or a rewind."""
    return str(uuid.uuid5(ASKS, f"{session_id} {epoch} {block_id}"))


def result_of(answer: Answer) -> tuple[Any, bool]:
    """Return what the model is told of an answer, and whether it is an error."""
    if answer.status != "ok":
        reasons = {"timeout": "did not answer in time", "cancelled": "was cancelled"}
        why = reasons.get(answer.status, f"failed: {answer.result}")
        return f"The agent {answer.agent} {why}.", True
    if not answer.artifacts:
        return answer.result, False
    made = [_told(each) for each in answer.artifacts]
    return {"result": answer.result, "artifacts": made}, False


def _told(artifact: Any) -> dict[str, Any]:
    told = {"name": artifact.name, "version": artifact.version, "media_type": artifact.media_type}
    return told if artifact.uri is None else {**told, "uri": artifact.uri}

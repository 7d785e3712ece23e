"""Agents of `holdfast.agent` as services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..agent import Agent
from ..codec import to_json
from ..errors import ApprovalNeeded, SessionWaiting
from ..peers import PeerRequest, Resumption
from .services import Service

MakeAgent: TypeAlias = Callable[[Any], Agent]


def agent_service(name: str, make: MakeAgent, *, tools: Any = None) -> Service:
    """Return a service whose requests are messages to an agent, and whose answers are its texts.

    `make` takes the session and returns a new agent, for every request and every resumption. The
    message is the input, or its `message`; other inputs are passed as JSON. While the agent waits
    for peers or for a person, nothing is held, and any instance resumes it. `tools` are those of
    its agents, as in a `Service`.
    """

    def on_request(request: PeerRequest[Any]) -> str | None:
        return _answer(make(request.session), message_of(request.input), request.ask_id)

    def on_resume(resumption: Resumption[Any]) -> str | None:
        return _answer(make(resumption.session))

    return Service(name, on_request, on_resume, tools=tools)


def _answer(agent: Agent, *message: str) -> str | None:
    text, message_id = message or (None, None)
    try:
        return agent.run(text, message_id=message_id).text
    except SessionWaiting:
        return None
    except ApprovalNeeded as needed:
        if "pause_id" not in needed.fields:
            raise
        return None


def message_of(input: Any) -> str:
    """Return the message for an agent in the input of a request."""
    said = input.get("message") if isinstance(input, dict) and len(input) == 1 else input
    return said if isinstance(said, str) else to_json(input)

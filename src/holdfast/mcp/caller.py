"""Who calls: the session that a request acts for, and how it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ..answers.problems import Refusal
from ..arguments import shown
from ..errors import Forbidden
from ..kernel.operation import Async
from ..session import Session
from ..store import AsyncStore

SESSION_HEADER = "x-agent-session-id"
SESSION_META = "holdfast/session"
SOURCE_META = "holdfast/session-source"

Permission = Literal["read", "write"]
Source = Literal["argument", "metadata", "header", "token", "option", "environment"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A session by its id, and where the id comes from."""

    source: Source
    session_id: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The session that a request acts for."""

    session: Session[Async]
    source: Source
    store: AsyncStore

    @property
    def metadata(self) -> dict[str, object]:
        """What a result tells of it."""
        return {SESSION_META: self.session.id, SOURCE_META: self.source}


class Reach(Protocol):
    """What a connection may do, and for which sessions."""

    @property
    def store(self) -> AsyncStore:
        """The store that it uses."""
        ...

    @property
    def default(self) -> Claim | None:
        """Whom a request acts for that names nobody."""
        ...

    @property
    def is_bound(self) -> bool:
        """Whether the default was chosen by who runs the agent: a model cannot choose another."""
        ...

    def require(self, permission: Permission) -> None:
        """Refuse what the connection may not do."""
        ...

    async def find(self, id: str) -> Session[Async]:
        """Return a session; one out of reach is as unknown as one that never was."""
        ...

    def note_refusal(self, code: str) -> None:
        """Count a refusal for the audit trail."""
        ...


async def find_caller(reach: Reach, claims: list[Claim], argument: str | None = None) -> Caller:
    """Return whom a request acts for: whom the client names, the argument, or the default.

    An argument is chosen by a model. It cannot contradict what the client or a bound connection
    says. Every session must be within reach.
    """
    if len({each.session_id for each in claims}) > 1:
        raise Refusal("invalid_request", "the header and the metadata name two sessions")
    fixed = claims[0] if claims else reach.default if reach.is_bound else None
    if fixed is not None and argument not in {None, fixed.session_id}:
        raise Forbidden(
            f"this connection acts for session {shown(fixed.session_id)} and for no other; "
            "leave `session` out"
        )
    claim = fixed
    if claim is None:
        claim = reach.default if argument is None else Claim("argument", argument)
    if claim is None:
        raise Refusal(
            "invalid_request",
            "name a session: by the header X-Agent-Session-Id, the argument `session`, or a token "
            "that is limited to a tree",
        )
    return Caller(await reach.find(claim.session_id), claim.source, reach.store)

"""The caller of a request: the session that it acts for, and how that was determined."""

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
    """The id of a session, and where the id comes from."""

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
        """The metadata that identifies the session in a result."""
        return {SESSION_META: self.session.id, SOURCE_META: self.source}


class Reach(Protocol):
    """What a connection is allowed to do, and for which sessions."""

    @property
    def store(self) -> AsyncStore:
        """The store that requests use."""
        ...

    @property
    def default(self) -> Claim | None:
        """The session for requests that name none."""
        ...

    @property
    def is_bound(self) -> bool:
        """Whether whoever runs the agent chose the default, so that a model cannot override it."""
        ...

    @property
    def conflict_bytes(self) -> int:
        """How many bytes of current values the response to a conflict includes."""
        ...

    def require(self, permission: Permission) -> None:
        """Raise if the connection does not have a permission."""
        ...

    async def find(self, id: str) -> Session[Async]:
        """Return a session; one out of reach is reported as not found."""
        ...

    def note_refusal(self, code: str) -> None:
        """Count a refusal for the audit trail."""
        ...


async def find_caller(reach: Reach, claims: list[Claim], argument: str | None = None) -> Caller:
    """Return the session that a request acts for: the client's, the argument's, or the default.

    The argument is chosen by a model, so it may not contradict the client or a bound connection.
    Whichever it is, the session must be within reach.
    """
    if len({each.session_id for each in claims}) > 1:
        raise Refusal("invalid_request", "the header and the metadata name different sessions")
    fixed = claims[0] if claims else reach.default if reach.is_bound else None
    if fixed is not None and argument not in {None, fixed.session_id}:
        raise Forbidden(
            f"this connection acts only for session {shown(fixed.session_id)}; "
            "omit the argument `session`"
        )
    claim = fixed
    if claim is None:
        claim = reach.default if argument is None else Claim("argument", argument)
    if claim is None:
        raise Refusal(
            "invalid_request",
            "no session to act for: pass the argument `session`, send the header "
            "X-Agent-Session-Id, or use a token that is limited to a tree",
        )
    return Caller(await reach.find(claim.session_id), claim.source, reach.store)

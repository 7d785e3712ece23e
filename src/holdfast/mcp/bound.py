"""Connections that act for one session, named by an option or by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..answers.problems import CONFLICT_BYTES
from ..arguments import require_text, shown
from ..errors import InvalidArgument, SessionNotFound
from ..kernel.operation import Async, Call
from ..session import Session
from ..sessions import IdentityOps
from ..store import AsyncStore
from .caller import Claim, Permission, Source


@dataclass(frozen=True, slots=True)
class BoundReach:
    """The reach of a connection that acts for one session: that session's tree."""

    store: AsyncStore
    session: Session[Async]
    source: Source
    is_bound: bool = True
    conflict_bytes: int = CONFLICT_BYTES

    @property
    def default(self) -> Claim:
        """The session that the connection acts for."""
        return Claim(self.source, self.session.id)

    def require(self, permission: Permission) -> None:
        """Allow everything: there is no token that could restrict it."""

    def note_refusal(self, code: str) -> None:
        """Do nothing: only refusals by the server are counted."""

    async def find(self, id: str) -> Session[Async]:
        """Return a session of the same tree; any other is reported as not found."""
        if id == self.session.id:
            return self.session
        found = await self.store.find_session(id)
        if found.id != id or found.root_id != self.session.root_id:
            raise SessionNotFound(f"there is no session {shown(id)}", id=id)
        return found


def bound_claim(session: str | None) -> Claim:
    """Return the session named by the caller, or else the one that `$AGENT_SESSION_ID` names."""
    if session is not None:
        return Claim("option", require_text("session", session))
    named = os.environ.get("AGENT_SESSION_ID")
    if not named:
        raise InvalidArgument("no session to act for: pass --session ID, or set AGENT_SESSION_ID")
    return Claim("environment", named)


async def bound_reach(store: AsyncStore, claim: Claim) -> BoundReach:
    """Return the reach of a session; one named by an option is created if it does not exist.

    One named by the environment must exist, with the root that the environment names.
    """
    if claim.source == "environment":
        asked = (claim.session_id, os.environ.get("AGENT_ROOT_SESSION_ID"), "")
        await store.runtime.start(Call(IdentityOps.find, IdentityOps(), asked))
    session = await _started(store, claim.session_id)
    return BoundReach(store, session, claim.source)


async def _started(store: AsyncStore, id: str) -> Session[Async]:
    """Return the session with exactly this id, ended or not; a prefix of an id does not match."""
    try:
        found = await store.find_session(id)
    except SessionNotFound:
        return await store.session(id)
    return found if found.id == id else await store.session(id)

"""Connections that are opened for one session, by an option or by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..arguments import require_text, shown
from ..errors import InvalidArgument, SessionNotFound
from ..kernel.operation import Async, Call
from ..session import Session
from ..sessions import IdentityOps
from ..store import AsyncStore
from .caller import Claim, Permission, Source


@dataclass(frozen=True, slots=True)
class BoundReach:
    """The reach of a connection that was opened for one session: its tree."""

    store: AsyncStore
    session: Session[Async]
    source: Source
    is_bound: bool = True

    @property
    def default(self) -> Claim:
        """The session that it was opened for."""
        return Claim(self.source, self.session.id)

    def require(self, permission: Permission) -> None:
        """Allow all that the store allows."""

    def note_refusal(self, code: str) -> None:
        """Count nothing: who has the store needs no token."""

    async def find(self, id: str) -> Session[Async]:
        """Return a session of the same tree."""
        if id == self.session.id:
            return self.session
        found = await self.store.find_session(id)
        if found.id != id or found.root_id != self.session.root_id:
            raise SessionNotFound(f"there is no session {shown(id)}", id=id)
        return found


def bound_claim(session: str | None) -> Claim:
    """Return the session that was named, or else the one that started this process."""
    if session is not None:
        return Claim("option", require_text("session", session))
    named = os.environ.get("AGENT_SESSION_ID")
    if not named:
        raise InvalidArgument(
            "no session to act for: name it (--session ID), or set AGENT_SESSION_ID"
        )
    return Claim("environment", named)


async def bound_reach(store: AsyncStore, claim: Claim) -> BoundReach:
    """Return the reach of a session; one that was named is started if there is none.

    That of the environment must exist, with the root that the environment names.
    """
    if claim.source == "environment":
        asked = (claim.session_id, os.environ.get("AGENT_ROOT_SESSION_ID"), "")
        await store.runtime.start(Call(IdentityOps.find, IdentityOps(), asked))
    session = await _started(store, claim.session_id)
    return BoundReach(store, session, claim.source)


async def _started(store: AsyncStore, id: str) -> Session[Async]:
    """Return a session, ended or not; no other whose id begins alike."""
    try:
        found = await store.find_session(id)
    except SessionNotFound:
        return await store.session(id)
    return found if found.id == id else await store.session(id)

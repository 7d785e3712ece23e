"""Finding a session that exists, without resuming it."""

from __future__ import annotations

from typing import Generic, TypeVar

from ..arguments import require_text
from ..errors import SessionNotFound
from ..kernel.finding import find_row
from ..kernel.operation import Op, query

H = TypeVar("H")

SELECT = "SELECT id, number, root_id, name FROM hf_sessions"


class FindOps(Generic[H]):
    """Looks sessions up."""

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> H:
        """Return a handle of this colour."""
        raise NotImplementedError

    @query
    def find_session(self, id: str) -> Op[H]:
        """Return a session that exists, ended or not, and change nothing; or SessionNotFound.

        It is named by its id, its number, or 8 characters or more that no other id begins with.
        """
        row = yield from find_row("session", SELECT, require_text("id", id))
        if row is None:
            raise SessionNotFound(f"there is no session {id!r}", id=id)
        return self._session(row["id"], row["number"], row["root_id"], row["name"])

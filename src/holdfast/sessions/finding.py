"""Finding a session that exists, by its id or the beginning of it, without resuming it."""

from __future__ import annotations

from typing import Generic, TypeVar

from ..errors import InvalidArgument, SessionNotFound
from ..kernel.operation import Op, one, query, rows
from .rows import require_id

H = TypeVar("H")

SHORT_CHARACTERS_MIN = 8
EXACT = "SELECT id, number, root_id, name FROM hf_sessions WHERE id = :id"
# SQLite compares without regard to case here, so what it finds is looked at again.
BEGINNING = r"""
SELECT id, number, root_id, name FROM hf_sessions WHERE id LIKE :pattern ESCAPE '\'
ORDER BY number LIMIT 20
"""


class FindOps(Generic[H]):
    """Looks sessions up."""

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> H:
        """Return a handle of this colour."""
        raise NotImplementedError

    @query
    def find_session(self, id: str) -> Op[H]:
        """Return a session that exists, ended or not, and change nothing; or SessionNotFound.

        The first 8 characters of its id or more are enough if no other id begins with them.
        """
        require_id(id)
        row = yield from one(EXACT, id=id)
        if row is None and len(id) >= SHORT_CHARACTERS_MIN:
            escaped = id.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
            found = yield from rows(BEGINNING, pattern=f"{escaped}%")
            found = [each for each in found if each["id"].startswith(id)]
            if len(found) > 1:
                ids = ", ".join(each["id"] for each in found[:3])
                raise InvalidArgument(f"more than one session's id begins with {id!r}: {ids} …")
            row = found[0] if found else None
        if row is None:
            raise SessionNotFound(f"there is no session {id!r}", id=id)
        return self._session(row["id"], row["number"], row["root_id"], row["name"])

"""The session that a process belongs to: named by its environment, confirmed by the store."""

from __future__ import annotations

from ..dataclass import dataclass
from ..errors import Forbidden, SessionNotFound
from ..kernel.operation import Op, one, query
from ..wire import travels
from .rows import READ_SESSION


@travels
@dataclass(frozen=True, slots=True)
class Identity:
    """The session that started this process."""

    id: str
    name: str | None
    root_id: str
    root_name: str | None
    url: str


@travels
class IdentityOps:
    """Looks up the identity of a process."""

    def _to_wire(self) -> tuple[()]:
        """Return nothing."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: object) -> IdentityOps:
        """Return those of the other end."""
        return cls()

    @query
    def find(self, id: str, root_id: str | None, url: str) -> Op[Identity]:
        """Return the identity of a session; refuse a root that is not its own."""
        row = yield from one(READ_SESSION, id=id)
        if row is None:
            raise SessionNotFound(f"AGENT_SESSION_ID names no session: {id!r}", id=id)
        if root_id not in {None, "", row["root_id"]}:
            raise Forbidden(
                f"AGENT_ROOT_SESSION_ID {root_id!r} is not the root of session {id!r}", id=id
            )
        root = yield from one(READ_SESSION, id=row["root_id"])
        return Identity(
            id=id,
            name=row["name"],
            root_id=row["root_id"],
            root_name=None if root is None else root["name"],
            url=url,
        )

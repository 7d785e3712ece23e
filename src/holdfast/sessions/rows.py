"""Sessions' rows: how they are read, and what may stand in them."""

from __future__ import annotations

from ..codec import Codec
from ..kernel.operation import Row
from ..records import SessionInfo

COLUMNS = """number, id, name, parent_id, root_id, agent, user_id, status, version, epoch,
    origin_version, metadata, holder, lease_expires_at,
    holder IS NOT NULL AND lease_expires_at > :now AS is_driven,
    created_at, updated_at, last_resumed_at"""
READ = f"SELECT {COLUMNS} FROM hf_sessions WHERE id = :id"  # noqa: S608


def info(codec: Codec, row: Row) -> SessionInfo:
    """Return a row as a record."""
    fields = dict(row)
    fields["user"] = fields.pop("user_id")
    fields["is_driven"] = bool(row["is_driven"])
    fields["metadata"] = codec.unpack(row["metadata"], context=("hf_sessions", row["id"]))
    return SessionInfo(**fields)

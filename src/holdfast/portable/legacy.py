"""Adopting SQLite databases of two older formats.

*coordinator*: sessions that name their parent, and a state of keys per root. The state becomes the
channel `legacy_state` of the root's first checkpoint, an item per key.

*checkpointer*: sessions with numbered checkpoints of transcript, plan and spent budget. They become
the channels `transcript`, `plan` and `budget` of the same versions. The log of tool calls becomes
the channel `legacy_tool_calls` of one more version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Raw

from ..codec import Codec, Limits, from_json
from ..errors import InvalidArgument, InvalidValue
from ..kernel.legacy import LegacyFile
from ..kernel.operation import Row
from ..records import Status
from .ancestry import Ancestry
from .building import SessionBuilder
from .frames import Frame, SessionFrame, TreeFrame

COORDINATOR = {
    "sessions": {
        "session_id", "session_name", "status", "created_at", "project_dir", "agent_name",
        "last_resumed_at", "parent_session_name",
    },
}  # fmt: skip
CHECKPOINTER = {
    "sessions": {"session_id", "created_at", "updated_at", "status"},
    "checkpoints": {
        "session_id", "version", "created_at", "transcript_json", "plan_json", "budget_spent_usd",
    },
    "tool_calls": {
        "session_id", "call_id", "tool_name", "args_json", "idempotency_key", "status",
        "result_text", "started_at", "completed_at",
    },
}  # fmt: skip
# A whole transcript may be larger than a value; its items are measured when they are stored.
WIDE = Limits(value_bytes=2**31 - 1, record_bytes=2**31 - 1, depth=256)
STATUSES: dict[str, Status] = {
    "active": "active",
    "running": "active",
    "waiting": "active",
    "paused": "active",
    "completed": "completed",
    "finished": "completed",
    "succeeded": "completed",
    "failed": "failed",
    "error": "failed",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "stopped": "cancelled",
}

SESSIONS = "SELECT * FROM sessions ORDER BY created_at, session_id"
KEYS = "SELECT * FROM session_state_kv WHERE root_session_id = :id ORDER BY key"
DOCUMENTS = {
    "session_state": "SELECT * FROM session_state WHERE root_session_id = :id",
    "session_state_materialized": """
        SELECT *, last_sequence AS version, materialized_at AS updated_at
        FROM session_state_materialized WHERE root_session_id = :id
    """,
}
STATE_OWNERS = {
    "session_state_kv": "SELECT DISTINCT root_session_id AS id FROM session_state_kv",
    "session_state": "SELECT root_session_id AS id FROM session_state",
    "session_state_materialized": "SELECT root_session_id AS id FROM session_state_materialized",
}
UNLISTED = """
SELECT session_id, min(created_at) AS created_at, max(created_at) AS updated_at,
    'active' AS status
FROM checkpoints WHERE session_id NOT IN (SELECT session_id FROM sessions)
GROUP BY session_id ORDER BY 2, 1
"""
CHECKPOINTS = "SELECT * FROM checkpoints WHERE session_id = :id ORDER BY version"
TOOL_CALLS = """
SELECT call_id, tool_name, args_json, idempotency_key, status, result_text, started_at, completed_at
FROM tool_calls WHERE session_id = :id ORDER BY started_at, call_id
"""


class LegacyDatabase:
    """A database of an older format, as the frames of an export."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self._path = path
        self._codec = codec
        self._notes: list[str] = []
        with LegacyFile(path) as file:
            found = file.columns()
        self._format, self._read = self._recognised(found)
        self._tables = found

    @property
    def label(self) -> str:
        """The format and the file."""
        return f"{self._format} database {self._path}"

    def notes(self) -> tuple[str, ...]:
        """Return what could not be taken over as it was."""
        return tuple(self._notes)

    def frames(self) -> Iterator[Frame]:
        """Yield every session with what belongs to it, parents first."""
        self._notes = []
        line_ids = count(1)
        with LegacyFile(self._path) as file:
            yield from self._read(file, lambda: next(line_ids))

    def _recognised(
        self, found: Mapping[str, set[str]]
    ) -> tuple[str, Callable[[LegacyFile, Callable[[], int]], Iterator[Frame]]]:
        for name, wanted, read in (
            ("coordinator", COORDINATOR, self._coordinator),
            ("checkpointer", CHECKPOINTER, self._checkpointer),
        ):
            if all(columns <= found.get(table, set()) for table, columns in wanted.items()):
                return name, read
        raise InvalidArgument(
            f"{self._path} is not a database of an older format that can be adopted: its tables "
            f"are {', '.join(sorted(found)) or 'none'}"
        )

    def _coordinator(self, file: LegacyFile, new_line_id: Callable[[], int]) -> Iterator[Frame]:
        sessions = list(file.rows(SESSIONS))
        ancestry = Ancestry(sessions, lambda row: moment(row, "created_at"))
        self._notes += ancestry.notes
        for owner in self._stateless(file, ancestry.ids):
            self._notes.append(f"the state of {owner!r} is left out: there is no such session")
        for row, parent_id, root_id in ancestry.ordered():
            if parent_id is None:
                yield TreeFrame(root_id, 0, 0)
            builder = SessionBuilder(self._codec, new_line_id)
            created_at = moment(row, "created_at")
            resumed_at = max(created_at, moment(row, "last_resumed_at") or 0)
            state = self._state(file, row["session_id"])
            if state:
                data = {"adopted": "state"}
                channels = {"legacy_state": state}
                builder.add(1, "manual_checkpoint", resumed_at, channels, data, _where(row))
            metadata = self._metadata(row, "project_dir", "parent_session_name")
            fields = {
                "name": row["session_name"] or None,
                "parent_id": parent_id,
                "root_id": root_id,
                "agent": row["agent_name"] or None,
                "created_at": created_at,
                "updated_at": resumed_at,
                "last_resumed_at": resumed_at,
            }
            yield from self._session(row, builder, metadata, fields)

    def _stateless(self, file: LegacyFile, ids: set[str]) -> list[str]:
        owners = {
            str(row["id"])
            for table, sql in STATE_OWNERS.items()
            if table in self._tables
            for row in file.rows(sql)
        }
        return sorted(owners - ids)

    def _state(self, file: LegacyFile, id: str) -> list[Any]:
        """Return the state of a root, an item per key; a document's keys share its version."""
        if "session_state_kv" in self._tables:
            return [
                {
                    "key": row["key"],
                    "value": parsed(row, "value", f"state key {row['key']!r} of {id!r}"),
                    "version": row["version"],
                    "updated_at": row["updated_at"],
                    "updated_by": row["updated_by_session"],
                }
                for row in file.rows(KEYS, id=id)
            ]
        for table, sql in DOCUMENTS.items():
            for row in file.rows(sql, id=id) if table in self._tables else ():
                document = parsed(row, "state_data", f"the state of {id!r}")
                if type(document) is not dict:
                    raise InvalidArgument(f"the state of {id!r} is no JSON object")
                shared = {"version": row["version"], "updated_at": row["updated_at"]}
                return [
                    {"key": key, "value": value, **shared, "updated_by": None}
                    for key, value in document.items()
                ]
        return []

    def _checkpointer(self, file: LegacyFile, new_line_id: Callable[[], int]) -> Iterator[Frame]:
        unlisted = list(file.rows(UNLISTED))
        for row in unlisted:
            self._notes.append(f"{_where(row)} had checkpoints only; it is taken for active")
        for row in [*file.rows(SESSIONS), *unlisted]:
            id = row["session_id"]
            yield TreeFrame(id, 0, 0)
            builder = SessionBuilder(self._codec, new_line_id)
            channels: dict[str, Any] = {}
            for saved in file.rows(CHECKPOINTS, id=id):
                channels = _channels(saved)
                builder.add(
                    saved["version"], "turn", moment(saved, "created_at"), channels, None,
                    f"{_where(row)} version {saved['version']}",
                )  # fmt: skip
            updated_at = moment(row, "updated_at")
            calls = [_tool_call(call, _where(row)) for call in file.rows(TOOL_CALLS, id=id)]
            if calls:
                unfinished = [call["call_id"] for call in calls if call["status"] == "issued"]
                data = {"adopted": "tool_calls", "unfinished": unfinished}
                channels = {**channels, "legacy_tool_calls": calls}
                version = builder.version + 1
                builder.add(version, "manual_checkpoint", updated_at, channels, data, _where(row))
            fields = {
                "name": None,
                "parent_id": None,
                "root_id": id,
                "agent": None,
                "created_at": moment(row, "created_at"),
                "updated_at": updated_at,
                "last_resumed_at": updated_at,
            }
            yield from self._session(row, builder, self._metadata(row), fields)

    def _metadata(self, row: Row, *columns: str) -> dict[str, Any]:
        kept = {name: row[name] for name in columns if row[name]}
        legacy = {"format": self._format, "status": row["status"]}
        return {**kept, "legacy": legacy}

    def _session(
        self, row: Row, builder: SessionBuilder, metadata: dict[str, Any], fields: dict[str, Any]
    ) -> Iterator[Frame]:
        status = STATUSES.get(str(row["status"]).lower())
        if status is None:
            self._notes.append(f"{_where(row)} was {row['status']!r}; it is taken for active")
        yield from builder.lines()
        yield SessionFrame(
            id=row["session_id"],
            user=None,
            status=status or "active",
            version=builder.version,
            epoch=1,
            fence=0,
            origin_id=None,
            origin_version=None,
            epochs=[],
            metadata=Raw(self._codec.encode(metadata, name=f"{_where(row)} metadata")),
            **fields,
        )
        yield from builder.checkpoints()


def _channels(saved: Row) -> dict[str, Any]:
    where = f"session {saved['session_id']!r} version {saved['version']}"
    if type(saved["version"]) is not int or not 0 < saved["version"] < 2**32:
        raise InvalidArgument(f"{where}: a version is a whole number from 1 up")
    transcript = parsed(saved, "transcript_json", f"the transcript of {where}")
    if type(transcript) is not list:
        raise InvalidArgument(f"the transcript of {where} is no JSON list")
    plan = None
    if saved["plan_json"] is not None:
        plan = parsed(saved, "plan_json", f"the plan of {where}")
    budget = {"spent_usd": saved["budget_spent_usd"]}
    return {"transcript": transcript, "plan": plan, "budget": budget}


def _tool_call(call: Row, where: str) -> dict[str, Any]:
    kept = {name: value for name, value in call.items() if name != "args_json"}
    args = parsed(call, "args_json", f"tool call {call['call_id']!r} of {where}")
    return {**kept, "args": args}


def _where(row: Row) -> str:
    return f"session {row['session_id']!r}"


def parsed(row: Row, column: str, where: str) -> Any:
    """Return the value of a column of JSON text."""
    text = row[column]
    if not isinstance(text, str):
        raise InvalidValue(f"{where} is not JSON text", path=where)
    return from_json(text, WIDE, name=where)


def moment(row: Row, column: str) -> int:
    """Return a time in milliseconds; text is ISO-8601, taken for UTC if it names no zone."""
    value = row[column]
    if value is None:
        return 0
    try:
        if isinstance(value, str):
            when = datetime.fromisoformat(value)
            when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
            return round(when.timestamp() * 1000)
        return round(float(value) * 1000)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{_where(row)} has a {column} that is no time: {value!r}") from None

"""Adopting SQLite databases of three older formats.

*coordinator*: sessions that name their parent, and a state per root, which becomes the shared state
of its tree (`legacy_state.py`).

*checkpointer*: sessions with numbered checkpoints of transcript, plan and spent budget. They become
the channels `transcript`, `plan` and `budget` of the same versions. The log of tool calls becomes
effects: a completed call is replayed, one that was only issued is in doubt. What was spent becomes
one entry of the ledger of spend.

*registry*: tasks with evidence, work items and idempotency keys. Evidence becomes versions, work
items that were not finished wait for review, and keys become those of `once` without a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from ..arguments import require_text, require_text_or_none, require_whole
from ..checkpoints.keys import VERSIONS
from ..checkpoints.write import ITERATIONS
from ..effects import Ledger
from ..errors import InvalidArgument
from ..feed.portable import TreeRecord
from ..kernel.legacy import LegacyFile
from ..kernel.operation import Row, Runtime
from ..kernel.portable import Record
from ..records import KINDS, Status
from ..sessions.portable import SessionRecord
from ..spend import nanos
from ..spend.portable import SpendRecord
from ..work.items import FINAL
from ..work.portable import ItemRecord
from .ancestry import Ancestry
from .builder import SessionBuilder
from .file import Format
from .legacy_ledger import LegacyLedger
from .legacy_state import LegacyState
from .legacy_values import moment, parsed

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
REGISTRY = {
    "tasks": {"task_id", "status"},
    "work_items": {
        "work_item_id", "task_id", "work_type", "status", "priority", "retry_count", "max_retries",
        "input_data", "output_data", "error_message", "created_at", "started_at", "completed_at",
        "updated_at",
    },
    "checkpoints": {
        "checkpoint_id", "task_id", "work_item_id", "checkpoint_type", "sequence_number",
        "snapshot_data", "metadata", "created_at",
    },
    "idempotency_keys": {
        "idempotency_key", "task_id", "work_item_id", "request_hash", "response_data", "status",
        "created_at", "completed_at", "expires_at",
    },
}  # fmt: skip
FORMATS = {"registry": REGISTRY, "coordinator": COORDINATOR, "checkpointer": CHECKPOINTER}
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
UNLISTED = """
SELECT session_id, min(created_at) AS created_at, max(created_at) AS updated_at,
    'active' AS status
FROM checkpoints WHERE session_id NOT IN (SELECT session_id FROM sessions)
GROUP BY session_id ORDER BY 2, 1
"""
CHECKPOINTS = "SELECT * FROM checkpoints WHERE session_id = :id ORDER BY version"
TASKS = "SELECT *, task_id AS session_id FROM tasks ORDER BY task_id"
EVIDENCE = """
SELECT *, task_id AS session_id FROM checkpoints WHERE task_id = :id ORDER BY sequence_number
"""
WORK = """
SELECT *, task_id AS session_id FROM work_items WHERE task_id = :id
ORDER BY created_at, work_item_id
"""
KEYS_OF_TASK = """
SELECT *, task_id AS session_id FROM idempotency_keys WHERE task_id = :id ORDER BY created_at, 1
"""
KEYS_OF_NONE = """
SELECT *, NULL AS session_id FROM idempotency_keys
WHERE task_id IS NULL OR task_id NOT IN (SELECT task_id FROM tasks) ORDER BY created_at, 1
"""
TOOL_CALLS = """
SELECT session_id, call_id, tool_name, args_json, idempotency_key, status, result_text, started_at,
    completed_at
FROM tool_calls WHERE session_id = :id ORDER BY started_at, call_id
"""


def recognise(path: Path) -> tuple[str, dict[str, set[str]]]:
    """Return the format of an older database, and its tables with their columns."""
    with LegacyFile(path) as file:
        found = file.columns()
    for name, wanted in FORMATS.items():
        if all(columns <= found.get(table, set()) for table, columns in wanted.items()):
            return name, found
    raise InvalidArgument(
        f"{path} is not a database of a supported older format: its tables "
        f"are {', '.join(sorted(found)) or 'none'}"
    )


class LegacyDatabase:
    """A database of an older format, as the records of an export."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        ledger = Ledger.of(runtime)
        self._path = path
        self._codec = runtime.codec
        self._runtime = runtime
        self._records = Format(runtime.nouns)
        self._ledger = LegacyLedger(ledger.statements, ledger.salts.key)
        self._numbers = count(1)
        self._notes: list[str] = []
        self._format, self._tables = recognise(path)

    @property
    def label(self) -> str:
        """The format and the file."""
        return f"{self._format} database {self._path}"

    def notes(self) -> tuple[str, ...]:
        """Return what could not be imported unchanged."""
        return tuple(self._notes)

    def records(self) -> Iterator[Record]:
        """Yield every session with what belongs to it, parents first."""
        self._notes = []
        self._numbers = count(1)
        line_ids = count(1)
        yield from self._ledger.records()
        with LegacyFile(self._path) as file:
            read = {
                "registry": self._registry,
                "coordinator": self._coordinator,
                "checkpointer": self._checkpointer,
            }[self._format]
            for record in read(file, lambda: next(line_ids)):
                try:
                    yield self._records.validated(record)
                except msgspec.ValidationError as error:
                    problem = f"{self.label} has a row that cannot be imported: it {error}"
                    raise InvalidArgument(problem) from error

    def _coordinator(self, file: LegacyFile, new_line_id: Callable[[], int]) -> Iterator[Record]:
        sessions = list(file.rows(SESSIONS))
        ancestry = Ancestry(sessions, lambda row: moment(row, "created_at"))
        self._notes += ancestry.notes
        states = LegacyState(self._runtime, file, self._tables)
        roots = {root_id for _, _, root_id in ancestry.ordered()}
        for owner in sorted(states.owners() - roots):
            why = "it is not a root" if owner in ancestry.ids else "there is no such session"
            self._notes.append(f"the state of {owner!r} is left out: {why}")
        for row, parent_id, root_id in ancestry.ordered():
            state: Iterator[Record] = iter(())
            if parent_id is None:
                sequence, state = states.of_root(require_text("id", root_id))
                yield TreeRecord(root_id, 0, sequence)
            builder = SessionBuilder(self._codec, next(self._numbers), new_line_id)
            created_at = moment(row, "created_at")
            resumed_at = max(created_at, moment(row, "last_resumed_at") or 0)
            metadata = self._metadata(row, "project_dir", "parent_session_name")
            names = {"name": row["session_name"] or None, "agent": row["agent_name"] or None}
            place = {"parent_id": parent_id, "root_id": root_id, **names}
            yield from self._session(row, builder, metadata, created_at, resumed_at, **place)
            yield from state
        self._notes += states.notes

    def _checkpointer(self, file: LegacyFile, new_line_id: Callable[[], int]) -> Iterator[Record]:
        unlisted = list(file.rows(UNLISTED))
        for row in unlisted:
            self._notes.append(f"{_where(row)} had only checkpoints; it is imported as active")
        for row in [*file.rows(SESSIONS), *unlisted]:
            id = row["session_id"]
            yield TreeRecord(require_text("id", id), 0, 0)
            builder = SessionBuilder(self._codec, next(self._numbers), new_line_id)
            spent: Any = 0
            for saved in file.rows(CHECKPOINTS, id=id):
                channels = _channels(saved)
                spent = channels["budget"]["spent_usd"]
                builder.add(
                    saved["version"], "turn", moment(saved, "created_at"), channels, None,
                    f"{_where(row)} version {saved['version']}",
                )  # fmt: skip
            updated_at = moment(row, "updated_at")
            times = moment(row, "created_at"), updated_at
            session = yield from self._session(row, builder, self._metadata(row), *times)
            if spent:
                yield _spend(session, spent, updated_at)
            for call in file.rows(TOOL_CALLS, id=id):
                yield self._call(session, call)

    def _call(self, session: SessionRecord, call: Row) -> Record:
        """Return a logged tool call; one that was issued and never ended is in doubt."""
        where = f"tool call {call['call_id']!r} of {_where(call)}"
        issued_at = moment(call, "started_at")
        ended_at = moment(call, "completed_at") or issued_at
        if call["status"] not in {"issued", "completed", "failed"}:
            self._notes.append(f"{where} was {call['status']!r}; it is imported as in doubt")
        return self._ledger.call(
            session,
            parsed(call, "args_json", where),
            id=_derived("call", call["session_id"], call["call_id"]),
            tool=call["tool_name"],
            status=call["status"],
            idempotency_key=call["idempotency_key"],
            result=call["result_text"],
            issued_at=issued_at,
            ended_at=max(issued_at, ended_at),
            call_id=call["call_id"],
            issued_version=session.version,
        )

    def _registry(self, file: LegacyFile, new_line_id: Callable[[], int]) -> Iterator[Record]:
        for row in file.rows(TASKS):
            id = row["task_id"]
            yield TreeRecord(require_text("id", id), 0, 0)
            builder = SessionBuilder(self._codec, next(self._numbers), new_line_id)
            iterations, latest = 0, moment(row, "updated_at")
            for saved in file.rows(EVIDENCE, id=id):
                iterations += saved["checkpoint_type"] == "iteration_start"
                self._evidence(builder, saved, iterations)
                latest = max(latest, moment(saved, "created_at"))
            created_at = moment(row, "created_at") or latest
            title = {"title": row["title"]} if row.get("title") else {}
            metadata = {**title, **self._metadata(row)}
            times = created_at, max(created_at, latest)
            session = yield from self._session(row, builder, metadata, *times)
            for item in file.rows(WORK, id=id):
                yield self._item(session, item)
            for key in file.rows(KEYS_OF_TASK, id=id):
                yield self._once(session, key)
        for key in file.rows(KEYS_OF_NONE):
            yield self._once(None, key)

    def _evidence(self, builder: SessionBuilder, saved: Row, iterations: int) -> None:
        """Add a record; one of an iteration that does not say which is given its place's number."""
        version, kind = saved["sequence_number"], saved["checkpoint_type"]
        where = f"{_where(saved)} version {version}"
        require_version_of(where, version)
        if kind not in KINDS or version <= builder.version:
            raise InvalidArgument(f"{where} has an unknown type, or comes twice")
        data = parsed(saved, "snapshot_data", f"the snapshot of {where}")
        metadata = None
        if saved["metadata"] is not None:
            metadata = parsed(saved, "metadata", f"the metadata of {where}")
        iteration = None
        if kind in ITERATIONS:
            data = data if type(data) is dict else {"snapshot": data}
            if type(data.get("iteration")) is not int or data["iteration"] < 0:
                self._notes.append(f"{where} names no iteration; {max(iterations, 1)} is used")
                data = {**data, "iteration": max(iterations, 1)}
            iteration = data["iteration"]
        builder.add(
            version, kind, moment(saved, "created_at"), {}, data, where,
            iteration=iteration, item_id=saved["work_item_id"],
            metadata=metadata if type(metadata) in {dict, NoneType} else {"metadata": metadata},
        )  # fmt: skip

    def _item(self, session: SessionRecord, row: Row) -> Record:
        """Return a work item; what was not finished will wait for review."""
        where = f"work item {row['work_item_id']!r}"
        created_at, updated_at = moment(row, "created_at"), moment(row, "updated_at")
        is_final = row["status"] in FINAL
        parts: dict[str, Any] = {"input": None, "output": None}
        for part, column in (("input", "input_data"), ("output", "output_data")):
            if row[column] is not None:
                parts[part] = parsed(row, column, f"the {part} of {where}")
        if row["error_message"] is not None:
            parts["error"] = str(row["error_message"])
        values: dict[str, Any] = {
            part: self._codec.encode(value, name=f"{part} of {where}")
            for part, value in parts.items()
            if value is not None or part == "input"
        }
        retries = row["max_retries"] if type(row["max_retries"]) is int else 0
        retry_count = row["retry_count"] if type(row["retry_count"]) is int else 0
        return ItemRecord(
            session_number=session.number,
            session_id=session.id,
            root_id=session.root_id,
            id=row["work_item_id"],
            type=row["work_type"],
            queue=row["work_type"],
            state=row["status"] if is_final else "pending",
            priority=row["priority"] or 0,
            on_crash="retry",
            retry_count=min(retry_count, retries),
            max_retries=retries,
            attempts=retry_count + (row["started_at"] is not None),
            available_at=created_at,
            created_at=created_at,
            started_at=moment(row, "started_at") or None,
            completed_at=(moment(row, "completed_at") or updated_at) if is_final else None,
            updated_at=updated_at,
            **values,
        )

    def _once(self, session: SessionRecord | None, row: Row) -> Record:
        """Return an idempotency key; one that was pending is in doubt."""
        key = row["idempotency_key"]
        response = None
        if row["response_data"] is not None:
            response = parsed(row, "response_data", f"the response of key {key!r}")
        issued_at = moment(row, "created_at")
        return self._ledger.once(
            session,
            key,
            {"request_hash": row["request_hash"]},
            id=_derived("key", key),
            tool="adopted key",
            status=row["status"],
            idempotency_key=key,
            result=response,
            issued_at=issued_at,
            ended_at=max(issued_at, moment(row, "completed_at")),
            item_id=row["work_item_id"],
            issued_version=0 if session is None else session.version,
            expires_at=moment(row, "expires_at") or None,
        )

    def _metadata(self, row: Row, *columns: str) -> dict[str, Any]:
        kept = {name: row[name] for name in columns if row.get(name)}
        legacy = {"format": self._format, "status": row["status"]}
        return {**kept, "legacy": legacy}

    def _session(
        self,
        row: Row,
        builder: SessionBuilder,
        metadata: dict[str, Any],
        created_at: int,
        updated_at: int,
        **place: Any,
    ) -> Generator[Record, None, SessionRecord]:
        """Yield a session with its lines and versions, and return it."""
        require_text("id", row["session_id"])
        for label in ("name", "agent"):
            require_text_or_none(label, place.get(label))
        status = STATUSES.get(str(row["status"]).lower())
        if status is None:
            self._notes.append(f"{_where(row)} was {row['status']!r}; it is imported as active")
        session = SessionRecord(
            number=builder.number,
            id=row["session_id"],
            status=status or "active",
            version=builder.version,
            metadata=self._codec.encode(metadata, name=f"{_where(row)} metadata"),
            created_at=created_at,
            updated_at=updated_at,
            last_resumed_at=updated_at,
            **{"root_id": row["session_id"], **place},
        )
        yield session
        yield self._ledger.ancestry(session.number)
        yield from builder.records()
        return session


def _channels(saved: Row) -> dict[str, Any]:
    where = f"session {saved['session_id']!r} version {saved['version']}"
    require_version_of(where, saved["version"])
    transcript = parsed(saved, "transcript_json", f"the transcript of {where}")
    if type(transcript) is not list:
        raise InvalidArgument(f"the transcript of {where} is not a JSON list")
    plan = None
    if saved["plan_json"] is not None:
        plan = parsed(saved, "plan_json", f"the plan of {where}")
    budget = {"spent_usd": saved["budget_spent_usd"]}
    return {"transcript": transcript, "plan": plan, "budget": budget}


def require_version_of(where: str, version: object) -> None:
    """Refuse what cannot number a checkpoint."""
    require_whole(f"{where}: version", version, 1, VERSIONS - 1)


def _spend(session: SessionRecord, spent: Any, at: int) -> SpendRecord:
    """Return all that a session spent as one entry: more was not written down."""
    return SpendRecord(
        session_number=session.number,
        session_id=session.id,
        root_id=session.root_id,
        id=_derived("spend", session.id),
        model="unknown",
        source="adopted",
        state="settled",
        input_tokens=0,
        output_tokens=0,
        nano_usd=nanos(spent),
        created_at=at,
        updated_at=at,
    )


def _derived(*names: object) -> str:
    """Return an id that is the same each time the same row is adopted."""
    text = "\0".join(map(str, names))
    return f"adopted-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _where(row: Row) -> str:
    return f"session {row['session_id']!r}"

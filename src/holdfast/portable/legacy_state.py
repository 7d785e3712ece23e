"""The shared state of an older format: keys, one document, or a log of events.

A log without a hole becomes the history of the state. Anything else becomes one `init` event, and
the state goes on above the versions that it had, so that whoever holds an old one gets a conflict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..arguments import require_text, require_whole, shown
from ..checkpoints.diff import same
from ..errors import HoldfastError, InvalidArgument
from ..kernel.legacy import LegacyFile
from ..kernel.operation import Row, Runtime
from ..kernel.portable import Record
from ..state.adoption import AdoptedState
from ..state.values import VERSION_MAX, Mutation, checked, merge_patch, require_key
from .legacy_values import moment, parsed

EVENTS = """
SELECT * FROM session_state_events WHERE root_session_id = :id ORDER BY sequence_number, event_id
"""
KEYS = "SELECT * FROM session_state_kv WHERE root_session_id = :id ORDER BY key"
KEYS_VERSION = """
SELECT global_version AS version FROM session_state_meta WHERE root_session_id = :id
"""
DOCUMENT = "SELECT * FROM session_state WHERE root_session_id = :id"
MATERIALIZED = """
SELECT *, last_sequence AS version, materialized_at AS updated_at
FROM session_state_materialized WHERE root_session_id = :id AND (
    last_sequence <> 0 OR state_data <> '{}'
)
"""
OWNERS = {
    table: f"SELECT DISTINCT root_session_id AS id FROM {table}"  # noqa: S608
    for table in (
        "session_state_kv", "session_state", "session_state_events", "session_state_materialized",
    )
}  # fmt: skip
# What the payload of an event calls its argument.
ARGUMENTS = {"set": "value", "increment": "delta", "append": "items", "patch": "patch"}


class LegacyState:
    """Reads the shared state of one root after the other."""

    def __init__(self, runtime: Runtime, file: LegacyFile, tables: Mapping[str, set[str]]) -> None:
        self._runtime = runtime
        self._file = file
        self._tables = tables
        self.notes: list[str] = []

    def owners(self) -> set[str]:
        """Return whose state there is."""
        found = [sql for table, sql in OWNERS.items() if table in self._tables]
        return {str(row["id"]) for sql in found for row in self._file.rows(sql)}

    def of_root(self, id: str) -> tuple[int, Iterator[Record]]:
        """Return the sequence of a root's state, and its records; all its tables must agree."""
        events = self._rows("session_state_events", EVENTS, id)
        keys = self._rows("session_state_kv", KEYS, id)
        document = self._row("session_state", DOCUMENT, id)
        materialized = self._row("session_state_materialized", MATERIALIZED, id)
        if events and self._is_whole(id, events, materialized):
            state = self._replayed(id, events, materialized)
            materialized = None
        elif events and materialized is not None:
            state = self._started(id, materialized)
        elif keys:
            state = self._with_keys(id, keys)
        elif first := document or materialized:
            state = self._started(id, first)
        else:
            return 0, iter(())
        others = [_document(row, id) for row in (document, materialized) if row is not None]
        if keys:
            others.append({row["key"]: _value(row, id) for row in keys})
        if not all(same(each, state.document()) for each in others):
            raise InvalidArgument(f"the tables contradict each other in the state of {shown(id)}")
        return state.sequence, state.records()

    def _rows(self, table: str, sql: str, id: str) -> list[Row]:
        return list(self._file.rows(sql, id=id)) if table in self._tables else []

    def _row(self, table: str, sql: str, id: str) -> Row | None:
        return next(iter(self._rows(table, sql, id)), None)

    def _is_whole(self, id: str, events: list[Row], materialized: Row | None) -> bool:
        """Whether a log can be replayed; if it has holes, a document must have all of it."""
        numbers = [_whole(row, "sequence_number", f"an event of {id!r}") for row in events]
        if numbers == list(range(1, len(numbers) + 1)):
            return True
        if materialized is None or _last(materialized, id) < numbers[-1]:
            raise InvalidArgument(
                f"the log of the state of {shown(id)} has gaps or duplicate numbers, and there "
                "is no document that is as new"
            )
        self.notes.append(f"the log of the state of {id!r} has gaps; it is left out")
        return False

    def _replayed(self, id: str, events: list[Row], materialized: Row | None) -> AdoptedState:
        """Replay a log; a document that was made on the way is compared where it was made."""
        state = AdoptedState(self._runtime, id)
        last = 0 if materialized is None else _last(materialized, id)
        made = {} if materialized is None else _document(materialized, id)
        is_met = same(made, {})
        for number, row in enumerate(events, 1):
            where = f"event {number} of the state of {id!r}"
            try:
                _replay(state, row, where)
            except HoldfastError as error:
                raise InvalidArgument(f"{where} cannot be replayed: {error}") from error
            if number == last:
                is_met = same(made, state.document())
        if last > len(events) or not is_met:
            raise InvalidArgument(f"the state of {shown(id)} does not match its events")
        return state

    def _with_keys(self, id: str, keys: list[Row]) -> AdoptedState:
        """Begin with keys, each with its version, its writer and its times."""
        meta = self._row("session_state_meta", KEYS_VERSION, id)
        version = 1
        if meta is not None:
            version = max(1, _whole(meta, "version", f"the state of {id!r}", 0))
        state, newest = AdoptedState(self._runtime, id, version - 1), 0
        document: dict[str, Any] = {}
        for row in keys:
            key, where = require_key(row["key"]), f"state key {row['key']!r} of {id!r}"
            document[key] = _value(row, id)
            times = moment(row, "created_at", where), moment(row, "updated_at", where)
            newest = max(newest, *times)
            above = _whole(row, "version", where) - 1
            state.expect(key, above, row["updated_by_session"] or id, min(times), max(times))
        state.write_document("init", document, id, newest)
        return state

    def _started(self, id: str, row: Row) -> AdoptedState:
        """Begin with one document, at its version."""
        where = f"the state of {id!r}"
        state = AdoptedState(self._runtime, id, _whole(row, "version", where) - 1)
        state.write_document("init", _document(row, id), id, moment(row, "updated_at", where))
        return state


def _replay(state: AdoptedState, row: Row, where: str) -> None:
    kind, key, payload = row["event_type"], row["key"], parsed(row, "payload", where)
    by = require_text("session_id", row["session_id"])
    at = moment(row, "timestamp", where)
    if key is None and kind in {"init", "full_replace", "patch"}:
        wanted = _object(payload)
        if kind == "patch":
            wanted = merge_patch(state.document(), wanted)
        state.write_document(
            kind, {require_key(name): each for name, each in wanted.items()}, by, at
        )
        return
    if kind not in {"delete", *ARGUMENTS}:
        raise InvalidArgument(f"{shown(kind)} is no event of {'a key' if key else 'the state'}")
    argument = None
    if kind in ARGUMENTS:
        details = _object(payload)
        if set(details) != {ARGUMENTS[kind]}:
            raise InvalidArgument(f"the payload of {kind} is {ARGUMENTS[kind]}, and nothing else")
        argument = details[ARGUMENTS[kind]]
    operation: Any = "merge" if kind == "patch" else kind
    mutation = Mutation(operation=operation, key=require_key(key), argument=argument)
    state.mutate(checked(mutation), by, at)


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidArgument(f"its payload is not a JSON object, but {shown(value)}")
    return value


def _document(row: Row, id: str) -> dict[str, Any]:
    document = parsed(row, "state_data", f"the state of {id!r}")
    if type(document) is not dict:
        raise InvalidArgument(f"the state of {shown(id)} is not a JSON object")
    return {require_key(key): value for key, value in document.items()}


def _value(row: Row, id: str) -> Any:
    return parsed(row, "value", f"state key {row['key']!r} of {id!r}")


def _whole(row: Row, column: str, where: str, least: int = 1) -> int:
    return require_whole(f"{where}: {column}", row[column], least, VERSION_MAX // 2)


def _last(materialized: Row, id: str) -> int:
    return _whole(materialized, "last_sequence", f"the state of {id!r}", 0)

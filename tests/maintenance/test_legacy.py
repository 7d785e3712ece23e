"""Databases of the three older formats are adopted whole, or refused with nothing written."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.arguments import shown
from holdfast.errors import (
    CorruptStore,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    LimitExceeded,
    NotAStore,
)
from tests.maintenance.stores import everything

COORDINATOR = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    session_name TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at TEXT NOT NULL,
    project_dir TEXT,
    agent_name TEXT,
    last_resumed_at TEXT,
    parent_session_name TEXT  -- Immediate parent only!
);
"""
ROOT_COLUMN = """
ALTER TABLE sessions ADD COLUMN root_session_id TEXT;
CREATE INDEX idx_sessions_root ON sessions(root_session_id);
"""
CHECKPOINTER = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    created_at TIMESTAMP NOT NULL,
    updated_at TIMESTAMP NOT NULL,
    status TEXT NOT NULL  -- 'active', 'completed', 'failed', 'cancelled'
);

CREATE TABLE IF NOT EXISTS checkpoints (
    session_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at TIMESTAMP NOT NULL,
    transcript_json TEXT NOT NULL,
    plan_json TEXT,
    budget_spent_usd REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (session_id, version)
);

CREATE TABLE IF NOT EXISTS tool_calls (
    session_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    args_json TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    status TEXT NOT NULL,  -- 'issued', 'completed', 'failed'
    result_text TEXT,
    started_at TIMESTAMP NOT NULL,
    completed_at TIMESTAMP,
    PRIMARY KEY (session_id, call_id)
);

CREATE INDEX IF NOT EXISTS idx_tool_calls_idempotency
    ON tool_calls(idempotency_key);
"""
NOON = "2025-12-20T12:00:00+00:00"
NOON_MS = 1_766_232_000_000

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a database from a schema and rows: (table, values)."""

    def make(schema: str, *rows: tuple[str, tuple[Any, ...]], journal: str = "delete") -> Path:
        path = tmp_path / "legacy.db"
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.executescript(schema)
            for table, values in rows:
                places = ", ".join("?" * len(values))
                connection.execute(f"INSERT INTO {table} VALUES ({places})", values)
            connection.commit()
        return path

    return make


def session(id: str, name: str, parent: str | None = None, **changes: Any) -> tuple[str, Any]:
    fields = {
        "session_id": id, "session_name": name, "status": "running", "created_at": NOON,
        "project_dir": None, "agent_name": None, "last_resumed_at": None,
        "parent_session_name": parent, **changes,
    }  # fmt: skip
    return "sessions", tuple(fields.values())


def saved(id: str, version: int, transcript: object, plan: object = None) -> tuple[str, Any]:
    text = None if plan is None else json.dumps(plan)
    values = (id, version, NOON, json.dumps(transcript), text, version / 4)
    return "checkpoints", values


def message(number: int) -> dict[str, Any]:
    return {
        "id": f"m{number}", "role": "user", "created_at": NOON,
        "blocks": [{"kind": "text", "text": f"message {number} ü"}],
    }  # fmt: skip


def test_coordinator_sessions_get_parents_and_roots_by_id(place: Any, make: Make) -> None:
    path = make(
        COORDINATOR,
        session("s4", "leaf", "inner", agent_name="writer", status="finished"),
        session("s3", "inner", "outer", last_resumed_at="2025-12-20 13:00:00", status="stopped"),
        session("s2", "outer", "top", project_dir="/work"),
        session("s1", "top", created_at="2025-12-20T11:59:59.123Z"),
        session("lone", "alone", "", status="failed"),
    )
    with holdfast.open(**place) as store:
        result = store.import_legacy(path)
        assert (result.sessions, result.checkpoints, result.notes) == (5, 0, ())
        infos = {info.id: info for info in store.sessions()}
        found = {id: (info.parent_id, info.root_id) for id, info in infos.items()}
        assert found == {
            "s1": (None, "s1"), "s2": ("s1", "s1"), "s3": ("s2", "s1"), "s4": ("s3", "s1"),
            "lone": (None, "lone"),
        }  # fmt: skip
        assert [infos[id].status for id in ("s1", "s3", "s4", "lone")] == [
            "active", "cancelled", "completed", "failed",
        ]  # fmt: skip
        assert infos["s4"].agent == "writer"
        assert infos["s2"].metadata["project_dir"] == "/work"
        assert infos["s3"].metadata["legacy"] == {"format": "coordinator", "status": "stopped"}
        assert infos["s1"].created_at == NOON_MS - 877
        assert (infos["s3"].created_at, infos["s3"].last_resumed_at) == (
            NOON_MS, NOON_MS + 3_600_000,
        )  # fmt: skip
        (event,) = store.events("s1")
        assert (event.kind, event.data["sessions"]) == ("session_imported", 4)
        store.session("s2").save(plan=1)


def test_what_cannot_be_taken_over_as_it_was_is_said(make: Make, tmp_path: Path) -> None:
    path = make(
        COORDINATOR + ROOT_COLUMN,
        ("sessions", (*session("old", "twin", created_at="2025-12-20T10:00:00Z")[1], None)),
        ("sessions", (*session("new", "twin", created_at="2025-12-20T11:00:00Z")[1], None)),
        ("sessions", (*session("kid", "kid", "twin")[1], None)),
        ("sessions", (*session("orphan", "orphan", "nobody")[1], None)),
        ("sessions", (*session("heir", "heir", "nobody", status="odd")[1], "new")),
    )
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        result = store.import_legacy(path)
        assert set(result.notes) == {
            "session 'kid' has the parent 'twin', a name of 2 sessions; 'new' was chosen, the "
            "newest when it began",
            "session 'orphan' becomes a root: its parent 'nobody' is missing",
            "session 'heir' is placed under its root: its parent 'nobody' is missing",
            "session 'heir' was 'odd'; it is imported as active",
        }
        roots = {info.id: info.root_id for info in store.sessions()}
        assert roots == {
            "old": "old", "new": "new", "kid": "new", "orphan": "orphan", "heir": "new",
        }  # fmt: skip


def test_a_long_chain_of_parents_is_followed_to_its_root(make: Make, tmp_path: Path) -> None:
    chain = [session(f"s{i}", f"n{i}", f"n{i + 1}" if i < 3_000 else None) for i in range(3_001)]
    path = make(COORDINATOR, *chain)
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        assert store.import_legacy(path).sessions == 3_001
        assert store.find_session("s0").root_id == "s3000"


def test_checkpointer_versions_become_versions(place: Any, make: Make) -> None:
    turns = [message(number) for number in range(200)]
    edited = [{"role": "system", "content": "summary"}, *turns[150:]]
    plan = {"steps": [{"text": "x" * 200, "done": False}]}
    path = make(
        CHECKPOINTER,
        ("sessions", ("alpha", NOON, NOON, "completed")),
        *(saved("alpha", version, turns[:version], plan) for version in range(1, 201)),
        saved("alpha", 202, edited, {**plan, "n": 1}),
        saved("alpha", 203, [*edited, message(7)]),
        saved("stray", 1, []),
    )
    with holdfast.open(**place) as store:
        result = store.import_legacy(path)
        assert (result.sessions, result.checkpoints) == (2, 203)
        assert result.notes == ("session 'stray' had only checkpoints; it is imported as active",)
        alpha = store.find_session("alpha")
        info = alpha.info()
        assert (info.status, info.version, info.created_at) == ("completed", 203, NOON_MS)
        for version in (1, 64, 65, 129, 200):
            found = alpha.at(version)
            assert found.channels == {
                "transcript": turns[:version], "plan": plan, "budget": {"spent_usd": version / 4},
            }  # fmt: skip
            assert (found.kind, found.created_at, found.epoch) == ("turn", NOON_MS, 1)
        assert alpha.at(202)["transcript"] == edited
        assert alpha.at(203).channels == {
            "transcript": [*edited, message(7)], "plan": None, "budget": {"spent_usd": 203 / 4},
        }  # fmt: skip
        with pytest.raises(holdfast.CheckpointNotFound):
            alpha.at(201)
        assert store.find_session("stray").at(1)["transcript"] == []
        again = store.session("alpha", reopen=True)
        again.append("transcript", [message(8)])
        latest = again.latest()
        assert latest is not None
        assert latest["transcript"] == [*edited, message(7), message(8)]


def test_checkpointer_storage_does_not_grow_with_the_square(make: Make, tmp_path: Path) -> None:
    turns = [message(number) for number in range(400)]
    path = make(CHECKPOINTER, *(saved("a", v, turns[:v]) for v in range(1, 401)))
    store_file = tmp_path / "store.db"
    holdfast.open(f"sqlite:///{store_file}").close()
    empty_bytes = store_file.stat().st_size
    with holdfast.open(f"sqlite:///{store_file}") as store:
        store.import_legacy(path)
    assert path.stat().st_size > 8_000_000
    assert store_file.stat().st_size - empty_bytes < 200_000


ran: list[Any] = []


@holdfast.tool(effect="mutate")
def charge(cents: int, password: str = "") -> str:
    ran.append(cents)
    return "charged"


@holdfast.tool(effect="mutate")
def mail(to: str) -> None:
    ran.append(to)


def call(id: str, tool: str, args: object, status: str, result: str | None) -> tuple[str, Any]:
    ended = NOON if status == "completed" else None
    values = ("a", id, tool, json.dumps(args), f"key {id}", status, result, NOON, ended)
    return "tool_calls", values


@pytest.mark.parametrize("key", [None, "a key beside the database"])
def test_checkpointer_tool_calls_are_known_again(place: Any, make: Make, key: str | None) -> None:
    ran.clear()
    path = make(
        CHECKPOINTER,
        ("sessions", ("a", NOON, NOON, "active")),
        saved("a", 1, [1]),
        call("c1", "charge", {"cents": 5}, "completed", "ok"),
        call("c2", "mail", {"to": "x"}, "issued", None),
        call("c3", "charge", {"cents": 6}, "failed", "no"),
        call("c4", "charge", {"cents": 7}, "issued", None),
        call("c5", "charge", {"cents": 7}, "completed", "the second time"),
        call("c6", "charge", {"cents": 8, "password": "hunter22"}, "completed", "ok"),
    )
    redaction = holdfast.Redactor(key=None if key is None else key.encode().ljust(32, b"."))
    with holdfast.open(**place, redaction=redaction) as store:
        result = store.import_legacy(path)
        assert (result.effects, result.spends, result.notes) == (6, 1, ())
        session = store.session("a")
        assert session.spent().usd == Decimal("0.25")
        assert session.call(charge, cents=5).value == "ok"
        assert session.call(charge, cents=5, call_id="c1").value == "ok"
        assert session.call(charge, cents=7).value == "the second time"
        assert session.call(charge, cents=8, password="hunter22").value == "ok"
        with pytest.raises(holdfast.Unresolved):
            session.call(mail, to="x")
        (doubtful,) = [each for each in session.unresolved() if each.tool == "mail"]
        assert (doubtful.call_id, doubtful.idempotency_key) == ("c2", "key c2")
        assert ran == []
        assert session.call(charge, cents=6).value == "charged"
        assert ran == [6]
        with pytest.raises(holdfast.RequestMismatch):
            session.call(charge, cents=9, call_id="c1")
        assert "hunter22" not in str([effect.arguments for effect in store.effects()])


REGISTRY = """
CREATE TABLE tasks (task_id TEXT PRIMARY KEY, title TEXT, status TEXT, updated_at TIMESTAMP);
CREATE TABLE work_items (
    work_item_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, work_type TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'pending', priority INTEGER DEFAULT 0, lease_holder TEXT,
    lease_acquired_at TIMESTAMP, lease_expires_at TIMESTAMP, heartbeat_at TIMESTAMP,
    retry_count INTEGER DEFAULT 0, max_retries INTEGER DEFAULT 3, input_data TEXT,
    output_data TEXT, error_message TEXT, created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
    started_at TIMESTAMP, completed_at TIMESTAMP, updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE checkpoints (
    checkpoint_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, work_item_id TEXT,
    checkpoint_type TEXT NOT NULL, sequence_number INTEGER NOT NULL, snapshot_data TEXT NOT NULL,
    metadata TEXT, created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE idempotency_keys (
    idempotency_key TEXT PRIMARY KEY, task_id TEXT, work_item_id TEXT, request_hash TEXT NOT NULL,
    response_data TEXT, status TEXT NOT NULL DEFAULT 'pending',
    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, completed_at TIMESTAMP, expires_at TIMESTAMP
);
"""


def work_item(id: str, status: str, output: str | None = None) -> tuple[str, Any]:
    lease = ("w", NOON, NOON, NOON) if status == "in_progress" else (None,) * 4
    ended = NOON if status in {"completed", "failed"} else None
    error = "broken" if status == "failed" else None
    values = (id, "t", "tool_execution", status, 10, *lease, 1, 3, '{"n": 1}', output, error,
              NOON, NOON, ended, NOON)  # fmt: skip
    return "work_items", values


def evidence(number: int, kind: str, data: object, item: str | None = None) -> tuple[str, Any]:
    return "checkpoints", (f"k{number}", "t", item, kind, number, json.dumps(data), None, NOON)


def test_a_registry_is_adopted_whole(place: Any, make: Make) -> None:
    path = make(
        REGISTRY,
        ("tasks", ("t", "Process documents", "running", NOON)),
        work_item("w1", "completed", '{"pages": 42}'),
        work_item("w2", "failed"),
        work_item("w3", "in_progress"),
        work_item("w4", "pending"),
        evidence(1, "iteration_start", {"iteration": 4}),
        evidence(2, "tool_executed", {"pages": 42}, "w1"),
        evidence(4, "iteration_end", {"state": "no number"}),
        ("idempotency_keys", ("parsed", "t", "w1", "sha256:abc", '{"pages": 42}', "completed",
                              NOON, NOON, None)),
        ("idempotency_keys", ("sent", None, None, "sha256:def", None, "pending", NOON, None, None)),
    )  # fmt: skip
    with holdfast.open(**place) as store:
        result = store.import_legacy(path)
        assert (result.sessions, result.checkpoints, result.items, result.effects) == (1, 3, 4, 2)
        assert result.notes == ("session 't' version 4 names no iteration; 1 is used",)
        session = store.session("t")
        info = session.info()
        assert (info.status, info.version) == ("active", 4)
        assert info.metadata["title"] == "Process documents"
        assert session.at(2).data == {"pages": 42}
        assert (session.at(2).kind, session.at(2).item_id) == ("tool_executed", "w1")
        assert session.resume_point().iteration == 2
        done = store.work.get("w1")
        assert (done.status, done.output, done.priority) == ("completed", {"pages": 42}, 10)
        assert (store.work.get("w2").status, store.work.get("w2").error) == ("failed", "broken")
        for id in ("w3", "w4"):
            item = store.work.get(id)
            assert (item.waits_for, item.input, item.session_id) == ("review", {"n": 1}, "t")
        again = store.once("parsed", lambda: ran.append("again"))
        assert (again.value, again.replayed) == ({"pages": 42}, True)
        with pytest.raises(holdfast.Unresolved):
            store.once("sent", lambda: ran.append("again"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (evidence(1, "guess", {}), "unknown type"),
        (evidence(0, "turn", {}), "version must be 1 to"),
        (("checkpoints", ("k", "t", None, "turn", 1, "{", None, NOON)), "is not JSON text"),
        (("work_items", ("w", "t", b"5", "pending", 0, *(None,) * 4, 0, 3, None, None, None, NOON,
                         None, None, NOON)), "cannot be imported"),
        (("idempotency_keys", ("k\x1b", None, None, "h", None, "pending", NOON, None, None)),
         "cannot be printed"),
    ],
)  # fmt: skip
def test_a_registry_that_is_not_in_order_is_refused(make: Make, row: Any, problem: str) -> None:
    path = make(REGISTRY, ("tasks", ("t", None, "running", NOON)), row)
    with holdfast.open("sqlite://") as store:
        before = everything(store)
        with pytest.raises(HoldfastError, match=problem):
            store.import_legacy(path)
        assert everything(store) == before


def test_the_old_database_is_only_read(make: Make, tmp_path: Path) -> None:
    path = make(COORDINATOR, session("s1", "top"), journal="wal")
    before = path.read_bytes(), sorted(tmp_path.iterdir())
    with holdfast.open("sqlite://") as store:
        store.import_legacy(path)
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == before


def test_the_async_colour_adopts_too(place: Any, make: Make) -> None:
    path = make(CHECKPOINTER, saved("a", 1, [message(1)]))

    async def body() -> None:
        async with await holdfast.aopen(**place) as store:
            assert (await store.import_legacy(path)).sessions == 1
            session = await store.find_session("a")
            assert (await session.at(1))["transcript"] == [message(1)]

    asyncio.run(body())


WRONG: dict[str, tuple[str, list[Any], type[HoldfastError], str]] = {
    "no known table": ("CREATE TABLE t (a)", [], InvalidArgument,
        "{path} is not a database of a supported older format: its tables are t"),
    "no table": ("", [], InvalidArgument,
        "{path} is not a database of a supported older format: its tables are none"),
    "a view": (
        "CREATE VIEW sessions AS SELECT 1 AS session_id, 2 AS session_name, 3 AS status, "
        "4 AS created_at, 5 AS project_dir, 6 AS agent_name, 7 AS last_resumed_at, "
        "8 AS parent_session_name", [], InvalidArgument,
        "{path} is not a database of a supported older format: its tables are none"),
    "a computed column": (
        "CREATE TABLE sessions (session_id, session_name, status, created_at, project_dir, "
        "agent_name, last_resumed_at, parent_session_name, bomb AS (zeroblob(900000000)))",
        [], InvalidArgument,
        "{path} is not a database of a supported older format: its tables are none"),
    "a virtual table": (
        "CREATE VIRTUAL TABLE sessions USING fts4(session_id, session_name, status, created_at, "
        "project_dir, agent_name, last_resumed_at, parent_session_name)", [], InvalidArgument,
        "{path} is not a database of a supported older format: its tables are sessions_content, "
        "sessions_docsize, sessions_segdir, sessions_segments, sessions_stat"),
    "text that is none": (
        COORDINATOR + "INSERT INTO sessions (session_id, session_name, status, created_at) "
        "VALUES ('a', CAST(x'ff' AS TEXT), 'running', 0)", [], CorruptStore,
        "{path} has text that is not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte"),
    "a circle": (COORDINATOR,
        [session("a", "A", "B"), session("b", "B", "C"), session("c", "C", "B")],
        InvalidArgument, "sessions are each other's parents: b → c → b"),
    "its own parent": (COORDINATOR, [session("a", "A", "A")], InvalidArgument,
        "sessions are each other's parents: a → a"),
    "no time": (COORDINATOR, [session("a", "A", created_at="yesterday")], InvalidArgument,
        "session 'a' has a created_at that is not a time: 'yesterday'"),
    "a time without end": (COORDINATOR.replace("created_at TEXT", "created_at"),
        [session("a", "A", created_at=2**62)], InvalidArgument,
        f"session 'a' has a created_at that is not a time: {2**62}"),
    "a time before 1970": (COORDINATOR, [session("a", "A", created_at="1969-12-31")],
        InvalidArgument, "session 'a' has a created_at that is not a time: '1969-12-31'"),
    "an id that is no text": (COORDINATOR, [session(b"a", "A")], InvalidArgument,  # type: ignore[arg-type]
        "a session's id is text, not b'a'"),
    "an empty id": (COORDINATOR, [session("", "A")], InvalidArgument,
        "id must be text of 1 to 256 printable characters, not ''"),
    "a hostile id": (COORDINATOR, [session("a\x1b[2J", "A")], InvalidArgument,
        "id must be text of 1 to 256 printable characters, not 'a\\x1b[2J'"),
    "a long name": (COORDINATOR, [session("a", "A" * 257)], InvalidArgument,
        f"name must be text of 1 to 256 printable characters, not {shown('A' * 257)}"),
    "a transcript that is no JSON": (CHECKPOINTER, [("checkpoints", ("a", 1, NOON, "[", None, 0))],
        InvalidValue, "the transcript of session 'a' version 1 is not JSON text: Expecting value: "
        "line 1 column 2 (char 1)."),
    "a transcript that is no list": (CHECKPOINTER, [saved("a", 1, {"role": "user"})],
        InvalidArgument, "the transcript of session 'a' version 1 is not a JSON list"),
    "a transcript of bytes": (CHECKPOINTER, [("checkpoints", ("a", 1, NOON, b"[]", None, 0))],
        InvalidValue, "the transcript of session 'a' version 1 is not JSON text"),
    "a version below 1": (CHECKPOINTER, [saved("a", 0, [])], InvalidArgument,
        "session 'a' version 0: version must be 1 to 268435455, not 0"),
    "a giant message": (CHECKPOINTER, [saved("a", 1, [1, "x" * 2**20])], LimitExceeded,
        "session 'a' version 1 transcript[1] takes 1,048,581 bytes or more; the limit is 1,048,576 "
        "(Limits.value_bytes)."),
    "an endless budget": (CHECKPOINTER, [("checkpoints", ("a", 1, NOON, "[]", None, float("inf")))],
        InvalidValue, "session 'a' version 1 budget.spent_usd is inf: JSON has only finite "
        "numbers within the range of a float."),
    "arguments that are no JSON": (CHECKPOINTER,
        [("sessions", ("a", NOON, NOON, "active")),
         ("tool_calls", ("a", "c", "t", "x", "k", "issued", None, NOON, None))],
        InvalidValue, "tool call 'c' of session 'a' is not JSON text: Expecting value: line 1 "
        "column 1 (char 0)."),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_database_is_refused_and_nothing_is_written(
    case: str, make: Make, tmp_path: Path
) -> None:
    schema, rows, error, message = WRONG[case]
    path = make(schema, *rows)
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session("kept").save(a=1)
        before = everything(store)
        with pytest.raises(error) as raised:
            store.import_legacy(path)
        assert type(raised.value) is error
        assert str(raised.value) == message.replace("{path}", str(path))
        assert everything(store) == before


def test_an_existing_session_is_refused(place: Any, make: Make) -> None:
    path = make(CHECKPOINTER, saved("fresh", 1, []), saved("taken", 1, []))
    with holdfast.open(**place) as store:
        store.session("taken").save(a=1)
        before = everything(store)
        with pytest.raises(InvalidArgument) as raised:
            store.import_legacy(path)
        expected = "session 'taken' exists already; nothing was imported"
        assert str(raised.value) == expected
        assert everything(store) == before


def test_files_that_are_no_databases_are_refused(make: Make, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, and long enough to be looked at " * 20)
    short = tmp_path / "short.db"
    shutil.copy(make(CHECKPOINTER, *(saved("a", v, ["x" * 500]) for v in range(1, 60))), short)
    with short.open("r+b") as file:
        file.truncate(9_000)
    cases: list[tuple[Any, type[HoldfastError], str]] = [
        (tmp_path / "none.db", InvalidArgument, f"there is no file {tmp_path}/none.db"),
        (tmp_path, InvalidArgument, f"{tmp_path} is a directory; name a file in it"),
        (3, InvalidArgument, "path must name a file, not 3"),
        ("", InvalidArgument, "path must name a file, not ''"),
        (text, NotAStore, f"{text} is not an SQLite database"),
        (short, CorruptStore, f"{short} is damaged: "),
    ]
    with holdfast.open("sqlite://") as store:
        before = everything(store)
        for path, error, message in cases:
            with pytest.raises(error) as raised:
                store.import_legacy(path)
            assert str(raised.value).startswith(message)
        assert everything(store) == before

"""The shared state of an older database is adopted with its history, or refused whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.maintenance.stores import everything
from tests.maintenance.test_legacy import COORDINATOR, NOON, NOON_MS, Make, make, session

__all__ = ["make"]

TABLES = """
CREATE TABLE session_state_kv (
    root_session_id TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
    version INTEGER NOT NULL DEFAULT 1, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
    updated_by_session TEXT, PRIMARY KEY (root_session_id, key)
);
CREATE TABLE session_state_meta (
    root_session_id TEXT PRIMARY KEY, global_version INTEGER NOT NULL DEFAULT 0,
    created_at TEXT NOT NULL
);
CREATE TABLE session_state (
    root_session_id TEXT PRIMARY KEY, state_data TEXT NOT NULL DEFAULT '{}',
    version INTEGER NOT NULL DEFAULT 1, created_at TEXT NOT NULL, updated_at TEXT NOT NULL
);
CREATE TABLE session_state_events (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT, root_session_id TEXT NOT NULL,
    session_id TEXT NOT NULL, event_type TEXT NOT NULL, key TEXT, payload TEXT NOT NULL,
    timestamp TEXT NOT NULL, sequence_number INTEGER NOT NULL
);
CREATE TABLE session_state_materialized (
    root_session_id TEXT PRIMARY KEY, state_data TEXT NOT NULL, last_sequence INTEGER NOT NULL,
    materialized_at TEXT NOT NULL
);
"""
SESSIONS = (session("s1", "top"), session("s2", "child", "top"), session("s3", "leaf", "child"))
LATER = "2025-12-20T13:00:00Z"


def key(key: Any, value: str, version: Any = 1, by: str | None = None) -> tuple[str, Any]:
    return "session_state_kv", ("s1", key, value, version, NOON, LATER, by)


def meta(version: int) -> tuple[str, Any]:
    return "session_state_meta", ("s1", version, NOON)


def document(data: str, version: Any = 6) -> tuple[str, Any]:
    return "session_state", ("s1", data, version, NOON, LATER)


def materialized(data: str, last: Any) -> tuple[str, Any]:
    return "session_state_materialized", ("s1", data, last, LATER)


def event(number: Any, kind: str, key: str | None, payload: Any, by: str = "s2") -> tuple[str, Any]:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return "session_state_events", (None, "s1", by, kind, key, text, NOON, number)


def test_keys_keep_their_versions_writers_and_times(place: Any, make: Make) -> None:
    lost = ("session_state_kv", ("gone", "lost", "1", 1, NOON, NOON, None))
    misplaced = ("session_state_kv", ("s3", "lost", "1", 1, NOON, NOON, None))
    rows = (key("big", str(2**70), 7, "s2"), key("empty", "null"), lost, misplaced, meta(15))
    path = make(COORDINATOR + TABLES, *SESSIONS, *rows)
    with holdfast.open(**place) as store:
        result = store.import_legacy(path)
        assert (result.entries, result.checkpoints) == (2, 0)
        assert result.notes == (
            "the state of 'gone' is left out: there is no such session",
            "the state of 's3' is left out: it is not a root",
        )
        state = store.find_session("s3").state
        assert state.snapshot() == holdfast.StateSnapshot(
            root_id="s1", version=15, document={"big": 2**70, "empty": None},
            versions={"big": 7, "empty": 1},
        )  # fmt: skip
        entry = state.entry("big")
        assert entry is not None
        assert (entry.updated_by, entry.updated_at) == ("s2", NOON_MS + 3_600_000)
        assert state.history("big") == [entry]
        [first] = state.events(after=14)
        assert (first.operation, first.sequence, first.value) == (
            "init", 15, {"big": 2**70, "empty": None},
        )  # fmt: skip
        # Who holds a version of the old store gets a conflict once the key has changed.
        assert state.set("big", 0, if_version=7).version == 8
        with pytest.raises(holdfast.Compacted):
            state.events(after=0)
    found = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    assert [each for each in found if each.level == "problem"] == []


@pytest.mark.parametrize("row", [document, materialized], ids=["document", "materialized"])
def test_one_document_is_where_the_state_begins(place: Any, make: Make, row: Any) -> None:
    path = make(COORDINATOR + TABLES, *SESSIONS, row('{"a": [1], "b": 2.0}', 6))
    with holdfast.open(**place) as store:
        assert store.import_legacy(path).entries == 2
        state = store.find_session("s2").state
        assert (state.version(), state.snapshot().versions) == (6, {"a": 1, "b": 1})
        assert repr(state.snapshot(6).document) == "{'a': [1], 'b': 2.0}"
        with pytest.raises(holdfast.VersionConflict):
            state.replace({}, if_version=5)
        assert state.replace({}, if_version=6).version == 7


LOG = (
    event(1, "init", None, {"n": 1, "log": ["a"]}, "s1"),
    event(2, "increment", "n", {"delta": 4}),
    event(3, "append", "log", {"items": ["x" * 300]}),
    event(4, "append", "log", {"items": ["y"]}, "s3"),
    event(5, "patch", "o", {"patch": {"a": {"b": 1}, "c": None}}),
    event(6, "delete", "n", {}),
    event(7, "set", "n", {"value": [1]}),
    event(8, "patch", None, {"o": None, "p": 1}),
    event(9, "full_replace", None, {"p": 2, "log": ["a", "x" * 300, "y"]}),
)
END = '{"log": ["a", "%s", "y"], "p": 2}' % ("x" * 300)


@pytest.mark.parametrize(
    "others",
    [(), (materialized(END, 9),), (materialized('{"n": 5, "log": ["a"]}', 2),),
     (materialized("{}", 0),),
     (document(END), key("p", "2"), key("log", json.dumps(json.loads(END)["log"])))],
    ids=["alone", "with its document", "with an older one", "with none yet", "with other tables"],
)  # fmt: skip
def test_a_log_without_holes_becomes_the_history(
    place: Any, make: Make, others: tuple[Any, ...]
) -> None:
    path = make(COORDINATOR + TABLES, *SESSIONS, *reversed(LOG), *others)
    with holdfast.open(**place) as store:
        store.import_legacy(path)
        state = store.find_session("s1").state
        assert state.snapshot().document == json.loads(END)
        assert [event.operation for event in state.events()] == [
            "init", "increment", "append", "append", "merge", "delete", "set", "patch",
            "full_replace",
        ]  # fmt: skip
        assert state.snapshot(5).document == {
            "n": 5, "log": ["a", "x" * 300, "y"], "o": {"a": {"b": 1}},
        }  # fmt: skip
        assert [(each.version, each.updated_by) for each in state.history("log")] == [
            (3, "s3"), (2, "s2"), (1, "s1"),
        ]  # fmt: skip
        assert [each.version for each in state.history("n")] == [5, 4, 3, 2, 1]
        assert state.append("log", ["z"]).version == 4
        assert state.snapshot().versions["p"] == 2


def test_a_log_with_holes_is_left_out_if_a_document_has_all_of_it(place: Any, make: Make) -> None:
    path = make(COORDINATOR + TABLES, *SESSIONS, *LOG[3:], materialized(END, 9))
    with holdfast.open(**place) as store:
        result = store.import_legacy(path)
        assert result.notes == ("the log of the state of 's1' has gaps; it is left out",)
        state = store.find_session("s1").state
        assert (state.version(), state.snapshot().document) == (9, json.loads(END))
        assert [event.operation for event in state.events(after=8)] == ["init"]


WRONG: dict[str, tuple[list[Any], str]] = {
    "a log that begins late": ([*LOG[3:]], "has gaps or duplicate numbers"),
    "a number twice": ([LOG[0], event(1, "delete", "n", {})], "has gaps or duplicate numbers"),
    "an older document": ([*LOG[3:], materialized(END, 8)], "has gaps or duplicate numbers"),
    "a document ahead": ([*LOG, materialized(END, 12)], "does not match its events"),
    "another document": ([*LOG, materialized('{"p": 3}', 9)], "does not match its events"),
    "a document of nothing": ([*LOG, materialized('{"p": 3}', 0)], "does not match its events"),
    "another key": ([*LOG, key("p", "3")], "the tables contradict each other"),
    "keys and a document": ([key("p", "1"), document('{"p": true}')], "contradict each other"),
    "an unknown event": ([event(1, "counter_add", "k", {"value": 1})], "'counter_add' is no event"),
    "an event without a key": ([event(1, "set", None, {"value": 1})], "key must be text"),
    "a log that is no JSON": ([event(1, "set", "k", "{")], "is not JSON"),
    "a payload of a list": ([event(1, "set", "k", [1])], "not a JSON object"),
    "a payload of more": ([event(1, "set", "k", {"value": 1, "x": 2})], "and nothing else"),
    "an increment of text": (
        [event(1, "set", "k", {"value": "a"}), event(2, "increment", "k", {"delta": 1})],
        "event 2 of the state of 's1' cannot be replayed: increment needs a number"),
    "a delete of nothing": ([event(1, "delete", "k", {})], "there is no key 'k'"),
    "a sequence of text": ([event("one", "delete", "k", {})], "sequence_number must be"),
    "a writer without a name": ([event(1, "set", "k", {"value": 1}, "")], "session_id must be"),
    "a hostile key": ([key("a\nb", "1")], "key must be text"),
    "a value that is no JSON": ([key("k", "{")], "state key 'k' of 's1' is not JSON"),
    "a value of NaN": ([key("k", "NaN")], "state key 'k' of 's1' is nan"),
    "a time of the past": (
        [("session_state_kv", ("s1", "k", "1", 1, "yesterday", NOON, None))],
        "state key 'k' of 's1' has a created_at that is not a time: 'yesterday'"),
    "a version of nothing": ([key("k", "1", 0)], "version must be 1 to"),
    "a version beyond": ([key("k", "1", 2**60)], "version must be 1 to"),
    "a document of a list": ([document("[]")], "is not a JSON object"),
    "a document of text": ([document("no")], "is not JSON"),
    "a value too large": ([key("k", json.dumps("x" * 2**21))], "1,048,576"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_contradicts_itself_is_refused(name: str, make: Make) -> None:
    rows, problem = WRONG[name]
    path = make(COORDINATOR + TABLES, *SESSIONS, *rows)
    with holdfast.open("sqlite://") as store:
        before = everything(store)
        with pytest.raises(holdfast.InvalidArgument, match=problem):
            store.import_legacy(path)
        assert everything(store) == before


def test_a_long_log_does_not_grow_with_the_square(make: Make, tmp_path: Path) -> None:
    log = [event(number, "append", "log", {"items": ["x" * 100]}) for number in range(1, 1_001)]
    path = make(COORDINATOR + TABLES, *SESSIONS, *log)
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.import_legacy(path)
        assert len(store.find_session("s1").state.snapshot(500)["log"]) == 500
    assert (tmp_path / "store.db").stat().st_size < 3_000_000

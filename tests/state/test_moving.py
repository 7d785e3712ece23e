"""Shared state moves with its tree, whole and with its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.portable import file as format
from holdfast.store import NOUNS


def fill(store: holdfast.Store) -> holdfast.State:
    root = store.session("root")
    state = store.session("child", parent=root).state
    for number in range(50):
        state.append("log", ["x" * 200, number])
        state.add("set", number % 5)
    state.set("gone", 1)
    state.delete("gone")
    state.patch({"doc": {"a": 1}, "set": None})
    state.increment("n", 5, idempotency_key="once")
    return root.state


def test_state_travels_with_its_history(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(**place) as store:
        state = fill(store)
        state.compact(20)
        exported = store.export(file)
        assert exported.entries == 5
        wanted = {at: state.snapshot(at_sequence=at) for at in range(20, state.version() + 1)}
        events, history = state.events(after=20, limit=1_000), state.history("log")
    with holdfast.open(**other) as store:
        assert store.import_sessions(file).entries == 5
        state = store.find_session("root").state
        assert {at: state.snapshot(at_sequence=at) for at in wanted} == wanted
        assert state.events(after=20, limit=1_000) == events
        assert state.history("log") == history
        with pytest.raises(holdfast.Compacted):
            state.snapshot(at_sequence=19)
        assert state.increment("n", 5, idempotency_key="once").version == 1
        assert state.set("gone", 2).version == 3
        assert state.version() == max(wanted) + 1
    url, namespace = other["url"], other.get("namespace")
    found = holdfast.store.check(url, namespace=namespace)
    assert [each for each in found if each.level == "problem"] == []


def frames(path: Path) -> list[Any]:
    codec = holdfast.codec.Codec(holdfast.Limits())
    return list(format.ExportFile(path, codec, format.Format(NOUNS)).records())


def test_a_state_that_does_not_follow_from_its_history_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        fill(store)
        store.export(file)
    records = frames(file)
    kinds = {type(each).__name__ for each in records}
    assert {"StateRecord", "StateEventRecord", "StateEntryRecord"} <= kinds
    for number, record in enumerate(records):
        tag = record.__struct_config__.tag
        if not str(tag).startswith("state") or number % 7:
            continue
        without = tmp_path / f"{number}.export"
        write(without, records[:number] + records[number + 1 :])
        with holdfast.open(f"sqlite:///{tmp_path}/{number}.db") as store:
            with pytest.raises(holdfast.CorruptRecord):
                store.import_sessions(without)
            assert store.sessions() == []


def write(path: Path, records: list[Any]) -> None:
    codec = holdfast.codec.Codec(holdfast.Limits())
    with path.open("w+b") as file:
        writer = format.ExportWriter(file, codec, format.Format(NOUNS), "e" * 32)
        writer.begin("store")
        for record in records:
            writer.write(record)
        writer.end()


def test_a_tree_that_was_deleted_and_imported_again_repeats_no_version(
    place: dict[str, Any], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.export", tmp_path / "second.export"
    with holdfast.open(**place) as store:
        session = store.session("root")
        for number in range(3):
            session.state.set("k", number)
        store.export(first)
        session.state.set("k", 3)
        held = session.state.set("k", "held")
        session.delete(force=True)
        store.import_sessions(first)
        state = store.find_session("root").state
        assert state.get("k") == 2
        with pytest.raises(holdfast.Compacted):
            state.snapshot(at_sequence=4)
        written = [state.set("k", number) for number in range(3)]
        assert [each.version for each in written] == [6, 7, 8]
        assert [each.sequence for each in written] == [6, 7, 8]
        with pytest.raises(holdfast.VersionConflict):
            state.set("k", "stale", if_version=held.version)
        assert [event.sequence for event in state.events(after=5)] == [6, 7, 8]
        store.export(second)
        assert state.set("new", 1).version == 6
    with holdfast.open(f"sqlite:///{tmp_path}/third.db") as store:
        store.import_sessions(second)
        assert store.find_session("root").state.set("k", 1).version == 9


def test_values_and_schemas_of_a_file_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        state = store.session("root").state
        state.set_rule("n", schema={"type": "number", "maximum": 9})
        state.set_rule("gone", schema={"type": "number"})
        state.set_rule("m", reducer="sum")
        state.set("n", 3)
        state.set("m", "text")
        state.set("gone", 1)
        state.delete("gone")
        store.export(file)
    records = frames(file)
    with holdfast.open("sqlite://") as store:
        store.import_sessions(file)
        assert store.find_session("root").state.get("n") == 3
    rules = [n for n, each in enumerate(records) if type(each).__name__ == "StateRuleRecord"]
    [rule] = [n for n in rules if records[n].key == "n"]
    codec = holdfast.codec.Codec(holdfast.Limits())
    forged = {
        "'n' would not match its schema: 3 is not of type 'string'": {"type": "string"},
        "the schema of 'n' cannot be used at": {"type": "nonsense"},
        "references are not fetched": {"$ref": "https://example.org/schema"},
    }
    for number, (problem, schema) in enumerate(forged.items()):
        changed = [*records]
        changed[rule] = msgspec.structs.replace(records[rule], json_schema=codec.encode(schema))
        write(tmp_path / f"{number}", changed)
        with holdfast.open("sqlite://") as store:
            with pytest.raises(holdfast.CorruptRecord, match=problem):
                store.import_sessions(tmp_path / f"{number}")
            assert store.sessions() == []
    late = [*records[:rule], *records[rule + 1 :], records[rule]]
    write(tmp_path / "late", late)
    with (
        holdfast.open("sqlite://") as store,
        pytest.raises(holdfast.CorruptRecord, match="comes after the entries"),
    ):
        store.import_sessions(tmp_path / "late")


def test_a_forged_sequence_floor_or_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        fill(store)
        store.export(file)
    records = frames(file)
    forged: dict[str, list[dict[str, Any]]] = {
        "TreeRecord": [{"sequence": 3}, {"sequence": 2**53}],
        "StateRecord": [{"floor": 1_000_000}, {"keys": 99}],
        "StateEntryRecord": [{"value": b"\x01"}, {"value": None}, {"version": 99}],
        "StateEventRecord": [{"key": "other"}, {"operation": "init"}],
    }
    for name, changes in forged.items():
        found = [n for n, each in enumerate(records) if type(each).__name__ == name]
        at = next(n for n in reversed(found) if getattr(records[n], "value", b"") is not None)
        for number, change in enumerate(changes):
            changed = [*records]
            changed[at] = msgspec.structs.replace(records[at], **change)
            path = tmp_path / f"{name}{number}"
            write(path, changed)
            with holdfast.open("sqlite://") as store:
                with pytest.raises(holdfast.CorruptRecord):
                    store.import_sessions(path)
                assert store.sessions() == []

"""Exports move sessions between databases whole; a file that is not as written is refused."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.checkpoints.portable import (
    AttestationRecord,
    CheckpointRecord,
    EpochRecord,
    ItemsRecord,
    LineRecord,
    PinRecord,
)
from holdfast.ciphers import AesGcm
from holdfast.codec import Codec
from holdfast.errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    SchemaMismatch,
    SessionNotFound,
    StoreBusy,
    StoreError,
    StoreUnavailable,
)
from holdfast.feed.portable import EventRecord, TreeRecord
from holdfast.kernel.operation import Call
from holdfast.portable import file as format
from holdfast.portable.transfer import Importer
from holdfast.sessions.portable import SessionRecord
from holdfast.store import NOUNS
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import boundaries, run
from tests.maintenance.stores import contents, everything, sound

KEY = {"k": bytes(range(32))}


@pytest.fixture(autouse=True)
def _on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of records goes to the disk at once, as that of large trees does."""
    monkeypatch.setattr("holdfast.kernel.kept.ENTRIES_IN_MEMORY", 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


def open_at(place: dict[str, str], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)  # type: ignore[arg-type]


def message(number: int) -> dict[str, Any]:
    return {"role": "user" if number % 2 else "assistant", "content": f"turn {number} ü"}


def fill(store: holdfast.Store) -> None:
    """Sessions with everything that sessions can have."""
    root = store.session("root", name="Root", agent="planner", user="u1", metadata={"n": 2**80})
    for number in range(130):
        root.append("transcript", [message(number)])
    root.save(transcript=[message(500), *map(message, range(60, 130))], plan={"x": "y" * 300})
    root.save({"odd name": None, "empty": [], "zero": 0.0, "minus": -0.0}, metadata={"m": [1]})
    root.record("iteration_start", {"iteration": 3}, item="item-1")
    root.record("tool_executed", {"exit": 0}, item="item-2")
    root.pin(7, "why not")
    root.attest(9, {"checked": True})
    root.attest(9, ["again"])
    fork = root.fork(100, id="fork", name="Fork")
    fork.append("transcript", [message(1_000)])
    store.session("fork-child", parent=fork).save(a=1)
    fork.fork(50, id="far").save(transcript=list(map(message, range(20))), plan={"x": "y" * 300})
    child = store.session("child", parent=root, agent="worker")
    child.save(transcript=[], plan={"deep": [[[[1]]]]})
    child.rewind(1)
    child.append("transcript", ["after", 1.5, True, None])
    child.end("failed")
    store.session("empty", parent=child)
    root.rewind(40)
    root.append("transcript", [message(2_000)])


def test_a_round_trip_through_both_databases_changes_nothing(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back.export"
    with open_at(place) as store, open_at(other) as second, open_at({"url": "sqlite://"}) as third:
        fill(store)
        exported = store.export(file)
        before = contents(store)
        assert exported.sessions == len(before) == 6
        counts = [store.find_session(id).counts() for id in before]
        assert exported.checkpoints == sum(sum(count.values()) for count in counts)
        assert (exported.path, exported.bytes) == (str(file), file.stat().st_size)
        assert contents(store) == before
        imported = second.import_sessions(file)
        assert (imported.sessions, imported.checkpoints) == (6, exported.checkpoints)
        assert imported.notes == ()
        assert contents(second) == before
        sound(second)
        second.export(back)
        third.import_sessions(back)
        assert contents(third) == before
        sound(third)


def test_an_export_counts_what_belongs_to_no_session_and_stays_behind(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_at(place) as store:
        session = store.session("s")
        store.work.submit("t", session=session)
        store.once("of a session", lambda: 1, session=session)
        assert store.export(tmp_path / "none").left_behind == {}
        store.work.submit("t", queue="mine")
        [item] = store.work.claim("w", queues="mine")
        item.once("of an item", lambda: 1)
        for key in ("a", "b", "a"):
            store.once(key, lambda: 1)
        exported = store.export(tmp_path / "all")
        assert exported.left_behind == {"work_items": 1, "once_keys": 2}
        assert exported.to_dict()["left_behind"] == exported.left_behind
        assert store.export(tmp_path / "named", ["s"]).left_behind == {}
        monkeypatch.setattr("holdfast.kernel.portable.LEFT_MAX", 1)
        assert store.export(tmp_path / "more").left_behind == {"work_items": 1, "once_keys": 1}


def test_pins_attestations_and_the_feed_move_too(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as second:
        fill(store)
        events = store.events("root", limit=1_000)
        store.export(file)
        second.import_sessions(file)
        moved = second.events("root", limit=1_000)
        assert moved[:-1] == events
        assert moved[-1].position == len(events) + 1
        assert moved[-1].kind == "session_imported"
        assert moved[-1].data == {"sessions": 3, "source": f"store {store.store_id()}"}
        second.prune(keep=1)
        left = [found.version for found in second.find_session("root").history(limit=1_000)]
        assert {7, 9, 100} <= set(left)
        assert (
            second.find_session("root").resume_point() == store.find_session("root").resume_point()
        )


def test_imported_sessions_go_on_as_if_they_had_never_moved(
    place: Any, other: Any, file: Path
) -> None:
    with open_at(place) as store, open_at(other) as second:
        fill(store)
        store.export(file)
        second.import_sessions(file)
        for id in ("root", "fork", "far", "child", "empty"):
            for opened in (store, second):
                session = opened.session(id, reopen=True)
                session.append("transcript", [message(1)])
                session.append("transcript", list(map(message, range(130))))
                latest = session.latest()
                assert latest is not None
                session.save(transcript=latest["transcript"][5:90], plan={"x": "y" * 300})
                session.fork(latest.version, id=f"{id}-again").append("transcript", [1])
                session.rewind(latest.version - 1)
        theirs, ours = contents(store), contents(second)
        for id, found in ours.items():
            assert [v["channels"] for v in found["versions"]] == [
                v["channels"] for v in theirs[id]["versions"]
            ]
        sound(second)


def test_a_thousand_turns_cost_their_own_size(tmp_path: Path, file: Path) -> None:
    with open_at({"url": "sqlite://"}) as store:
        session = store.session("long")
        for number in range(1_000):
            session.append("transcript", [{"role": "user", "content": str(number) * 500}])
        exported = store.export(file)
    payload = sum(500 * len(str(number)) + 24 for number in range(1_000))
    assert payload < exported.bytes < 1.2 * payload + 200_000


def test_a_long_history_travels_whole(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as second:
        session = store.session("long")
        for number in range(1_100):
            session.append("transcript", [number])
        store.export(file)
        second.import_sessions(file)
        latest = second.find_session("long").latest()
        assert latest is not None
        assert latest["transcript"] == list(range(1_100))
        assert len(second.find_session("long").history(limit=10_000)) == 1_100
        assert second.events("long", limit=10_000)[:-1] == store.events("long", limit=10_000)


def test_a_session_brings_its_tree_and_what_it_was_forked_from(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store, open_at(other) as second:
        fill(store)
        store.session("unrelated").save(a=1)
        before = contents(store)
        assert store.export(file, [store.find_session("fork-child")]).sessions == 5
        assert store.export(tmp_path / "root.export", ["empty", "root"]).sessions == 3
        second.import_sessions(file)
        expected = {"root", "fork", "fork-child", "child", "empty"}
        assert contents(second) == {id: before[id] for id in expected}
        second.find_session("fork").delete(force=True)
        second.find_session("root").delete(force=True)
        second.import_sessions(tmp_path / "root.export")
        assert contents(second) == {id: before[id] for id in ("root", "child", "empty")}
        sound(second)


def test_a_deleted_tree_comes_back_with_a_feed_that_only_grew(place: Any, file: Path) -> None:
    with open_at(place) as store:
        fill(store)
        before = contents(store)
        store.export(file)
        for id in ("far", "fork", "root"):
            store.find_session(id).delete(force=True)
        deleted = store.events("root", limit=1_000)
        store.import_sessions(file)
        assert contents(store) == before
        events = store.events("root", limit=1_000)
        assert events[:-1] == deleted
        assert [event.position for event in events] == list(range(1, len(events) + 1))
        sound(store)


def test_pruned_versions_stay_missing(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as second:
        fill(store)
        store.prune(keep=5)
        before = contents(store)
        store.export(file)
        second.import_sessions(file)
        assert contents(second) == before
        sound(second)


def test_an_export_has_nothing_that_no_version_shows(place: Any, file: Path) -> None:
    with open_at(place) as store:
        origin = store.session("origin")
        for number in range(100):
            origin.append("transcript", [f"word-{number}"])
        origin.fork(70, id="fork")
        origin.delete(force=True)
        store.export(file)
        with open_at({"url": "sqlite://"}) as second:
            second.import_sessions(file)
            assert contents(second) == contents(store)
            sound(second)
    assert b"word-69" in file.read_bytes()
    assert b"word-70" not in file.read_bytes()


def test_it_is_one_moment_while_others_write(place: Any, file: Path) -> None:
    with open_at(place) as store, open_at({"url": "sqlite://"}) as second:
        fill(store)
        stop = threading.Event()

        def write() -> None:
            session = store.session("busy")
            for number in range(10_000):
                if stop.is_set():
                    return
                session.append("transcript", [number])
                if number % 10 == 0:
                    session.fork(session.info().version)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            while len(store.sessions(limit=20)) < 12:
                pass
            store.export(file)
        finally:
            stop.set()
            thread.join()
        second.import_sessions(file)
        sound(second)
        busy = second.find_session("busy").latest()
        assert busy is not None
        assert busy["transcript"] == list(range(busy.version))


def test_the_async_colour_does_the_same(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store:
        fill(store)
        before = contents(store)

    async def body() -> None:
        async with await holdfast.aopen(**place) as store:
            exported = await store.export(file)
        async with await holdfast.aopen(**other) as second:
            imported = await second.import_sessions(file)
            assert imported.sessions == exported.sessions
            with pytest.raises(InvalidArgument, match="session 'root' exists already"):
                await second.import_sessions(file)

    asyncio.run(body())
    with open_at(other) as second:
        assert contents(second) == before


def test_a_cipher_covers_the_file(file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.export"
    with (
        open_at({"url": "sqlite://"}, cipher=AesGcm(KEY, "k")) as secret,
        open_at({"url": f"sqlite:///{tmp_path}/open.db"}) as unlocked,
    ):
        fill(secret)
        before = contents(secret)
        secret.export(file)
        assert b"assistant" not in file.read_bytes()
        with pytest.raises(StoreError, match="is encrypted; open the store with its cipher"):
            unlocked.import_sessions(file)
        with open_at({"url": "sqlite://"}, cipher=AesGcm(KEY, "k")) as second:
            second.import_sessions(file)
            assert contents(second) == before
        fill(unlocked)
        unlocked.export(plain)
        assert b"assistant" in plain.read_bytes()
        with open_at({"url": "sqlite://"}, cipher=AesGcm(KEY, "k")) as second:
            with pytest.raises(InvalidArgument) as raised:
                second.import_sessions(plain)
            assert str(raised.value) == (
                f"{plain} is not encrypted and this store has a cipher; import it with "
                "allow_plaintext=True if you trust its source"
            )
            second.import_sessions(plain, allow_plaintext=True)
            assert contents(second) == contents(unlocked)


def test_compressed_exports_can_be_read_by_any_store(file: Path) -> None:
    with (
        open_at({"url": "sqlite://"}, compression="zstd") as store,
        open_at({"url": "sqlite://"}) as second,
    ):
        fill(store)
        store.export(file)
        second.import_sessions(file)
        assert contents(second) == contents(store)


# What is not as it was written.


@pytest.fixture
def small(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, holdfast.Store, dict[str, Any]]]:
    """A small export of many frames, a store that could take it, and what that store holds."""
    monkeypatch.setattr(format, "FRAME_BYTES", 500)
    with open_at({"url": "sqlite://"}) as store:
        session = store.session("a", name="A")
        for number in range(70):
            session.append("transcript", [number])
        session.pin(1, "p")
        session.attest(1, "e")
        session.fork(30, id="b")
        store.export(file)
    with open_at({"url": "sqlite://"}) as target:
        target.session("kept").save(a=1)
        yield file, target, everything(target)


def refuses(small: tuple[Path, holdfast.Store, Any], error: type[HoldfastError]) -> str:
    """Import a file that must be refused, and return the sentence; nothing was written."""
    file, target, before = small
    with pytest.raises(error) as raised:
        target.import_sessions(file)
    assert type(raised.value) is error
    assert everything(target) == before
    return str(raised.value)


def test_one_changed_byte_anywhere_is_found(small: Any) -> None:
    file, target, before = small
    content = file.read_bytes()
    places = {*range(200), *range(len(content) - 200, len(content))}
    places |= set(random.Random(7).sample(range(len(content)), 400))
    refused = (CorruptRecord, InvalidArgument, SchemaMismatch)
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        file.write_bytes(changed)
        with pytest.raises(refused) as raised:
            target.import_sessions(file)
        assert str(file) in str(raised.value), place
    assert everything(target) == before
    file.write_bytes(content)
    assert target.import_sessions(file).sessions == 2


def test_a_file_cut_off_anywhere_is_refused(small: Any) -> None:
    file, target, before = small
    content = file.read_bytes()
    header = content.index(b"\n") + 1
    lengths = {header, header + 3, len(content) - 1, *range(header, len(content), 97)}
    for length in sorted(lengths):
        file.write_bytes(content[:length])
        with pytest.raises(CorruptRecord) as raised:
            target.import_sessions(file)
        assert str(raised.value) == (
            f"{file} is damaged: it is truncated; export the sessions again"
        )
    assert everything(target) == before


def test_records_cannot_be_moved_repeated_or_left_out(small: Any) -> None:
    file, _, _ = small
    content = file.read_bytes()
    start = content.index(b"\n") + 1
    pieces = [content[:start]]
    while start < len(content):
        length = 4 + int.from_bytes(content[start : start + 4])
        pieces.append(content[start : start + length])
        start += length
    changes: dict[str, list[bytes]] = {
        "moved": [*pieces[:1], pieces[2], pieces[1], *pieces[3:]],
        "repeated": [*pieces[:2], pieces[1], *pieces[2:]],
        "left out": [*pieces[:1], *pieces[2:]],
    }
    for change in changes.values():
        file.write_bytes(b"".join(change))
        ordinal = 1 if change is changes["repeated"] else 0
        problem = f"frame {ordinal} does not match its digest"
        assert refuses(small, CorruptRecord) == f"{file} is damaged: {problem}"
    file.write_bytes(content + b"\0")
    problem = "its end record does not match its content"
    assert refuses(small, CorruptRecord) == f"{file} is damaged: {problem}"


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"hello", b"{}\n", b"[1]\n", b'{"holdfast_export":"1"}\n', b"\xff\xfe\n",
     b'{"holdfast_export":true}\n', b"{" * 10_000],
)  # fmt: skip
def test_a_foreign_file_is_refused(content: bytes, small: Any) -> None:
    file, _, _ = small
    file.write_bytes(content)
    assert refuses(small, InvalidArgument) == f"{file} is not a Holdfast export"


def test_a_store_is_not_an_export(small: Any, tmp_path: Path) -> None:
    file, _, _ = small
    file.unlink()
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as store:
        store.backup(file)
    said = refuses(small, InvalidArgument)
    assert said.startswith(f"{file} is an SQLite database, not a Holdfast export.")


def test_a_newer_format_is_refused(small: Any) -> None:
    file, _, _ = small
    file.write_bytes(file.read_bytes().replace(b'"holdfast_export":1', b'"holdfast_export":2'))
    assert refuses(small, SchemaMismatch) == (
        f"{file} has export format 2, this Holdfast reads 1; upgrade Holdfast"
    )
    file.write_bytes(file.read_bytes().replace(b'"holdfast_export":2', b'"holdfast_export":0'))
    problem = "its first line is not what was written"
    assert refuses(small, CorruptRecord) == f"{file} is damaged: {problem}"


def test_a_path_that_names_no_file_is_refused(small: Any, tmp_path: Path) -> None:
    _, target, before = small
    for path, message in (
        (tmp_path / "none", f"there is no file {tmp_path}/none"),
        (tmp_path, f"{tmp_path} is a directory; name a file in it"),
        ("", "path must name a file, not ''"),
        (None, "path must name a file, not None"),
        ("a\0b", "path must name a file, not 'a\\x00b'"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            target.import_sessions(path)
        assert str(raised.value) == message
    assert everything(target) == before


def test_an_existing_session_is_refused_whoever_comes_first(small: Any) -> None:
    file, target, _ = small
    target.session("b", parent=None).save(mine=True)
    before = everything(target)
    expected = "session 'b' exists already; nothing was imported"
    with pytest.raises(InvalidArgument) as raised:
        target.import_sessions(file)
    assert str(raised.value) == expected
    # Somebody may start it after the look and before the transaction.
    source = format.ExportFile(file, target.runtime.codec, format.Format(NOUNS))
    call = Call(Importer.write, Importer(target.runtime), (source,))
    with pytest.raises(InvalidArgument) as raised:
        target.runtime.driver.run(call)
    assert str(raised.value) == expected
    assert everything(target) == before


def frame(tag: str, /, **changes: Any) -> Any:
    """A record that is in order, but for the changes."""
    session: dict[str, Any] = {
        "number": 1, "id": "s", "root_id": "s", "status": "active", "version": 2,
        "created_at": 1, "updated_at": 1, "last_resumed_at": 1, "metadata": b"\x80",
    }  # fmt: skip
    checkpoint = {
        "session_number": 1, "version": 1, "epoch": 1, "kind": "turn", "state_sequence": 0,
        "created_at": 1, "manifest": b"\x80",
    }  # fmt: skip
    said = {"session_number": 1, "version": 1, "created_at": 1}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "tree": (TreeRecord, {"root_id": "s", "position": 0, "sequence": 0}),
        "event": (EventRecord, {"root_id": "s", "position": 1, "session_id": "s", "kind": "k",
                                "created_at": 1, "data": b"\x01"}),
        "line": (LineRecord, {"id": 1, "pieces": []}),
        "items": (ItemsRecord, {"line_id": 1, "index": 0, "count": 1, "data": b"\x01"}),
        "session": (SessionRecord, session),
        "epoch": (EpochRecord, {"session_number": 1, "epoch": 2, "first_version": 2,
                               "target_version": 1}),
        "checkpoint": (CheckpointRecord, checkpoint),
        "pin": (PinRecord, {**said, "reason": "r"}),
        "attestation": (AttestationRecord, {**said, "evidence": b"\x01"}),
    }  # fmt: skip
    made, fields = kinds[tag]
    return made(**{**fields, **changes})


def manifest(**channels: Any) -> bytes:
    return Codec().encode(channels)


def first() -> list[Any]:
    return [frame("tree"), frame("line"), frame("items"), frame("session")]


DISORDER: dict[str, tuple[list[Any], str]] = {
    "two trees": ([frame("tree"), frame("tree")], "tree 's' comes twice"),
    "an event without a tree": ([frame("event")], "event 1 is out of order"),
    "an event twice": ([frame("tree"), frame("event"), frame("event")], "event 1 is out of order"),
    "an event too late": ([frame("tree"), frame("event", position=2)], "event 2 is out of order"),
    "a feed without its end": ([frame("tree", position=2), frame("event"), frame("line")],
        "the feed of tree 's' ends at 1"),
    "a feed that goes too far": ([frame("tree"), frame("event"), frame("session")],
        "the feed of tree 's' ends at 1"),
    "a feed without its end, at the end": ([frame("tree", position=2), frame("event")],
        "the feed of tree 's' ends at 1"),
    "a line twice": ([frame("line"), frame("line")], "line 1 comes twice"),
    "a line of nothing": ([frame("line", id=2, pieces=[(1, 0, 1)])],
        "line 2 begins with items that are missing"),
    "an item without a line": ([frame("items")], "item 0 is out of order"),
    "a hole": ([frame("line"), frame("items", index=1)], "item 1 is out of order"),
    "too few items": ([frame("line"), frame("items", count=2, data=b"\x91\x01")],
        "item 0 does not hold the items it says"),
    "a session without a tree": ([frame("session")],
        "session 's' has a parent or root that is not before it"),
    "a session without its parent": ([frame("tree"), frame("session", parent_id="p")],
        "session 's' has a parent or root that is not before it"),
    "another root": ([frame("tree"), frame("session", root_id="r")],
        "session 's' has a parent or root that is not before it"),
    "a session twice": ([*first(), frame("session")], "session 's' comes twice"),
    "metadata that is a list": ([frame("tree"), frame("session", metadata=b"\x90")],
        "session 's' has metadata that is not an object"),
    "an epoch from nowhere": ([*first(), frame("epoch", first_version=3)],
        "session 's' has an epoch that begins nowhere"),
    "an epoch into the future": ([*first(), frame("epoch", target_version=2)],
        "session 's' has an epoch that begins nowhere"),
    "an epoch that the session never came to": ([*first(), frame("epoch")],
        "session 's' has an epoch that begins nowhere"),
    "an epoch behind its versions": ([*first(), frame("checkpoint"), frame("epoch")],
        "epoch 2 of session 1 is out of order"),
    "a line that others need more of": (
        [*first(), frame("line", id=2, pieces=[(1, 0, 2)])],
        "line 1 lacks items between 1 and 2"),
    "a checkpoint without a session": ([frame("checkpoint")], "checkpoint 1 is out of order"),
    "a checkpoint twice": ([*first(), frame("checkpoint"), frame("checkpoint")],
        "checkpoint 1 is out of order"),
    "a checkpoint too late": ([*first(), frame("checkpoint", version=3)],
        "checkpoint 3 is out of order"),
    "a turn with an iteration": ([*first(), frame("checkpoint", iteration=1)],
        "checkpoint 1 has the wrong iteration"),
    "an iteration without": ([*first(), frame("checkpoint", kind="iteration_end")],
        "checkpoint 1 has the wrong iteration"),
    "a list that is too long": ([*first(), frame("checkpoint", manifest=manifest(a=[2, 1, 2]))],
        "checkpoint 1 of 's' lacks items"),
    "a list with another base": (
        [*first(), frame("checkpoint", manifest=manifest(a=[2, 1, 1, 1, 0]))],
        "checkpoint 1 of 's' lacks items"),
    "a list that begins before itself": (
        [*first(), frame("line", id=2, pieces=[(1, 0, 1)]), frame("items", line_id=2),
         frame("session", id="t", parent_id="s", number=2),
         frame("checkpoint", session_number=2, manifest=manifest(a=[2, 2, 2, 1, -1]))],
        "checkpoint 1 of 't' lacks items"),
    "a value of no line": ([*first(), frame("checkpoint", manifest=manifest(a=[1, 7]))],
        "checkpoint 1 of 's' lacks items"),
    "channels that are a list": ([*first(), frame("checkpoint", manifest=b"\x90")],
        "checkpoint 1 of 's' has channels that cannot be read"),
    "a channel of text": ([*first(), frame("checkpoint", manifest=manifest(a=[2, "x", "y"]))],
        "checkpoint 1 of 's' has channels that cannot be read"),
    "a line with a fraction": ([*first(), frame("checkpoint", manifest=manifest(a=[1, 1.0]))],
        "checkpoint 1 of 's' has channels that cannot be read"),
    "a channel twice": ([*first(), frame("checkpoint",
        manifest=b"\x82\xa1a\x92\x00\x01\xa1a\x92\x00\x02")],
        "checkpoint 1 of 's' has channels that cannot be read"),
    "a value written at length": ([frame("line"), frame("items", data=b"\xcc\x01")],
        "item is not written as this Holdfast writes it"),
    "the wrong epoch": ([*first(), frame("checkpoint", epoch=2)],
        "checkpoint 1 has the wrong epoch"),
    "an origin that is not there": ([frame("tree"),
        frame("session", origin_number=7, origin_version=1)],
        "session 's' has an origin that is not before it"),
    "an escape in a reason": ([*first(), frame("pin", reason="\x1b[2J")],
        "reason '\\x1b[2J' has characters that cannot be printed"),
    "a pin of nothing": ([*first(), frame("pin", version=3)],
        "version 3 is referred to and does not exist"),
    "an attestation of nothing": ([frame("attestation")],
        "version 1 is referred to and does not exist"),
}  # fmt: skip


def craft(file: Path, frames: list[Any]) -> None:
    """Write an export whose digests are right, whatever it says."""
    with file.open("wb") as opened:
        writer = format.ExportWriter(opened, Codec(), format.Format(NOUNS), "crafted")
        writer.begin("nowhere")
        for each in frames:
            writer.write(each)
        writer.end()


@pytest.mark.parametrize("case", DISORDER)
def test_a_file_that_was_made_up_is_refused(case: str, small: Any) -> None:
    file, _, _ = small
    frames, problem = DISORDER[case]
    craft(file, frames)
    expected = f"the sessions of store nowhere are not in order: {problem}"
    assert refuses(small, CorruptRecord) == expected


def test_a_made_up_file_in_order_is_taken(small: Any) -> None:
    file, target, _ = small
    channels = manifest(a=[2, 1, 1], b=[1, 1], c=[0, "x"])
    craft(file, [*first(), frame("checkpoint", version=2, manifest=channels)])
    target.import_sessions(file)
    assert target.find_session("s").at(2).channels == {"a": [1], "b": 1, "c": "x"}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (frame("session", status="odd"), "session.status: Invalid enum value 'odd'"),
        (frame("session", version=-1), "session.version: Expected `int` >= 0"),
        (frame("session", id=""), "session.id: Expected `str` of length >= 1"),
        (frame("checkpoint", kind="guess"), "checkpoint.kind: Invalid enum value 'guess'"),
        (frame("checkpoint", version=2**32), "checkpoint.version: Expected `int` <= 268435455"),
        (frame("tree", root_id=5), "tree.root_id: Expected `str`, got `int`"),
    ],
)
def test_a_record_of_the_wrong_shape_is_refused(bad: Any, problem: str, small: Any) -> None:
    file, _, _ = small
    craft(file, [bad])
    found = refuses(small, CorruptRecord)
    assert found.startswith(f"{file} is damaged: record 0 has a wrong {problem}")


def test_hostile_names_and_bodies_are_refused(small: Any) -> None:
    file, target, before = small
    for bad, error in (
        ([frame("tree", root_id="a\x1b[2J")], CorruptRecord),
        ([frame("tree"), frame("session", name="\x00")], CorruptRecord),
        ([frame("tree"), frame("event", data=b"\xc1")], CorruptRecord),
        ([frame("line"), frame("items", data=b"\xd4\x05\x00")], CorruptRecord),
    ):
        craft(file, bad)
        with pytest.raises(error):
            target.import_sessions(file)
    assert everything(target) == before


def test_an_export_that_cannot_be_written_leaves_nothing_behind(
    place: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store:
        fill(store)
        taken = tmp_path / "taken"
        taken.write_text("mine")
        before = sorted(tmp_path.rglob("*"))
        cases: list[tuple[Any, Any, type[HoldfastError], str]] = [
            (taken, None, InvalidArgument, f"{taken} exists already; name a new file"),
            (tmp_path / "no" / "x", None, InvalidArgument,
                f"there is no directory {tmp_path}/no; create it first"),
            ("", None, InvalidArgument, "path must name a new file, not ''"),
            (7, None, InvalidArgument, "path must name a new file, not 7"),
            (file, ["root", "nobody"], SessionNotFound, "there is no session 'nobody'"),
            (file, [], InvalidArgument, "sessions is empty; omit it to export all"),
            (file, "root", InvalidArgument, "sessions must be a list of sessions or of their ids"),
            (file, [3], InvalidArgument, "a session is named by its id, not by 3"),
            ("/proc/x.export", None, StoreUnavailable,
                "cannot write /proc/x.export: No such file or directory"),
        ]  # fmt: skip
        for path, sessions, error, message in cases:
            with pytest.raises(error) as raised:
                store.export(path, sessions)
            assert str(raised.value) == message
        assert taken.read_text() == "mine"
        assert sorted(tmp_path.rglob("*")) == before


def test_a_second_export_to_the_same_name_takes_nothing_from_the_first(
    place: Any, other: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_at(place) as store, open_at(place) as second, open_at(other) as target:
        fill(store)
        ended = format.ExportWriter.end

        def end(self: format.ExportWriter) -> None:
            with pytest.raises(StoreBusy, match="another process is writing"):
                second.export(file)
            ended(self)

        monkeypatch.setattr(format.ExportWriter, "end", end)
        store.export(file)
        assert [path.name for path in file.parent.iterdir() if file.name in path.name] == [
            file.name
        ]
        target.import_sessions(file)
        assert contents(target) == contents(store)


def test_a_damaged_session_is_not_exported(file: Path, tmp_path: Path) -> None:
    import apsw

    database = tmp_path / "store.db"
    with open_at({"url": f"sqlite:///{database}"}) as store:
        session = store.session("a")
        for number in range(10):
            session.append("transcript", [number])
        connection = apsw.Connection(str(database))
        connection.execute("DROP TRIGGER hf_items_no_delete")
        connection.execute("DELETE FROM hf_items WHERE key = (SELECT max(key) FROM hf_items) - 3")
        connection.close()
        with pytest.raises(CorruptRecord) as raised:
            store.export(file)
        assert str(raised.value) == "line 1 lacks items between 6 and 10"
        assert not file.exists()


def test_a_store_inside_a_transaction_neither_exports_nor_imports(
    postgres_dsn: str, namespace: str, file: Path
) -> None:
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn) as connection,
    ):
        inside = store.within(connection)
        for what, act in (
            ("export", lambda: inside.export(file)),
            ("import", lambda: inside.import_sessions(file)),
            ("import", lambda: inside.import_legacy(file)),
            ("be vacuumed", lambda: inside.prune(vacuum=True)),
        ):
            with pytest.raises(InvalidArgument) as raised:
                act()
            assert str(raised.value) == (
                f"a store joined to a transaction by within() cannot {what}"
            )


# Dying on the way.


def test_an_import_killed_at_any_point_is_whole_or_nothing(
    place: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sessions.export"

    def export(say: Callable[[str], None]) -> None:
        with open_at({"url": "sqlite://"}) as store:
            session = store.session("a")
            session.save(transcript=list(range(70)), plan={"x": "y" * 200})
            session.save(transcript=[0, *range(5, 70)])
            session.fork(1, id="b").append("transcript", [1])
            session.rewind(1)
            session.pin(1, "p")
            session.attest(1, "e")
            store.export(file)

    def life(points: CrashPoints) -> Callable[..., None]:
        def live(say: Callable[[str], None]) -> None:
            points.is_armed = False
            with open_at(place, hooks=points.hooks) as store:
                points.is_armed = True
                store.import_sessions(file)
                points.is_armed = False
                say(repr(boundaries(points)))
                for id in ("b", "a"):
                    store.find_session(id).delete(force=True)

        return live

    assert run(export)[0] == 0
    assert run(life(CrashPoints()))[0] == 0
    # From the second time on there is a feed already, and fewer statements.
    status, lines = run(life(CrashPoints()))
    assert status == 0
    places = eval(lines[0])
    assert len(places) > 20
    for die_at in places:
        status, _ = run(life(CrashPoints(die_at)))
        assert status == -signal.SIGKILL
        with open_at(place) as store:
            ids = [info.id for info in store.sessions()]
            assert ids == (["a", "b"] if die_at == places[-1] else [])
            sound(store)
            if ids:
                assert [e.kind for e in store.events("a", limit=1_000)].count("session_imported")
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: import killed at {len(places)} points")


def test_an_export_killed_at_any_frame_leaves_no_file(place: Any, file: Path) -> None:
    def build(say: Callable[[str], None]) -> None:
        with open_at(place) as store:
            store.session("a").save(transcript=list(range(5)), plan={"x": "y" * 200})
            store.session("a").append("transcript", [6])

    def export(die_at: int) -> Callable[..., None]:
        def live(say: Callable[[str], None]) -> None:
            write = format.ExportWriter.write
            written: list[object] = []

            def dying(self: format.ExportWriter, each: Any) -> None:
                written.append(each)
                if len(written) == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(self, each)

            vars(format)["ExportWriter"].write = dying
            with open_at(place) as store:
                store.export(file)
            say(str(len(written)))

        return live

    assert run(build)[0] == 0
    status, lines = run(export(-1))
    assert status == 0
    file.unlink()
    for die_at in range(1, int(lines[0]) + 1):
        assert run(export(die_at))[0] == -signal.SIGKILL
        assert not file.exists()
    assert run(export(-1))[0] == 0
    assert sorted(path.name for path in file.parent.glob("*.*partial")) == []

"""Pruning removes old checkpoints, never one that is needed, and survives a kill at any point."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.checkpoints import needs, removal
from holdfast.checkpoints.keys import VERSIONS
from holdfast.ciphers import AesGcm
from holdfast.errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    SchemaMismatch,
    StoreBusy,
    StoreUnavailable,
)
from holdfast.kernel import commit_settlement, files
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.nouns import Retention
from holdfast.kernel.operation import rows
from holdfast.maintenance import Pruned, read_archive
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import boundaries, run
from tests.maintenance.stores import everything, sound


def open_at(place: dict[str, str], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)  # type: ignore[arg-type]


def versions(session: holdfast.Session) -> list[int]:
    return [found.version for found in reversed(session.history(limit=10_000))]


def talk(session: holdfast.Session, turns: int) -> None:
    for number in range(turns):
        session.append("transcript", [{"role": "user", "content": f"turn {number}"}])


def test_all_but_the_newest_go_and_the_rest_load_as_before(place: Any) -> None:
    with open_at(place) as store:
        long, short = store.session("long"), store.session("short", parent="long")
        talk(long, 150)
        talk(short, 100)
        before = {version: long.at(version) for version in range(51, 151)}
        result = store.prune()
        assert result == Pruned(sessions=1, checkpoints=50)
        assert versions(long) == list(range(51, 151))
        assert {version: long.at(version) for version in before} == before
        assert versions(short) == list(range(1, 101))
        assert store.prune() == Pruned()
        talk(long, 1)
        assert versions(long)[-1] == 151
        sound(store)


def test_one_session_is_pruned_alone(place: Any) -> None:
    clock = holdfast.VirtualClock()
    with open_at(place, clock=clock) as store:
        one, other = store.session("one"), store.session("other")
        talk(one, 5)
        talk(other, 5)
        item = store.work.submit("t", None)
        store.work.claim("w")[0].complete(None)
        store.once("key", lambda: 1)
        clock.advance(30 * 86_400)
        assert store.prune(session=one, keep=2, work_days=0) == Pruned(sessions=1, checkpoints=3)
        assert len(store.effects()) == 1
        assert (versions(one), versions(other)) == ([4, 5], [1, 2, 3, 4, 5])
        assert store.work.get(item.id).status == "completed"
        assert store.prune(session="one", keep=2) == Pruned()
        with pytest.raises(holdfast.SessionNotFound):
            store.prune(session="nobody")


def test_what_was_removed_is_in_the_feed(place: Any) -> None:
    with open_at(place) as store:
        root = store.session("root")
        session = store.session("child", parent=root)
        talk(session, 10)
        session.pin(3, "kept")
        session.pin(5, "kept")
        store.prune(keep=2)
        event = store.events("root", limit=100)[-1]
        assert (event.kind, event.session_id) == ("checkpoints_pruned", "child")
        assert event.data == {"versions": [[1, 2], [4, 4], [6, 8]], "count": 6}


def test_whatever_is_needed_stays(place: Any) -> None:
    with open_at(place) as store:
        session = store.session("a")
        session.record("iteration_end", {"iteration": 4})  # 1: the resume point
        session.record("approval_point", {"question": "?"})  # 2
        talk(session, 3)  # 3: pinned, 4: attested, 5: forked
        session.pin(3, "mine")
        session.attest(4, {"tests": "passed"})
        session.fork(5, id="fork")
        talk(session, 20)
        session.record("error_boundary", {"why": "crash"})
        point = session.resume_point()
        assert store.prune(keep=1) == Pruned(sessions=1, checkpoints=20)
        assert versions(session) == [1, 2, 3, 4, 5, 26]
        assert session.resume_point() == point
        assert (point.iteration, point.checkpoint and point.checkpoint.version) == (5, 1)
        session.unpin(3)
        store.find_session("fork").delete()
        store.prune(keep=1)
        assert versions(session) == [1, 2, 4, 26]
        sound(store)


def test_the_resume_point_of_a_rewound_session_is_the_one_on_its_path(place: Any) -> None:
    with open_at(place) as store:
        session = store.session("a")
        for iteration in range(1, 6):
            session.record("iteration_start", {"iteration": iteration})
            talk(session, 2)
        session.rewind(5)  # Version 4 started iteration 2.
        talk(session, 3)
        assert session.resume_point().iteration == 2
        latest = session.latest()
        store.prune(keep=1)
        assert versions(session) == [4, 19]
        assert session.resume_point().iteration == 2
        assert session.latest() == latest
        sound(store)


def test_a_fork_keeps_its_resume_point_in_its_origin(place: Any) -> None:
    with open_at(place) as store:
        origin = store.session("origin")
        for iteration in range(1, 8):
            origin.record("iteration_end", {"iteration": iteration})
            talk(origin, 2)
        fork = origin.fork(9, id="fork")  # Version 7 ended iteration 3.
        further = fork.fork(5, id="further")  # Version 4 ended iteration 2.
        points = [each.resume_point() for each in (origin, fork, further)]
        assert [point.iteration for point in points] == [8, 4, 3]
        store.prune(keep=1)
        assert [each.resume_point() for each in (origin, fork, further)] == points
        assert {4, 5, 7, 9} < set(versions(origin))
        sound(store)


def test_forks_keep_every_line_they_share(place: Any) -> None:
    with open_at(place) as store:
        origin = store.session("origin")
        talk(origin, 70)
        origin.save(plan={"text": "x" * 300})
        fork = origin.fork(71, id="fork")
        shown = fork.latest()
        origin.save(transcript=["new"], plan={"text": "z" * 300})
        talk(origin, 10)
        store.prune(keep=1)
        assert fork.latest() == shown
        origin.delete()
        assert fork.latest() == shown
        sound(store)


def line_count(tx: holdfast.Transaction) -> holdfast.Op[int]:
    return len((yield from rows("SELECT id FROM hf_lines")))


def test_lines_of_removed_values_and_overtaken_saves_are_collected(place: Any) -> None:
    def orphan(tx: holdfast.Transaction) -> holdfast.Op[None]:
        # What a save leaves whose head was moved by another: lines that nobody uses.
        for _ in range(3):
            yield from rows("INSERT INTO hf_lines (base, pieces) VALUES (0, NULL)")

    with open_at(place) as store:
        session = store.session("a")
        for number in range(20):
            session.save(plan={"text": str(number) * 300})
        store.run(orphan)
        assert store.run(line_count) == 23
        assert store.prune(keep=5) == Pruned(sessions=1, checkpoints=15, lines=3)
        assert store.run(line_count) == 5
        sound(store)


def test_writers_that_are_long_gone_are_forgotten(place: Any) -> None:
    clock = holdfast.VirtualClock()
    with open_at(place, clock=clock) as store:
        store.session("a")
        with open_at(place, clock=clock) as silent:
            silent.session("b")
            clock.advance(8 * 24 * 3600)
            store.session("a").save(a=1)
            assert store.prune().writers >= 1
            assert store.prune() == Pruned()
            store.session("a").save(a=2)


def test_very_many_writers_are_forgotten_in_small_transactions(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = "INSERT INTO hf_writers (id, batch, updated_at) VALUES (:id, 1, :at)"

    def forgotten(tx: holdfast.Transaction, now_ms: int) -> holdfast.Op[None]:
        for number in range(30):
            at = now_ms if number % 6 == 0 else 0
            yield from rows(add, id=f"writer {number:02}", at=at)

    monkeypatch.setattr(commit_settlement, "WRITERS_PER_PASS", 10)
    traces: list[Trace] = []
    with open_at(place, hooks=Hooks(trace=traces.append)) as store:
        # The first write of a connection forgets some too.
        store.session("a")
        store.run(forgotten, store.now_ms())
        traces.clear()
        assert store.prune() == Pruned(writers=25)
        assert [each.call for each in traces].count("_forget") == 3
        assert store.prune() == Pruned()


def test_many_sessions_are_paged(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "SESSIONS_PER_PAGE", 3)
    monkeypatch.setattr(removal, "VERSIONS_PER_PASS", 4)
    with open_at(place) as store:
        for number in range(7):
            talk(store.session(f"s{number}"), 12)
        told: list[int] = []
        result = store.prune(keep=2, progress=told.append)
        assert result == Pruned(sessions=7, checkpoints=70)
        assert told == list(range(10, 71, 10))
        for info in store.sessions():
            assert versions(store.find_session(info.id)) == [11, 12]
        sound(store)


def test_each_manifest_is_read_a_bounded_number_of_times(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "VERSIONS_PER_PASS", 5)
    monkeypatch.setattr(needs, "MANIFESTS_PER_PAGE", 10)
    monkeypatch.setattr("holdfast.kernel.owned_rows.ROWS_PER_PAGE", 10)
    points: list[Point] = []
    with open_at(place, hooks=Hooks(probe=points.append)) as store:
        pages, costs = [], []
        for count in (60, 180):
            session = store.session(f"s{count}")
            talk(session, count)
            points.clear()
            store.prune(session=session, keep=5)
            before = [point for point in points if point.moment == "before"]
            pages.append(sum("key, manifest" in point.sql for point in before))
            costs.append(sum(point.call == "remove_planned" for point in before) / count)
        assert pages[1] <= 3 * pages[0]
        assert costs[1] <= costs[0] * 1.1


def test_versions_that_stay_are_looked_at_once(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []

    def looked(retention: Any, number: int, after: int, limit: int) -> Any:
        places.append(after)
        return (yield from prunable(retention, number, after, limit))

    prunable = removal.prunable
    monkeypatch.setattr(removal, "prunable", looked)
    monkeypatch.setattr(removal, "VERSIONS_PER_PASS", 5)
    with open_at(place) as store:
        session = store.session("a")
        talk(session, 30)
        for version in range(1, 13):
            session.pin(version, "good")
        assert store.prune(keep=5).checkpoints == 13
        assert places == [0, 17, 22]
        low = session.number * VERSIONS
        retention = Retention(keep=1, work_ms=0, key_ms=0, effect_ms=0)
        left = store.run(lambda _: prunable(retention, session.number, 26, 9))
        assert left == [low + 27, low + 28, low + 29]


def test_forks_cost_a_prune_nothing(place: Any) -> None:
    """Each of them resumes at its fork point, which they share, or in itself."""
    traces: list[Trace] = []
    with open_at(place, hooks=Hooks(trace=traces.append)) as store:
        costs = []
        for forks in (4, 40):
            session = store.session(f"origin of {forks}")
            session.record("iteration_start", {"iteration": 1})
            talk(session, 30)
            for number in range(forks):
                fork = session.fork(20)
                if number % 2:
                    fork.record("iteration_start", {"iteration": 2})
            traces.clear()
            assert store.prune(session=session, keep=5).checkpoints == 24
            assert versions(session) == [1, 20, 27, 28, 29, 30, 31]
            planned = ("read_plan", "remove_planned")
            costs.append([each.statements for each in traces if each.call in planned])
        assert costs[0] == costs[1]
        traces.clear()
        store.prune(keep=5)
        # The forks have the number of a long session, and few versions.
        assert [each.call for each in traces].count("read_plan") == 2


@pytest.mark.parametrize("call", ["remove_planned", "release_unused"])
def test_a_prune_that_was_stopped_leaves_no_lines_behind(
    call: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(trace: Trace) -> None:
        if trace.call == call and not stops:
            stops.append(trace)
            raise Stopped

    monkeypatch.setattr(removal, "VERSIONS_PER_PASS", 4)
    monkeypatch.setattr(removal, "LINES_PER_BATCH", 3)
    stops: list[Trace] = []
    with open_at(place, hooks=Hooks(trace=stop)) as store:
        session = store.session("a")
        for number in range(20):
            session.save(plan={"text": str(number) * 300})
        with pytest.raises(Stopped):
            store.prune(keep=5)
        assert 5 < len(versions(session)) < 20
        for checkpoint in session.history():
            assert session.at(checkpoint.version)["plan"]
        store.prune(keep=5)
        assert versions(session) == [16, 17, 18, 19, 20]
        assert store.run(line_count) == 5
        sound(store)


def test_what_is_written_while_a_prune_is_planned_keeps_its_lines(place: Any) -> None:
    def rewind(trace: Trace) -> None:
        # It goes back to a version that is about to be removed, and pins another.
        if trace.call == "read_plan" and not rewound:
            rewound.append(other.find_session("a").rewind(2))
            other.find_session("a").pin(4, "good")

    rewound: list[Any] = []
    hooks = Hooks(trace=rewind)
    with open_at(place) as other, open_at(place, hooks=hooks) as store:
        session = other.session("a")
        for number in range(10):
            session.save(plan={"text": str(number) * 300})
        store.prune(keep=2)
        newest = store.find_session("a").latest()
        assert newest is not None
        assert newest["plan"] == {"text": "1" * 300}
        assert store.find_session("a").at(4)["plan"] == {"text": "3" * 300}
        sound(store)


def test_a_damaged_session_is_left_alone_and_named(tmp_path: Path) -> None:
    import apsw

    database = tmp_path / "store.db"
    with open_at({"url": f"sqlite:///{database}"}) as store:
        for id in ("first", "second", "third"):
            talk(store.session(id), 10)
        number = store.find_session("second").number
        connection = apsw.Connection(str(database))
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
        connection.execute(
            "UPDATE hf_checkpoints SET manifest = zeroblob(30) WHERE key = ?",
            [number * VERSIONS + 9],
        )
        connection.close()
        result = store.prune(keep=5)
        assert (result.sessions, result.checkpoints, result.damaged) == (2, 10, ("second",))
        assert versions(store.find_session("second")) == list(range(1, 11))


@pytest.mark.parametrize("keep", [0, -1, True, 1.0, "5", None, 2**32])
def test_a_number_that_would_not_keep_the_latest_is_refused(keep: Any) -> None:
    with open_at({"url": "sqlite://"}) as store:
        talk(store.session("a"), 5)
        before = everything(store)
        with pytest.raises(InvalidArgument) as raised:
            store.prune(keep=keep)
        assert str(raised.value) == f"keep must be 1 to 4294967295, not {keep!r}"
        assert everything(store) == before


def test_it_runs_beside_writers(place: Any) -> None:
    with open_at(place) as store:
        session = store.session("a")
        talk(session, 20)
        failed: list[BaseException] = []

        def write() -> None:
            try:
                for number in range(100):
                    session.append("transcript", [number])
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        while thread.is_alive():
            store.prune(keep=3)
        thread.join()
        assert failed == []
        store.prune(keep=3)
        assert versions(session) == [118, 119, 120]
        latest = session.latest()
        assert latest is not None
        assert latest["transcript"][20:] == list(range(100))
        sound(store)


def test_the_async_colour_prunes_archives_and_vacuums(place: Any, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at(place) as store:
        talk(store.session("a"), 10)

    async def body() -> Pruned:
        async with await holdfast.aopen(**place) as store:
            told: list[int] = []
            result = await store.prune(keep=4, archive=file, vacuum=True, progress=told.append)
            assert told == [6]
            return result

    result = asyncio.run(body())
    assert (result.checkpoints, result.archived, result.is_vacuumed) == (6, 6, True)
    assert [record["version"] for record in read_archive(file)] == [1, 2, 3, 4, 5, 6]


def test_vacuum_gives_the_space_back(tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    with open_at({"url": f"sqlite:///{database}"}) as store:
        session = store.session("a")
        store.prune(vacuum=True)
        empty = database.stat().st_size
        for number in range(300):
            session.save(blob=f"{number} " + "x" * 5_000)
        store.prune(keep=1)
        store.find_session("a").info()
        full = database.stat().st_size + database.with_name("store.db-wal").stat().st_size
        assert store.prune(vacuum=True).is_vacuumed
        size = database.stat().st_size + database.with_name("store.db-wal").stat().st_size
        assert full > 1_500_000
        assert size < empty + 50_000
        latest = session.latest()
        assert latest is not None
        assert latest["blob"].startswith("299 ")
        session.save(blob="after")
    assert store.url == f"sqlite:///{database}"


def test_vacuum_while_others_read_and_write(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}
    with open_at(place) as store, open_at(place) as other:
        session = store.session("a")
        talk(session, 50)
        stop = threading.Event()
        seen: list[int] = []

        def write() -> None:
            theirs = other.find_session("a")
            while not stop.is_set():
                seen.append(theirs.append("transcript", [1]).version)
                assert theirs.latest() is not None

        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(5):
            store.prune(keep=10, vacuum=True)
        stop.set()
        thread.join()
        assert seen == list(range(51, 51 + len(seen)))
        sound(store)


# The archive.


def test_the_archive_gives_back_every_version_that_went(place: Any, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at(place) as store:
        session = store.session("a")
        talk(session, 80)
        session.save(plan={"x": "y" * 300}, odd=2**80)
        session.save(transcript=[1, 2, *range(100)], plan=None, empty=[])
        session.record("tool_executed", {"exit": 0.5}, item="i", metadata={"m": None})
        session.rewind(40)
        session.save({"transcript": [], "zero": 0})
        talk(session, 5)
        before = {version: session.at(version) for version in versions(session)}
        store.prune(keep=2, archive=file)
        left = versions(session)
        records = list(read_archive(file))
        assert [record["version"] for record in records] == sorted(before.keys() - set(left))
        for record in records:
            wanted = asdict(before[record["version"]])
            del wanted["left_out"]
            wanted["created_at"] = holdfast.clock.iso(wanted["created_at"])
            assert record == wanted
        sound(store)


def test_the_archive_costs_what_changed(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at({"url": "sqlite://"}) as store:
        session = store.session("a")
        for number in range(600):
            session.append("transcript", [{"role": "user", "content": str(number) * 200}])
        last = session.at(600)
        assert store.prune(keep=1, archive=file).archived > 2 * removal.VERSIONS_PER_PASS
        *_, newest = read_archive(file)
    assert newest["channels"]["transcript"] == last["transcript"][:-1]
    assert file.stat().st_size < 1.5 * 600 * 600
    assert oct(file.stat().st_mode)[-3:] == "600"


def test_an_archive_is_added_to(place: Any, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at(place) as store:
        session = store.session("a")
        talk(session, 10)
        store.prune(keep=5, archive=file)
        first = file.read_bytes()
        talk(session, 2)
        assert store.prune(keep=5, archive=file).archived == 2
        assert store.prune(keep=5, archive=file).archived == 0
    assert file.read_bytes().startswith(first)
    assert [record["version"] for record in read_archive(file)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(type(json.loads(line)) is dict for line in file.read_text().splitlines())


def test_half_a_line_at_the_end_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at({"url": "sqlite://"}) as store:
        session = store.session("a")
        talk(session, 10)
        store.prune(keep=5, archive=file)
        whole = file.read_bytes()
        for torn in (b'{"session_id":', b"x" * 200_000):
            file.write_bytes(whole + torn)
            assert len(list(read_archive(file))) == 5
            store.prune(keep=5, archive=file)
            assert file.read_bytes() == whole
        file.write_bytes(whole[:12])
        store.prune(keep=4, archive=file)
        assert [record["version"] for record in read_archive(file)] == [6]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"my notes\n", InvalidArgument, "{file} exists and is not an archive; name another file"),
        (b"{\n", InvalidArgument, "{file} exists and is not an archive; name another file"),
        (b"[]", InvalidArgument, "{file} exists and is not an archive; name another file"),
        (b'{"holdfast_archive":"x\n', InvalidArgument, "{file} is not an archive"),
        (b'{"holdfast_archive":2,"store_id":"s"}\n', SchemaMismatch,
         "{file} is an archive of format 2, this Holdfast reads 1; install a newer Holdfast"),
    ],
)  # fmt: skip
def test_a_foreign_file_is_never_written_to(
    content: bytes, error: type[HoldfastError], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with open_at({"url": "sqlite://"}) as store:
        talk(store.session("a"), 10)
        before = everything(store)
        with pytest.raises(error) as raised:
            store.prune(keep=1, archive=file)
        assert str(raised.value) == message.replace("{file}", str(file))
        assert everything(store) == before
    assert file.read_bytes() == content


@pytest.mark.parametrize("call", ["archive", "backup", "export"])
def test_nothing_is_written_through_a_symbolic_link(call: str, place: Any, tmp_path: Path) -> None:
    """Else whoever may write in the directory chooses which file gets what a store holds."""
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    file, other = tmp_path / "linked" / "file", tmp_path / "other"
    with open_at(place) as store:
        talk(store.session("a"), 10)
        writes: dict[str, Callable[[], object]] = {
            "archive": lambda: store.prune(keep=1, archive=file),
            "backup": lambda: store.backup(file),
            "export": lambda: store.export(file),
        }
        before = everything(store)
        file.symlink_to(other)
        with pytest.raises(holdfast.StoreError, match="file is a symbolic link"):
            writes[call]()
        assert everything(store) == before
        assert not other.exists()
        file.unlink()
        writes[call]()
    assert (tmp_path / "real" / "file").stat().st_mode & 0o777 == 0o600


def test_an_archive_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "old.jsonl"
    with open_at({"url": "sqlite://"}) as store:
        talk(store.session("a"), 10)
        store.prune(keep=5, archive=file)
        assert file.stat().st_mode & 0o777 == 0o600
        assert caplog.text == ""
        file.chmod(0o644)
        store.prune(keep=1, archive=file)
    assert f"{file} is open to other users (mode 0644); run `chmod 600 {file}`" in caplog.text


def test_an_archive_that_cannot_be_written_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.jsonl"
    with open_at({"url": "sqlite://"}) as store:
        talk(store.session("a"), 10)
        before = everything(store)
        cases: list[tuple[Any, type[HoldfastError], str]] = [
            (tmp_path, InvalidArgument, f"{tmp_path} is a directory; name a file in it"),
            (tmp_path / "no" / "x", InvalidArgument,
                f"there is no directory {tmp_path}/no; create it first"),
            ("", InvalidArgument, "path must name a file, not ''"),
            (5, InvalidArgument, "path must name a file, not 5"),
            ("/proc/x", StoreUnavailable,
                "cannot write the archive /proc/x: No such file or directory"),
        ]  # fmt: skip
        for path, error, message in cases:
            with pytest.raises(error) as raised:
                store.prune(keep=1, archive=path)
            assert str(raised.value) == message
        held = files.Archive(file, "s")
        with pytest.raises(StoreBusy) as raised:
            store.prune(keep=1, archive=file)
        assert str(raised.value) == f"another process writes to the archive {file}"
        held.close()
        header = file.read_bytes()
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            store.prune(keep=1, archive=file)
        assert file.read_bytes() == header
        assert everything(store) == before


def test_what_is_pinned_after_it_was_archived_stays(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.jsonl"
    with open_at(place) as store:
        session = store.session("a")
        talk(session, 10)
        append = files.Archive.append

        def pin_then_append(self: files.Archive, lines: list[str]) -> None:
            append(self, lines)
            session.pin(3, "just in time")

        monkeypatch.setattr(files.Archive, "append", pin_then_append)
        result = store.prune(keep=5, archive=file)
        assert (result.archived, result.checkpoints) == (5, 4)
        assert versions(session) == [3, 6, 7, 8, 9, 10]


def test_with_a_cipher_the_archive_is_sealed(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    cipher = AesGcm({"k": bytes(range(32))}, "k")
    with open_at({"url": "sqlite://"}, cipher=cipher) as store:
        talk(store.session("a"), 10)
        store.prune(keep=5, archive=file)
    assert b"turn" not in file.read_bytes()
    assert len(list(read_archive(file, cipher=cipher))) == 5
    with pytest.raises(holdfast.StoreError, match="is encrypted"):
        list(read_archive(file))


def test_a_damaged_archive_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    with open_at({"url": "sqlite://"}) as store:
        talk(store.session("a"), 10)
        store.prune(keep=5, archive=file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(CorruptRecord) as raised:
        list(read_archive(file))
    assert str(raised.value) == (f"{file} line 3 continues version 2, which is not before it")
    file.write_bytes(b"".join([*lines[:2], b"{]\n", *lines[3:]]))
    with pytest.raises(CorruptRecord, match=r"line 3 is damaged: value is not JSON text"):
        list(read_archive(file))
    with pytest.raises(InvalidArgument, match="is not an archive"):
        list(read_archive(Path(__file__)))


# Dying on the way.


class WritePoints(CrashPoints):
    """Dies only where something is written: a read that is killed changes nothing."""

    def visit(self, point: Point) -> None:
        if point.call not in {"list_long", "read_prunable"}:
            super().visit(point)


@pytest.mark.parametrize("in_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prune_killed_at_any_point_loses_nothing(
    place: dict[str, str], in_each: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was removed is in the archive, what is left loads, and the next prune ends it."""
    file = tmp_path / "old.jsonl"

    def build(store: holdfast.Store, id: str) -> None:
        for info in store.sessions():
            store.find_session(info.id).delete(force=True)
        session = store.session(id)
        talk(session, 6)
        session.save(plan={"x": "y" * 300})
        session.fork(3, id=f"{id}-fork")
        session.pin(2, "p")

    def prune(points: CrashPoints) -> Callable[..., None]:
        def live(say: Callable[[str], None]) -> None:
            removal.VERSIONS_PER_PASS = 2
            points.is_armed = False
            with open_at(place, hooks=points.hooks) as store:
                points.is_armed = True
                store.prune(keep=2, archive=file)
                points.is_armed = False
            say(repr(boundaries(points, None if in_each else set())))

        return live

    with open_at(place) as store:
        build(store, "counted")
    status, lines = run(prune(WritePoints()))
    assert status == 0
    places = ast.literal_eval(lines[0])
    assert len(places) > 20
    with open_at(place) as store:
        build(store, "k0")
    for number, die_at in enumerate(places):
        id = f"k{number}"
        assert run(prune(WritePoints(die_at)))[0] == -signal.SIGKILL
        archived = [found for found in read_archive(file) if found["session_id"] == id]
        with open_at(place) as store:
            session = store.find_session(id)
            left = versions(session)
            gone = set(range(1, 8)) - set(left)
            assert gone <= {found["version"] for found in archived} <= {1, 4, 5}
            assert {2, 3, 6, 7} <= set(left)
            sound(store)
            told = [e for e in store.events(id, limit=100) if e.kind == "checkpoints_pruned"]
            assert sum(event.data["count"] for event in told) == len(gone)
            store.prune(keep=2)
            assert versions(session) == [2, 3, 6, 7]
            sound(store)
            build(store, f"k{number + 1}")
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: prune killed at {len(places)} points")


def test_a_vacuum_that_is_killed_leaves_a_sound_file(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}
    for delay_ms in (0, 1, 2, 4, 8, 16):

        def live(say: Callable[[str], None], delay_ms: int = delay_ms) -> None:
            with open_at(place) as store:
                session = store.session("a")
                for number in range(100):
                    session.save(blob=f"{number} " + "x" * 5_000)
                store.prune(keep=1)
                say("pruned")
                threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
                while True:
                    store.prune(vacuum=True)

        status, lines = run(live)
        assert (status, lines) == (-signal.SIGKILL, ["pruned"])
        with open_at(place) as store:
            findings = holdfast.store.check(place["url"], full=True)
            assert [found for found in findings if found.level == "problem"] == []
            latest = store.find_session("a").latest()
            assert latest is not None
            assert latest["blob"].startswith("99 ")
            sound(store)


def test_vacuum_on_postgresql_needs_no_transaction(postgres_dsn: str, namespace: str) -> None:
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        talk(store.session("a"), 20)
        assert store.prune(keep=1, vacuum=True).is_vacuumed
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        found = connection.execute(
            "SELECT relname FROM pg_stat_user_tables WHERE schemaname = %s AND vacuum_count > 0",
            [namespace],
        ).fetchall()
        assert {"hf_checkpoints", "hf_items", "hf_lines"} <= {name for (name,) in found}

"""Stores opened with mode="read", on both databases in both colours."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import store as store_module
from holdfast.cli import app as app_module
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.operation import Handle, Op, query, rows
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.crash.children import stopped

SECONDS_MAX = 300
SEVEN = holdfast.tool(name="seven")(lambda: 7)
WRITES: dict[str, Callable[[Any], Any]] = {
    "session": lambda store: store.session("new"),
    "submit": lambda store: store.work.submit("t", 1),
    "claim": lambda store: store.work.claim("w"),
    "cancel": lambda store: store.work.cancel("i"),
    "sweep": lambda store: store.work.sweep(),
    "settle": lambda store: store.settle("w:1"),
    "resolve": lambda store: store.resolve("e", holdfast.NotLanded(), by="me"),
    "prune": lambda store: store.prune(),
    "vacuum": lambda store: store.prune(vacuum=True),
    "run": lambda store: store.run(lambda tx: (yield from tx.session("new"))),
}


async def filled(subject: Subject) -> Any:
    store = await subject.open()
    session = await done(store.session("s", metadata={"a": 1}))
    await done(session.save({"notes": ["one", "two"]}))
    await done(session.call(SEVEN))
    await done(store.work.submit("t", {"n": 1}))
    return store


async def reading(subject: Subject, **arguments: Any) -> Any:
    opener: Any = holdfast.open if subject.colour == "sync" else holdfast.aopen
    return await done(opener(**subject.place, mode="read", **arguments))


async def seen(store: Any) -> list[Any]:
    session = await done(store.find_session("s"))
    checkpoint = await done(session.latest())
    return [
        await done(store.store_id()),
        await done(store.sessions()),
        [checkpoint.version, checkpoint.channels],
        await done(session.history()),
        await done(session.tree()),
        await done(store.effects()),
        [item.id for item in await done(store.work.list())],
        [count.items for count in await done(store.work.counts())],
        await done(store.spending()),
        await done(store.events("s")),
    ]


@both_colours
async def test_everything_can_be_read(subject: Subject) -> None:
    writing = await filled(subject)
    store = await reading(subject)
    expected = await seen(writing)
    assert await seen(store) == expected
    # Also when nobody writes any more, and what was written last lies in the database itself.
    await done(writing.close())
    assert await seen(store) == expected
    await done(store.close())
    store = await reading(subject)
    assert await seen(store) == expected
    assert abs(await done(store.now_ms()) - holdfast.SystemClock().now_ms()) < SECONDS_MAX * 1000
    await done(store.close())


@both_colours
async def test_what_is_written_is_seen_at_once(subject: Subject) -> None:
    writing = await filled(subject)
    store = await reading(subject)
    for number in range(3):
        await done((await done(writing.session("s"))).save({"n": number}))
        found = await done((await done(store.find_session("s"))).latest())
        assert found.channels["n"] == number
        # Without a writer, and with one again: neither is noticed.
        await done(writing.close())
        assert (await done((await done(store.find_session("s"))).latest())).version == found.version
        writing = await subject.open()
    await done(store.close())


@both_colours
async def test_every_write_is_refused(subject: Subject) -> None:
    writing = await filled(subject)
    before = await seen(writing)
    store = await reading(subject)
    session = await done(store.find_session("s"))
    sent: list[str] = []
    tool = holdfast.tool(name="send")(lambda: sent.append("sent"))
    calls = {name: lambda write=write: write(store) for name, write in WRITES.items()} | {
        "save": lambda: session.save({"x": 1}),
        "append": lambda: session.append("notes", ["x"]),
        "end": lambda: session.end("completed"),
        "fork": lambda: session.fork(1),
        "delete": session.delete,
        "call": lambda: session.call(tool),
    }
    for name, call in calls.items():
        error = await raises(holdfast.StoreReadOnly, call)
        assert 'mode="read"; open it for writing' in str(error), name
    assert sent == []
    await done(store.close())
    assert await seen(writing) == before


class Sneaky(Handle[Any]):
    """A query that writes."""

    def __init__(self, store: Any) -> None:
        super().__init__(store.runtime)

    @query
    def write(self) -> Op[None]:
        yield from rows("INSERT INTO hf_meta (name, value) VALUES ('sneaky', 'x')")


@both_colours
async def test_the_database_itself_refuses_what_calls_itself_a_query_and_writes(
    subject: Subject,
) -> None:
    await filled(subject)
    store = await reading(subject)
    await raises(holdfast.StoreError, lambda: Sneaky(store).write())
    found = await done(store.run(lambda tx: rows("SELECT * FROM hf_meta WHERE name = 'sneaky'")))
    assert found == []
    await done(store.close())


@both_colours
async def test_several_reads_can_be_one_snapshot(subject: Subject) -> None:
    await filled(subject)
    store = await reading(subject)

    def read(tx: Any) -> Op[tuple[str, int]]:
        session = yield from tx.find_session("s")
        return session.id, len((yield from tx.work.list()))

    assert await done(store.run(read)) == ("s", 1)
    await done(store.close())


@both_colours
async def test_a_reader_of_a_backup_can_make_one(subject: Subject) -> None:
    writing = await filled(subject)
    store = await reading(subject)
    await done(store.backup(subject.directory / "copy.db"))
    expected = await seen(writing)
    await done(store.close())
    copy = Subject({"url": f"sqlite:///{subject.directory}/copy.db"}, subject.colour, Path())
    store = await reading(copy)
    assert await seen(store) == expected
    await done(store.close())


@both_colours
async def test_waiting_ends_when_a_writer_commits(subject: Subject) -> None:
    writing = await filled(subject)
    store = await reading(subject)
    seen_before = store.runtime.signals.count("anything")
    rung = asyncio.ensure_future(
        asyncio.to_thread(store.runtime.signals.wait, "anything", seen_before, SECONDS_MAX)
    )
    while not rung.done():
        await done((await done(writing.session("s"))).append("notes", ["x"]))
        if "namespace" in subject.place:
            writing.runtime.signals.ring("anything")
        await asyncio.sleep(0.01)
    assert await rung
    await done(store.close())


def test_a_reader_is_traced(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.session("s")
    traces: list[Trace] = []
    for mode in ("write", "read"):
        with holdfast.open(**place, mode=mode, hooks=Hooks(trace=traces.append)) as store:
            traces.clear()
            store.find_session("s")
            with pytest.raises(holdfast.SessionNotFound):
                store.find_session("t")
        assert [(trace.call, trace.attempts, trace.error) for trace in traces] == [
            ("StoreSessions.find_session", 1, None),
            ("StoreSessions.find_session", 1, "SessionNotFound"),
        ], mode
        assert all(trace.statements for trace in traces)


def test_a_store_that_is_not_there_is_not_made(new_place: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFound, match="there is no store"):
        holdfast.open(**new_place, mode="read")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(holdfast.NotFound, match="there is no store"):
        store_module.inspect(new_place["url"], namespace=new_place.get("namespace"))


def test_a_mode_is_read_or_write() -> None:
    with pytest.raises(holdfast.InvalidArgument, match="mode"):
        holdfast.open("sqlite://", mode="rw")  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgument, match="name a file"):
        holdfast.open("sqlite://", mode="read")


def test_an_older_store_is_not_migrated(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.run(lambda tx: rows("UPDATE hf_migrations SET version = version - 1000"))
    with pytest.raises(holdfast.SchemaMismatch, match="holdfast migrate"):
        holdfast.open(**place, mode="read")


@contextmanager
def writer_stopped(place: dict[str, Any]) -> Iterator[None]:
    """A process that was stopped in the middle of a transaction, goes on afterwards and commits."""

    def stop(point: Point) -> None:
        if (point.boundary, point.moment) == ("commit", "before") and "append" in point.call:
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(say: Callable[[str], None]) -> None:
        hooks = Hooks(probe=stop)
        with holdfast.open(**place, busy_timeout_seconds=600, hooks=hooks) as store:
            say(str(store.find_session("s").append("notes", ["three"]).version))

    child = stopped(write)
    try:
        yield
        os.kill(child.pid, signal.SIGCONT)
        status, lines = child.wait()
        assert (status, lines) == (0, ["3"])
    except BaseException:
        child.kill()
        child.wait()
        raise


def looks(place: dict[str, Any]) -> list[list[str]]:
    return [
        ["sessions", "list"],
        ["sessions", "show", "s"],
        ["sessions", "tree", "s"],
        ["checkpoints", "list", "s"],
        ["checkpoints", "show", "s"],
        ["checkpoints", "diff", "s", "1", "2"],
        ["effects", "list"],
        ["effects", "show", "1"],
        ["work", "list"],
        ["work", "show", "1"],
        ["work", "why", "1"],
        ["work", "top", "--once"],
        ["spend", "list"],
        ["spend", "sums"],
        ["export", "OUT", "s"],
        ["backup", "COPY"],
        ["doctor"],
    ]


def test_every_look_answers_while_a_stopped_process_holds_the_write_lock(
    place: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save({"notes": ["one"]})
        session.save({"notes": ["one", "two"]})
        session.call(SEVEN)
        store.work.submit("t", 1)
    options = [f"--{name}={text}" for name, text in place.items()]
    files = {"OUT": str(tmp_path / "out.export"), "COPY": str(tmp_path / "copy.db")}
    with writer_stopped(place):
        for arguments in looks(place):
            given = [files.get(argument, argument) for argument in arguments]
            code = app_module.run([*given, *options])
            assert (code, arguments) == (0, arguments), capfd.readouterr().err
        with holdfast.open(**place, mode="read") as store:
            assert len(store.find_session("s").history()) == 2


def test_ids_are_completed_while_a_stopped_process_holds_the_write_lock(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        for notes in (["one"], ["one", "two"]):
            store.session("s").save({"notes": notes})
    line = " ".join(f"--{name} {text}" for name, text in place.items())
    environment = {
        **os.environ,
        "_HOLDFAST_COMPLETE": "complete_bash",
        "COMP_WORDS": f"holdfast sessions show {line} ",
        "COMP_CWORD": str(3 + 2 * len(place)),
    }
    with writer_stopped(place):
        done = subprocess.run(
            [sys.executable, "-m", "holdfast"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert done.stdout.split() == ["s"], done.stderr


def test_the_url_of_the_environment_is_looked_at_while_the_lock_is_held(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        environment = store.session("s").environment()
        for notes in (["one"], ["one", "two"]):
            store.session("s").save({"notes": notes})
    with writer_stopped(place):
        found = holdfast.current_session(environment)
    assert found is not None
    assert found.id == "s"

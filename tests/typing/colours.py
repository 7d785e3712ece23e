"""What type checkers infer for operations in every colour; mypy and pyright check this file."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, assert_type

import holdfast
from holdfast.kernel.flow import Flow, Give, Stream, flow, invoke, perform, stream, wait
from holdfast.kernel.operation import (
    Async,
    C,
    Handle,
    Op,
    Sync,
    Tx,
    large_query,
    one,
    operation,
    query,
    rows,
)
from holdfast.testing.nouns import Counter, Queue


class Notes(Handle[C]):
    """Operations, a query and a flow with every kind of parameter."""

    @operation
    def save(self, text: str, /, times: int = 1, *, tags: list[str] | None = None) -> Op[int]:
        """Save a note."""
        yield from rows("SELECT :text", text=text)
        return times

    @operation
    def keep(self, /, **fields: str) -> Op[None]:
        """Keep any fields."""
        yield from rows("SELECT 1")

    @query
    def find(self, text: str) -> Op[str | None]:
        """Find a note."""
        row = yield from one("SELECT :text AS text", text=text)
        return None if row is None else str(row["text"])

    @large_query
    def all(self) -> Op[list[str]]:
        """Read all notes."""
        return [str(row["text"]) for row in (yield from rows("SELECT 'a' AS text"))]

    @operation
    def save_twice(self, text: str) -> Op[int]:
        """Save a note twice, in one transaction."""
        first = yield from Notes.save(self, text)
        assert_type(first, int)
        return first + (yield from Notes.save(self, text, times=2))

    @flow
    def save_result(self, function: Callable[[], str]) -> Flow[int]:
        """Save what a function returns."""
        text = yield from invoke(function)
        rang = yield from wait(0.1, "topic")
        assert_type(rang, bool)
        saved = yield from perform(Notes.save, self, str(text), times=2)
        assert_type(saved, int)
        return saved

    @stream
    def each(self, prefix: str, *, limit: int = 10) -> Stream[str]:
        """Give notes as they come."""
        for text in (yield from perform(Notes.all, self)):
            yield Give(prefix + text)
        yield from wait(0.1)


def sync_colour(notes: Notes[Sync]) -> None:
    assert_type(notes.save("a"), int)
    assert_type(notes.save("a", 2, tags=["b"]), int)
    assert_type(notes.keep(a="b"), None)
    assert_type(notes.find("a"), str | None)
    assert_type(notes.all(), list[str])
    assert_type(notes.save_result(lambda: "a"), int)
    assert_type(notes.each("a"), Iterator[str])
    for note in notes.each("a", limit=1):
        assert_type(note, str)
    notes.save("a", time=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    notes.save(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    notes.save(text="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    notes.keep(a=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def async_colour(notes: Notes[Async]) -> None:
    assert_type(notes.save("a"), Awaitable[int])
    assert_type(await notes.save("a", times=3), int)
    assert_type(await notes.find("a"), str | None)
    assert_type(notes.each("a"), AsyncIterator[str])
    async for note in notes.each("a"):
        assert_type(note, str)
    assert_type(await notes.save_result(lambda: "a"), int)
    await notes.save("a", time=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def transaction_colour(notes: Notes[Tx]) -> Op[int]:
    count = yield from notes.save("a")
    assert_type(count, int)
    found = yield from notes.find("a")
    assert_type(found, str | None)
    return count


def composed(tx: holdfast.Transaction, root_id: str, *, amount: int) -> Op[str]:
    value = yield from Counter(tx, root_id).add(amount)
    assert_type(value, int)
    return str(value)


def stores(store: holdfast.Store) -> None:
    assert_type(store.run(composed, "root", amount=1), str)
    assert_type(store.events("root", after=1), list[holdfast.Event])
    assert_type(Counter(store).add(1), int)
    assert_type(Queue(store).claim("w"), holdfast.Lease | None)
    store.run(composed, "root")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    store.run(composed, 1, amount=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def worked(store: holdfast.Store) -> None:
    worker = holdfast.Worker(store, {"t": handler})
    assert_type(worker, holdfast.Worker[holdfast.Store])
    worker.run()


async def worked_async(store: holdfast.AsyncStore) -> None:
    worker = holdfast.Worker(store, {"t": async_handler})
    assert_type(worker, holdfast.Worker[holdfast.AsyncStore])
    await worker.run(until_empty=True)


def handler(item: holdfast.RunningItem[Sync]) -> int:
    assert_type(item.progress("half"), None)
    assert_type(item.session, holdfast.Session | None)
    return item.fence


async def async_handler(item: holdfast.RunningItem[Async]) -> int:
    assert_type(await item.progress("half"), None)
    assert_type(item.session, holdfast.Session[Async] | None)
    return item.fence


async def async_stores(store: holdfast.AsyncStore) -> None:
    assert_type(await store.run(composed, "root", amount=1), str)
    assert_type(await store.events("root"), list[holdfast.Event])
    assert_type(await holdfast.resume_prompt(await store.session("s")), str)
    assert_type(await Counter(store).value(), int)
    assert_type(await Queue(store).claim("w"), holdfast.Lease | None)


assert_type(Counter.value, operation[[], int])


def handles(store: holdfast.Store) -> None:
    session = store.session("s")
    assert_type(session, holdfast.Session[Sync])
    assert_type(session, holdfast.Session)
    assert_type(session.fork(1), holdfast.Session[Sync])
    assert_type(store.find_session("s"), holdfast.Session[Sync])
    assert_type(session.latest(), holdfast.LoadedCheckpoint | None)
    assert_type(session.at(1), holdfast.LoadedCheckpoint)
    session.latest()["plan"]  # type: ignore[index]  # pyright: ignore[reportOptionalSubscript]
    assert_type(store.follow(session), Iterator[holdfast.Event])
    assert_type(session.state.watch(), Iterator[holdfast.StateEvent])
    assert_type(session.state, holdfast.State[Sync])
    assert_type(session.state.increment("n"), holdfast.Entry)
    assert_type(session.state.update("n", lambda value: value), holdfast.Entry)
    assert_type(session.state.reduce("n", 1), holdfast.Entry)
    assert_type(session.state.rules(), list[holdfast.KeyRule])
    assert_type(holdfast.resume_prompt(session), str)
    assert_type(session.drive(), holdfast.DrivenSession[Sync])
    with session.drive() as driven:
        assert_type(driven, holdfast.DrivenSession[Sync])
        assert_type(driven.close(), None)
    begun = session.begin("t", {})
    assert_type(begun, holdfast.Replay | holdfast.Issued[Sync])
    assert_type(session.begun("c"), holdfast.Replay | holdfast.Issued[Sync])
    assert_type(store.begin("k"), holdfast.Replay | holdfast.Issued[Sync])
    if isinstance(begun, holdfast.Issued):
        assert_type(begun.complete(1), holdfast.Result[Any])
    assert_type(store.work, holdfast.Work[Sync])
    assert_type(store.work.submit("t"), holdfast.WorkItem[Sync])
    assert_type(store.work.claim("w"), list[holdfast.WorkItem[Sync]])
    assert_type(store.work.submit_many([]), list[holdfast.WorkItem[Sync]])
    assert_type(store.work.list(), list[holdfast.WorkItem[Sync]])
    assert_type(store.work.dead(), list[holdfast.WorkItem[Sync]])
    for item in (
        store.work.get("i"),
        store.work.find("i"),
        store.work.retry("i"),
        store.work.redrive("i"),
    ):
        assert_type(item, holdfast.WorkItem[Sync])
        assert_type(item.session, holdfast.Session[Sync] | None)
        assert_type(item.drive(), holdfast.Session[Sync])
        assert_type(item.state, holdfast.State[Sync])
    assert_type(store.within(object()), holdfast.Store)


async def async_handles(store: holdfast.AsyncStore) -> None:
    session = await store.session("s")
    assert_type(session, holdfast.Session[Async])
    assert_type(await session.fork(1), holdfast.Session[Async])
    assert_type(await store.find_session("s"), holdfast.Session[Async])
    assert_type(await session.latest(), holdfast.LoadedCheckpoint | None)
    assert_type(store.follow(session), AsyncIterator[holdfast.Event])
    assert_type(session.state, holdfast.State[Async])
    assert_type(await session.state.set("k", 1, if_version=0), holdfast.Entry)
    assert_type(await session.state.snapshot(), holdfast.StateSnapshot)
    assert_type(await session.drive(), holdfast.DrivenSession[Async])
    async with session.drive() as driven:
        assert_type(driven, holdfast.DrivenSession[Async])
        assert_type(await driven.close(), None)
    begun = await session.begin("t", {})
    assert_type(begun, holdfast.Replay | holdfast.Issued[Async])
    assert_type(await session.begun("c"), holdfast.Replay | holdfast.Issued[Async])
    assert_type(await store.begin("k"), holdfast.Replay | holdfast.Issued[Async])
    if isinstance(begun, holdfast.Issued):
        assert_type(await begun.complete(1), holdfast.Result[Any])
    assert_type(store.work, holdfast.Work[Async])
    assert_type(await store.work.submit("t"), holdfast.WorkItem[Async])
    assert_type(await store.work.claim("w"), list[holdfast.WorkItem[Async]])
    item = await store.work.get("i")
    assert_type(item, holdfast.WorkItem[Async])
    assert_type(item.session, holdfast.Session[Async] | None)
    assert_type(await item.drive(), holdfast.Session[Async])
    assert_type(store.within(object()), holdfast.AsyncStore)


def handles_in_a_transaction(tx: holdfast.Transaction) -> Op[None]:
    session = yield from tx.session("s")
    assert_type(session, holdfast.Session[Tx])
    assert_type((yield from session.fork(1)), holdfast.Session[Tx])
    assert_type((yield from tx.find_session("s")), holdfast.Session[Tx])
    assert_type(tx.work, holdfast.Work[Tx])
    item = yield from tx.work.submit("t")
    assert_type(item, holdfast.WorkItem[Tx])
    assert_type((yield from tx.work.claim("w")), list[holdfast.WorkItem[Tx]])
    assert_type(tx.work.within(item), holdfast.WorkItem[Tx])
    assert_type(tx.within(session), holdfast.Session[Tx])
    assert_type(tx.state(session), holdfast.State[Tx])
    assert_type((yield from tx.state(session).increment("done")), holdfast.Entry)
    # What runs user code or waits between transactions cannot be part of one.
    session.rewind(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    session.drive()  # type: ignore[misc]  # pyright: ignore[reportCallIssue]

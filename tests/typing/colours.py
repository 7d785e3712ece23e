"""What type checkers infer for operations in every colour; mypy and pyright check this file."""

from collections.abc import Awaitable, Callable
from typing import assert_type

import holdfast
from holdfast.kernel.flow import Flow, flow, invoke, perform, wait
from holdfast.kernel.operation import (
    AsyncBound,
    Op,
    SyncBound,
    TxBound,
    large_query,
    one,
    operation,
    query,
    rows,
)
from holdfast.testing.nouns import AsyncCounter, AsyncQueue, Counter, CounterOps, Queue, TxCounter


class NoteOps:
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
        first = yield from NoteOps.save(self, text)
        assert_type(first, int)
        return first + (yield from NoteOps.save(self, text, times=2))

    @flow
    def save_result(self, function: Callable[[], str]) -> Flow[int]:
        """Save what a function returns."""
        text = yield from invoke(function)
        rang = yield from wait(0.1, "topic")
        assert_type(rang, bool)
        saved = yield from perform(NoteOps.save, self, str(text), times=2)
        assert_type(saved, int)
        return saved


class Notes(NoteOps, SyncBound):
    """The sync colour."""


class AsyncNotes(NoteOps, AsyncBound):
    """The async colour."""


class TxNotes(NoteOps, TxBound):
    """The transaction colour."""


def sync_colour(notes: Notes) -> None:
    assert_type(notes.save("a"), int)
    assert_type(notes.save("a", 2, tags=["b"]), int)
    assert_type(notes.keep(a="b"), None)
    assert_type(notes.find("a"), str | None)
    assert_type(notes.all(), list[str])
    assert_type(notes.save_result(lambda: "a"), int)
    notes.save("a", time=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    notes.save(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    notes.save(text="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    notes.keep(a=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def async_colour(notes: AsyncNotes) -> None:
    assert_type(notes.save("a"), Awaitable[int])
    assert_type(await notes.save("a", times=3), int)
    assert_type(await notes.find("a"), str | None)
    assert_type(await notes.save_result(lambda: "a"), int)
    await notes.save("a", time=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def transaction_colour(notes: TxNotes) -> Op[int]:
    count = yield from notes.save("a")
    assert_type(count, int)
    found = yield from notes.find("a")
    assert_type(found, str | None)
    return count


def composed(tx: holdfast.Transaction, root_id: str, *, amount: int) -> Op[str]:
    value = yield from TxCounter(tx, root_id).add(amount)
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


def handler(item: holdfast.RunningItem) -> int:
    assert_type(item.progress("half"), None)
    assert_type(item.session, holdfast.Session | None)
    return item.fence


async def async_handler(item: holdfast.AsyncRunningItem) -> int:
    assert_type(await item.progress("half"), None)
    assert_type(item.session, holdfast.AsyncSession | None)
    return item.fence


async def async_stores(store: holdfast.AsyncStore) -> None:
    assert_type(await store.run(composed, "root", amount=1), str)
    assert_type(await store.events("root"), list[holdfast.Event])
    assert_type(await AsyncCounter(store).value(), int)
    assert_type(await AsyncQueue(store).claim("w"), holdfast.Lease | None)


assert_type(CounterOps.value, operation[[], int])

"""What the fault tests share: clients that keep a record, groups that commit together, judging."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.codec import Codec
from holdfast.kernel.sqlite import transactions
from holdfast.testing import history
from holdfast.testing.nouns import Counter, Setup
from tests.internals import engine_of

WAIT_SECONDS = 120.0


def prepare(store: holdfast.Store, *root_ids: str) -> None:
    """Create the tables and trees that the clients write to."""
    Setup(store).install()
    for root_id in root_ids or ("root",):
        Counter(store, root_id).plant()


def twice(tx: holdfast.Transaction, note: str) -> holdfast.Op[int]:
    """Two additions in one commit; one without the other is a torn transaction."""
    yield from Counter(tx).add(1, note=f"{note}/first")
    return (yield from Counter(tx).add(1, note=f"{note}/second"))


def whole(notes: Sequence[str]) -> list[str]:
    """Return the calls that the notes of a feed stand for; both halves of `twice` must be there."""
    calls: list[str] = []
    begun: str | None = None
    for note in notes:
        id, _, half = note.partition("/")
        assert begun == (id if half == "second" else None), f"{begun or id} is torn"
        begun = id if half == "first" else None
        if half != "second":
            calls.append(id)
    assert begun is None, f"the second half of {begun} is missing"
    return calls


def found_in(store: holdfast.Store, root_id: str = "root") -> list[str]:
    """Read the whole feed, make sure that it agrees with the counter, and return its calls."""
    notes: list[str] = []
    while events := store.events(root_id, after=len(notes), limit=10_000):
        positions = [event.position for event in events]
        assert positions == list(range(len(notes) + 1, len(notes) + len(events) + 1))
        notes += [event.data["note"] for event in events]
    assert Counter(store, root_id).value() == len(notes)
    return whole(notes)


class Clients:
    """Makes calls and keeps on record what was asked and what was answered. Threads share it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.unknown: dict[str, str] = {}
        self.errors: list[holdfast.HoldfastError] = []
        self.outcomes: Tally[str] = Tally()
        self.on_outcome: Callable[[str, str], None] = lambda outcome, id: None
        self._history = history.History(directory)
        self.writes = (self.add, self.add_twice, self.add_at_once)
        self.writes_async = (self.add_async, self.add_twice_async, self.add_at_once_async)

    def add(self, store: holdfast.Store) -> None:
        """Add one."""
        with self._recording() as call:
            call.result = Counter(store).add(1, note=call.id)

    def add_at_once(self, store: holdfast.Store) -> None:
        """Add one, with COMMIT in the same round trip."""
        with self._recording() as call:
            call.result = Counter(store).add_at_once(1, note=call.id)

    def add_twice(self, store: holdfast.Store) -> None:
        """Add two in one composed commit."""
        with self._recording() as call:
            call.result = store.run(twice, call.id)

    async def add_async(self, store: holdfast.AsyncStore) -> None:
        """Add one."""
        with self._recording() as call:
            call.result = await Counter(store).add(1, note=call.id)

    async def add_at_once_async(self, store: holdfast.AsyncStore) -> None:
        """Add one, with COMMIT in the same round trip."""
        with self._recording() as call:
            call.result = await Counter(store).add_at_once(1, note=call.id)

    async def add_twice_async(self, store: holdfast.AsyncStore) -> None:
        """Add two in one composed commit."""
        with self._recording() as call:
            call.result = await store.run(twice, call.id)

    def judge(self, store: holdfast.Store) -> None:
        """Compare the record with what the store holds, and each settlement with it."""
        found = found_in(store)
        calls = history.read(self.directory)
        assert history.lost_or_doubled(calls, found) == []
        assert history.out_of_order(calls, found) == []
        for id, commit_id in self.unknown.items():
            assert store.settle(commit_id) is (id in found), f"{id} was settled wrongly"

    @contextmanager
    def _recording(self) -> Iterator[history.Recorded]:
        outcome, call = "returned", None
        try:
            with self._history.call("add") as call:
                yield call
        except holdfast.HoldfastError as error:
            outcome = type(error).__name__
            self.errors.append(error)
            if isinstance(error, holdfast.CommitUnknown) and call is not None:
                self.unknown[call.id] = error.id
        self.outcomes[outcome] += 1
        if call is not None:
            self.on_outcome(outcome, call.id)


def in_threads(functions: Sequence[Callable[[], object]]) -> None:
    """Run functions at once, each in its thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a call did not return"
    if errors:
        raise errors[0]


def together(store: holdfast.Store, functions: Sequence[Callable[[], object]]) -> None:
    """Run functions that make one SQLite write each, so that all of them share one commit."""
    engine: Any = engine_of(store)
    queued, is_held = threading.Semaphore(0), threading.Event()
    enqueue = engine.enqueue

    def counting(job: Any) -> None:
        enqueue(job)
        queued.release()

    def hold() -> None:
        with engine.writer.mutex:
            is_held.set()
            for _ in functions:
                assert queued.acquire(timeout=WAIT_SECONDS)

    def behind(function: Callable[[], object]) -> None:
        assert is_held.wait(WAIT_SECONDS)
        function()

    engine.enqueue = counting
    try:
        in_threads([hold, *(partial(behind, function) for function in functions)])
    finally:
        del engine.enqueue


@contextmanager
def each_connection(path: Path, **pragmas: int) -> Iterator[dict[str, int]]:
    """Set pragmas on every SQLite connection to a file, those that the store opens itself too."""

    def configure(connection: apsw.Connection) -> None:
        if connection.filename == str(path):
            for name, value in pragmas.items():
                connection.pragma(name, value)

    apsw.connection_hooks.append(configure)
    try:
        yield pragmas
    finally:
        apsw.connection_hooks.remove(configure)


@contextmanager
def moving_the_log_every(pages: int) -> Iterator[None]:
    """Have stores move their write-ahead log into the database after that many pages."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WAL_PAGES", "WAL_PAGES_AFTER_LONG", "WAL_PAGES_BEGUN_AGAIN"):
            patch.setattr(transactions, name, pages)
        yield


def read_file(path: Path) -> list[str] | None:
    """Check a database file with plain SQLite and return its calls; None if it has no tables."""
    connection = apsw.Connection(str(path))
    try:
        assert connection.pragma("integrity_check") == "ok"
        assert connection.pragma("foreign_key_check") is None
        if not connection.table_exists("main", "hf_test_counters"):
            return None
        connection.execute("BEGIN")
        tree = "SELECT position FROM hf_trees WHERE root_id = 'root'"
        events = "SELECT position, data FROM hf_events WHERE root_id = 'root' ORDER BY position"
        counter = "SELECT value FROM hf_test_counters WHERE id = 'root'"
        found = connection.execute(events).fetchall()
        count = len(found)
        assert [position for position, _ in found] == list(range(1, count + 1))
        assert connection.execute(tree).fetchall() in ([(count,)], [] if count == 0 else None)
        assert connection.execute(counter).fetchall() == ([(count,)] if count else [])
        codec = Codec()
        unpacked: list[Any] = [
            codec.unpack(data, context=("hf_events", "root"))  # type: ignore[arg-type]
            for _, data in found
        ]
        return whole([data["note"] for data in unpacked])
    finally:
        connection.close()

"""The keeper of leases: one thread per store renews what sessions, effects and items hold."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import VirtualClock, Worker
from holdfast.errors import LeaseLost, StoreClosed, StoreForked
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.nouns import Noun
from holdfast.kernel.operation import Handle, Op, Sync, query, rows
from holdfast.leases import Guard, Held, Keeper, Kept, uptime_seconds
from holdfast.records import Lease
from holdfast.work.items import Item

WAIT_SECONDS = 120.0
# Far longer than any test: what is renewed is renewed because the uptime was moved.
LEASE_SECONDS = 6_000.0
CONNECTIONS = 16


class Uptime:
    """The machine's uptime, as if it had slept for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._slept_seconds = 0.0
        monkeypatch.setattr("holdfast.leases.uptime_seconds", self)

    def __call__(self) -> float:
        return uptime_seconds() + self._slept_seconds

    def sleep(self, seconds: float, store: holdfast.Store | None = None) -> None:
        """Let time pass, while the keeper of a store waits."""
        if store is not None:
            keeper = Keeper.of(store.runtime)
            wait_for(lambda: keeper.inbox.empty() and 0 < keeper._wakes_at < math.inf)
        self._slept_seconds += seconds


@pytest.fixture
def uptime(monkeypatch: pytest.MonkeyPatch) -> Uptime:
    return Uptime(monkeypatch)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def wait_for(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def look(store: holdfast.Store) -> Keeper:
    """Have the keeper look at its leases, as when it wakes."""
    keeper = Keeper.of(store.runtime)
    keeper.inbox.put(None)
    return keeper


def kept_item(store: holdfast.Store) -> tuple[Any, Kept]:
    """Return an item of a session and its lease, which is kept as a worker does it."""
    store.work.submit("t", session=store.session("of the item"))
    [item] = store.work.claim("me", lease_seconds=LEASE_SECONDS)
    kept = Kept(item, item._guard(), LEASE_SECONDS, uptime_seconds())
    return item, Keeper.of(store.runtime).keep(kept)


def keepers() -> list[str]:
    """Return the names of this test's own keepers; others may have left a store open."""
    own = set(threading.enumerate()) - _earlier
    return [thread.name for thread in own if thread.name == "holdfast-keeper"]


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    _earlier.clear()
    _earlier.update(threading.enumerate())


def test_leases_of_all_nouns_are_renewed_in_one_call(
    place: dict[str, Any], uptime: Uptime, clock: VirtualClock
) -> None:
    calls: list[str] = []

    def trace(trace: Trace) -> None:
        calls.append(trace.call)

    tool = holdfast.tool(effect="mutate", lease_seconds=LEASE_SECONDS)(lambda: None)
    with holdfast.open(**place, clock=clock, hooks=Hooks(trace=trace)) as store:
        sessions = [store.session(name) for name in "ab"]
        drivers = [session.drive(lease_seconds=LEASE_SECONDS) for session in sessions]
        effect = drivers[0].begin(tool, {})
        assert isinstance(effect, holdfast.Issued)
        item, _ = kept_item(store)

        def ends() -> list[int]:
            leases = [session.info().lease_expires_at for session in sessions]
            leases += [store.effect(effect.effect_id).takeover_at]
            leases += [store.work.get(item.id).lease_expires_at]
            return [ends_at or 0 for ends_at in leases]

        before = ends()
        clock.advance(1_000)
        uptime.sleep(LEASE_SECONDS / 2, store)
        look(store)
        wait_for(lambda: min(ends()) > max(before))
        assert [call for call in calls if call.endswith(".renew")] == ["Keeper.renew"]
        for driven in drivers:
            driven.close()


def test_a_hundred_drivers_and_two_workers_have_one_keeper(place: dict[str, Any]) -> None:
    def count() -> int:
        return sum(thread.name.startswith("holdfast") for thread in threading.enumerate())

    with holdfast.open(**place) as store:
        sessions = [store.session(f"s{number}") for number in range(100)]
        before = count()
        drivers = [session.drive() for session in sessions]
        wait_for(lambda: count() <= before + 1)
        meeting = threading.Barrier(3, timeout=WAIT_SECONDS)
        store.work.submit_many([holdfast.Submission("t") for _ in range(2)])
        workers = [Worker(store, {"t": lambda item: meeting.wait()}) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            for worker in workers:
                threads.submit(worker.run)
            meeting.wait()
            assert keepers() == ["holdfast-keeper"]
            for worker in workers:
                worker.stop()
        for driven in drivers:
            driven.close()
        assert all(session.info().holder is None for session in sessions)
    assert keepers() == []


def test_an_async_store_and_its_workers_have_one_keeper(place: dict[str, Any]) -> None:
    seen: list[list[str]] = []

    async def run() -> None:
        async with holdfast.aopen(**place) as store:
            async with (await store.session("s")).drive():
                await store.work.submit("t")
                worker = Worker(store, {"t": lambda item: seen.append(keepers())})
                await worker.run(until_empty=True)
            seen.append(keepers())

    asyncio.run(run())
    assert seen == [["holdfast-keeper"], ["holdfast-keeper"]]
    assert keepers() == []


def test_a_worker_that_has_ended_keeps_no_lease_alive(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of an item which it could not give back."""
    monkeypatch.setattr("holdfast.worker.loop.RELEASE_SECONDS_MAX", 0.1)
    started, go_on = threading.Event(), threading.Event()
    guards: list[Guard] = []

    def handler(item: Any) -> None:
        guards.append(item._guard())
        started.set()
        go_on.wait(WAIT_SECONDS)

    with holdfast.open(**place) as store:
        store.work.submit("t")
        worker = Worker(store, {"t": handler}, drain_seconds=0)
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert started.wait(WAIT_SECONDS)
        keeper = Keeper.of(store.runtime)
        assert keeper.is_kept(guards[0])
        with locked(place, "LOCK TABLE hf_work"):
            worker.stop()
            thread.join()
        assert not keeper.is_kept(guards[0])
        go_on.set()


def test_a_lease_is_lost_to_its_holder_when_the_machine_slept_too_long(
    place: dict[str, Any], uptime: Uptime
) -> None:
    with holdfast.open(**place) as store, store.session("s").drive(lease_seconds=600) as driven:
        assert driven.fence is not None
        guard = Guard("session", "s", driven.number, driven.fence)
        keeper = Keeper.of(store.runtime)
        uptime.sleep(479, store)
        assert (driven.held.is_lost, keeper.is_lost(guard)) == (False, False)
        uptime.sleep(2)
        assert (driven.held.is_lost, keeper.is_lost(guard)) == (True, True)
        look(store)
        # Nobody took it meanwhile.
        wait_for(lambda: not keeper.is_lost(guard))


def test_nothing_is_written_under_a_lease_that_is_known_to_be_lost(place: dict[str, Any]) -> None:
    """The database would still allow it: nobody has taken the item over."""
    tool = holdfast.tool(effect="mutate")(lambda: "done")
    with holdfast.open(**place) as store:
        item, kept = kept_item(store)
        item.session.save(x=1)
        kept.lose()
        writes: list[Callable[[], object]] = [
            lambda: item.session.save(x=2),
            lambda: item.session.save(x=2, y=list(range(1_000))),
            item.session.end,
            lambda: item.session.pin(1, "x"),
            item.session.drive,
            lambda: item.call(tool),
            lambda: item.session.call(tool),
            item.drive,
            lambda: store.work.submit("next", session=item.session),
        ]
        for write in writes:
            with pytest.raises(LeaseLost, match="with fence 1 is lost"):
                write()
        latest = item.session.latest()
        assert (latest["x"], latest.version) == (1, 1)
        assert store.effects() == []


def test_a_lost_lease_is_known_as_such_for_as_long_as_somebody_has_it(
    place: dict[str, Any], uptime: Uptime
) -> None:
    with holdfast.open(**place) as store:
        keeper = Keeper.of(store.runtime)
        owners = [Item[Sync](store.runtime, {}), Item[Sync](store.runtime, {})]
        guards = [Guard("work item", "gone", 1_000, fence) for fence in (1, 2)]
        leases = [
            Kept(owner, guard, LEASE_SECONDS, uptime_seconds())
            for owner, guard in zip(owners, guards, strict=True)
        ]
        for kept in leases:
            keeper.drop(keeper.keep(kept))
            assert not keeper.is_kept(kept.guard)
            keeper.keep(kept)
        uptime.sleep(LEASE_SECONDS / 2)
        look(store)
        wait_for(lambda: all(map(keeper.is_lost, guards)))
        keeper.drop(leases[1])
        assert keeper.is_lost(guards[1])
        owners.pop()
        gc.collect()
        look(store)
        wait_for(lambda: not keeper.is_kept(guards[1]))
        assert keeper.is_lost(guards[0])


def test_of_two_leases_on_one_row_the_newer_is_kept(place: dict[str, Any], uptime: Uptime) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        old = session.drive(lease_seconds=LEASE_SECONDS)
        session.cancel()
        session = store.session("s", reopen=True)
        new = session.drive(lease_seconds=LEASE_SECONDS)
        uptime.sleep(LEASE_SECONDS * 0.9, store)
        assert (old.held.is_lost, new.held.is_lost) == (True, True)
        look(store)
        wait_for(lambda: not new.held.is_lost)
        assert old.held.is_lost
        old.close()
        new.save(x=1)
        new.close()


class Broken(Noun):
    """A noun whose leases cannot be renewed at first."""

    name = "broken"

    def __init__(self) -> None:
        self.asked = 0

    def renew(self, held: Any, lease_seconds: float) -> Op[Any]:
        yield from ()
        self.asked += 1
        if self.asked < 3:
            raise ValueError("no such thing was foreseen")
        return {number: {} for number in held}


def test_a_keeper_goes_on_after_an_error_that_nobody_expected(
    place: dict[str, Any], uptime: Uptime, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.open(**place) as store:
        noun = Broken()
        settings = replace(store.runtime.settings, nouns=[noun])
        keeper = Keeper(replace(store.runtime, settings=settings))
        kept = keeper.keep(Kept(noun, Guard("broken", "b", 1, 1), 60, uptime_seconds()))
        uptime.sleep(55)
        keeper.inbox.put(None)
        wait_for(lambda: not kept.is_lost)
        keeper.close()
    assert noun.asked == 3
    assert caplog.text.count("leases could not be renewed; retrying") == 2
    assert caplog.text.count("Traceback") == 2


def test_a_lease_that_nobody_has_is_given_back_at_once(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        # It does not look by itself while this test runs.
        Keeper.of(store.runtime)._idle_seconds = LEASE_SECONDS
        driven = store.session("s").drive(lease_seconds=LEASE_SECONDS)
        assert store.session("s").info().holder is not None
        del driven
        wait_for(lambda: store.session("s").info().holder is None)


class Waiting(Noun):
    """A noun whose leases are renewed when that is allowed."""

    name = "waiting"

    def __init__(self) -> None:
        self.is_asked, self.may_end = threading.Event(), threading.Event()

    def renew(self, held: Any, lease_seconds: float) -> Op[Any]:
        yield from ()
        self.is_asked.set()
        assert self.may_end.wait(WAIT_SECONDS)
        return {number: {} for number in held}


def test_what_is_dropped_while_leases_are_renewed_is_given_back_before_the_keeper_ends(
    place: dict[str, Any], uptime: Uptime
) -> None:
    released: list[Lease] = []
    lease = Lease(id="held", holder="me", fence=1, expires_at=0)
    with holdfast.open(**place) as store, ThreadPoolExecutor(1) as threads:
        noun, owner = Waiting(), Broken()
        settings = replace(store.runtime.settings, nouns=[noun])
        keeper = Keeper(replace(store.runtime, settings=settings))
        guards = [Guard("waiting", id, 1, 1) for id in ("kept", "held")]
        held = Held(owner, keeper, LEASE_SECONDS, lambda: (guards[1], lease), released.append)
        keeper.take(held)
        keeper.keep(Kept(noun, guards[0], 60, uptime_seconds()))
        uptime.sleep(30)
        keeper.inbox.put(None)
        assert noun.is_asked.wait(WAIT_SECONDS)
        del owner
        closing = threads.submit(keeper.close)
        wait_for(lambda: keeper._is_closed)
        noun.may_end.set()
        closing.result()
    assert released == [lease]


def test_a_lease_that_was_given_up_while_it_was_taken_is_given_back(place: dict[str, Any]) -> None:
    released: list[Lease] = []
    lease = Lease(id="held", holder="me", fence=1, expires_at=0)

    def take() -> tuple[Guard, Lease]:
        held.inbox.put(held)
        wait_for(lambda: held.is_stopped)
        return Guard("session", "held", 1, 1), lease

    with holdfast.open(**place) as store:
        keeper = Keeper.of(store.runtime)
        keeper._idle_seconds = LEASE_SECONDS
        _item, _ = kept_item(store)
        held = Held(store, keeper, LEASE_SECONDS, take, released.append)
        keeper.take(held)
        wait_for(lambda: released)
    assert released == [lease]


@contextlib.contextmanager
def locked(place: dict[str, Any], sql: str) -> Iterator[None]:
    """Keep writers out: of the file, or of what a statement locks."""
    if "namespace" in place:
        with psycopg.connect(place["url"]) as connection:
            connection.execute(sql.replace("hf_", f'"{place["namespace"]}".hf_'))
            yield
        return
    with open(place["url"].removeprefix("sqlite:///") + "-lock", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_keeper_that_cannot_reach_the_store_says_so_and_its_holder_stops_in_time(
    place: dict[str, Any], uptime: Uptime, caplog: pytest.LogCaptureFixture
) -> None:
    holdfast.open(**place).close()
    with holdfast.open(**place, busy_timeout_seconds=0.1) as store:
        driven = store.session("s").drive(lease_seconds=LEASE_SECONDS)
        with caplog.at_level(logging.WARNING), locked(place, "LOCK TABLE hf_sessions"):
            uptime.sleep(LEASE_SECONDS / 2, store)
            look(store)
            wait_for(lambda: "leases could not be renewed; retrying" in caplog.text)
            assert "Traceback" not in caplog.text
            assert not driven.held.is_lost
            uptime.sleep(LEASE_SECONDS / 2)
            assert driven.held.is_lost
        wait_for(lambda: not driven.held.is_lost)
        driven.close()


def test_closing_an_async_driver_leaves_the_event_loop_free(place: dict[str, Any]) -> None:
    async def run() -> None:
        async with holdfast.aopen(**place) as store:
            driven = await (await store.session("s")).drive()
            with locked(place, "LOCK TABLE hf_sessions"):
                closing = asyncio.ensure_future(driven.close())
                # Only a loop that goes on gets here while the lease cannot be given back.
                for _ in range(50):
                    await asyncio.sleep(0.001)
                assert not closing.done()
            await closing
            assert (await (await store.session("s")).info()).holder is None

    asyncio.run(run())


def test_a_row_that_somebody_has_locked_holds_up_no_other_lease(
    postgres_dsn: str, namespace: str, uptime: Uptime
) -> None:
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace}
    with holdfast.open(**place) as store:
        drivers = [store.session(name).drive(lease_seconds=LEASE_SECONDS) for name in "abc"]
        uptime.sleep(LEASE_SECONDS * 0.9, store)
        with locked(place, "SELECT id FROM hf_sessions WHERE id = 'b' FOR UPDATE"):
            look(store)
            wait_for(lambda: not drivers[0].held.is_lost and not drivers[2].held.is_lost)
            assert drivers[1].held.is_lost
        wait_for(lambda: not drivers[1].held.is_lost)
        for driven in drivers:
            driven.close()


class Holding(Handle[Sync]):
    """Calls that hold their connection until all have met again."""

    @query
    def hold(self, meeting: threading.Barrier) -> Op[None]:
        """Read, and wait for the others twice."""
        yield from rows("SELECT 1 AS one")
        meeting.wait()
        meeting.wait()


def test_leases_are_renewed_while_all_connections_of_the_store_are_in_use(
    place: dict[str, Any], uptime: Uptime
) -> None:
    with holdfast.open(**place) as store, ThreadPoolExecutor(CONNECTIONS) as threads:
        driven = store.session("s").drive(lease_seconds=LEASE_SECONDS)
        meeting = threading.Barrier(CONNECTIONS + 1, timeout=WAIT_SECONDS)
        held = [threads.submit(Holding(store.runtime).hold, meeting) for _ in range(CONNECTIONS)]
        meeting.wait()
        uptime.sleep(LEASE_SECONDS * 0.9, store)
        assert driven.held.is_lost
        look(store)
        wait_for(lambda: not driven.held.is_lost)
        meeting.wait()
        for one in held:
            one.result()
        driven.close()


def test_a_forked_child_renews_nothing_and_gives_nothing_back(
    place: dict[str, Any], uptime: Uptime
) -> None:
    with holdfast.open(**place) as store:
        driven = store.session("s").drive("parent", lease_seconds=LEASE_SECONDS)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = str(keepers())
            try:
                uptime.sleep(LEASE_SECONDS / 2)
                look(store)
                driven.close()
            except StoreForked:
                said += " StoreForked"
            store.close()
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answers:
            assert answers.read() == "[] StoreForked"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert keepers() == ["holdfast-keeper"]
        assert store.session("s").info().holder == "parent"
        driven.save(x=1)
        driven.close()


def test_a_store_that_is_closed_gives_back_what_nobody_has_and_ends_the_thread(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        driven = store.session("kept").drive("me", lease_seconds=LEASE_SECONDS)
        for number in range(20):
            store.session(f"s{number}").drive(lease_seconds=LEASE_SECONDS)
        gc.collect()
    assert keepers() == []
    with pytest.raises(StoreClosed):
        driven.close()
    with holdfast.open(**place) as store:
        assert [info.id for info in store.sessions() if info.holder is not None] == ["kept"]

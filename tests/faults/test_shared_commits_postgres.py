"""Calls of one process that write to one PostgreSQL tree share transactions, and fail alone."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter as TransactionSizes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.operation import Call
from holdfast.kernel.postgres import shared_commits, transactions
from holdfast.kernel.postgres.connections import Turn
from holdfast.kernel.postgres.pipeline import Queue, Send
from holdfast.testing.nouns import Counter
from holdfast.testing.proxy import Cut, Moment, PostgresProxy
from tests.faults.workload import WAIT_SECONDS, Clients, in_threads
from tests.work.fleet import wait_until

CALLS = 4
# Tests of other processes wait for locks of the same server.
WAITING_FOR = """
WITH RECURSIVE waiting AS (
    SELECT pid FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))
    UNION
    SELECT a.pid FROM pg_stat_activity a JOIN waiting w ON w.pid = ANY (pg_blocking_pids(a.pid))
)
SELECT count(*) FROM waiting
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait in gathering until they come, however busy the machine is."""
    monkeypatch.setattr(transactions, "QUEUE_LOOK_SECONDS", 60.0)
    # Tests share schemas: a group that failed in the last one must not keep calls apart in this.
    shared_commits._failed.clear()


def waiting_for(holder: psycopg.Connection[Any], admin: psycopg.Connection[Any]) -> Any:
    """How many transactions wait at the server for one, or behind others that do."""
    found = admin.execute(WAITING_FOR, [holder.info.backend_pid]).fetchone()
    assert found is not None
    return found[0]


def waiting() -> int:
    return sum(len(gathering._waiting) for gathering in list(shared_commits._gatherings.values()))


def behind_one(
    direct: dict[str, Any],
    first: Callable[[], object],
    others: Sequence[Callable[[], object]],
    then: Callable[[], object] = lambda: None,
    lock: str = "SELECT * FROM {}.hf_trees FOR UPDATE",
) -> None:
    """Make one call wait at the server and others behind it in gathering; then let them go."""

    def release() -> None:
        wait_until(lambda: waiting_for(holder, admin) == 1)
        may_join.set()
        wait_until(lambda: waiting() == len(others))
        then()
        holder.rollback()

    def join(call: Callable[[], object]) -> None:
        assert may_join.wait(WAIT_SECONDS)
        call()

    may_join = threading.Event()
    with (
        psycopg.connect(direct["url"]) as holder,
        psycopg.connect(direct["url"], autocommit=True) as admin,
    ):
        holder.execute(lock.format(f'"{direct["namespace"]}"').encode())
        in_threads([first, release, *(partial(join, call) for call in others)])


def transactions_of(direct: dict[str, Any]) -> list[int]:
    """Return how many events each transaction has written, in order."""
    query = (
        f'SELECT count(*) FROM "{direct["namespace"]}".hf_events '
        "GROUP BY CAST(CAST(xmin AS TEXT) AS BIGINT) ORDER BY min(position)"
    )
    with psycopg.connect(direct["url"]) as connection:
        return [count for (count,) in connection.execute(query.encode()).fetchall()]


def test_calls_that_wait_in_line_share_one_transaction(
    direct: dict[str, Any], tmp_path: Path
) -> None:
    clients = Clients(tmp_path / "history")
    with holdfast.open(**direct) as store, holdfast.open(**direct) as other:
        before = len(transactions_of(direct))
        first = partial(clients.add_at_once, store)
        calls = [partial(clients.add_at_once, (store, other)[n % 2]) for n in range(CALLS)]
        behind_one(direct, first, calls)
        clients.judge(store)
    assert transactions_of(direct)[before:] == [1, CALLS]
    assert clients.outcomes == {"returned": CALLS + 1}


def request_at_once(
    store: holdfast.Store, direct: dict[str, Any], then: Callable[[], object] = lambda: None
) -> None:
    """Make one request wait at the server, and others behind it; each must be there, once."""
    made: list[holdfast.PeerCall] = []

    def request() -> None:
        made.append(store.request("peer"))

    lock = "LOCK TABLE {}.hf_trees IN SHARE MODE"
    behind_one(direct, request, CALLS * [request], then, lock)
    ids = sorted(call.id for call in made)
    assert len(set(ids)) == CALLS + 1
    assert [store.peer_call(call.id) for call in made] == made
    assert sorted(item.session_id or "" for item in store.work.list(queue="agent:peer")) == ids


def test_requests_made_at_once_share_one_transaction(direct: dict[str, Any]) -> None:
    """Each creates a tree, which nobody else can hold or wait for."""
    before = TransactionSizes(transactions_of(direct))
    with holdfast.open(**direct) as store:
        request_at_once(store, direct)
    events = 3
    sizes = TransactionSizes(transactions_of(direct)) - before
    assert sizes == {events: 1, events * CALLS: 1}


@pytest.mark.parametrize("moment", ["before", "after", "before-late"])
def test_requests_whose_common_commit_was_cut_are_there_once(
    moment: Moment, proxy: PostgresProxy, through: dict[str, Any], direct: dict[str, Any]
) -> None:
    cuts: list[Cut] = []
    with holdfast.open(**through) as store:
        request_at_once(store, direct, then=lambda: cuts.append(proxy.cut_next_commit(moment)))
    cuts[0].wait()


def test_a_call_that_is_refused_fails_alone(direct: dict[str, Any], tmp_path: Path) -> None:
    clients = Clients(tmp_path / "history")
    with holdfast.open(**direct) as store:

        def overfill() -> None:
            with pytest.raises(holdfast.InvalidArgument, match="the limit is 0"):
                Counter(store).add_at_once(limit=0)

        add = partial(clients.add_at_once, store)
        behind_one(direct, add, [add, overfill, add])
        clients.judge(store)
    assert clients.outcomes == {"returned": 3}


@pytest.mark.parametrize("moment", ["before", "after", "before-late"])
def test_a_group_whose_commit_was_cut_is_settled_by_each_of_its_calls(
    moment: Moment,
    proxy: PostgresProxy,
    through: dict[str, Any],
    direct: dict[str, Any],
    tmp_path: Path,
) -> None:
    clients, cuts = Clients(tmp_path / "history"), []
    with holdfast.open(**through) as store:
        add = partial(clients.add_at_once, store)
        cut = partial(proxy.cut_next_commit, moment)
        behind_one(direct, add, CALLS * [add], then=lambda: cuts.append(cut()))
        clients.judge(store)
    cuts[0].wait()
    assert clients.outcomes == {"returned": CALLS + 1}


def test_who_was_interrupted_leads_no_more() -> None:
    execution: Any = None
    gathering = shared_commits.Gathering()
    first, second, third = (shared_commits.Member(execution) for _ in range(3))
    gathering.join(first)
    gathering.join(second)
    assert first.has_come
    assert not second.has_come
    assert gathering.gather(first, ("writer", 1)) == [second]
    del first
    gc.collect()
    assert second.led_by() is None, "the one that was to send it is gone"
    gathering.join(third)
    assert third.has_come


def test_a_thread_does_not_wait_for_calls_of_the_event_loop_that_it_runs(
    direct: dict[str, Any], tmp_path: Path
) -> None:
    clients = Clients(tmp_path / "history")

    async def run() -> None:
        async with await holdfast.aopen(**direct) as store:
            tasks = [asyncio.create_task(clients.add_at_once_async(store)) for _ in range(3)]
            await asyncio.to_thread(wait_until, lambda: waiting() == 2)
            with ThreadPoolExecutor(1) as threads:
                # The call of this thread stands at the server, not behind those of the loop.
                released = threads.submit(release)
                clients.add_at_once(sync)
                released.result()
            await asyncio.gather(*tasks)

    def release() -> None:
        wait_until(lambda: waiting_for(holder, admin) == 2, seconds=30)
        holder.rollback()

    with (
        holdfast.open(**direct) as sync,
        psycopg.connect(direct["url"]) as holder,
        psycopg.connect(direct["url"], autocommit=True) as admin,
    ):
        holder.execute(f'SELECT * FROM "{direct["namespace"]}".hf_trees FOR UPDATE'.encode())
        asyncio.run(run())
        clients.judge(sync)
    assert clients.outcomes == {"returned": 4}


def test_a_call_that_is_cancelled_while_it_waits_for_others_is_never_run(
    direct: dict[str, Any],
) -> None:
    async def run() -> None:
        async with await holdfast.aopen(**direct) as store:
            tasks = [asyncio.ensure_future(Counter(store).add_at_once())]
            await asyncio.to_thread(wait_until, is_at_the_server)
            tasks += [asyncio.ensure_future(Counter(store).add_at_once()) for _ in range(2)]
            await asyncio.to_thread(wait_until, lambda: waiting() == 2)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            holder.rollback()
            assert [await tasks[0], await tasks[2]] == [1, 2]
            assert await Counter(store).value() == 2

    def is_at_the_server() -> bool:
        return bool(waiting_for(holder, admin) == 1)

    with (
        psycopg.connect(direct["url"]) as holder,
        psycopg.connect(direct["url"], autocommit=True) as admin,
    ):
        holder.execute(f'SELECT * FROM "{direct["namespace"]}".hf_trees FOR UPDATE'.encode())
        asyncio.run(run())


class Stepped:
    """A call that goes on only when it is told to, as if its thread stood still meanwhile."""

    def __init__(self, store: holdfast.Store) -> None:
        driver: Any = store.runtime.driver
        self._perform = driver._perform
        self._steps = driver.transactions.run(Call(Counter.add_at_once, Counter(store)))
        self.step: Any = next(self._steps)

    def go_on(self, *, until: type | None = None) -> Any:
        """Perform its steps up to one of this kind, or to its end; return its result."""
        while until is None or not isinstance(self.step, until):
            try:
                result = self._perform(self.step)
            except psycopg.Error as error:
                self.step = self._steps.throw(error)
                continue
            if (ended := self.advance(result)) is not None:
                return ended
        return None

    def advance(self, answer: Any = None) -> Any:
        """Answer its step; return its result, if that was its last."""
        try:
            self.step = self._steps.send(answer)
        except StopIteration as ended:
            return ended.value
        return None

    def sends(self) -> int:
        """Return how many calls are in the transaction that it is about to send."""
        assert isinstance(self.step, Send)
        return sum("done AS" in message.text for message in self.step.messages)


def waiting_behind(store: holdfast.Store, count: int) -> tuple[Stepped, list[Stepped]]:
    """Return a call that is about to be sent, and others that wait behind it."""
    first = Stepped(store)
    while not (isinstance(first.step, Send) and first.step.is_commit):
        first.advance(first._perform(first.step))
    others = [Stepped(store) for _ in range(count)]
    for other in others:
        other.go_on(until=Queue)
    assert waiting() == count
    return first, others


def test_calls_behind_one_that_takes_long_are_sent_together(direct: dict[str, Any]) -> None:
    with holdfast.open(**direct) as store:
        first, [second, *others] = waiting_behind(store, CALLS)
        second.advance()
        assert second.sends() == CALLS, "it has waited long enough, and takes the others along"
        assert second.go_on() == 1
        assert [other.go_on() for other in others] == [2, 3, 4]
        assert first.go_on() == CALLS + 1
        assert Counter(store).value() == CALLS + 1


def test_a_call_does_not_wait_for_ever_for_one_that_was_to_send_it(direct: dict[str, Any]) -> None:
    with holdfast.open(**direct, busy_timeout_seconds=0.5) as store:
        first, [second, third] = waiting_behind(store, 2)
        assert first.go_on() == 1
        second.advance()
        assert second.sends() == 2
        # The second stands still, and the third waits for it no longer than for a server.
        wait_until(lambda: third.advance() is None and not isinstance(third.step, Queue))
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            third.go_on()
        # What the second sends now is too late, for both of them.
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            second.go_on()
        assert Counter(store).value() == 1


def test_a_cancellation_that_comes_with_the_turn_is_not_lost(direct: dict[str, Any]) -> None:
    async def run() -> None:
        async with await holdfast.aopen(**direct) as store:
            perform = store.runtime.driver._perform  # type: ignore[attr-defined]
            for ticks in range(8):
                turn = Turn()
                task = asyncio.ensure_future(perform(Queue(turn, WAIT_SECONDS)))
                await asyncio.sleep(0.01)
                turn.come(None)
                for _ in range(ticks):
                    await asyncio.sleep(0)
                is_cancelled = task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() == is_cancelled, ticks

    asyncio.run(run())

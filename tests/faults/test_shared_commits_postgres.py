"""Calls of one process that write to one PostgreSQL tree share transactions, and fail alone."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.postgres import shared_commits, transactions
from holdfast.testing.nouns import Counter
from holdfast.testing.proxy import Moment, PostgresProxy
from tests.faults.workload import WAIT_SECONDS, Clients, in_threads
from tests.work.fleet import wait_until

CALLS = 4
WAITING_FOR_A_LOCK = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait in gathering until they come, however busy the machine is."""
    monkeypatch.setattr(transactions, "QUEUE_LOOK_SECONDS", 60.0)


def waiting() -> int:
    return sum(len(gathering._waiting) for gathering in list(shared_commits._gatherings.values()))


def behind_one(
    direct: dict[str, Any],
    first: Callable[[], object],
    others: Sequence[Callable[[], object]],
    then: Callable[[], object] = lambda: None,
) -> None:
    """Make one call wait at the server and others behind it in gathering; then let them go."""

    def release() -> None:
        wait_until(lambda: admin.execute(WAITING_FOR_A_LOCK).fetchone() == (1,))
        may_join.set()
        wait_until(lambda: waiting() == len(others))
        then()
        holder.rollback()

    def join(call: Callable[[], object]) -> None:
        assert may_join.wait(WAIT_SECONDS)
        call()

    may_join = threading.Event()
    lock = f'SELECT * FROM "{direct["namespace"]}".hf_trees FOR UPDATE'
    with (
        psycopg.connect(direct["url"]) as holder,
        psycopg.connect(direct["url"], autocommit=True) as admin,
    ):
        holder.execute(lock.encode())
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
    assert gathering.gather(first) == [second]
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
        wait_until(lambda: admin.execute(WAITING_FOR_A_LOCK).fetchone() == (2,), seconds=30)
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
            tasks = [asyncio.ensure_future(Counter(store).add_at_once()) for _ in range(3)]
            await asyncio.to_thread(wait_until, lambda: waiting() == 2)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            holder.rollback()
            assert [await tasks[0], await tasks[2]] == [1, 2]
            assert await Counter(store).value() == 2

    with psycopg.connect(direct["url"]) as holder:
        holder.execute(f'SELECT * FROM "{direct["namespace"]}".hf_trees FOR UPDATE'.encode())
        asyncio.run(run())

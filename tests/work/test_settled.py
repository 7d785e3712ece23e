"""An answer that is lost with its connection is read again: what was done is done once."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.testing.proxy import Moment, PostgresProxy

MOMENTS: tuple[Moment, ...] = ("before", "after", "before-late")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("in_session", [False, True])
def test_a_commit_that_is_cut_off(
    proxy: PostgresProxy, postgres_dsn: str, namespace: str, moment: Moment, in_session: bool
) -> None:
    url = f"{proxy.dsn(postgres_dsn)}&listen=off"

    def cut(call: Any) -> Any:
        ordered = proxy.cut_next_commit(moment, delay_seconds=0.05)
        found = call()
        ordered.wait()
        return found

    with holdfast.open(url, namespace=namespace) as store:
        session = store.session("s") if in_session else None
        for number in range(5):
            item = cut(lambda: store.work.submit("t", {"n": number}, session=session))  # noqa: B023
            assert (item.input, item.status) == ({"n": number}, "pending")
            taken = cut(lambda: store.work.claim("w", queues="t"))
            # The transaction that was cut off may hold its row still: then it is passed over.
            [held] = taken or store.work.claim("w", queues="t")
            assert (held.id, held.fence, held.attempts, held.input) == (item.id, 1, 1, item.input)
            cut(lambda: held.complete("out"))  # noqa: B023
            assert (held.status, held.output) == ("completed", "out")
            assert held.completed_at is not None
        items = store.work.list()
        assert [item.status for item in items] == ["completed"] * 5
        events = [event.kind for event in store.events("s")] if in_session else []
    assert [kind for kind in events if kind == "work_completed"] == (
        ["work_completed"] * 5 if in_session else []
    )


def test_a_key_that_lives_is_found_after_the_insert_that_was_refused(
    postgres_dsn: str, namespace: str
) -> None:
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        first = store.work.submit("t", 1, key="k")
        assert store.work.submit("t", 2, key="k").id == first.id
        [held] = store.work.claim("w", queues="t")
        held.complete()
        with pytest.raises(holdfast.LeaseLost, match="the item is completed"):
            held.complete("another output")
        assert store.work.submit("t", 3, key="k").id != first.id


@pytest.mark.parametrize("concurrency", [1, 5])
def test_a_worker_whose_completion_was_committed_unseen_does_not_take_it_for_lost(
    proxy: PostgresProxy, postgres_dsn: str, namespace: str, concurrency: int
) -> None:
    """Nobody can tell it for longer than the store waits."""
    url = f"{proxy.dsn(postgres_dsn)}&listen=off"
    runs: list[int] = []

    def handle(item: holdfast.RunningItem) -> None:
        runs.append(item.input)
        if item.input == 0:
            proxy.cut_next_commit("after")
            proxy.refuse(1.5)

    # Stores of one server are made one after the other.
    holdfast.open(url, namespace=namespace).close()
    with holdfast.open(url, namespace=namespace, busy_timeout_seconds=0.5) as store:
        for number in range(concurrency):
            store.work.submit("t", number)
        worker = holdfast.Worker(store, {"t": handle}, concurrency=concurrency)
        worker.run(until_empty=True)
        assert sorted(runs) == list(range(concurrency))
        assert worker.counts["completed"] == concurrency
        assert {item.status for item in store.work.list()} == {"completed"}

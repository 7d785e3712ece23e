"""A call that goes out with its COMMIT in one trip, and a network that fails around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.testing.proxy import PostgresProxy
from tests.threads import begin

T = TypeVar("T")
Place = dict[str, Any]
WAIT_SECONDS = 120.0


@pytest.fixture
def direct(direct: Place) -> Place:
    """A store with a session that has a version."""
    with holdfast.open(**direct) as store:
        store.session("trip").append("messages", [1])
    return direct


def lose_answer(proxy: PostgresProxy, call: Callable[[], T]) -> Future[T]:
    """Begin a call whose COMMIT is made and whose answer is lost; then nobody can connect."""
    cut = proxy.cut_next_commit("after")
    ended = begin(call)
    assert cut.wait() == "COMMIT"
    proxy.refuse()
    proxy.cut_all()
    return ended


def test_who_learns_too_late_that_it_may_run_an_effect_does_not(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """Its intent was committed; before it knew, its lease was over and another stepped in."""
    runs: list[str] = []
    is_verifying, goes_on, has_learnt = (threading.Event() for _ in range(3))

    def trace(trace: Trace) -> None:
        if trace.call == "Ledger.take" and is_verifying.is_set():
            has_learnt.set()

    def verify(arguments: dict[str, Any], idempotency_key: str) -> holdfast.NotLanded:
        is_verifying.set()
        assert goes_on.wait(WAIT_SECONDS)
        return holdfast.NotLanded()

    def make(who: str, lease_seconds: float | None = None) -> Any:
        @holdfast.tool(effect="mutate", name="pay", verify=verify, lease_seconds=lease_seconds)
        def pay(amount: int) -> int:
            runs.append(who)
            return amount

        return pay

    with (
        holdfast.open(**through, busy_timeout_seconds=600, hooks=Hooks(trace=trace)) as slow,
        holdfast.open(**direct) as other,
    ):
        slow.session("warm").call(make("warm"), amount=0)
        session = slow.session("trip")
        first = lose_answer(proxy, lambda: session.call(make("slow", lease_seconds=1), amount=1))
        second = begin(lambda: other.session("trip").call(make("other"), amount=1))
        assert is_verifying.wait(WAIT_SECONDS)
        proxy.accept()
        assert has_learnt.wait(WAIT_SECONDS)
        goes_on.set()
        assert first.result(WAIT_SECONDS).value == second.result(WAIT_SECONDS).value == 1
        assert runs == ["warm", "other"]


def test_what_was_committed_and_then_removed_is_said_to_be(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    with (
        holdfast.open(**through, busy_timeout_seconds=600) as store,
        holdfast.open(**direct) as other,
    ):
        session = store.session("trip")
        session.append("messages", [2])
        lost = lose_answer(proxy, lambda: session.append("messages", [3]))
        other.session("trip").delete(force=True)
        proxy.accept()
        with pytest.raises(holdfast.NotFound, match=r"was committed.*removed since"):
            lost.result(WAIT_SECONDS)


def test_a_committed_call_whose_answer_stays_lost_does_not_say_that_nothing_was_written(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    with (
        holdfast.open(**through, busy_timeout_seconds=0.5) as store,
        holdfast.open(**direct) as other,
    ):
        session = store.session("trip")
        session.append("messages", [2])
        proxy.cut_next_commit("after")
        for _ in range(2_000):
            proxy.cut_next_commit("before", statement=".*FROM .*hf_checkpoints.*WHERE key.*")
        with pytest.raises(holdfast.CommitUnknown, match="was committed") as caught:
            session.append("messages", [3])
        assert "nothing was written" not in str(caught.value)
        assert other.settle(caught.value.id) is True
        kept = other.session("trip").latest()
        assert kept is not None
        assert kept.channels["messages"] == [1, 2, 3]


def test_a_lease_is_not_given_while_an_effect_of_the_session_is_being_issued(
    direct: Place,
) -> None:
    """Between the statement and its COMMIT; who then drives the session sees the effect."""
    is_issued, goes_on = threading.Event(), threading.Event()

    def probe(point: Point) -> None:
        is_commit = (point.boundary, point.moment) == ("commit", "before")
        if is_commit and point.call == "Ledger.take" and not is_issued.is_set():
            is_issued.set()
            assert goes_on.wait(WAIT_SECONDS)

    @holdfast.tool(effect="mutate")
    def pay(amount: int) -> int:
        return amount

    with (
        holdfast.open(**direct, hooks=Hooks(probe=probe)) as store,
        holdfast.open(**direct) as other,
    ):
        session, driver = store.session("trip"), other.session("trip")
        paid = begin(lambda: session.call(pay, amount=1))
        assert is_issued.wait(WAIT_SECONDS)
        leased = begin(lambda: (driver.lease("driver", 60), len(other.effects(session="trip")))[1])
        with pytest.raises(TimeoutError):
            leased.result(0.5)
        goes_on.set()
        assert leased.result(WAIT_SECONDS) == 1
        paid.exception(WAIT_SECONDS)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_outcome_is_recorded_although_its_commit_was_unknown_at_first(
    is_committed: bool, proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """It is all that is known of what was done."""

    @holdfast.tool(effect="mutate")
    def pay(amount: int) -> int:
        proxy.cut_next_commit("after" if is_committed else "before")
        proxy.refuse(1.2)
        return amount

    with (
        holdfast.open(**through, busy_timeout_seconds=0.5) as store,
        holdfast.open(**direct) as other,
    ):
        assert store.session("trip").call(pay, amount=1).value == 1
        [effect] = other.effects(session="trip")
        assert (effect.status, effect.result, effect.late) == ("completed", 1, None)


def test_a_server_that_has_gone_away_is_unavailable_and_nothing_is_unknown(
    proxy: PostgresProxy, through: Place
) -> None:
    with holdfast.open(**through, busy_timeout_seconds=0.5) as store:
        session = store.session("trip")
        session.append("messages", [2])
        proxy.refuse()
        proxy.cut_all()
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            session.append("messages", [3])


def test_a_cancelled_call_ends_although_the_network_hangs(
    proxy: PostgresProxy, through: Place
) -> None:
    async def run() -> None:
        store = await holdfast.aopen(**through)
        session = await store.session("trip")
        await session.append("messages", [2])
        proxy.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.append("messages", [3])
        proxy.thaw()
        await store.close()

    # Without an end to its waiting this would never return.
    asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))

"""Races: the last answer against its timeout, equal answers, and cancelling against resuming."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import holdfast

ROUNDS = [20, pytest.param(1_000, marks=pytest.mark.slow)]


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same moment, each in its thread; return what each gave or raised."""
    barrier, found = threading.Barrier(len(calls)), [None] * len(calls)

    def run(place: int, call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            found[place] = call()
        except holdfast.HoldfastError as error:
            found[place] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("rounds", ROUNDS)
def test_of_the_last_answer_and_its_timeout_exactly_one_counts(
    rounds: int, place: dict[str, Any]
) -> None:
    clock = holdfast.VirtualClock()
    won: Counter[str] = Counter()
    with (
        holdfast.open(**place, clock=clock, durability="normal") as store,
        holdfast.open(**place, clock=clock, durability="normal") as other,
    ):
        for number in range(rounds):
            session = store.session(f"s{number}", agent=f"agent {number}")
            call = session.ask("peer", timeout_seconds=1)
            session.pause()
            clock.advance(1)
            race(lambda: other.answer(call.id, "in time"), store._sweep)  # noqa: B023
            state = store.peer_call(call.id).state
            won[state] += 1
            [item] = store.work.claim("w", queues=f"agent:agent {number}", limit=5)
            [answer] = item.resume().answers
            assert (answer.status, state) in {("ok", "ok"), ("timeout", "timeout")}
            assert (store.peer_call(call.id).late is not None) == (state == "timeout")
            item.complete()
    assert won.total() == rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_last_answers_of_two_peers_resume_once(rounds: int, place: dict[str, Any]) -> None:
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**place, durability="normal") as other,
    ):
        for number in range(rounds):
            session = store.session(f"s{number}", agent=f"agent {number}")
            first, second = session.ask("a", 1), session.ask("b", 2)
            receipts = race(
                lambda: store.answer(first.id, 1),  # noqa: B023
                lambda: other.answer(second.id, 2),  # noqa: B023
                lambda: store.answer(second.id, 2),  # noqa: B023
                session.pause,
            )
            assert Counter(map(str, receipts[:3])) == {"counted": 2, "duplicate": 1}
            found = receipts[3]
            items = store.work.claim("w", queues=f"agent:agent {number}", limit=5)
            if isinstance(found, holdfast.Parked):
                assert len(items) == 1
                found = items[0].resume()
            else:
                assert items == []
            assert [answer.result for answer in found.answers] == [1, 2]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_cancelling_against_resuming_has_one_winner(rounds: int, place: dict[str, Any]) -> None:
    won: Counter[str] = Counter()
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**place, durability="normal") as other,
    ):
        for number in range(rounds):
            caller = store.request(f"agent {number}", request_id=f"r{number}")
            [item] = store.work.claim("w", queues=f"agent:agent {number}")
            session = item.receive().session
            call = session.ask("peer")
            session.pause()
            store.answer(call.id)

            def go_on() -> None:
                for item in store.work.claim("w", queues=f"agent:agent {number}"):  # noqa: B023
                    item.resume()
                    item.complete("done")

            race(go_on, other.find_session(caller.id).cancel)
            status = store.find_session(caller.id).info().status
            answer = store.peer_call(caller.id).answer
            assert answer is not None
            assert (status, answer.status) in {("completed", "ok"), ("cancelled", "cancelled")}
            won[status] += 1
            assert store.pauses(agent=f"agent {number}", state="waiting") == []
            assert store.work.list(queue=f"agent:agent {number}", status="in_progress") == []
    assert won.total() == rounds

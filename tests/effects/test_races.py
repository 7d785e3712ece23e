"""Orders of events that let an effect happen twice unless each is thought of, one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import Landed, NotDone, NotLanded, VirtualClock
from holdfast.kernel.driver import Hooks, Point
from holdfast.kernel.operation import Call
from holdfast.leases import Guard, Keeper, Kept, uptime_seconds

THREADS = 8
ROUNDS = 15


class Counted:
    """A tool that counts its calls, and a verify hook that tells the truth."""

    def __init__(self, **rules: Any) -> None:
        self.calls: list[str] = []
        self.verified = 0
        self.inside: Callable[[], object] = lambda: None

        def act(what: str = "") -> str:
            self.calls.append(what)
            self.inside()
            return f"{what} {len(self.calls)}"

        if rules.pop("verify", False):
            rules["verify"] = self._verify
        self.tool = holdfast.tool(effect="mutate", **rules)(act)

    def _verify(self, arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
        self.verified += 1
        return Landed(self.calls[-1]) if self.calls else NotLanded()


def kept_of(begun: holdfast.Issued) -> Kept:
    """Return the lease of an effect that was begun."""
    ticket = begun.ticket
    return Kept(
        begun, Guard("effect", ticket.id, ticket.number, ticket.fence), 15, uptime_seconds()
    )


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """Run a function in threads that start together; return what it returned or raised."""
    barrier, found = threading.Barrier(count), [object()] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = work(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_of_one_process_are_not_taken_for_one_owner(place: dict[str, Any]) -> None:
    """They have one holder's name, and without a common tree no lock keeps them apart."""
    counted = Counted(dedupe="global")
    with holdfast.open(**place) as store:
        sessions = [store.session(f"s{number}") for number in range(THREADS)]
        for turn in range(ROUNDS):
            ways: list[Callable[[int], Any]] = [
                lambda _: store.once(f"key {turn}", counted.tool, request={"what": f"once {turn}"}),  # noqa: B023
                lambda number: sessions[number].call(counted.tool, what=f"global {turn}"),  # noqa: B023
            ]
            for way in ways:
                counted.calls.clear()
                results = at_once(THREADS, way)
                values = {getattr(result, "value", result) for result in results}
                assert len(values) == 1, f"not one result: {values}"
                assert len(counted.calls) == 1, f"round {turn}: {counted.calls}"


def test_an_owner_that_renews_while_another_steps_in_keeps_the_effect(
    postgres_dsn: str, namespace: str
) -> None:
    """On SQLite nothing can come between: the one who steps in holds the file's lock."""
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace}
    counted, clock = Counted(verify=True), VirtualClock()
    renewed: list[dict[Kept, Any]] = []
    with holdfast.open(**place, clock=clock) as owner:
        begun = owner.session("s").begin(counted.tool, {"what": "it"})
        assert not isinstance(begun, holdfast.Replay)
        kept = kept_of(begun)

        def renew_first(point: Point) -> None:
            if "SET status = 'issued'" in point.sql and point.moment == "before" and not renewed:
                due = [(kept.guard, kept.lease_seconds)]
                renewal = Call(Keeper.renew, owner.ledger.keeper, (due,))
                renewed.append(owner.runtime.run(renewal))

        clock.advance(60)
        with (
            holdfast.open(**place, clock=clock, hooks=Hooks(probe=renew_first)) as other,
            pytest.raises(holdfast.InProgress),
        ):
            other.find_session("s").call(counted.tool, what="it", wait_seconds=0)
        assert [renewal is not None for [renewal] in renewed] == [True]
        assert begun.complete("done").value == "done"
    assert (counted.calls, counted.verified) == ([], 0)


@pytest.mark.parametrize("lands", [True, False])
def test_an_owner_has_no_say_while_another_verifies(place: dict[str, Any], lands: bool) -> None:
    """The row is `issued` for both of them then: only the fence tells them apart."""
    clock, refused = VirtualClock(), []
    with holdfast.open(**place, clock=clock) as owner, holdfast.open(**place, clock=clock) as heir:
        begun = owner.session("s").begin("act", {"what": "it"})
        assert not isinstance(begun, holdfast.Replay)
        kept = kept_of(begun)

        def verify(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
            due = [(kept.guard, kept.lease_seconds)]
            assert owner.runtime.run(Call(Keeper.renew, owner.ledger.keeper, (due,))) == [None]
            for end in (lambda: begun.complete("late"), lambda: begun.fail("no", happened=False)):
                with pytest.raises(holdfast.LeaseLost) as lost:
                    end()
                refused.append(lost.value)
            return Landed("found") if lands else NotLanded()

        def act(what: str) -> str:
            return "ran"

        clock.advance(60)
        tool = holdfast.tool(effect="mutate", verify=verify)(act)
        result = heir.find_session("s").call(tool, what="it")
        assert result.value == ("found" if lands else "ran")
    assert len(refused) == 2


def test_a_failed_call_finds_what_an_equal_call_did_since(place: dict[str, Any]) -> None:
    counted = Counted()
    problems = [NotDone("not now")]

    def fail_once() -> None:
        if problems:
            raise problems.pop()

    counted.inside = fail_once
    with holdfast.open(**place) as store:
        session = store.session("s")
        with pytest.raises(NotDone):
            session.call(counted.tool, what="it", call_id="call_1")
        second = session.call(counted.tool, what="it", call_id="call_2")
        again = session.call(counted.tool, what="it", call_id="call_1")
        assert (again.value, again.replay_of) == (second.value, second.effect_id)
        with pytest.raises(holdfast.RequestMismatch):
            session.call(counted.tool, what="other", call_id="call_1")
    assert counted.calls == ["it", "it"]


def test_a_failed_call_finds_what_was_done_since_in_a_rewound_session(
    place: dict[str, Any],
) -> None:
    counted = Counted()
    problems = [NotDone("not now")]

    def fail_once() -> None:
        if problems:
            raise problems.pop()

    counted.inside = fail_once
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save(plan=1)
        session.save(plan=2)
        session.rewind(1)
        with pytest.raises(NotDone):
            session.call(counted.tool, what="it", call_id="call_1")
        second = session.call(counted.tool, what="it", call_id="call_2")
        again = session.call(counted.tool, what="it", call_id="call_1")
        assert (again.value, again.replay_of) == (second.value, second.effect_id)
    assert counted.calls == ["it", "it"]


def test_what_may_be_in_flight_is_verified_after_its_settle_time_only(
    place: dict[str, Any],
) -> None:
    counted, clock = Counted(verify=True, settle_seconds=5), VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        begun = session.begin(counted.tool, {"what": "it"})
        assert not isinstance(begun, holdfast.Replay)
        begun.fail("the connection was cut")
        with pytest.raises(holdfast.InProgress):
            session.call(counted.tool, what="it", wait_seconds=0)
        clock.advance(4.9)
        with pytest.raises(holdfast.InProgress):
            session.call(counted.tool, what="it", wait_seconds=0)
        assert (counted.calls, counted.verified) == ([], 0)
        clock.advance(0.2)
        session.call(counted.tool, what="it", wait_seconds=0)
        assert (counted.calls, counted.verified) == (["it"], 1)


def test_what_runs_while_its_session_is_rewound_is_verified_when_its_owner_must_be_over(
    place: dict[str, Any],
) -> None:
    counted = Counted(verify=True, settle_seconds=5, lease_seconds=10)
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        session.save(plan=1)
        begun = session.begin(counted.tool, {"what": "it"})
        assert not isinstance(begun, holdfast.Replay)
        assert [effect.id for effect in session.rewind(1).in_flight] == [begun.effect_id]
        clock.advance(14.9)
        with pytest.raises(holdfast.InProgress):
            session.call(counted.tool, what="it", wait_seconds=0)
        assert counted.verified == 0
        clock.advance(0.2)
        session.call(counted.tool, what="it", wait_seconds=0)
        with pytest.raises(holdfast.LeaseLost):
            begun.complete("late")
    assert (counted.calls, counted.verified) == (["it"], 1)


@pytest.mark.parametrize("state", ["issued", "unknown"])
def test_what_is_in_doubt_when_its_session_is_rewound_blocks_equal_calls_undo_or_not(
    place: dict[str, Any], state: str
) -> None:
    counted, clock = Counted(undo=lambda arguments, result, idempotency_key: None), VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        session.save(plan=1)
        session.save(plan=2)
        begun = session.begin(counted.tool, {"what": "it"})
        assert not isinstance(begun, holdfast.Replay)
        if state == "unknown":
            begun.fail("the connection was cut")
        session.rewind(1)
        clock.advance(3600)
        with pytest.raises(holdfast.Unresolved):
            session.call(counted.tool, what="it")
    assert counted.calls == []


@pytest.mark.parametrize("call_id", ["call_1", None])
@pytest.mark.parametrize("has_undo", [True, False])
def test_what_a_fork_runs_of_its_origin_is_found_by_both(
    place: dict[str, Any], call_id: str | None, has_undo: bool
) -> None:
    rules = {"undo": lambda arguments, result, idempotency_key: None} if has_undo else {}
    counted, clock = Counted(verify=True, **rules), VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        session.save(plan=1)
        session.begin(counted.tool, {"what": "it"}, call_id)
        session.save(plan=2)
        forks = [session.fork(2), session.fork(2)]
        clock.advance(3600)
        for each in (forks[0], forks[0], session, forks[1]):
            assert each.call(counted.tool, what="it", call_id=call_id).value == "it 1"
    assert (counted.calls, counted.verified) == (["it"], 1)


def test_the_outcome_of_a_work_item_that_was_lost_is_not_recorded(place: dict[str, Any]) -> None:
    counted, clock = Counted(), VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.work.submit("job", session=store.session("s"))
        (item,) = store.work.claim("zombie", lease_seconds=10)

        def lose_the_item() -> None:
            clock.advance(11)
            assert store.work.sweep().requeued == 1

        counted.inside = lose_the_item
        session = item.session
        assert session is not None
        with pytest.raises(holdfast.LeaseLost):
            session.call(counted.tool, what="it")
        (effect,) = store.effects(session="s")
        assert effect.status == "issued"
        assert effect.late["result"] == "it 1"
    assert counted.calls == ["it"]


def test_a_tool_that_raises_stop_iteration_does_not_hang_an_event_loop(
    place: dict[str, Any],
) -> None:
    def act() -> str:
        return next(iter(()))

    tool = holdfast.tool(effect="mutate", atomic=True)(act)

    async def main() -> None:
        async with await holdfast.aopen(**place) as store:
            session = await store.session("s")
            with pytest.raises(RuntimeError, match="StopIteration"):
                await session.call(tool)
            (effect,) = await store.effects(session="s")
            assert effect.status == "failed"
            ended.set()

    ended = threading.Event()
    # What hangs here cannot even be cancelled: the loop waits for the thread of a sync tool.
    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    assert ended.wait(120)

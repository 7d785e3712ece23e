"""Owners that do not know that they are dead, and requests that are still under way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Landed, NotDone, NotLanded, VirtualClock
from holdfast.kernel.driver import Hooks, Trace
from tests.checkpoints.colours import sql
from tests.crash.children import Child, stopped
from tests.effects.cases import Outcome, told
from tests.effects.server import Receiver
from tests.effects.test_processes import wait_for

Say = Callable[[str], None]

LEASE_SECONDS = 0.6


class Owner:
    """A process that calls a tool and stops itself on the way."""

    def __init__(
        self, place: dict[str, Any], receiver: Receiver, what: str, *, honours: bool = False
    ) -> None:
        self.place = place
        self.receiver = receiver
        self.what = what
        self._honours = honours

    def tool(self, stops: bool = False, **rules: Any) -> holdfast.Tool[..., Any]:
        def act(what: str, *, idempotency_key: str) -> str:
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            return self.receiver.act(what, idempotency_key, self.place, honours=self._honours)

        def verify(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
            seen = self.receiver.look(arguments["what"])
            return Landed(seen.receipt) if seen.count else NotLanded()

        if rules.pop("verify", False):
            rules["verify"] = verify
        given = {"effect": "mutate", "lease_seconds": LEASE_SECONDS, **rules}
        return holdfast.tool(name="act", **given)(act)

    def call(self, store: holdfast.Store, tool: holdfast.Tool[..., Any]) -> Outcome:
        """Call the tool as whoever comes later."""
        return told(lambda: store.session(self.what).call(tool, what=self.what))

    def frozen(self, **rules: Any) -> Child:
        """Return a process that has stopped inside its tool, before the request."""

        def run(say: Say) -> None:
            with holdfast.open(**self.place) as store:
                outcome = self.call(store, self.tool(stops=True, **rules))
                say(json.dumps(asdict(outcome)))

        return stopped(run)

    def frozen_before_the_call(self, **rules: Any) -> Child:
        """Return a process that has stopped when its intent was durable, before its tool."""

        def stop(trace: Trace) -> None:
            if trace.call.endswith("take"):
                os.kill(os.getpid(), signal.SIGSTOP)

        def run(say: Say) -> None:
            with holdfast.open(**self.place) as store:
                store.session(self.what)
            with holdfast.open(**self.place, hooks=Hooks(trace=stop)) as store:
                outcome = self.call(store, self.tool(**rules))
                say(json.dumps(asdict(outcome)))

        return stopped(run)


def wake(child: Child) -> Outcome:
    """Let a stopped process go on; return how its call ended."""
    os.kill(child.pid, signal.SIGCONT)
    status, lines = child.wait()
    assert status == 0
    return Outcome(**json.loads(lines[-1]))


def name_of(path: Path) -> str:
    return f"zombie-{path.name}"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "park"])
def test_an_owner_frozen_between_intent_and_call_does_not_act_any_more(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path, verify: bool
) -> None:
    owner = Owner(place, receiver, name_of(tmp_path))
    zombie = owner.frozen_before_the_call(verify=verify)
    with holdfast.open(**place) as store:
        heir = owner.call(store, owner.tool(verify=verify))
        assert wake(zombie).ended == "LeaseLost"
        seen = receiver.look(owner.what)
        assert (heir.ended, seen.count) == (("ok", 1) if verify else ("Unresolved", 0))


def test_an_owner_frozen_inside_its_tool_cannot_say_what_came_of_it(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path
) -> None:
    """Nobody can keep it from acting when it wakes: its outcome is refused, and kept aside."""
    owner = Owner(place, receiver, name_of(tmp_path))
    zombie = owner.frozen()
    with holdfast.open(**place) as store:
        heir = owner.call(store, owner.tool())
        assert (heir.ended, receiver.look(owner.what).count) == ("Unresolved", 0)
        assert wake(zombie).ended == "LeaseLost"
        (effect,) = store.session(owner.what).unresolved()
        assert (effect.status, effect.result) == ("unknown", None)
        assert effect.late["result"] == receiver.look(owner.what).receipt
        # Who decides sees that it happened after all.
        store.resolve(effect.id, Landed(effect.late["result"]), by="ann")
        assert owner.call(store, owner.tool()).receipt == f"{owner.what}#1"
    assert receiver.look(owner.what).count == 1


@pytest.mark.parametrize("honours", [True, False], ids=["key honoured", "key ignored"])
def test_residual_risk_an_owner_frozen_inside_its_tool_acts_when_it_wakes(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path, honours: bool
) -> None:
    """It passed its last look at the lease, and verify found nothing, for it had not acted.

    A receiver that honours the key takes both requests for one. One that does not, acts twice:
    what Holdfast then adds is that both are in the ledger.
    """
    owner = Owner(place, receiver, name_of(tmp_path), honours=honours)
    zombie = owner.frozen(verify=True)
    with holdfast.open(**place) as store:
        heir = owner.call(store, owner.tool(verify=True))
        assert (heir.ended, heir.receipt) == ("ok", f"{owner.what}#1")
        assert wake(zombie).ended == "LeaseLost"
        seen = receiver.look(owner.what)
        assert seen.count == (1 if honours else 2)
        first, second = store.effects(session=owner.what)
        assert (first.status, first.reason, second.status) == ("failed", "not_landed", "completed")
        assert first.idempotency_key == second.idempotency_key
        assert first.late["result"] == f"{owner.what}#{seen.count}"
        assert owner.call(store, owner.tool(verify=True)).receipt == f"{owner.what}#1"


@pytest.mark.parametrize("settle_seconds", [30, 0], ids=["settled", "not settled"])
def test_a_request_in_flight_when_its_owner_dies_is_covered_by_the_settle_time(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path, settle_seconds: int
) -> None:
    """Residual risk: without a settle time that is long enough, verify looks too early."""
    what, clock = name_of(tmp_path), VirtualClock()
    owner = Owner(place, receiver, what)
    times: dict[str, Any] = {"lease_seconds": 10, "settle_seconds": settle_seconds}

    def die(say: Say) -> None:
        def moment(name: str) -> None:
            if name == "sent":
                os.kill(os.getpid(), signal.SIGKILL)

        def act(what: str, *, idempotency_key: str) -> None:
            receiver.act(what, idempotency_key, place, is_held=True, moment=moment)

        with holdfast.open(**place, clock=clock) as store:
            owner.call(store, holdfast.tool(name="act", effect="mutate", **times)(act))

    assert Child(die).wait()[0] == -signal.SIGKILL
    clock.advance(20)
    with holdfast.open(**place, clock=clock) as store:
        tool = owner.tool(verify=True, **times)
        if settle_seconds:
            with pytest.raises(holdfast.InProgress):
                store.session(what).call(tool, what=what, wait_seconds=0)
            receiver.let_go(what)
            clock.advance(settle_seconds)
        assert owner.call(store, tool).ended == "ok"
        receiver.let_go(what)
        attempts = store.effects(session=what)
        assert len(attempts) == receiver.look(what).count == (1 if settle_seconds else 2)


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "park"])
def test_the_zombie_of_a_driven_session_records_nothing_after_another_drives(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path, verify: bool
) -> None:
    """The effect is its own still, by its lease: the session's fence alone refuses it."""
    owner = Owner(place, receiver, name_of(tmp_path))
    rules: dict[str, Any] = {"verify": verify, "lease_seconds": 3.0}

    def drive(say: Say) -> None:
        with holdfast.open(**place) as store:
            driven = store.session(owner.what).drive("zombie", lease_seconds=600)
            tool = owner.tool(stops=True, **rules)
            outcome = told(lambda: driven.call(tool, what=owner.what))
            say(json.dumps(asdict(outcome)))

    zombie = stopped(drive)
    with holdfast.open(**place) as store:
        session = store.find_session(owner.what)
        sql(store, "UPDATE hf_sessions SET lease_expires_at = 1 WHERE id = :id", id=owner.what)
        with session.drive("heir", lease_seconds=60) as heir:
            assert wake(zombie).ended == "LeaseLost"
            (effect,) = store.effects(session=owner.what)
            seen = receiver.look(owner.what)
            assert (effect.status, effect.result, seen.count) == ("issued", None, 1)
            assert effect.late["result"] == seen.receipt
            outcome = told(lambda: heir.call(owner.tool(**rules), what=owner.what))
            assert outcome.ended == ("ok" if verify else "Unresolved")
            assert outcome.receipt == (seen.receipt if verify else None)
    assert receiver.look(owner.what).count == 1


def outlast(place: dict[str, Any], clock: VirtualClock, tool: holdfast.Tool[..., Any]) -> None:
    """Let three lengths of a tool's lease pass, and make sure that nobody else gets its effect."""
    with holdfast.open(**place, clock=clock) as store:
        session = store.find_session("s")

        def expires_at() -> int:
            (effect,) = store.effects(session="s")
            return effect.lease_expires_at or 0

        for _ in range(6):
            before = expires_at()
            clock.advance(tool.lease_ms / 1000 / 2)
            wait_for(lambda: expires_at() > before)  # noqa: B023
            with pytest.raises(holdfast.InProgress):
                session.call(tool, wait_seconds=0)


class Long:
    """A tool that runs for three lengths of its lease, while others would like to have it."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.clock = VirtualClock()
        self.calls = 0

    def run(self) -> str:
        self.calls += 1
        outlast(self.place, self.clock, self.tool(self.run))
        return "ran"

    async def run_async(self) -> str:
        return await asyncio.to_thread(self.run)

    async def block_the_loop(self) -> str:
        return self.run()

    def tool(self, function: Callable[..., Any]) -> holdfast.Tool[..., Any]:
        rules: dict[str, Any] = {"effect": "mutate", "on_unknown": "retry"}
        return holdfast.tool(name="long", lease_seconds=LEASE_SECONDS, **rules)(function)


@pytest.mark.parametrize("way", ["sync", "async", "async blocks", "sync in async"])
def test_a_heartbeat_keeps_a_long_tool_owned(place: dict[str, Any], way: str) -> None:
    long = Long(place)
    functions: dict[str, Callable[..., Any]] = {
        "async": long.run_async,
        "async blocks": long.block_the_loop,
    }
    tool = long.tool(functions.get(way, long.run))

    async def in_a_loop() -> None:
        async with await holdfast.aopen(**place, clock=long.clock) as store:
            session = await store.session("s")
            assert (await session.call(tool)).value == "ran"

    with holdfast.open(**place, clock=long.clock) as store:
        session = store.session("s")
        if way == "sync":
            assert session.call(tool).value == "ran"
        else:
            asyncio.run(in_a_loop())
        (effect,) = store.effects(session="s")
        assert (effect.status, effect.result, effect.fence) == ("completed", "ran", 1)
    assert long.calls == 1


class Slow:
    """A tool that takes longer than it may, until it is let go."""

    def __init__(self, ends: Callable[[], Any] = lambda: "done", **rules: Any) -> None:
        self.calls = 0
        self.go = threading.Event()
        self._ends = ends
        given = {"effect": "mutate", "timeout_seconds": 0.2, "lease_seconds": 0.3, **rules}
        self.tool = holdfast.tool(**given)(self.act)

    def act(self) -> Any:
        self.calls += 1
        assert self.go.wait(120)
        return self._ends()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_tool_that_timed_out_is_not_run_again_while_its_thread_lives(
    place: dict[str, Any], colour: str
) -> None:
    slow, clock = Slow(on_unknown="retry"), VirtualClock()

    async def call_async() -> holdfast.Result[Any]:
        async with await holdfast.aopen(**place, clock=clock) as store:
            session = await store.session("s")
            with pytest.raises(holdfast.InProgress, match="did not return within"):
                await session.call(slow.tool)
            await asyncio.to_thread(outlast, place, clock, slow.tool)
            slow.go.set()
            return await session.call(slow.tool)

    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        if colour == "sync":
            with pytest.raises(holdfast.InProgress, match="did not return within"):
                session.call(slow.tool)
            outlast(place, clock, slow.tool)
            slow.go.set()
            result = session.call(slow.tool)
        else:
            result = asyncio.run(call_async())
        assert (result.value, result.replayed, slow.calls) == ("done", True, 1)
        assert [effect.attempt for effect in store.effects(session="s")] == [1]


def test_a_tool_that_timed_out_and_then_did_nothing_may_run_again(place: dict[str, Any]) -> None:
    def refuse_once() -> str:
        if slow.calls == 1:
            raise NotDone("the other side said no")
        return "done"

    slow = Slow(refuse_once)
    with holdfast.open(**place) as store:
        session = store.session("s")
        with pytest.raises(holdfast.InProgress):
            session.call(slow.tool)
        slow.go.set()
        wait_for(lambda: store.effects(session="s")[0].status == "failed")
        assert session.call(slow.tool).value == "done"
    assert slow.calls == 2


def test_what_a_thread_comes_to_after_another_took_over_is_kept_aside(
    place: dict[str, Any],
) -> None:
    slow = Slow(verify=lambda arguments, idempotency_key: Landed("seen"))
    with holdfast.open(**place) as store:
        session = store.session("s")
        # The receiver knows of it already, so there is no need to wait for the thread.
        assert session.call(slow.tool).value == "seen"
        slow.go.set()
        wait_for(lambda: store.effects(session="s")[0].late is not None)
        (effect,) = store.effects(session="s")
        assert (effect.result, effect.late["result"]) == ("seen", "done")
        assert session.call(slow.tool).value == "seen"
    assert slow.calls == 1


def test_a_cancelled_async_tool_is_in_doubt(place: dict[str, Any], receiver: Receiver) -> None:
    what, clock, sent = f"cancelled-{os.urandom(4).hex()}", VirtualClock(), asyncio.Event()

    async def act(what: str, *, idempotency_key: str) -> str:
        given: dict[str, Any] = {"is_held": True, "moment": lambda name: sent.set()}
        return await receiver.act_async(what, idempotency_key, place, **given)

    def verify(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
        seen = receiver.look(arguments["what"])
        return Landed(seen.receipt) if seen.count else NotLanded()

    parks = holdfast.tool(name="act", effect="mutate")(act)
    verifies = holdfast.tool(name="act", effect="mutate", settle_seconds=30, verify=verify)(act)

    async def cancel(store: holdfast.AsyncStore, tool: Any, id: str) -> Any:
        session = await store.session(id)
        task = asyncio.ensure_future(session.call(tool, what=id))
        await sent.wait()
        sent.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (effect,) = await session.unresolved()
        assert (effect.status, effect.reason) == ("unknown", "cancelled")
        return session

    async def main() -> None:
        async with await holdfast.aopen(**place, clock=clock) as store:
            session = await cancel(store, parks, f"{what} parked")
            with pytest.raises(holdfast.Unresolved):
                await session.call(parks, what=session.id)
            session = await cancel(store, verifies, what)
            # Its request is under way still: a look at once would find nothing.
            with pytest.raises(holdfast.InProgress):
                await session.call(verifies, what=what, wait_seconds=0)
            await asyncio.to_thread(receiver.let_go, what)
            clock.advance(30)
            result = await session.call(verifies, what=what)
            assert (result.value, result.replayed) == (f"{what}#1", True)

    asyncio.run(main())
    receiver.let_go(f"{what} parked")
    assert receiver.look(f"{what} parked").count == receiver.look(what).count == 1


def test_a_cancelled_sync_tool_is_waited_for_and_recorded(place: dict[str, Any]) -> None:
    slow = Slow(timeout_seconds=None)

    async def main() -> None:
        async with await holdfast.aopen(**place) as store:
            session = await store.session("s")
            task = asyncio.ensure_future(session.call(slow.tool))
            await asyncio.to_thread(wait_for, lambda: slow.calls == 1)
            task.cancel()
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0.1)
            assert not task.done(), "it did not wait for the tool"
            slow.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            (effect,) = await store.effects(session="s")
            assert (effect.status, effect.result) == ("completed", "done")
            assert (await session.call(slow.tool)).replayed

    asyncio.run(main())
    assert slow.calls == 1

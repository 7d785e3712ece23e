"""Ctrl-C at any place of a call: a tool that was not called is known not to have happened."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.effects.world import World
from tests.faults.tracing import interrupted_everywhere

LEASE_SECONDS = 5
TRACED = (
    "effects/calls.py",
    "effects/handles.py",
    "effects/ledger.py",
    "effects/turns.py",
    "kernel/flow.py",
    "leases.py",
)


def wait_until_nothing_is_owned(store: holdfast.Store, session: holdfast.Session) -> None:
    """Wait until the leases of all that is issued have run out: nobody renews them."""
    issued = {effect.id for effect in store.effects(status="issued", limit=1_000)}
    deadline = time.monotonic() + 60
    while not issued <= {effect.id for effect in session.unresolved()}:
        assert time.monotonic() < deadline, "a lease is renewed that nobody uses"
        time.sleep(0.05)


@pytest.mark.parametrize("timeout_seconds", [None, 4])
def test_a_call_that_is_interrupted_at_any_place(
    place: dict[str, Any], timeout_seconds: float | None
) -> None:
    world = World()
    mail = world.tool(lease_seconds=LEASE_SECONDS, timeout_seconds=timeout_seconds)
    with holdfast.open(**place) as store:
        session = store.session("s")
        *_, places = interrupted_everywhere(lambda nth: session.call(mail, to=str(nth)), TRACED)
        ran = {to for to, _ in world.done}
        effects = store.effects(limit=1_000)
        not_called = [effect for effect in effects if effect.arguments["to"] not in ran]
        assert len(not_called) > 5
        ends = Counter((effect.status, effect.reason) for effect in not_called)
        # As the tool's function begins it can be interrupted too, and has been called.
        assert ends.pop(("unknown", "cancelled"), 0) <= 1
        assert ends.keys() == {("failed", "not_landed")}
        assert 5 < len(ran) < places
        wait_until_nothing_is_owned(store, session)


def test_what_is_begun_by_who_is_interrupted_at_any_place(place: dict[str, Any]) -> None:
    mail = World().tool(lease_seconds=LEASE_SECONDS)
    with holdfast.open(**place) as store:
        session = store.session("s")
        list(interrupted_everywhere(lambda nth: session.begin(mail, {"to": str(nth)}), TRACED))
        issued = store.effects(status="issued", limit=1_000)
        closed = store.effects(status="failed", limit=1_000)
        # Only what was made and lost on its way out is in doubt.
        assert 0 < len(issued) < 10
        assert len(closed) > 5
        wait_until_nothing_is_owned(store, session)


@contextlib.contextmanager
def interrupted_by(number: signal.Signals) -> Iterator[threading.Semaphore]:
    """Let a signal interrupt this thread; the semaphore counts how often it has."""
    received = threading.Semaphore(0)

    def interrupt(*_: object) -> None:
        received.release()
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("times", [1, 2])
def test_a_tool_in_a_thread_is_waited_for_until_the_second_interrupt(
    place: dict[str, Any], times: int
) -> None:
    world, main, may_end = World(), threading.get_ident(), threading.Event()
    mail = world.tool(timeout_seconds=100, lease_seconds=200)

    def interrupt() -> None:
        for _ in range(times):
            signal.pthread_kill(main, signal.SIGUSR1)
            # Two signals at once would be one; the second is to meet who waits again.
            assert received.acquire(timeout=120)
            time.sleep(0.2)
        if times == 2:
            assert may_end.wait(120)

    world.inside = interrupt
    with holdfast.open(**place) as store:
        session = store.session("s")
        with interrupted_by(signal.SIGUSR1) as received, pytest.raises(KeyboardInterrupt):
            session.call(mail, to="ann", call_id="c1")
        (effect,) = store.effects()
        if times == 2:
            # Its thread goes on and owns it: nobody can say that it did not happen.
            assert effect.status == "issued"
            with pytest.raises(holdfast.InProgress):
                store.resolve(effect.id, holdfast.NotLanded(), by="ann")
            may_end.set()
        again = session.call(mail, to="ann", call_id="c1", wait_seconds=60)
        assert (again.value, again.replayed) == (1, True)
        if times == 1:
            assert (effect.status, effect.result) == ("completed", 1)
    assert len(world.done) == 1

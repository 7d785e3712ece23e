"""Tools whose effects a receiver counts, what each of them promises, and agents that call them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import holdfast
from holdfast import Landed, NotLanded
from holdfast.kernel.driver import Point
from holdfast.testing.crashes import CrashPoints
from tests.effects.server import Receiver

Kill = str | int | None
"""A moment inside the tool, the number of a statement boundary, or not at all."""
Way = Literal["call", "begin", "once", "timed", "async"]
Promise = Literal["once", "surfaced", "repeated"]

LEASE_SECONDS = 0.4
TIMEOUT_SECONDS = 2.0
SETTLE_SECONDS = 0.4
FLIGHT_SECONDS = 0.1
MOMENTS = ("before", "sent", "acted", "answered")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of tool and the way it is called."""

    effect: Literal["write", "mutate"] = "mutate"
    verify: bool = False
    atomic: bool = False
    on_unknown: Literal["park", "fail", "retry"] = "park"
    honours: bool = False
    way: Way = "call"
    recovers: bool = False
    """Whether each process begins with `store.recover`."""

    @property
    def lease_seconds(self) -> float:
        """How long a dead owner is waited for; a tool must end before its lease does."""
        return 1.5 * TIMEOUT_SECONDS if self.way == "timed" else LEASE_SECONDS

    @property
    def promise(self) -> Promise:
        """What holds whenever its owner dies."""
        repeats = self.effect == "write" or self.on_unknown == "retry"
        if self.verify or (self.honours and repeats):
            return "once"
        return "repeated" if repeats else "surfaced"


@dataclass(frozen=True)
class Outcome:
    """How a call ended, as its caller sees it."""

    ended: str
    receipt: str | None = None
    replayed: bool = False
    effect_id: str | None = None
    """The effect that answered, though each call has a row of its own."""


class Places(CrashPoints):
    """The places of a call itself: leases are renewed at any time, more often on a busy machine."""

    def visit(self, point: Point) -> None:
        """Pass a place, or die there."""
        if point.call != "Keeper.renew":
            super().visit(point)


@dataclass(frozen=True)
class Agent:
    """Whoever calls a tool once: in a process that dies where it is told to."""

    place: dict[str, str]
    receiver: Receiver
    case: Case
    kill: Kill = None
    lease_seconds: float | None = None
    settle_seconds: float = SETTLE_SECONDS

    def moment(self, name: str) -> None:
        """Pass a moment inside the tool, or die there."""
        if name == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def tool(self) -> holdfast.Tool[..., Any]:
        """Return the tool of the case."""
        case, receiver, place = self.case, self.receiver, self.place
        given: dict[str, Any] = {"honours": case.honours}
        if self.kill == "sent":
            given["delay_seconds"] = FLIGHT_SECONDS

        def act(what: str, *, idempotency_key: str) -> str:
            self.moment("before")
            receipt = receiver.act(what, idempotency_key, place, moment=self.moment, **given)
            self.moment("answered")
            return receipt

        async def act_async(what: str, *, idempotency_key: str) -> str:
            self.moment("before")
            receipt = await receiver.act_async(
                what, idempotency_key, place, moment=self.moment, **given
            )
            self.moment("answered")
            return receipt

        def verify(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
            self.moment("verifying")
            seen = receiver.look(arguments["what"])
            self.moment("verified")
            return Landed(seen.receipt) if seen.count else NotLanded()

        return holdfast.tool(
            name="act",
            effect=case.effect,
            verify=verify if case.verify else None,
            atomic=case.atomic,
            on_unknown=case.on_unknown,
            lease_seconds=self.lease_seconds or case.lease_seconds,
            settle_seconds=self.settle_seconds if case.verify else 0.0,
            timeout_seconds=TIMEOUT_SECONDS if case.way == "timed" else None,
        )(act_async if case.way == "async" else act)

    def recover(self, store: holdfast.Store) -> None:
        """Do what everything that starts does first; to die in verify is to die here too."""
        if self.case.recovers:
            store.recover(tools=[self.tool()])

    def call(self, store: holdfast.Store, what: str) -> Outcome:
        """Call the tool and tell how that ended."""
        return told(lambda: self._result(store, what))

    def _result(self, store: holdfast.Store, what: str) -> holdfast.Result[Any]:
        tool = self.tool()
        if self.case.way == "once":
            return store.once(what, tool, request={"what": what})
        session = store.find_session(what)
        if self.case.way != "begin":
            return session.call(tool, what=what, call_id="call_1")
        begun = session.begin(tool, {"what": what}, "call_1")
        if isinstance(begun, holdfast.Replay):
            return begun.result
        value = tool.function(what, idempotency_key=begun.idempotency_key)
        return begun.complete(value)

    async def call_async(self, store: holdfast.AsyncStore, what: str) -> Outcome:
        """Call an async tool and tell how that ended."""
        session = await store.find_session(what)
        try:
            result = await session.call(self.tool(), what=what, call_id="call_1")
        except holdfast.HoldfastError as error:
            return failed(error)
        return Outcome("ok", result.value, result.replayed, result.replay_of or result.effect_id)

    def live(self, what: str, say: Callable[[str], None]) -> None:
        """Call the tool in a store of its own, armed; say how it ended and the places passed."""
        points = Places(self.kill if isinstance(self.kill, int) else None)
        points.is_armed = False
        given: Any = {**self.place, "hooks": points.hooks, "durability": "normal"}

        async def in_a_loop() -> Outcome:
            async with await holdfast.aopen(**given) as store:
                await store.settle("nobody:1")
                points.is_armed = True
                outcome = await self.call_async(store, what)
                points.is_armed = False
                return outcome

        if self.case.way == "async":
            outcome = asyncio.run(in_a_loop())
        else:
            with holdfast.open(**given) as store:
                # The first write of a connection has statements of its own.
                store.settle("nobody:1")
                self.recover(store)
                points.is_armed = True
                outcome = self.call(store, what)
                points.is_armed = False
        say(json.dumps([asdict(outcome), boundaries(points)]))


def boundaries(points: CrashPoints) -> list[int]:
    """Return the places to die at: before each statement and COMMIT, and after each COMMIT."""
    return [
        number
        for number, point in enumerate(points.points, 1)
        if point.moment == "before" or point.boundary == "commit"
    ]


def told(function: Callable[[], holdfast.Result[Any]]) -> Outcome:
    """Return how a call ended."""
    try:
        result = function()
    except holdfast.HoldfastError as error:
        return failed(error)
    return Outcome("ok", result.value, result.replayed, result.replay_of or result.effect_id)


def failed(error: holdfast.HoldfastError) -> Outcome:
    """Return how a call ended that raised."""
    return Outcome(type(error).__name__, effect_id=getattr(error, "effect_id", None))

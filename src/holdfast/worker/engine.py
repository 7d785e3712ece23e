"""The engine of a worker: claims, hands out, keeps leases, drains. One copy for both colours.

It runs on threads and a sync driver, also for an async store, so that a handler that blocks the
event loop stops neither the heartbeat nor the other items. Everything that happens to it arrives
in one queue, which a signal handler may write to as well.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ..errors import CommitUnknown, HoldfastError
from ..kernel.flow import in_thread, is_async
from ..kernel.operation import Call, Row
from ..kernel.threads import Thread
from ..leases import Keeper, Kept, uptime_seconds
from ..store import Store
from ..work import topic
from ..work.claims import Claim
from ..work.transitions import Endings
from .attempts import (
    BACKOFF_SECONDS,
    BACKOFF_SECONDS_MAX,
    PASSING,
    Attempt,
    Handler,
    Outcome,
    log,
)
from .gathering import Gathering
from .pools import Crew, LoopCrew
from .statements import Statements
from .upkeep import Upkeep

# How long the store may take with what must end: in good order, and at once.
RELEASE_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a worker was told; `boot` names this process, `holder` is who its leases name."""

    handlers: Mapping[str, Handler]
    queues: Sequence[str]
    concurrency: int
    prefetch: int
    lease_seconds: float
    boot: str
    instance: str | None
    holder: str
    poll_seconds: float
    sweep_interval_seconds: float
    drain_seconds: float
    work_days: float | None
    tools: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has come to its end."""

    attempt: Attempt
    outcome: Outcome


# An attempt by itself has completed, and its end is to be written.
Happening: TypeAlias = Attempt | Ended | Literal["rung", "beat", "stop"]


class Engine:
    """Runs items until it is stopped.

    `async_store` and its `loop` are given where handlers may be coroutines of that loop.
    """

    def __init__(self, plan: Plan, store: Store, async_store: Any = None, loop: Any = None) -> None:
        self.counts: Counter[Outcome] = Counter()
        self.stops = 0
        self._plan = plan
        self._store = store
        self._async_store = async_store
        self._loop = loop
        self._happened: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._crew: Crew[Callable[[], None]] = Crew(plan.concurrency, _call)
        self._loop_crew: LoopCrew[Attempt] | None = None
        if async_store is not None and all(map(is_async, plan.handlers.values())):
            self._loop_crew = LoopCrew(plan.concurrency, self._serve_here, loop)
        # An item of a session locks its tree, and no tree has to wait for another.
        self._gathering = Gathering(self._complete)
        self._statements = Statements(Endings(store.runtime))
        self._attempts: dict[Kept, Attempt] = {}
        self._completed: list[Attempt] = []
        self._until_empty = False
        self._lost: set[int] = set()
        self._is_rung = True
        self._has_more = False
        self._pause_seconds = 0.0
        self._look_at = 0.0
        self._keeper = Keeper.of(store.runtime)
        self._upkeep = Upkeep(store, plan.sweep_interval_seconds, plan.work_days, self._ring)

    def stop(self) -> None:
        """Take nothing more and drain; a second time, stop at once. Safe in a signal handler."""
        self.stops += 1
        self._happened.put("stop")

    def run(self, *, until_empty: bool) -> None:
        """Recover, then work until stopped, or until nothing is ready and nothing runs."""
        self._until_empty = until_empty
        self._recover()
        self._upkeep.start()
        forget = self._store.runtime.signals.watch(map(topic, self._plan.queues), self._ring)
        try:
            while not self.stops:
                self._turn()
                if until_empty and self._is_empty():
                    break
                self._watch_leases()
                self._receive(self._timeout())
        finally:
            forget()
            self._drain()
            self._crew.close()
            if self._loop_crew is not None:
                self._loop_crew.close()
            within(STOP_SECONDS_MAX, self._upkeep.stop)
            for attempt in self._attempts.values():
                self._keeper.drop(attempt.kept)

    def _ring(self) -> None:
        self._happened.put("rung")

    def _recover(self) -> None:
        """Bring the store in order; one that cannot be reached now is waited for."""
        while not self.stops:
            try:
                self._recover_once()
            except PASSING as error:
                self._back_off("recovery", error)
                self._receive(self._pause_seconds)
            else:
                self._pause_seconds = 0.0
                return

    def _recover_once(self) -> None:
        plan = self._plan
        if self._async_store is None:
            self._store.recover(plan.boot, instance=plan.instance, tools=plan.tools)
        else:
            # In the loop, because the hooks of tools may be coroutines.
            steps = self._async_store.recover(plan.boot, instance=plan.instance, tools=plan.tools)
            asyncio.run_coroutine_threadsafe(steps, self._loop).result()

    # Claiming

    def _room(self, leaving: int = 0) -> int:
        """Return how many items to ask for: none until half of what may wait here is used up."""
        room = self._plan.concurrency + self._plan.prefetch + leaving - len(self._attempts)
        return room if room > self._plan.prefetch // 2 else 0

    def _is_empty(self) -> bool:
        if self._attempts or self._is_rung or self._has_more or self._pause_seconds:
            return False
        return not self._lost or not self._has_undone()

    def _has_undone(self) -> bool:
        """Tell whether an item whose lease was lost here is still to be done, by anybody."""
        try:
            self._lost = self._ask(Statements.undone, self._lost)
        except PASSING as error:
            self._back_off("a look at lost items", error)
        return bool(self._lost)

    def _is_pausing(self) -> bool:
        return self._pause_seconds > 0 and time.monotonic() < self._look_at

    def _turn(self) -> None:
        """Complete what has been done, and take more: in one commit where more is known to wait."""
        if completed := self._take_completed():
            room = self._room(len(completed)) if self._has_more and not self._is_pausing() else 0
            asked_at = uptime_seconds()
            taken = self._complete(completed, self._wish(room) if room else None)
            self._receive(0)
            if room and taken is not None:
                self._accept(taken, room, asked_at)
        self._take_more()

    def _take_more(self) -> None:
        room = self._room()
        is_due = time.monotonic() >= self._look_at
        if not room or self._is_pausing() or not (self._has_more or self._is_rung or is_due):
            return
        try:
            if self._has_more or self._look():
                asked_at = uptime_seconds()
                _, taken = self._ask(Statements.turn, (), self._wish(room))
                self._accept(taken, room, asked_at)
        except PASSING as error:
            # Should the claim have been made all the same, its leases run out and are swept.
            self._back_off("a claim", error)
        else:
            self._pause_seconds = 0.0

    def _ask(self, operation: Any, *arguments: Any) -> Any:
        return self._store.runtime.driver.run(Call(operation, self._statements, arguments))

    def _look(self) -> bool:
        """Tell whether something is ready; reading costs less than asking for it."""
        self._look_at = time.monotonic() + self._plan.poll_seconds * random.uniform(0.5, 1)
        self._is_rung = False
        is_ready, due_seconds = self._ask(Statements.look, self._plan.queues)
        if due_seconds is not None:
            self._upkeep.expect(max(0.0, due_seconds))
        return bool(is_ready)

    def _wish(self, room: int) -> Claim:
        plan = self._plan
        return Claim(plan.holder, room, plan.queues, plan.lease_seconds)

    def _accept(self, taken: Sequence[Row], room: int, asked_at: float) -> None:
        """Keep the leases of new items, and have them run as soon as threads are free."""
        self._has_more = len(taken) == room
        lease_seconds = self._plan.lease_seconds
        ready = []
        for row in taken:
            attempt = Attempt(row, self._store, lease_seconds, asked_at, self._renewed)
            self._keeper.keep(attempt.kept)
            before = self._running(attempt.number)
            self._attempts[attempt.kept] = attempt
            if before is None:
                ready.append(attempt)
            else:
                # Its lease was lost and its handler still runs: never two of one item in a process.
                before.successor = attempt
        self._hand_out(ready)

    def _running(self, number: int) -> Attempt | None:
        return next((a for a in self._attempts.values() if a.number == number), None)

    # Running

    def _hand_out(self, attempts: Sequence[Attempt]) -> None:
        """Have attempts run as soon as there is somebody free to do so."""
        here, in_threads = [], []
        for attempt in attempts:
            if self._loop_crew is not None and attempt.item.type in self._plan.handlers:
                here.append(attempt)
            else:
                in_threads.append(functools.partial(self._serve, attempt))
        if self._loop_crew is not None and here:
            self._loop_crew.put(here)
        self._crew.put(in_threads)

    def _serve(self, attempt: Attempt) -> None:
        """Run an attempt on one of the crew's threads."""
        if attempt.begin():
            self._conclude(attempt, functools.partial(self._run, attempt))

    async def _serve_here(self, attempt: Attempt) -> None:
        """Run an attempt in the event loop; a thread writes its outcome, if that may block."""
        if not attempt.begin():
            return
        handler = self._plan.handlers[attempt.item.type]
        conclude = await attempt.run_here(handler, self._async_store)
        self._crew.put([functools.partial(self._conclude, attempt, conclude)])

    def _conclude(self, attempt: Attempt, conclude: Callable[[], Outcome | None]) -> None:
        outcome: Outcome | None = "lost"
        try:
            outcome = conclude()
        except Exception:
            log.exception("work item %s could not be ended", attempt.item.id)
        if outcome is not None:
            self._tell(attempt, outcome)
        elif attempt.item.root_id is None:
            self._happened.put(attempt)
        else:
            self._gathering.add(attempt.item.root_id, attempt)

    def _complete(
        self, attempts: Sequence[Attempt], claim: Claim | None = None
    ) -> Sequence[Row] | None:
        """Complete attempts in one commit; where that fails, each by itself.

        With a claim, return what it took, None if it was not made.
        """
        held = []
        for attempt in attempts:
            if attempt.is_lost:
                self._tell(attempt, attempt.lose())
            else:
                held.append(attempt)
        if not held and claim is None:
            return None
        ended = [(attempt.item, attempt.ending) for attempt in held]
        try:
            found, taken = self._ask(Statements.turn, ended, claim)
        except Exception as error:
            # One of them may be the cause; the others shall not wait for it.
            log.info("%s items are completed one by one: %s", len(held), error)
            for attempt in held:
                attempt.unknown = error if isinstance(error, CommitUnknown) else None
                in_thread(functools.partial(self._conclude, attempt, attempt.complete))
            return None
        for attempt, row in zip(held, found, strict=True):
            self._tell(attempt, attempt.completed(row))
        return cast("list[Row]", taken)

    def _take_completed(self) -> Sequence[Attempt]:
        completed, self._completed = self._completed, []
        return completed

    def _tell(self, attempt: Attempt, outcome: Outcome) -> None:
        self._keeper.drop(attempt.kept)
        self._happened.put(Ended(attempt, outcome))

    def _run(self, attempt: Attempt) -> Outcome | None:
        handler = self._plan.handlers.get(attempt.item.type)
        if handler is None:
            known = ", ".join(sorted(self._plan.handlers))
            return attempt.refuse(
                f"the worker has no handler for type {attempt.item.type!r}, only for {known}"
            )
        return attempt.run(handler, self._async_store, self._loop)

    def _end(self, ended: Ended) -> None:
        attempt = ended.attempt
        if self._attempts.pop(attempt.kept, None) is None:
            return
        self.counts[ended.outcome] += 1
        if ended.outcome == "lost" and self._until_empty:
            self._lost.add(attempt.number)
        if ended.outcome == "retried":
            self._upkeep.expect(attempt.delay_seconds)
        # What it submitted or gave back may ring late; only a look says that nothing is left.
        self._is_rung |= self._until_empty
        if attempt.successor is not None:
            self._hand_out([attempt.successor])

    # Leases

    def _renewed(self, attempt: Attempt, row: Row | None) -> None:
        """Take in what a heartbeat brought."""
        if row is None:
            self._happened.put("beat")
        elif row["cancel_requested"]:
            attempt.cancel()

    def _watch_leases(self) -> None:
        """Stop handlers whose lease was lost, or was not renewed in time."""
        for attempt in self._attempts.values():
            if attempt.is_lost and not attempt.has_ended:
                attempt.lose()

    # Waiting

    def _timeout(self) -> float:
        watch_seconds = self._plan.lease_seconds / 10
        if self._completed:
            return 0.0
        if not self._room():
            return watch_seconds
        if (self._has_more or self._is_rung) and not self._is_pausing():
            return 0.0
        return max(0.0, min(self._look_at - time.monotonic(), watch_seconds))

    def _receive(self, seconds: float) -> None:
        """Wait for something to happen, and take in everything that has."""
        try:
            happened = (
                self._happened.get(timeout=seconds) if seconds else self._happened.get_nowait()
            )
            while True:
                if isinstance(happened, Ended):
                    self._end(happened)
                elif isinstance(happened, Attempt):
                    self._completed.append(happened)
                elif happened == "rung":
                    self._is_rung = True
                happened = self._happened.get_nowait()
        except queue.Empty:
            return

    def _back_off(self, what: str, error: HoldfastError) -> None:
        self._is_rung = True
        self._pause_seconds = min(
            max(BACKOFF_SECONDS, self._pause_seconds * 2), BACKOFF_SECONDS_MAX
        )
        self._look_at = time.monotonic() + self._pause_seconds * random.uniform(0.5, 1)
        log.warning("%s failed and will be tried again: %s", what, error)

    # Stopping

    def _drain(self) -> None:
        """Give back what was not started, let the rest finish for a while, then give that back."""
        for attempt in self._attempts.values():
            attempt.is_draining = True
        self._give_back([attempt for attempt in self._attempts.values() if attempt.begin()])
        deadline = time.monotonic() + self._plan.drain_seconds
        while self._attempts and self.stops < 2 and (left := deadline - time.monotonic()) > 0:
            self._complete(self._take_completed())
            self._watch_leases()
            self._receive(0 if self._completed else min(left, self._plan.lease_seconds / 10))
        # What has returned by now is done, and better completed than done again.
        self._receive(0)
        within(STOP_SECONDS_MAX, functools.partial(self._complete, self._take_completed()))
        self._receive(0)
        unfinished = list(self._attempts.values())
        for attempt in unfinished:
            log.warning("work item %s is given back while its handler runs", attempt.item.id)
            attempt.give_up()
        self._give_back(unfinished)

    def _give_back(self, attempts: Sequence[Attempt]) -> None:
        ended: list[Ended] = []

        def release() -> None:
            for attempt in attempts:
                ended.append(Ended(attempt, attempt.release()))
                self._keeper.drop(attempt.kept)

        if attempts:
            is_urgent = self.stops > 1
            within(STOP_SECONDS_MAX if is_urgent else RELEASE_SECONDS_MAX, release)
            for each in list(ended):
                self._end(each)


def _call(job: Callable[[], None]) -> None:
    job()


def within(seconds: float, function: Callable[[], object]) -> None:
    """Run a function, and wait for it no longer than this."""
    thread = Thread(function, "holdfast-stopping")
    thread.start()
    thread.join(seconds)

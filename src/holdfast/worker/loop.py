"""The worker's loop, for sync and async stores: it claims, dispatches, watches leases and drains.

It runs on threads and a sync driver, also for an async store, so that a handler that blocks the
event loop stops neither the heartbeat nor the other items. All its events arrive in one queue,
which a signal handler may write to as well.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from ..dataclass import dataclass
from ..errors import CommitUnknown, HoldfastError, InProgress
from ..formatting import plural
from ..kernel.flow import in_thread, is_async
from ..kernel.operation import Call, Row, operation
from ..leases import Keeper, Kept, lease_milliseconds, uptime_seconds
from ..peers.uptake import Ended, Taken, TakenUp
from ..store import Store
from ..work import topic
from ..work.claims import Claim, find_ready, not_ended
from ..work.transitions import Finished, turn
from .abandoned import STOP_SECONDS, AbandonedHandlers, log_losses
from .attempts import (
    BACKOFF_SECONDS,
    BACKOFF_SECONDS_MAX,
    TRANSIENT,
    AttemptOutcome,
    Handler,
    HandlerRun,
    log,
    run_in_loop,
)
from .inbox import Delivered, Inbox, Intake, ServiceTurn
from .pools import GroupCommit, TaskPool, ThreadPool, within
from .upkeep import Upkeep
from .verification import Verification

# How long to wait for the store to release items: normally, and after a second stop.
RELEASE_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 2.0
WATCH_SECONDS_MAX = 1.0
# How long an item that was claimed ahead may wait for its handler before it is given back.
AHEAD_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of a worker. `boot` names this process, `holder` is the name in its leases."""

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
    inbox: Inbox | None = None
    turn: ServiceTurn | None = None


@dataclass(frozen=True, slots=True)
class EndedWithout:
    """An item that was ended although its handler still runs."""

    attempt: HandlerRun
    outcome: AttemptOutcome


# A run with an outcome has ended; a run alone has a completion to be written.
LoopEvent: TypeAlias = (
    HandlerRun
    | Delivered
    | EndedWithout
    | tuple[HandlerRun, AttemptOutcome]
    | Literal["rung", "renewed", "stop"]
)


class WorkerLoop:
    """Runs items until it is stopped.

    `async_store` and `loop` are for handlers that are coroutines of that loop.
    """

    def __init__(
        self, options: WorkerOptions, store: Store, async_store: Any = None, loop: Any = None
    ) -> None:
        self.counts: Counter[AttemptOutcome] = Counter()
        self.stops = 0
        self._options = options
        self._store = store
        self._async_store = async_store
        self._loop = loop
        self._events: queue.SimpleQueue[LoopEvent] = queue.SimpleQueue()
        self._threads: ThreadPool[Callable[[], None]] = ThreadPool(
            options.concurrency, lambda job: job()
        )
        self._tasks: TaskPool[HandlerRun] | None = None
        if async_store is not None and all(map(is_async, options.handlers.values())):
            self._tasks = TaskPool(options.concurrency, self._serve_here, loop)
        # Completing an item of a session locks its tree; no tree has to wait for another. The turn
        # of a service locks only trees that are free.
        self._by_tree = GroupCommit(partial(self._complete, waits=True))
        self._service_turn = None if store.runtime.is_remote else options.turn
        self._attempts: dict[Kept, HandlerRun] = {}
        self.abandoned = AbandonedHandlers(options.concurrency, self._resize)
        self._returned: list[HandlerRun] = []
        self._until_empty = False
        self._returns = self._returns_before_claim = self._ahead = 0
        self._lost: set[int] = set()
        self._is_rung = True
        self._has_more = False
        self._pause_seconds = 0.0
        self._poll_at = 0.0
        self._terms = (store, options.lease_seconds)
        self._keeper = Keeper.of(store.runtime)
        # On SQLite whatever another process writes rings all topics.
        self._rings_are_exact = store.runtime.driver.dialect == "postgres"
        self._ring: Callable[[], None] = partial(self._events.put, "rung")
        self._upkeep = Upkeep(store, options.sweep_interval_seconds, options.work_days, self._ring)
        self._verification: Verification | None = None
        if options.tools:
            self._verification = Verification(options.sweep_interval_seconds, self._recover_once)

    def stop(self) -> None:
        """Claim nothing more and drain; a second time, stop at once. Safe in a signal handler."""
        self.stops += 1
        self._events.put("stop")

    def run(self, *, until_empty: bool) -> None:
        """Recover, then run items until stopped, or until nothing is ready or running."""
        self._until_empty = until_empty
        self._recover()
        self._upkeep.start()
        if self._verification is not None:
            self._verification.start()
        inbox = self._options.inbox
        if inbox is not None:
            inbox.start(Intake(self._store, self._claim(1), self._room, self._events.put))
        unwatch = self._store.runtime.signals.watch(map(topic, self._options.queues), self._ring)
        try:
            while not self.stops:
                self._turn()
                if until_empty and self._is_empty():
                    break
                self._watch_leases()
                self._give_back()
                self._receive(self._timeout())
        finally:
            unwatch()
            if inbox is not None:
                within(STOP_SECONDS_MAX if self.stops > 1 else RELEASE_SECONDS_MAX, inbox.stop)
            self._drain()
            self._threads.close()
            if self._tasks is not None:
                self._tasks.close()
            within(STOP_SECONDS_MAX, self._upkeep.stop)
            if self._verification is not None:
                within(STOP_SECONDS_MAX, self._verification.stop)
            for kept in self._attempts:
                self._keeper.drop(kept)
            self.abandoned.leave()

    def _recover(self) -> None:
        """Recover the effects and leases of dead owners; retry while the store is unavailable."""
        while not self.stops:
            try:
                self._recover_once(self._options.instance)
            except TRANSIENT as error:
                self._back_off("recovery", error)
                self._receive(self._pause_seconds)
            else:
                self._pause_seconds = 0.0
                return

    def _recover_once(self, instance: str | None = None) -> None:
        """Recover; later than at the start without the instance, which a successor may have."""
        options = self._options
        given: dict[str, Any] = {"instance": instance, "tools": options.tools}
        if self._async_store is None:
            self._store.recover(options.boot, **given)
        else:
            # In the loop, because the hooks of tools may be coroutines.
            steps = self._async_store.recover(options.boot, **given)
            run_in_loop(steps, self._loop)

    # Claiming

    def _room(self, leaving: int = 0) -> int:
        """Return how many items to claim: none until half of the prefetched ones are used up.

        A turn of a service takes longer than many a handler. So that no slot is idle until the next
        one, it claims for those that will become free meanwhile: as many as in the last turn.
        """
        slots = self._options.concurrency + self._options.prefetch + self._ahead
        room = slots + leaving - len(self._attempts)
        return room if room > self._options.prefetch // 2 else 0

    def _is_empty(self) -> bool:
        if self._attempts or self._is_rung or self._has_more or self._pause_seconds:
            return False
        try:
            # An item whose lease was lost here may be run again by any worker.
            self._lost = self._ask(not_ended, self._lost) if self._lost else set()
        except TRANSIENT as error:
            self._back_off("reading lost items", error)
        return not self._lost

    def _is_pausing(self) -> bool:
        return self._pause_seconds > 0 and time.monotonic() < self._poll_at

    def _turn(self) -> None:
        """Complete returned items and claim more; in one commit if more are known to be ready."""
        if returned := self._take_returned():
            is_told = self._is_rung and self._rings_are_exact
            may_claim = (self._has_more or is_told) and not self._is_pausing()
            room = self._room(len(returned)) if may_claim else 0
            if room:
                self._is_rung &= not is_told
            asked_at = uptime_seconds()
            taken = self._complete(returned, self._claim(room) if room else None)
            self._receive(0)
            if room and taken is not None:
                self._accept(*taken, room, asked_at)
            elif room:
                # The claim was not made.
                self._is_rung = True
        room = self._room()
        is_due = time.monotonic() >= self._poll_at
        if not room or self._is_pausing() or not (self._has_more or self._is_rung or is_due):
            return
        try:
            # Without a ring of its queues, a read costs less than a claim.
            is_told = self._is_rung and self._rings_are_exact and not is_due
            if is_told and not self._has_more:
                self._is_rung = False
            if self._has_more or is_told or self._poll():
                asked_at = uptime_seconds()
                self._accept(*self._take(self._claim(room)), room, asked_at)
        except TRANSIENT as error:
            # If the claim was made nevertheless, its leases expire and are swept.
            self._back_off("a claim", error)
        else:
            self._pause_seconds = 0.0

    def _take(self, claim: Claim) -> Taken:
        """Claim items, and take up their sessions if the handlers are those of a service."""
        try:
            return self._run_turn((), claim)[1]
        except TRANSIENT:
            raise
        except Exception as error:
            if self._service_turn is None:
                raise
            # What is wrong with one of them is found out by its own attempt.
            log.info("items are claimed without their sessions: %s", error)
        return self._run_turn((), replace(claim, drives=False), waits=True)[1]

    def _run_turn(
        self, ended: Finished, claim: Claim | None, *, waits: bool = False
    ) -> tuple[Ended, Taken]:
        """Complete items and claim others in one commit; a service does not wait for any tree."""
        runtime, service_turn = self._store.runtime, self._service_turn
        if service_turn is not None and not waits:
            return runtime.driver.run(Call(service_turn, runtime, (ended, claim)))  # type: ignore[no-any-return]
        found, claimed = self._ask(turn, ended, claim)
        return dict(enumerate(found)), (claimed, {})

    def _ask(self, asked: operation[..., Any], *arguments: Any) -> Any:
        return self._store.runtime.driver.run(Call(asked, None, arguments))

    def _poll(self) -> bool:
        """Whether an item is ready; a read costs less than a claim."""
        self._poll_at = time.monotonic() + self._options.poll_seconds * random.uniform(0.5, 1)
        self._is_rung = False
        runtime = self._store.runtime
        call = Call(find_ready, runtime, (self._options.queues,))
        is_ready, due_seconds = runtime.driver.run(call)
        if due_seconds is not None:
            self._upkeep.expect(max(0.0, due_seconds))
        return bool(is_ready)

    def _claim(self, room: int) -> Claim:
        options = self._options
        lease_ms = lease_milliseconds(options.lease_seconds)
        drives = self._service_turn is not None
        self._returns_before_claim = self._returns
        return Claim(options.holder, room, options.queues, lease_ms, drives)

    def _accept(
        self, taken: Sequence[Row], given: Mapping[int, TakenUp], room: int, asked_at: float
    ) -> None:
        """Run items that were claimed."""
        if self._service_turn is not None:
            self._receive(0)
            returns = self._returns - self._returns_before_claim
            self._ahead = min(max(returns, self._ahead // 2), self._options.concurrency)
        self._has_more = len(taken) == room
        terms = (*self._terms, asked_at, self._renewed)
        self._keep([HandlerRun(row, *terms, taken_up=given.get(row["number"])) for row in taken])

    def _keep(self, attempts: Sequence[HandlerRun]) -> None:
        """Start renewing the leases of attempts, and dispatch them."""
        ready = []
        for attempt in attempts:
            self._keeper.keep(attempt.kept)
            before = [each for each in self._attempts.values() if each.number == attempt.number]
            self._attempts[attempt.kept] = attempt
            if before:
                # Its lease was lost while its handler still runs; one process never runs two.
                before[-1].successor = attempt
            elif not self._put_off(attempt):
                ready.append(attempt)
        self._dispatch(ready)

    def _follow(self, attempt: HandlerRun) -> None:
        """Run what has waited for an attempt to end."""
        if attempt.successor is not None and not self._put_off(attempt.successor):
            self._dispatch([attempt.successor])

    def _put_off(self, attempt: HandlerRun) -> bool:
        """Leave an item to others or to later if an abandoned handler of it still runs here."""
        if not self.abandoned.has_item(attempt.number):
            return False
        error = InProgress("the handler of an earlier attempt still runs in this process")
        if attempt.begin():
            in_thread(partial(self._conclude, attempt, partial(attempt.fail, error)))
        return True

    # Running

    def _dispatch(self, attempts: Sequence[HandlerRun]) -> None:
        """Run attempts as soon as a thread or task is free."""
        here, in_threads = [], []
        for attempt in attempts:
            attempt.dispatched_at = time.monotonic()
            if self._tasks is not None and attempt.item.type in self._options.handlers:
                here.append(attempt)
            else:
                in_threads.append(partial(self._serve, attempt))
        if self._tasks is not None and here:
            self._tasks.put(here)
        self._threads.put(in_threads)

    def _serve(self, attempt: HandlerRun) -> None:
        """Run an attempt on a thread."""
        if attempt.begin():
            self._conclude(attempt, partial(self._run, attempt))

    async def _serve_here(self, attempt: HandlerRun) -> None:
        """Run an attempt in the event loop; its outcome is written by a thread, as it may block."""
        if attempt.begin():
            handler = self._options.handlers[attempt.item.type]
            conclude = await attempt.run_here(handler, self._async_store)
            self._threads.put([partial(self._conclude, attempt, conclude)])

    def _run(self, attempt: HandlerRun) -> AttemptOutcome | None:
        handlers = self._options.handlers
        if (handler := handlers.get(attempt.item.type)) is None:
            known = ", ".join(sorted(handlers))
            return attempt.fail(
                f"the worker has no handler for type {attempt.item.type!r}, only for {known}"
            )
        return attempt.run(handler, self._async_store, self._loop)

    def _conclude(self, attempt: HandlerRun, conclude: Callable[[], AttemptOutcome | None]) -> None:
        outcome: AttemptOutcome | None = "lost"
        try:
            outcome = conclude()
        except Exception:
            log.exception("work item %s could not be ended", attempt.item.id)
        if outcome is not None:
            self._put_outcome(attempt, outcome)
        elif attempt.item.root_id is None or self._service_turn is not None:
            self._events.put(attempt)
        else:
            self._by_tree.add(attempt.item.root_id, attempt)

    def _complete(
        self, attempts: Sequence[HandlerRun], claim: Claim | None = None, *, waits: bool = False
    ) -> Taken | None:
        """Complete attempts in one commit or, if that fails, one by one.

        With a claim, return what was claimed, or None if it was not made. Unless it `waits` for
        them, attempts of a service whose trees are locked are left to threads.
        """
        held = []
        for attempt in attempts:
            if attempt.kept.is_lost:
                self._put_outcome(attempt, attempt.lose())
            else:
                held.append(attempt)
        if not held and claim is None:
            return None
        try:
            completions = [attempt.completion for attempt in held if attempt.completion]
            found, taken = self._run_turn(completions, claim, waits=waits)
        except Exception as error:
            # One of them may be the cause; the others must not wait for it.
            log.info("%s are completed one by one: %s", plural(len(held), "item"), error)
            for attempt in held:
                attempt.unknown = error if isinstance(error, CommitUnknown) else None
                in_thread(partial(self._conclude, attempt, attempt.complete))
            return None
        for index, attempt in enumerate(held):
            if index in found:
                self._put_outcome(attempt, attempt.completed(found[index]))
            else:
                in_thread(partial(self._by_tree.add, attempt.item.root_id or "", attempt))
        return taken

    def _take_returned(self) -> Sequence[HandlerRun]:
        returned, self._returned = self._returned, []
        return returned

    def _put_outcome(self, attempt: HandlerRun, outcome: AttemptOutcome) -> None:
        self._keeper.drop(attempt.kept)
        self._events.put((attempt, outcome))

    def _end(self, attempt: HandlerRun, outcome: AttemptOutcome) -> None:
        if self.abandoned.remove(attempt) or self._attempts.pop(attempt.kept, None) is None:
            return
        if outcome == "lost" and attempt.kept.is_lost:
            log_losses(self._store, [attempt])
        self._count(attempt, outcome)
        self._follow(attempt)

    def _abandon(self, attempt: HandlerRun, outcome: AttemptOutcome) -> None:
        """Give the slot of a handler that does not stop to others."""
        if self._attempts.pop(attempt.kept, None) is None:
            return
        self._keeper.drop(attempt.kept)
        self._count(attempt, outcome)
        self.abandoned.add(attempt)
        self._follow(attempt)

    def _end_cancelled(self, attempt: HandlerRun) -> None:
        self._events.put(EndedWithout(attempt, attempt.end_cancelled()))

    def _resize(self, abandoned: int) -> None:
        """Have as many threads or tasks more as abandoned handlers hold."""
        size = self._options.concurrency + abandoned
        self._threads.resize(size)
        if self._tasks is not None:
            self._tasks.resize(size)

    def _count(self, attempt: HandlerRun, outcome: AttemptOutcome) -> None:
        self.counts[outcome] += 1
        if outcome != "lost":
            attempt.acknowledge()
        if outcome == "lost" and self._until_empty:
            self._lost.add(attempt.number)
        if outcome == "retried":
            self._upkeep.expect(attempt.delay_seconds)
        # Its signals for items it submitted may come late; only a poll shows that none is left.
        self._is_rung |= self._until_empty

    # Leases and waiting

    def _renewed(self, attempt: HandlerRun, row: Row | None) -> None:
        """Handle the answer to a heartbeat."""
        if row is None:
            attempt.is_refused = True
            self._events.put("renewed")
            return
        attempt.extend()
        if row["cancel_requested"]:
            attempt.cancel()

    def _watch_leases(self) -> None:
        """Stop handlers whose lease was lost, or was not renewed in time; abandon stubborn ones."""
        running = [each for each in self._attempts.values() if not each.has_ended]
        lost = [attempt for attempt in running if attempt.kept.is_lost]
        for attempt in lost:
            attempt.lose()
        log_losses(self._store, lost)
        for attempt in running:
            # A cancelled item is still held: its handler may finish what it is doing.
            more_seconds = 0.0 if attempt.kept.is_lost else self._options.drain_seconds
            if not attempt.stops_for(max(STOP_SECONDS, more_seconds)):
                continue
            if self.abandoned.has_room(attempt):
                self._leave(attempt)

    def _give_back(self) -> None:
        """Leave items that were claimed ahead to others, if the handlers have become slow."""
        ahead = len(self._attempts) - self._options.concurrency - self._options.prefetch
        if ahead <= 0:
            return
        waiting = [each for each in self._attempts.values() if each.is_waiting]
        for attempt in waiting[-ahead:]:
            is_late = time.monotonic() - attempt.dispatched_at > AHEAD_SECONDS_MAX
            if is_late and attempt.begin():
                self._ahead = 0
                in_thread(partial(self._conclude, attempt, attempt.release))

    def _leave(self, attempt: HandlerRun) -> None:
        """Wait no longer for a handler that was told to stop."""
        if attempt.kept.is_lost:
            self._abandon(attempt, "lost")
        else:
            attempt.is_ending = True
            in_thread(partial(self._end_cancelled, attempt))

    @property
    def _watch_seconds(self) -> float:
        return min(WATCH_SECONDS_MAX, self._options.lease_seconds / 10)

    def _timeout(self) -> float:
        watch_seconds = self._watch_seconds
        if self._returned:
            return 0.0
        if not self._room():
            return watch_seconds
        if (self._has_more or self._is_rung) and not self._is_pausing():
            return 0.0
        return max(0.0, min(self._poll_at - time.monotonic(), watch_seconds))

    def _receive(self, seconds: float) -> None:
        """Wait for an event, and handle all that have arrived."""
        try:
            event = self._events.get(bool(seconds), seconds or None)
            while True:
                if isinstance(event, tuple):
                    # One with a completion has been counted when its handler returned.
                    self._returns += event[0].completion is None
                    self._end(*event)
                elif isinstance(event, HandlerRun):
                    self._returns += 1
                    self._returned.append(event)
                elif isinstance(event, Delivered):
                    given = (event.row, *self._terms, event.asked_at, self._renewed)
                    self._keep([HandlerRun(*given, envelope=event.envelope)])
                elif isinstance(event, EndedWithout):
                    self._abandon(event.attempt, event.outcome)
                elif event == "rung":
                    self._is_rung = True
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _back_off(self, what: str, error: HoldfastError) -> None:
        self._is_rung = True
        self._pause_seconds = min(
            max(BACKOFF_SECONDS, self._pause_seconds * 2), BACKOFF_SECONDS_MAX
        )
        self._poll_at = time.monotonic() + self._pause_seconds * random.uniform(0.5, 1)
        log.warning("%s failed and will be retried: %s", what, error)

    # Stopping

    def _drain(self) -> None:
        """Release items that were not started, wait for the others, then release the rest."""
        self._receive(0)
        for attempt in self._attempts.values():
            attempt.is_draining = True
        self._release([attempt for attempt in self._attempts.values() if attempt.begin()])
        deadline = time.monotonic() + self._options.drain_seconds
        while self._attempts and self.stops < 2 and (left := deadline - time.monotonic()) > 0:
            self._complete(self._take_returned(), waits=True)
            self._watch_leases()
            self._receive(0 if self._returned else min(left, self._watch_seconds))
        # Completing items that have returned by now is better than running them again.
        self._receive(0)
        within(STOP_SECONDS_MAX, partial(self._complete, self._take_returned(), waits=True))
        self._receive(0)
        unfinished = list(self._attempts.values())
        for attempt in unfinished:
            log.warning("work item %s is released while its handler runs", attempt.item.id)
            attempt.give_up()
        self._release(unfinished)

    def _release(self, attempts: Sequence[HandlerRun]) -> None:
        ended: list[tuple[HandlerRun, AttemptOutcome]] = []

        def release() -> None:
            for attempt in attempts:
                ended.append((attempt, attempt.release()))
                self._keeper.drop(attempt.kept)

        if attempts:
            within(STOP_SECONDS_MAX if self.stops > 1 else RELEASE_SECONDS_MAX, release)
            for each in list(ended):
                self._end(*each)

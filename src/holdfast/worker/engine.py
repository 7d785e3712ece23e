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
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..errors import HoldfastError
from ..kernel.operation import Call, Op, Row, one, operation, query
from ..leases import Keeper, Kept, uptime_seconds
from ..store import Store
from ..work import topic
from ..work.claiming import heartbeat
from ..work.items import Item
from .attempts import BACKOFF_SECONDS, BACKOFF_SECONDS_MAX, PASSING, Attempt, Handler, Outcome, log
from .upkeep import Upkeep

# How long the store may take with what must end: in good order, and at once.
RELEASE_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 2.0

READY = "EXISTS (SELECT 1 FROM hf_work WHERE state = 'pending' AND queue = :queue{index})"
LOOK = """
SELECT {ready} AS is_ready, :now AS now,
    (SELECT min(available_at) FROM hf_work WHERE state = 'scheduled') AS due_at
"""


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


Happening: TypeAlias = Ended | Literal["rung", "beat", "stop"]


class Statements:
    """The worker's own transactions."""

    @query
    def look(self, queues: Sequence[str]) -> Op[tuple[bool, float | None]]:
        """Return whether something is ready, and in how many seconds something is due."""
        named = {f"queue{index}": name for index, name in enumerate(queues)}
        found = yield from one(_look_at(len(queues)), **named)
        assert found is not None
        due_at = found["due_at"]
        return bool(found["is_ready"]), None if due_at is None else (due_at - found["now"]) / 1000

    @operation
    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Prolong all leases in one statement; those missing from the answer are lost."""
        return (yield from heartbeat(held, lease_seconds))


@functools.cache
def _look_at(count: int) -> str:
    return LOOK.format(ready=" OR ".join(READY.format(index=index) for index in range(count)))


class Engine:
    """Runs items until it is stopped.

    `beats` is the driver that leases are renewed with; `async_store` and its `loop` are given
    where handlers may be coroutines of that loop.
    """

    def __init__(
        self, plan: Plan, store: Store, beats: Any, async_store: Any = None, loop: Any = None
    ) -> None:
        self.counts: Counter[Outcome] = Counter()
        self.stops = 0
        self._plan = plan
        self._store = store
        self._beats = beats
        self._async_store = async_store
        self._loop = loop
        self._happened: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._attempts: dict[Kept, Attempt] = {}
        self._threads = 0
        self._until_empty = False
        self._is_rung = True
        self._has_more = False
        self._pause_seconds = 0.0
        self._look_at = 0.0
        self._keeper = Keeper(self._renew)
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
        forget = self._store.signals.watch(map(topic, self._plan.queues), self._ring)
        try:
            while not self.stops:
                self._take_more()
                if until_empty and self._is_empty():
                    break
                self._watch_leases()
                self._receive(self._timeout())
        finally:
            forget()
            self._drain()
            for _ in range(self._threads):
                self._inbox.put(None)
            within(STOP_SECONDS_MAX, self._upkeep.stop)
            within(STOP_SECONDS_MAX, self._keeper.close)

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

    def _room(self) -> int:
        """Return how many items to ask for: none until half of what may wait here is used up."""
        room = self._plan.concurrency + self._plan.prefetch - len(self._attempts)
        return room if room > self._plan.prefetch // 2 else 0

    def _is_empty(self) -> bool:
        return not (self._attempts or self._is_rung or self._has_more or self._pause_seconds)

    def _is_pausing(self) -> bool:
        return self._pause_seconds > 0 and time.monotonic() < self._look_at

    def _take_more(self) -> None:
        room = self._room()
        is_due = time.monotonic() >= self._look_at
        if not room or self._is_pausing() or not (self._has_more or self._is_rung or is_due):
            return
        try:
            if self._has_more or self._look():
                self._claim(room)
        except PASSING as error:
            # Should the claim have been made all the same, its leases run out and are swept.
            self._back_off("a claim", error)
        else:
            self._pause_seconds = 0.0

    def _look(self) -> bool:
        """Tell whether something is ready; reading costs less than asking for it."""
        self._look_at = time.monotonic() + self._plan.poll_seconds * random.uniform(0.5, 1)
        self._is_rung = False
        call = Call(Statements.look, Statements(), (self._plan.queues,))
        is_ready, due_seconds = self._store.driver.run(call)
        if due_seconds is not None:
            self._upkeep.expect(max(0.0, due_seconds))
        return bool(is_ready)

    def _claim(self, room: int) -> None:
        plan = self._plan
        asked_at = uptime_seconds()
        found = self._store.work.claim(
            plan.holder, limit=room, queues=list(plan.queues), lease_seconds=plan.lease_seconds
        )
        self._has_more = len(found) == room
        for item in found:
            self._accept(item, asked_at)

    def _accept(self, item: Item, asked_at: float) -> None:
        """Keep an item's lease, and have it run as soon as a thread is free."""
        item.lease_seconds = self._plan.lease_seconds
        kept = self._keeper.keep(item.number, item.fence, item.lease_seconds, asked_at)
        attempt = Attempt(item, self._store, kept)
        before = next((a for a in self._attempts.values() if a.number == item.number), None)
        self._attempts[kept] = attempt
        if before is not None:
            # Its lease was lost and its handler still runs: never two of one item in a process.
            before.successor = attempt
            return
        self._inbox.put(attempt)
        if self._threads < min(self._plan.concurrency, len(self._attempts)):
            self._threads += 1
            name = f"holdfast-worker-{self._threads}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    # Running

    def _serve(self) -> None:
        """Run one attempt after the other, on a thread of its own."""
        while (attempt := self._inbox.get()) is not None:
            if not attempt.begin():
                continue
            outcome: Outcome = "lost"
            try:
                outcome = self._run(attempt)
            except Exception:
                log.exception("work item %s could not be ended", attempt.item.id)
            finally:
                self._keeper.drop(attempt.kept)
                self._happened.put(Ended(attempt, outcome))

    def _run(self, attempt: Attempt) -> Outcome:
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
        if ended.outcome == "retried":
            self._upkeep.expect(attempt.delay_seconds)
        # What it submitted or gave back may ring late; only a look says that nothing is left.
        self._is_rung |= self._until_empty
        if attempt.successor is not None:
            self._inbox.put(attempt.successor)

    # Leases

    def _renew(self, due: Sequence[Kept]) -> Sequence[Kept]:
        """Renew the leases that are due, and all others with them, in one statement."""
        attempts = dict(self._attempts)
        held = {*due, *attempts}
        began = uptime_seconds()
        # A lost attempt may still run beside the next one of its item; the newest fence counts.
        fences = {kept.number: kept.fence for kept in sorted(held, key=lambda kept: kept.fence)}
        call = Call(Statements.renew, Statements(), (fences, self._plan.lease_seconds))
        try:
            found = self._beats.run(call)
        except HoldfastError:
            raise
        except Exception as error:
            # The thread that renews leases goes on whatever happens.
            raise HoldfastError(f"a heartbeat failed: {error}") from error
        renewed = []
        for kept in held:
            row = found.get(kept.number) if fences[kept.number] == kept.fence else None
            if row is None:
                kept.lose()
                continue
            kept.renewed_at = began
            renewed.append(kept)
            if row["cancel_requested"] and kept in attempts:
                attempts[kept].cancel()
        self._happened.put("beat")
        return renewed

    def _watch_leases(self) -> None:
        """Stop handlers whose lease was lost, or was not renewed in time."""
        for attempt in self._attempts.values():
            if attempt.is_lost and not attempt.has_ended:
                attempt.lose()

    # Waiting

    def _timeout(self) -> float:
        watch_seconds = self._plan.lease_seconds / 10
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
            self._watch_leases()
            self._receive(min(left, self._plan.lease_seconds / 10))
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


def within(seconds: float, function: Callable[[], object]) -> None:
    """Run a function, and wait for it no longer than this."""
    thread = threading.Thread(target=function, name="holdfast-stopping", daemon=True)
    thread.start()
    thread.join(seconds)

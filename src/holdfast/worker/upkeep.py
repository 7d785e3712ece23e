"""A worker's background thread: it sweeps, promotes due items and prunes old ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import StoreClosed
from ..kernel.flow import Flow, run_flow
from ..kernel.nouns import Retention
from ..kernel.threads import Thread
from ..maintenance.retention import EFFECT_DAYS, KEY_DAYS, require_days
from ..store import Store
from .attempts import log

SWEEPS_PER_PASS = 20
RETENTION_SECONDS = 3600.0
RETENTION_STEPS_MAX = 400
# Items that become due shortly after each other are promoted together.
PASS_SECONDS_MIN = 0.05
# Of its own: a background thread must not disturb what a program makes of its seed.
_chance = random.Random()


class Upkeep:
    """A thread that sweeps at its interval, and earlier when a delayed item is due."""

    def __init__(
        self,
        store: Store,
        interval_seconds: float,
        work_days: float | None,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._interval_seconds = interval_seconds
        self._work_ms = None if work_days is None else require_days(work_days)
        self._wake = wake
        self._changed = threading.Condition()
        self._is_stopping = False
        self._next_at = time.monotonic() + self._pause()
        self._retention_at = time.monotonic() + _chance.uniform(0, RETENTION_SECONDS)
        self._thread = Thread(self._run, "holdfast-upkeep")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current transaction."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def expect(self, seconds: float) -> None:
        """Sweep again when an item is due, in this many seconds."""
        at = time.monotonic() + seconds + _chance.uniform(0, PASS_SECONDS_MIN)
        with self._changed:
            if at < self._next_at:
                self._next_at = at
                self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            with logged("the sweep failed and will be retried"):
                self._sweep()
            if self._work_ms is not None and time.monotonic() >= self._retention_at:
                self._retention_at = time.monotonic() + RETENTION_SECONDS * _chance.uniform(0.5, 1)
                with logged("pruning old items failed and will be retried"):
                    self._prune(self._work_ms)

    def _wait(self) -> bool:
        """Wait for the next pass; False if the thread is to stop."""
        with self._changed:
            while not self._is_stopping:
                left = self._next_at - time.monotonic()
                if left <= 0:
                    self._next_at = time.monotonic() + self._pause()
                    return True
                self._changed.wait(left)
        return False

    def _pause(self) -> float:
        return self._interval_seconds * _chance.uniform(0.5, 1)

    def _sweep(self) -> None:
        for _ in range(SWEEPS_PER_PASS):
            swept = self._store._sweep()
            if swept.promoted:
                # The promotion also sends a signal, but signals are not available everywhere.
                self._wake()
            if swept.next_due_ms is not None:
                self.expect(max(PASS_SECONDS_MIN, swept.next_due_ms / 1000))
            if not swept.has_more or self._is_stopping:
                return

    def _prune(self, work_ms: int) -> None:
        runtime = self._store.runtime
        if runtime.is_remote:
            return  # The server does that.
        key_ms, effect_ms = require_days(KEY_DAYS), require_days(EFFECT_DAYS)
        retention = Retention(work_ms=work_ms, key_ms=key_ms, effect_ms=effect_ms)
        for noun in reversed(runtime.nouns):
            run_flow(runtime.driver.twin(), self._bounded(noun.prune(runtime, retention)))

    def _bounded(self, steps: Flow[Any]) -> Flow[None]:
        """Run a flow for a bounded number of steps; the rest is left for the next pass."""
        answer = None
        for _ in range(RETENTION_STEPS_MAX):
            if self._is_stopping:
                break
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = yield step
        steps.close()


@contextmanager
def logged(failure: str) -> Iterator[None]:
    """Log an error of a background thread instead of raising it."""
    try:
        yield
    except StoreClosed:
        log.debug("the store is closed")
    except Exception:
        log.warning(failure, exc_info=True)

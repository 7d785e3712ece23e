"""Records outcomes that wait to be recorded with others, when they have waited long enough."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from ..errors import HoldfastError
from ..kernel.flow import Flow
from ..kernel.operation import PerStore, Runtime
from ..kernel.threads import Latch, Thread
from ..leases import LEAVE_SECONDS_MAX, Keeper, uptime_seconds

log = logging.getLogger("holdfast.effects")

# The longest that an outcome waits.
HOLD_SECONDS = 0.02


class Turn(Protocol):
    """Several calls that were issued together, to be made one after the other."""

    def make_way(self, id: str) -> Flow[None]:
        """Let another caller look for one of their effects.

        If its tool has returned, its outcome is recorded. If it has not begun, it is closed with
        those after it; each is issued again when its time comes.
        """
        raise NotImplementedError


class Recorder(PerStore):
    """One thread of a store. It starts with the first outcome that waits."""

    def __init__(self, runtime: Runtime) -> None:
        self.turns: dict[str, Turn] = {}
        """The turn that has issued an effect together with others, by the effect's id."""
        self._inbox: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        # A signal handler may enter while its thread holds the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closing = Latch()
        Keeper.of(runtime).at_close(self.close)

    def watch(self, record: Callable[[], None]) -> None:
        """Call a function in a moment, from the thread."""
        self._inbox.put((uptime_seconds() + HOLD_SECONDS, record))
        with self._lock:
            # An earlier call may have been interrupted before it started the thread.
            if self._thread is None or self._thread.ident is None:
                self._thread = Thread(self._run, "holdfast-recorder")
                self._thread.start()

    def close(self) -> None:
        """Call what was to be called in a moment, and end the thread."""
        self._closing.set()
        self._inbox.put(None)
        thread = self._thread
        if thread is not None and thread.ident not in {None, threading.get_ident()}:
            thread.join(LEAVE_SECONDS_MAX)

    def _run(self) -> None:
        while (watched := self._inbox.get()) is not None:
            due_at, record = watched
            left = due_at - uptime_seconds()
            # Those that are due soon are recorded now, so that many do not wake it one by one.
            if left > HOLD_SECONDS / 2:
                self._closing.wait(left)
            try:
                record()
            except BaseException as error:
                # Whoever holds the outcomes records them later.
                is_fault = not isinstance(error, HoldfastError)
                log.warning("outcomes could not be recorded yet: %s", error, exc_info=is_fault)

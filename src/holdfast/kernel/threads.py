"""Background threads and a latch that stay consistent when the caller's thread is interrupted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Thread(threading.Thread):
    """A daemon thread whose start may be interrupted like any other call."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        """Start it; after an interrupt, `ident` shows whether it was started."""
        if self.ident is not None:
            return  # By a signal handler, just before.
        handled = sys.exception()
        try:
            super().start()
        except RuntimeError as error:
            # An interrupt inside `start` can surface as an error of the lock it waits on.
            interrupt = error.__context__
            if interrupt is None or interrupt is handled:
                raise
            raise interrupt from None


class Latch:
    """A one-shot event with one waiting thread, which is safe to set from an interrupted thread.

    An interrupt can leave the lock inside `threading.Event` held, and its waiter never wakes.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Wake the waiting thread; later waits return at once."""
        self.is_set = True
        try:
            self._gate.release()
        except RuntimeError:
            return  # Already set.

    def wait(self, seconds: float) -> bool:
        """Wait until it is set or the time is up; return whether it is set."""
        if not self.is_set:
            self._gate.acquire(timeout=seconds)
        return self.is_set

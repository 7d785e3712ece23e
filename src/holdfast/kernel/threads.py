"""Threads of our own, which an interrupt of the caller's thread cannot harm."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Thread(threading.Thread):
    """A daemon thread whose start can be interrupted like any other call."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        """Start it; after an interrupt `ident` tells whether it was started."""
        handled = sys.exception()
        try:
            super().start()
        except RuntimeError as error:
            # An interrupt while `start` waits can end as an error of the lock that it waits with.
            interrupt = error.__context__
            if interrupt is None or interrupt is handled:
                raise
            raise interrupt from None


class Flag:
    """An event for which one thread waits, and which an interrupt cannot harm while it is set.

    The lock inside `threading.Event` can be left held; then whoever waits never wakes.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Wake the thread that waits, now and later."""
        self.is_set = True
        try:
            self._gate.release()
        except RuntimeError:
            return  # It was set before.

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, but no longer than this; return whether it is."""
        if not self.is_set:
            self._gate.acquire(timeout=seconds)
        return self.is_set

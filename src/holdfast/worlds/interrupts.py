"""Ctrl-C that waits while a system and what is known of it are changed together."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """Puts an interrupt off until the block has ended; a second one does not wait.

    Python interrupts the main thread only, and only if it has a handler of its own for the signal.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._is_pending = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._receive)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._is_pending:
            self._handler(signal.SIGINT, sys._getframe())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._handler(number, frame)
        self._is_pending = True

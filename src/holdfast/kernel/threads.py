"""Threads of our own."""

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

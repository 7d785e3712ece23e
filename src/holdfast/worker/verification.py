"""A worker's thread that verifies effects whose owner's lease has ended."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..kernel.threads import Latch, Thread
from .attempts import log
from .upkeep import logged

# Of its own: a background thread must not disturb what a program makes of its seed.
_chance = random.Random()


class Verification:
    """Verifies now and then; in a thread of its own, so that a slow hook delays nothing else."""

    def __init__(self, interval_seconds: float, verify: Callable[[], None]) -> None:
        self._interval_seconds = interval_seconds
        self._verify = verify
        self._ended = Latch()
        self._thread = Thread(self._run, "holdfast-verification")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the hook that runs."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_seconds * _chance.uniform(0.5, 1)):
            try:
                with logged("verifying effects failed and will be retried"):
                    self._verify()
            except BaseException as error:
                # Of a hook; it must not end this thread, which nobody would notice.
                log.error("a hook that verifies effects raised %s", type(error).__name__)

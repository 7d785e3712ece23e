"""A fan in a process of its own, which stands still while another one is measured.

DBOS and Absurd look for work every 20 ms even if there is none, and everybody has threads that wake
up now and then. None of that slows down the one whose turn it is, neither by the processor time nor
by the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from .keepers import Place
from .meshes import WAIT_SECONDS_MAX, Fan

STOP_SECONDS_MAX = 10.0


class FanApart:
    """A fan that is opened, measured and closed in a child process."""

    def __init__(self, kind: type[Fan], place: Place) -> None:
        self.name = kind.name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, place), daemon=True)
        self.process.start()
        theirs.close()
        with self._going():
            self._answer()

    def seconds(self, requests: int, peers: int) -> float:
        """Return how long so many requests take, each to so many peers."""
        with self._going():
            self._pipe.send((requests, peers))
            return self._answer()

    def close(self) -> None:
        """Stop serving, and end the process."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self.process.join(STOP_SECONDS_MAX)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    @contextlib.contextmanager
    def _going(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def _answer(self) -> float:
        if not self._pipe.poll(WAIT_SECONDS_MAX):
            raise TimeoutError(f"{self.name} gave no answer for {WAIT_SECONDS_MAX:.0f} seconds")
        try:
            seconds: float = self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process of {self.name} has ended; what it printed says why"
            ) from None
        return seconds


def _serve(pipe: Connection, kind: type[Fan], place: Place) -> None:
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(kind(place)) as fan:
        fan.open()
        # What was imported is not walked again by every collection of garbage.
        gc.freeze()
        pipe.send(0.0)
        while (order := pipe.recv()) is not None:
            pipe.send(_seconds(fan, *order))


def _seconds(fan: Fan, requests: int, peers: int) -> float:
    started = time.perf_counter()
    answers = fan.ask(requests, peers)
    seconds = time.perf_counter() - started
    if answers != [list(range(peers))] * requests:
        raise RuntimeError(f"{fan.name} gave {answers[:3]} …")
    return seconds

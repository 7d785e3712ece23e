"""A product in a process of its own, for libraries of which a process can have only one.

The process waits for orders, so that its rounds take turns with everybody's; it measures itself,
so that the pipe is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from .callers import Crowd, Product, Round, opened
from .keepers import Place
from .load import GRACE_SECONDS
from .measure import Figures

ROUNDS, AWAITED_ROUNDS, CROWDS = "rounds", "awaited rounds", "crowds"
STOP_SECONDS_MAX = 5.0


class ApartProduct(Product):
    """Another product, opened and called in a child process."""

    def __init__(self, place: Place, runner: asyncio.Runner, kind: type[Product]) -> None:
        super().__init__(place, runner)
        self._kind = kind

    def open(self) -> None:
        """Start the process and wait until its product is open."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._kind, self.place)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._stack.callback(self._stop)
        self._names: dict[str, list[str]] = self._answer(GRACE_SECONDS)

    def rounds(self) -> dict[str, Round]:
        """Return the child's ways to call without an event loop."""
        return self._ways(ROUNDS)

    def awaited_rounds(self) -> dict[str, Round]:
        """Return the child's ways to call from one task."""
        return self._ways(AWAITED_ROUNDS)

    def crowds(self) -> dict[str, Crowd]:
        """Return the child's ways to call from many tasks."""
        return self._ways(CROWDS)

    def _ways(self, kind: str) -> dict[str, Any]:
        return {name: functools.partial(self._order, kind, name) for name in self._names[kind]}

    def _order(self, kind: str, name: str, *arguments: float) -> Figures:
        self._pipe.send((kind, name, arguments))
        figures: Figures = self._answer(sum(arguments) + GRACE_SECONDS)
        return figures

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{self._kind.__name__} gave no answer for {seconds:.0f} seconds")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process of {self._kind.__name__} has ended; what it printed says why"
            ) from None

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(STOP_SECONDS_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, kind: type[Product], place: Place) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt), asyncio.Runner() as runner:
        product = kind(place, runner)
        with opened([product]):
            gc.collect()
            gc.freeze()
            ways: dict[str, dict[str, Any]] = {
                ROUNDS: {**product.rounds()},
                AWAITED_ROUNDS: {**product.awaited_rounds()},
                CROWDS: {**product.crowds()},
            }
            pipe.send({name: list(works) for name, works in ways.items()})
            while (order := pipe.recv()) is not None:
                way, name, arguments = order
                pipe.send(ways[way][name](*arguments))

"""Runs agents in separate processes, kills them, and counts what that cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import HoldfastError, SessionNotFound
from ...store import Store
from .payments import Payments
from .telling import POINTS, Point
from .trip import CHARGE

PROCESS_SECONDS_MAX = 60
# The status of the charge in the ledger at each point, if the kill came where it was meant to.
LEDGER_AT = (None, "issued", "issued", "completed", "completed")

Loop = Literal["plain", "durable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened: when, in which process, and what the process reported."""

    seconds: float
    process_id: int
    what: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A killed process: where, and what the ledger and the payment server had of the charge."""

    point: Point
    process_id: int
    ledger: str | None
    charges: int


@dataclass(slots=True, kw_only=True)
class Trip:
    """A trip, and what it took to plan it."""

    id: str
    number: int
    loop: Loop
    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    charges: int = 0
    model_calls: int = 0
    tokens: int = 0
    tokens_not_spent_again: int = 0
    answer: str | None = None

    def problems(self) -> list[str]:
        """Return what differs from what Holdfast promises or the demo intends."""
        found = []
        if self.charges != 1:
            found.append(f"{self.id} was charged {self.charges} times")
        if [kill.point for kill in self.kills] != list(POINTS):
            found.append(f"{self.id} was not killed at every point")
        if tuple(kill.ledger for kill in self.kills) != LEDGER_AT:
            found.append(f"{self.id} was killed at other points than it was meant to be")
        if self.answer is None:
            found.append(f"{self.id} was never answered")
        return found


class Runner:
    """Plans trips in processes that it kills, with a payment server that outlives them."""

    def __init__(
        self, store: Store, port: int, directory: Path, show: Callable[[Moment], None]
    ) -> None:
        self._store = store
        self._port = port
        self._directory = directory
        self._show = show
        self._payments = Payments(port)
        self._started = time.monotonic()

    def next_number(self) -> int:
        """Return the number of the first trip that the store does not have yet."""
        number = 1
        while self._has(f"trip-{number}"):
            number += 1
        return number

    def _has(self, id: str) -> bool:
        try:
            return self._store.find_session(id).id == id
        except SessionNotFound:
            return False

    def plan(self, number: int, loop: Loop) -> Trip:
        """Plan a trip with one process after another, killed at each point in turn."""
        id = f"trip-{number}" if loop == "durable" else f"trip-{number}-plain"
        trip = Trip(id=id, number=number, loop=loop)
        for place, point in enumerate((*POINTS, None)):
            trip.restarts = place
            if place and loop == "durable":
                trip.tokens_not_spent_again += self._spent(trip).tokens
            self._run(trip, point)
        trip.charges = len(self._payments.charges(trip.id))
        if loop == "durable":
            spent = self._spent(trip)
            trip.model_calls, trip.tokens = spent.attempts, spent.tokens
        return trip

    def _spent(self, trip: Trip) -> Any:
        return self._store.find_session(trip.id).spent()

    def _run(self, trip: Trip, point: Point | None) -> None:
        """Start one process and kill it when it reaches the point."""
        arguments = [trip.id, str(trip.number), str(self._port), str(self._directory)]
        command = [sys.executable, "-m", f"{__package__}.{trip.loop}", *arguments]
        errors = self._directory / "errors"
        with (
            started([*command, point or "never"], errors, HOLDFAST_URL=self._store.url) as process,
            _limited(process),
        ):
            assert process.stdout is not None
            tokens_before = trip.tokens
            for line in process.stdout:
                told = json.loads(line)
                if told["what"] == "reached":
                    process.kill()
                    process.wait()
                self._told(trip, process.pid, tokens_before, told.pop("what"), told)
            code = process.wait()
        expected = 0 if point is None else -signal.SIGKILL
        if code != expected:
            said = errors.read_text(errors="replace").strip().splitlines()
            raise HoldfastError(
                f"a process of the demo ended with {code}, not with {expected}: "
                f"{said[-1] if said else 'it did not say why'}"
            )

    def _told(
        self, trip: Trip, process_id: int, tokens_before: int, what: str, fields: dict[str, Any]
    ) -> None:
        """Count what a process reported, and show it."""
        match what:
            case "answered" if trip.loop == "plain":
                trip.model_calls += 1
                trip.tokens += fields["tokens"]
            case "reached":
                kill = self._look(trip, process_id, fields["point"])
                trip.kills.append(kill)
                fields |= {"ledger": kill.ledger, "charges": kill.charges}
            case "done":
                trip.answer = fields["text"]
                fields["charges"] = len(self._payments.charges(trip.id))
        if trip.loop == "plain" and what in {"reached", "done"}:
            fields["tokens"] = trip.tokens - tokens_before
        seconds = time.monotonic() - self._started
        self._show(Moment(seconds=seconds, process_id=process_id, what=what, fields=fields))

    def _look(self, trip: Trip, process_id: int, point: Point) -> Kill:
        ledger = None
        if trip.loop == "durable":
            effects = self._store.effects(session=trip.id, tool=CHARGE)
            ledger = effects[-1].status if effects else None
        charges = len(self._payments.charges(trip.id))
        return Kill(point=point, process_id=process_id, ledger=ledger, charges=charges)


@contextmanager
def started(
    command: list[str], errors: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that reports on its standard output; it does not outlive the block."""
    with (
        errors.open("wb") as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**os.environ, **variables},
            # Python looks for modules in the working directory first, which contains only ours.
            cwd=errors.parent,
            # The demo handles an interrupt at the terminal, and ends its processes itself.
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _limited(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that hangs, so that the demo does not."""
    guard = threading.Timer(PROCESS_SECONDS_MAX, process.kill)
    # An interrupt before the block below must not leave the demo waiting for it.
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()

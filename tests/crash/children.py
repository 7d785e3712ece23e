"""Child processes for the crash tests: forked from a process that has no store open."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO

from holdfast.testing.crashes import CrashPoints

# A lock counts as written, as does whatever a function may do.
HARMLESS = r"(?:count|max|min|sum|coalesce|json_each)\("
NOTHING_WRITTEN = re.compile(
    rf"\s*(BEGIN\b|SELECT\b(?!.*(\bFOR\b|\b(?!{HARMLESS})\w+\()))", re.DOTALL
)


class Child:
    """A forked process that runs a function and writes lines to a pipe until it ends or dies."""

    def __init__(self, function: Callable[[Callable[[str], None]], None]) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            status = 1
            try:
                function(lambda line: _write(writer, line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # Skips the test runner's own exit handlers, which belong to the parent.
                sys.stderr.flush()
                os._exit(status)
        os.close(writer)
        self.lines: IO[str] = os.fdopen(reader)

    def kill(self) -> None:
        """Kill it at once."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[int, list[str]]:
        """Return how it ended (minus the signal that killed it) and what it still wrote."""
        with self.lines:
            lines = self.lines.read().splitlines()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), lines


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())


def run(function: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """Run a function in a child to its end."""
    return Child(function).wait()


def stopped(function: Callable[[Callable[[str], None]], None]) -> Child:
    """Start a process and return it when it has stopped itself."""
    child = Child(function)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return child


def boundaries(points: CrashPoints, seen: set[str] | None = None) -> list[int]:
    """Return the places to die at: before each statement and COMMIT, and after the last one.

    After one and before the next is the same moment for the database. With `seen`, statements of
    earlier operations are left out, and so is every place before which nothing was written since
    the last one: to the database that is the same moment, too.
    """
    places: list[int] = []
    is_written = not seen
    for number, point in enumerate(points.points, 1):
        is_seen = seen is not None and point.boundary == "statement" and point.sql in seen
        if point.moment == "before":
            if not is_seen and (is_written or seen is None):
                places.append(number)
                is_written = False
            is_written = is_written or not NOTHING_WRITTEN.match(point.sql)
        if seen is not None:
            seen.add(point.sql)
    last = len(points.points)
    return places if places and places[-1] == last else [*places, last]

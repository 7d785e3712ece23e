"""Worker processes for the tests, forked from a process that never has a store open."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

Main = Callable[..., None]


class Fleet:
    """Starts processes by name of their function, and remembers those that it started.

    It must be made before a store is opened: what it forks inherits nothing of one.
    """

    def __init__(self, **mains: Main) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self.pids: list[int] = []
        self._zygote = os.fork()
        if self._zygote == 0:
            os.close(self._ask)
            os.close(self._answers)
            _breed(asked, answer, mains)
        os.close(asked)
        os.close(answer)
        self._replies: IO[str] = os.fdopen(self._answers)

    def start(self, name: str, *arguments: Any) -> int:
        """Start a process; return its id."""
        os.write(self._ask, (repr((name, arguments)) + "\n").encode())
        pid = int(self._replies.readline())
        self.pids.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        """Kill a process at once."""
        self.pids.remove(pid)
        os.kill(pid, signal.SIGKILL)

    def is_alive(self, pid: int) -> bool:
        """Tell whether a process still runs; those that have ended are reaped by their parent."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Kill everything that is left."""
        for pid in self.pids:
            if self.is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        os.close(self._ask)
        self._replies.close()
        os.waitpid(self._zygote, 0)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _breed(asked: int, answer: int, mains: dict[str, Main]) -> None:
    """Fork a process for every line, until there are no more lines."""
    # The kernel reaps what has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with os.fdopen(asked) as lines:
        for line in iter(lines.readline, ""):
            name, arguments = eval(line)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(asked)
                os.close(answer)
                _run(mains[name], arguments)
            os.write(answer, f"{pid}\n".encode())
    os._exit(0)


def _run(main: Main, arguments: tuple[Any, ...]) -> None:
    status = 1
    try:
        main(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def write_line(path: str, text: str) -> None:
    """Append a line to a file, in one write that a kill cannot tear."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def read_lines(path: str) -> list[str]:
    """Return the lines that were written so far."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return file.read().splitlines()


def wait_until(is_so: Callable[[], object], seconds: float = 120) -> None:
    """Wait for something that must become true."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not become true within {seconds:g} s"
        time.sleep(0.02)

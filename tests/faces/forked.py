"""The command line in a forked process, which has nothing to load: for tests that run many."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

import holdfast.kernel.postgres  # noqa: F401 - loaded once, not in each process
from holdfast.cli import main

SECONDS_MAX = 120
Result = subprocess.CompletedProcess[str]


def run(arguments: list[str], *, directory: Path, environment: Mapping[str, str]) -> Result:
    """Run the command line to its end."""
    with TemporaryFile() as output, TemporaryFile() as messages:
        child = _start(arguments, directory, environment, output.fileno(), messages.fileno())
        ending = os.pidfd_open(child)
        ended, _, _ = select.select([ending], [], [], SECONDS_MAX)
        os.close(ending)
        if not ended:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [_read(file.fileno()) for file in (output, messages)]
    return Result(arguments, code, *said)


def show(
    arguments: list[str], *, directory: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Return how the command line ends, and what it shows in a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    environment = {**environment, "TERM": "xterm-256color", "COLUMNS": "80"}
    child = _start(arguments, directory, environment, terminal, terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65_536):
            shown += piece
    except OSError:
        pass  # Linux reports the end of a terminal as an error.
    os.close(controller)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def _start(
    arguments: list[str],
    directory: Path,
    environment: Mapping[str, str],
    output: int,
    messages: int,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        # The streams of the test runner are not those of a process.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(messages, 2)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115 - until it ends
            for number, mode in enumerate(("r", "w", "w"))
        )
        sys.argv = ["holdfast", *arguments]
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, closefd=False) as file:
        return file.read()

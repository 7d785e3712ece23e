"""The command line in a forked process, which has nothing to load: for tests that run many."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Mapping
from pathlib import Path

import holdfast.kernel.postgres  # noqa: F401 - loaded once, not in each process
from holdfast.cli import main


def shown(
    arguments: list[str], *, directory: Path, environment: Mapping[str, str], is_terminal: bool
) -> str:
    """Return what the command line writes, messages too, until it ends."""
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        _be_the_command(arguments, writer)
    os.close(writer)
    written = b""
    try:
        while piece := os.read(reader, 65_536):
            written += piece
    except OSError:
        pass  # Linux reports the end of a terminal as an error.
    os.close(reader)
    os.waitpid(child, 0)
    return written.decode()


def _be_the_command(arguments: list[str], output: int) -> None:
    # The streams of the test runner are not those of a process.
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - until it ends
    sys.argv = ["holdfast", *arguments]
    try:
        main()
    except BaseException as ended:
        if not isinstance(ended, SystemExit):
            print(repr(ended))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

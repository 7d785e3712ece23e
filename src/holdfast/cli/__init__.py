"""The command line `holdfast`: a face of the store for people and for scripts."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process with its exit code."""
    _have_streams()
    _escape_unencodable()
    try:
        # An import that Ctrl-C cuts short would show where it was; nothing has been done yet.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if not ignored:
            signal.signal(signal.SIGINT, _leave)
        from .app import run

        if not ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Who read the output has gone; Python would complain once more when it exits.
        discard_output()
        code = 1
    sys.exit(code)


def discard_output() -> None:
    """Let what could not be written go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unencodable() -> None:
    """Let a stream that is not UTF-8 show the other characters as JSON escapes them."""
    codecs.register_error("holdfast", _escapes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="holdfast")


def _escapes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[n : n + 4]}" for n in range(0, len(units), 4)), error.end


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _have_streams() -> None:
    """Open standard streams that are closed: a database must not get the number of one.

    Output that nobody can have taken is an error when it is written; messages go nowhere.
    """
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_RDONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open

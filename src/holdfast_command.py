"""The command `holdfast`. It stands outside the package, whose import takes a while.

Ctrl-C in that time ends the process as it does later, without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    end_quietly()
    from holdfast.cli import main as run

    run()


def end_quietly() -> None:
    """Let Ctrl-C end the process at once, until the command line has been loaded."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


# As `python -m holdfast` loads the package, `sys.argv` says so in place of a file.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in {"holdfast", "-mholdfast"}:
    end_quietly()

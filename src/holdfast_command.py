"""The command `holdfast`. It stands outside the package, whose import takes a while.

Ctrl-C in that time ends the process as it does later, without a traceback.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from holdfast.cli import main as run

    run()

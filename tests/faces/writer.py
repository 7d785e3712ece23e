"""A process that writes all the time, for commands that look at a store while it is used.

It runs as `python -m tests.faces.writer URL [NAMESPACE]` until somebody ends it, and prints each
version once it is durable.
"""

from __future__ import annotations

import contextlib
import os
import sys

import holdfast

SESSION_ID = "written"


def write(url: str, namespace: str | None = None) -> None:
    with holdfast.open(url, namespace=namespace) as store:
        session = store.session(SESSION_ID)
        while True:
            version = session.append("transcript", [{"role": "user", "content": "And?"}]).version
            # One write to a pipe arrives whole or not at all.
            os.write(sys.stdout.fileno(), b"%d\n" % version)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        write(*sys.argv[1:])

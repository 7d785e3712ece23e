"""The process that the demo kills: it adds to a counter and prints each number once it is durable.

It runs as `python -m holdfast.cli.demo_writer URL [NAMESPACE]` until somebody ends it.
"""

from __future__ import annotations

import contextlib
import os
import sys

from ..store import open
from ..testing.nouns import Counter, Setup

ROOT_ID = "demo"


def write(url: str, namespace: str | None = None) -> None:
    """Count on from where the store is, for ever."""
    with open(url, namespace=namespace) as store:
        Setup(store).install()
        counter = Counter(store, ROOT_ID)
        counter.plant()
        while True:
            # One write to a pipe arrives whole or not at all.
            os.write(sys.stdout.fileno(), b"%d\n" % counter.add())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        write(*sys.argv[1:])

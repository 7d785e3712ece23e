"""The process that the demo kills: an agent whose every message is saved before the next is made.

It runs as `python -m holdfast.cli.demo_writer URL [NAMESPACE]` until somebody ends it, and prints
each version once it is durable.
"""

from __future__ import annotations

import contextlib
import os
import sys

from ..store import open

SESSION_ID = "demo"
QUESTIONS = ("Where shall I go?", "How do I get there?", "What shall I take along?")
ANSWERS = ("To Oslo.", "By the night train.", "A warm coat.")


def message(version: int) -> dict[str, str]:
    """Return what the scripted conversation says at a version."""
    is_question = version % 2 == 1
    text = (QUESTIONS if is_question else ANSWERS)[(version - 1) // 2 % len(ANSWERS)]
    return {"role": "user" if is_question else "assistant", "content": f"{text} ({version})"}


def converse(url: str, namespace: str | None = None) -> None:
    """Go on with the conversation from where the store is, for ever."""
    with open(url, namespace=namespace) as store:
        session = store.session(SESSION_ID)
        latest = session.latest(last=1)
        version = 0 if latest is None else latest.version
        while True:
            version = session.append("transcript", [message(version + 1)]).version
            # One write to a pipe arrives whole or not at all.
            os.write(sys.stdout.fileno(), b"%d\n" % version)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        converse(*sys.argv[1:])

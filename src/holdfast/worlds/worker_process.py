"""A worker process that another process started; its task comes through stdin."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from typing import Any

from ..codec import Limits
from ..store import open as open_store
from .folders import sweep_folders
from .journal import frontier_of, journal_in
from .shared import SCRATCH
from .values import decode
from .worker import Participant, Terms


def main() -> None:
    """Take part in an exploration until it ends, SIGTERM comes, or the parent has died."""
    told = {"is_leaving": False}
    # Ctrl-C is handled by the parent, which then sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: told.update(is_leaving=True))
    task: dict[str, Any] = decode(sys.stdin.buffer.read())

    def is_orphan() -> bool:
        return os.getppid() != int(task["parent"])

    terms = Terms(
        holder=task["holder"],
        is_leaving=lambda: told["is_leaving"] or is_orphan(),
        lease_seconds=task["lease_seconds"],
        commit_every=task["commit_every"],
        also=task["also"],
    )
    limits = Limits(**task["limits"])
    with open_store(task["url"], limits=limits, migrate=False, **task["options"]) as store:
        journal = journal_in(store, task["id"])
        if journal is not None:
            frontier = frontier_of(journal)
            Participant(store, frontier, *_resolved(task), terms).run()
    if is_orphan():
        sweep_folders(SCRATCH)


def _resolved(task: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
    """Return the function that makes the world, the actions and the invariants."""
    resolve = pkgutil.resolve_name
    names = (task["actions"], task["invariants"])
    actions, invariants = ([resolve(name) for name in each] for each in names)
    return resolve(task["world"]), actions, invariants


if __name__ == "__main__":
    main()

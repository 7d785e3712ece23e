"""Removing what a killed exploration left behind, in the store and in its systems."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arguments import require_text
from ..errors import ExplorationAborted
from .explore import made_world, require_both
from .folders import sweep_folders
from .journal import discard, drive, frontier_of, journal_in, journal_of, require_store
from .recording import Recording
from .shared import SCRATCH, is_dead

if TYPE_CHECKING:
    from ..explorations.frontier import Frontier
    from ..items import WorkItem
    from ..kernel.operation import Sync
    from ..store import Store
    from .world import World

LEAVE_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was removed: whether the store had the exploration, and how many leftovers of systems.

    `problem` says why the systems were not restored to the initial state, if they were not.
    """

    is_found: bool
    things: int
    problem: str | None = None


def clean(
    world: World | Callable[[], World], store: Store | None = None, id: str | None = None
) -> Cleaned:
    """Remove an exploration from the store, and what its killed processes left elsewhere.

    The systems of the world are restored to the initial state first, if the exploration has kept
    it. Workers that are still alive are told to leave, and waited for. What belongs to other live
    processes, or to another exploration, is not removed. Without a store, only what killed
    processes left elsewhere is.
    """
    require_both(store, id)
    if store is not None:
        require_store(store)
        require_text("id", id)
    with ExitStack() as closing:
        made = made_world(world, closing)
        is_found, problem = False, None
        if store is not None and id is not None and journal_in(store, id) is not None:
            is_found, problem = True, _forget(made, store, id)
        things = sweep_folders(SCRATCH)
        things += sum(system.sweep() for system in made.systems.values())
    return Cleaned(is_found=is_found, things=things, problem=problem)


def _forget(world: World, store: Store, id: str) -> str | None:
    # A process that still writes to it is fenced.
    with drive(store, id) as session:
        problem = _dismiss(store, frontier_of(session))
        recording = Recording(journal_of(session), (), ())
        try:
            recording.restore_initial(world)
        except ExplorationAborted as error:
            problem = str(error)
        recording.forget_initial(world)
    store.find_session(id).delete(force=True)
    return problem


def _dismiss(store: Store, frontier: Frontier[Sync]) -> str | None:
    """Tell all workers to leave, and wait until they have; return the problem if they do not."""
    until = time.monotonic() + LEAVE_SECONDS
    while living := _living(store, frontier):
        for member in living:
            if not member.cancel_requested:
                store.work.cancel(member.id)
        # Whoever tries something finds that it is not theirs any more.
        discard(frontier, with_workers=False)
        if time.monotonic() > until:
            names = ", ".join(str(member.holder) for member in living)
            return f"These workers have not left yet, clean again when they have: {names}."
        time.sleep(_LOOK_SECONDS)
    return None


def _living(store: Store, frontier: Frontier[Sync]) -> list[WorkItem[Sync]]:
    """Return the items of workers that may be alive."""
    members = store.work.list(queue=frontier.workers_queue, status="in_progress")
    now = store.now_ms()
    return [
        member
        for member in members
        if (member.lease_expires_at or 0) > now and not is_dead(member.holder or "")
    ]

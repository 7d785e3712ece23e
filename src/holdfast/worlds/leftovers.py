"""Removing what a killed exploration left behind, in the store and in its systems."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arguments import require_text
from ..errors import ExplorationAborted, SessionNotFound
from .explore import made_world
from .journal import drive, journal_of, require_store
from .recording import Recording

if TYPE_CHECKING:
    from ..store import Store
    from .world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was removed: whether the store had the exploration, and how many leftovers of systems.

    `problem` says why the systems were not restored to the initial state, if they were not.
    """

    is_found: bool
    things: int
    problem: str | None = None


def clean(world: World | Callable[[], World], store: Store, id: str) -> Cleaned:
    """Remove an exploration from the store, and what its killed processes left elsewhere.

    The systems of the world are restored to the initial state first, if the exploration has kept
    it. What belongs to live processes, or to another exploration, is not removed.
    """
    require_store(store)
    require_text("id", id)
    with ExitStack() as closing:
        made = made_world(world, closing)
        try:
            is_found = store.find_session(id).id == id
        except SessionNotFound:
            is_found = False
        problem = _forget(made, store, id) if is_found else None
        things = sum(system.sweep() for system in made.systems.values())
    return Cleaned(is_found=is_found, things=things, problem=problem)


def _forget(world: World, store: Store, id: str) -> str | None:
    problem = None
    # A process that still writes to it is fenced.
    with drive(store, id) as session:
        recording = Recording(journal_of(session), (), ())
        try:
            recording.restore_initial(world)
        except ExplorationAborted as error:
            problem = str(error)
        recording.forget_initial(world)
    store.find_session(id).delete(force=True)
    return problem

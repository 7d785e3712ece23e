"""Explorations in a store, looked at without the world that was explored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CorruptRecord, NotFound
from ..explorations import ExplorationInfo, Explorations
from .actions import Action
from .findings import Findings, Limits
from .invariants import Invariant
from .journal import journal_of, require_store
from .recording import Recorded, Recording
from .result import Exploration
from .strategies import as_strategy
from .values import decode

if TYPE_CHECKING:
    from ..kernel.operation import Sync
    from ..store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExploration:
    """An exploration as it was written: what was found so far, and what is left to try.

    `has_graph` is false once retention has removed the states and the log of actions.
    """

    info: ExplorationInfo
    actions: list[str]
    invariants: list[str]
    result: Exploration
    left: int

    @property
    def has_graph(self) -> bool:
        """Whether the states are still there."""
        return self.result.graph.initial is not None


class _Reader(Findings):
    """Concludes what an exploration would have found if it had ended now."""

    def __init__(
        self,
        recorded: Recorded,
        choices: Sequence[tuple[Action, dict[str, Any]]],
        invariants: Sequence[Invariant],
    ) -> None:
        order, limits = as_strategy("bfs", 0), Limits(1, None, None, None)
        super().__init__(recorded.graph, (), invariants, order, limits, None)
        self._choices = list(choices)
        self._load(recorded)
        self._conclude()


def list_explorations(store: Store, *, after: int = 0, limit: int = 100) -> list[ExplorationInfo]:
    """Return the explorations of a store in order of creation, without their graphs."""
    explorations: Explorations[Sync] = Explorations(require_store(store).runtime)
    return explorations.list(after=after, limit=limit)


def read_exploration(store: Store, id: str) -> StoredExploration:
    """Return an exploration with its graph; it may be going on. Raise NotFound if it is none."""
    session = require_store(store).find_session(id)
    found = list_explorations(store, after=session.number - 1, limit=1)
    if not found or found[0].number != session.number:
        raise NotFound(f"session {session.id} is no exploration", id=session.id)
    journal = journal_of(session)
    settings = journal.world().settings
    try:
        known = decode(settings or b"")
        choices = [
            (Action(name=name, run=_unknown), decode(arguments))
            for name, arguments in known["actions"]
        ]
        invariants = [
            Invariant(name=name, check=_unknown, when=when) for name, when in known["invariants"]
        ]
        recorded = Recording(journal, choices, invariants).read()
        result = _Reader(recorded, choices, invariants).result
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        # It may have come from a file that somebody else has written.
        raise CorruptRecord(
            f"What is stored of exploration {session.id} cannot be read: {error!r}"
        ) from error
    return StoredExploration(
        info=found[0],
        actions=list(dict.fromkeys(action.name for action, _ in choices)),
        invariants=[check.name for check in invariants],
        result=result,
        left=sum(map(len, recorded.left.values())),
    )


def _unknown(*_: object) -> None:
    """Stand for a function of the module that was explored, which is not loaded."""

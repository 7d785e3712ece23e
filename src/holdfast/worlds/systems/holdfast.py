"""A Holdfast store: sessions, shared state and effects are restored, under new versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from ...arguments import require_seconds
from ...effects.undo import Range
from ...errors import InvalidArgument, SystemBusy
from ...records import SessionInfo
from ..journal import require_store
from ..system import System
from .holdfast_trees import NOTHING, Change, LiveTree, SessionPoint, StoreTrees, TreePoint

if TYPE_CHECKING:
    from ...store import Store

_WAIT_SECONDS_MAX: Final = 3_600
_PAUSE_SECONDS: Final = 0.02
_GENERATED: Final = 7


@dataclass(frozen=True, slots=True)
class StorePoint:
    """A store at one moment: its trees by their roots, and the effects that are in force."""

    trees: Mapping[str, TreePoint]
    effects: tuple[Range, ...]


class HoldfastSystem(System):
    """The store of agents under test; what they do through it is rolled back with the world.

    A rollback rewinds sessions, restores shared state, and marks effects as undone by the world,
    because their consequences are rolled back with the other systems; those of tools declared with
    `outside=True` stay. Sessions started after the point are cancelled and no longer observed.

    A checkpoint needs a store at rest: no effect in flight or in doubt, no open work item, peer
    call or pause. A rollback waits up to `wait_seconds` while somebody drives a session or runs a
    call, and cancels open work. `observe` is a function of the store that returns what a state
    shows; by default it is all of the above, without versions and generated ids.
    """

    leaves_without_checkpoint = True
    not_covered = (
        "work items, peer calls and pauses: a rollback cancels what is open of them, and no "
        "checkpoint is made meanwhile",
        "ids of sessions that were begun after the point: they stay taken",
        "effects of tools with outside=True, what was spent, tokens and the audit trail",
        "rules of shared keys, and idempotency keys of their changes",
        "sessions that were deleted, and versions or history that were pruned: a rollback to them "
        "is refused",
    )

    def __init__(
        self,
        store: Store,
        *,
        observe: Callable[[Store], object] | None = None,
        wait_seconds: float = 5,
    ) -> None:
        self.store = require_store(store)
        require_seconds("wait_seconds", wait_seconds, _WAIT_SECONDS_MAX)
        if store.runtime.settings.mode != "write":
            raise InvalidArgument("store must be open for writing, or it could not be rolled back")
        self.store_id = store.store_id()
        self._observe = observe
        self._wait_seconds = wait_seconds
        self._trees = StoreTrees(store.runtime)
        self._live: dict[str, LiveTree] = {}
        # Effects up to this one are part of the world if they are in the ranges; newer ones always.
        self._last_effect, _ = self._trees.effects_since(0)
        self._effects: tuple[Range, ...] = _joined([(0, self._last_effect)])
        self._shown: dict[str, tuple[int, Any]] = {}

    def uses(self, store_id: str) -> bool:
        """Return whether this store has that id."""
        return store_id == self.store_id

    def sessions(self) -> list[SessionInfo]:
        """Return the sessions that are part of the world, without those started after the point."""
        return [
            session
            for root_id in self._trees.positions()
            for session in self._trees.visible(root_id, self._live.get(root_id))
        ]

    def checkpoint(self, name: str) -> StorePoint:
        """Record the version of every session; raise SystemBusy unless the store is at rest."""
        problem = self._trees.why_in_use() or self._trees.why_unsettled()
        if problem is not None:
            raise SystemBusy(f"{problem}; a checkpoint needs a store at rest")
        last, touched = self._trees.effects_since(self._last_effect)
        positions = self._trees.positions()
        for root_id in positions:
            if self._has_moved(root_id, positions):
                live = self._live.get(root_id)
                where = (root_id, positions[root_id])
                self._live[root_id] = self._trees.hold(*where, live, touched, name)
        self._effects = _joined([*self._effects, (self._last_effect, last)])
        self._last_effect = last
        trees = {root_id: live.point for root_id, live in self._live.items()}
        is_there = {root_id: point for root_id, point in trees.items() if point.sessions}
        return StorePoint(is_there, self._effects)

    def prepare(self, token: StorePoint) -> None:
        """Raise unless every session can be rewound and nobody writes."""
        self._wait()
        positions = self._trees.positions()
        for root_id, target in token.trees.items():
            live = self._live.get(root_id)
            if self._has_moved(root_id, positions) or live is None or live.point != target:
                self._trees.check(root_id, target)

    def rollback(self, token: StorePoint) -> None:
        """Restore every tree to the point, each in one transaction."""
        last, touched = self._trees.effects_since(self._last_effect)
        now = _joined([*self._effects, (self._last_effect, last)])
        undone, redone = _without(now, token.effects), _without(token.effects, now)
        self._move(token, Change(undone, redone, touched))

    def _move(self, token: StorePoint, change: Change) -> None:
        self._wait()
        self._cancel_work()
        positions = self._trees.positions()
        for root_id in positions:
            live, target = self._live.get(root_id), token.trees.get(root_id, NOTHING)
            if self._has_moved(root_id, positions) or live is None or live.point != target:
                self._live[root_id] = self._trees.restore(root_id, target, live, change)
                self._shown.pop(root_id, None)
        self._trees.restore_effects(change)
        self._effects = token.effects
        self._last_effect, _ = self._trees.effects_since(self._last_effect)

    def keep(self, token: StorePoint) -> object:
        """Return the versions of all sessions; the store itself keeps the rest."""
        return asdict(token)

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore every tree to a point that a dead process has kept."""
        trees = {
            root_id: TreePoint(
                tree["sequence"],
                {number: SessionPoint(**point) for number, point in tree["sessions"].items()},
            )
            for root_id, tree in kept["trees"].items()
        }
        effects = tuple((after, upto) for after, upto in kept["effects"])
        # It is unknown what that process has done since, so everything is restored.
        self._live, self._shown = {}, {}
        last, touched = self._trees.effects_since(0)
        undone = _without([(0, last)], effects)
        self._move(StorePoint(trees, effects), Change(undone, effects, touched))

    def observe(self) -> object:
        """Return what the observer reads; by default sessions, state and effects as values."""
        if self._observe is not None:
            return self._observe(self.store)
        positions = self._trees.positions()
        trees = []
        for root_id, position in positions.items():
            if self._shown.get(root_id, (None, None))[0] != position:
                self._shown[root_id] = position, self._trees.shown(root_id, self._live.get(root_id))
            tree = self._shown[root_id][1]
            if tree is not None:
                trees.append(tree)
        return {"trees": _named(trees), "effects": self._trees.shown_without_session()}

    def _has_moved(self, root_id: str, positions: Mapping[str, int]) -> bool:
        live = self._live.get(root_id)
        return live is None or live.position != positions.get(root_id)

    def _wait(self) -> None:
        """Wait until nobody writes to the store, or raise SystemBusy."""
        until = time.monotonic() + self._wait_seconds
        while (problem := self._trees.why_in_use()) is not None:
            if time.monotonic() > until:
                raise SystemBusy(f"{problem}, for {self._wait_seconds:g} s by now")
            time.sleep(_PAUSE_SECONDS)

    def _cancel_work(self) -> None:
        """Cancel the open work items, because no checkpoint has any."""
        while items := self.store.work.list(status=("pending", "in_progress"), limit=1_000):
            for item in items:
                if self.store.work.cancel(item.id) == "in_progress":
                    # Its worker is dead and would not notice the cancellation.
                    self.store.work.release(item.id, reason="the world was rolled back")


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, without empty ones, and with adjacent ones joined."""
    found: list[Range] = []
    for after, upto in sorted(ranges):
        if after >= upto:
            continue
        if found and found[-1][1] >= after:
            found[-1] = found[-1][0], max(found[-1][1], upto)
        else:
            found.append((after, upto))
    return tuple(found)


def _without(ranges: Sequence[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """Return the parts of ranges that are not in others."""
    left = list(ranges)
    for low, high in others:
        left = [
            part
            for after, upto in left
            for part in ((after, min(upto, low)), (max(after, high), upto))
            if part[0] < part[1]
        ]
    return tuple(left)


def _named(trees: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return trees with generated session ids replaced by the order of the sessions."""
    ids = [session["id"] for tree in trees for session in tree["sessions"]]
    names = {id: f"session {number}" if _is_generated(id) else id for number, id in enumerate(ids)}
    return [
        {
            "state": tree["state"],
            "sessions": [
                {
                    **session,
                    "id": names[session["id"]],
                    "parent_id": names.get(session["parent_id"]),
                }
                for session in tree["sessions"]
            ],
        }
        for tree in trees
    ]


def _is_generated(id: str) -> bool:
    try:
        return UUID(id).version == _GENERATED
    except ValueError:
        return False

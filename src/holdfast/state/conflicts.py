"""The log of version conflicts: each refused write is recorded afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from ..arguments import require_limit, require_whole
from ..errors import HoldfastError, VersionConflict
from ..feed.latest import place_of
from ..kernel.flow import Flow, Perform, perform, refuse_steps
from ..kernel.operation import C, Call, Handle, Op, Row, operation, query, rows
from ..sessions import SessionHandle, SessionPart
from ..sessions.rows import require_root
from ..wire import travels
from .records import StateConflict
from .requests import Ordinals

if TYPE_CHECKING:
    from .handle import State

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

CONFLICTS_KEPT = 1_000
# Operations that are not idempotent; inside a work item they get an idempotency key.
REPEATED = ("increment", "append", "add", "reduce", "batch")

ADD_CONFLICT = """
INSERT INTO hf_state_conflicts (
    root_id, number, key, expected, current, attempt, is_retried, session_id, created_at
) VALUES (
    :root_id,
    1 + coalesce((SELECT max(c.number) FROM hf_state_conflicts c WHERE c.root_id = :root_id), 0),
    :key, :expected, :current, :attempt, :is_retried, :session_id, :now
)
"""
REMOVE_OLD_CONFLICTS = """
DELETE FROM hf_state_conflicts WHERE root_id = :root_id AND number <= (
    SELECT max(c.number) FROM hf_state_conflicts c WHERE c.root_id = :root_id
) - :kept
"""
SELECT_CONFLICTS = """
SELECT root_id, number, key, expected, current, attempt, is_retried, session_id AS updated_by,
    created_at
FROM hf_state_conflicts
"""
LIST_CONFLICTS = f"""
{SELECT_CONFLICTS} WHERE root_id = :root_id AND number < :before ORDER BY number DESC LIMIT :limit
"""
NEWEST_FIRST = "ORDER BY created_at DESC, root_id DESC, number DESC LIMIT :limit"
LATEST_CONFLICTS = f"{SELECT_CONFLICTS} {NEWEST_FIRST}"
CONFLICTS_BEFORE = f"""
{SELECT_CONFLICTS} WHERE (created_at, root_id, number) < (
    SELECT created_at, root_id, number FROM hf_state_conflicts
    WHERE root_id = :root_id AND number = :position
) {NEWEST_FIRST}
"""  # noqa: S608
COUNT_CONFLICTS = """
SELECT (:now - created_at) / 3600000 AS hours_ago, count(*) AS conflicts FROM hf_state_conflicts
WHERE created_at > :now - :span_ms GROUP BY hours_ago
"""
CONFLICTS_PER_PAGE_MAX = 1_000
HOURS_MAX = 24 * 30


class recorded(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An operation whose VersionConflict is recorded, in a transaction of its own.

    Inside `store.run` it is not, because there the caller's transaction decides.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], Op[R_co]]) -> None:
        super().__init__(function)
        unrecorded = self._start

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            runtime, state = handle.runtime, cast("State[Any]", handle)
            if runtime.run_flow is refuse_steps:
                return unrecorded(handle, *args, **kwargs)
            item, name = state._session.item, function.__name__
            if item is not None and name in REPEATED and kwargs.get("idempotency_key") is None:
                kwargs["idempotency_key"] = Ordinals.of(runtime).key(item, name, args, kwargs)
            call = Call(self, handle, args, kwargs)
            if runtime.is_async:
                steps: Any = _recorded(state, call)
                steps.__qualname__ = call.name
                return runtime.run_flow(steps)
            try:
                # A flow is needed only to record a conflict.
                return runtime.driver.run(call)
            except VersionConflict as conflict:
                runtime.run_flow(_record_first(state, conflict))
                raise

        self._start = start


def _recorded(state: State[Any], call: Call[Any]) -> Flow[Any]:
    try:
        return (yield Perform(call))
    except VersionConflict as conflict:
        yield from _record_first(state, conflict)
        raise


def _record_first(state: State[Any], conflict: VersionConflict) -> Flow[None]:
    return record_conflict(state._session, conflict, attempt=1, is_retried=False)


def record_conflict(
    session: SessionHandle[Any], conflict: VersionConflict, attempt: int, is_retried: bool
) -> Flow[None]:
    """Record a conflict, best effort: the caller must get the conflict itself in any case."""
    with contextlib.suppress(HoldfastError):
        yield from perform(
            ConflictLog.add, ConflictLog(session), conflict.fields, attempt, is_retried
        )


def list_conflicts(root_id: str, before: int, limit: int) -> Op[list[StateConflict]]:
    """Return the version conflicts of a tree, newest first."""
    found = yield from rows(LIST_CONFLICTS, root_id=root_id, before=before, limit=limit)
    if not found:
        yield from require_root(root_id)
    return list(map(_conflict, found))


def _conflict(row: Row) -> StateConflict:
    return StateConflict(**{**row, "is_retried": bool(row["is_retried"])})


class StoreConflicts(Handle[C]):
    """The version conflicts of all trees."""

    @query
    def conflicts(
        self, *, before: tuple[str, int] | None = None, limit: int = 100
    ) -> Op[list[StateConflict]]:
        """Return version conflicts of all trees, newest first, as far as they are kept.

        `before` is the `root_id` and the `number` of the last one seen.
        """
        require_limit(limit, CONFLICTS_PER_PAGE_MAX)
        if before is None:
            found = yield from rows(LATEST_CONFLICTS, limit=limit)
        else:
            found = yield from rows(CONFLICTS_BEFORE, **place_of(before), limit=limit)
        return list(map(_conflict, found))

    @query
    def conflicts_per_hour(self, *, hours: int = 24) -> Op[list[int]]:
        """Return how many conflicts each of the last hours had, the oldest hour first."""
        require_whole("hours", hours, 1, HOURS_MAX)
        found = yield from rows(COUNT_CONFLICTS, span_ms=hours * 3_600_000)
        counts = {row["hours_ago"]: row["conflicts"] for row in found}
        return [counts.get(ago, 0) for ago in reversed(range(hours))]


@travels
class ConflictLog(SessionPart[C]):
    """The last version conflicts of a tree."""

    @operation
    def add(self, fields: Mapping[str, Any], attempt: int, is_retried: bool) -> Op[None]:
        """Add a conflict, and remove the oldest above the limit."""
        root_id = self._session.root_id
        yield from rows(
            ADD_CONFLICT,
            root_id=root_id,
            key=fields["key"] or "",
            expected=fields["expected_version"],
            current=fields["current_version"],
            attempt=attempt,
            is_retried=int(is_retried),
            session_id=self._session.id,
        )
        yield from rows(REMOVE_OLD_CONFLICTS, root_id=root_id, kept=CONFLICTS_KEPT)

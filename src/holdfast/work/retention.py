"""Retention of work: finished items go when they are old, and then what they did."""

from __future__ import annotations

from collections.abc import Sequence

from ..effects.retention import OF_OLD_CHAINS, forget_effects
from ..feed import by_tree, emit
from ..kernel.append_only import through_door
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Retention
from ..kernel.operation import Lock, Op, Query, Row, Runtime, operation, query, rows
from ..records import Pruned

ITEMS_PER_PASS = 500

OLD = """
SELECT number, root_id, session_id FROM hf_work
WHERE completed_at IS NOT NULL AND completed_at < :now - :age_ms
ORDER BY completed_at, number LIMIT :limit
"""
REMOVE = "DELETE FROM hf_work WHERE number = :number AND completed_at IS NOT NULL RETURNING number"
OF_NO_ITEM = f"""{OF_OLD_CHAINS}
    AND NOT EXISTS (SELECT 1 FROM hf_work w WHERE w.id = item_id)
    AND NOT EXISTS (SELECT 1 FROM hf_work w WHERE w.first_id = substr(scope, 6))"""  # noqa: S608


class Removal:
    """The transactions of a prune."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @query
    def old(self, age_ms: int) -> Op[list[Row]]:
        """Return finished items that retention may remove, the oldest first."""
        return (yield from rows(OLD, age_ms=age_ms, limit=ITEMS_PER_PASS))

    @operation
    def remove(self, found: Sequence[Row]) -> Op[int]:
        """Remove finished items of one tree, or of none, and tell its feed."""
        root_id, session_id = found[0]["root_id"], found[0]["session_id"]
        if root_id is not None:
            yield Lock(root_id)
        numbers = [row["number"] for row in found]
        removals = (Query(REMOVE, {"number": number}) for number in numbers)
        answers = yield from through_door(f"work {numbers[0]}", *removals)
        count = sum(map(len, answers))
        if count and root_id is not None:
            data = {"count": count}
            yield from emit(self.runtime.codec, root_id, session_id, "work_pruned", data)
        return count


def prune(runtime: Runtime, retention: Retention) -> Flow[Pruned]:
    """Remove finished items, and then effects of items that are gone."""
    removal = Removal(runtime)
    count = 0
    while found := (yield from perform(Removal.old, removal, retention.work_ms)):
        removed = 0
        for rows_of_tree in by_tree(found):
            removed += yield from perform(Removal.remove, removal, rows_of_tree)
        if not removed:
            break
        count += removed
    forgotten = yield from forget_effects(runtime.codec, retention, OF_NO_ITEM)
    return Pruned(items=count) + forgotten

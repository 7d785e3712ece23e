"""The lifecycle of shared state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..feed.events import TREE_SEQUENCE
from ..formatting import plural
from ..kernel.append_only import through_door
from ..kernel.flow import Flow
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Query, Runtime, rows
from ..records import Finding, Pruned, SessionRef
from .portable import StatePortable
from .retention import prune_histories

# A root that is created again under the same id continues the deleted one's sequence and versions.
KEEP_COUNTERS = f"""
UPDATE hf_state SET keys = 0, floor = {TREE_SEQUENCE.format(root_id=":root_id")},
    forgotten_version = (
        SELECT max(known.version) FROM (
            SELECT e.version AS version FROM hf_state_entries e WHERE e.root_id = :root_id
            UNION ALL SELECT s.forgotten_version FROM hf_state s WHERE s.root_id = :root_id
            UNION ALL SELECT s.least_version FROM hf_state s WHERE s.root_id = :root_id
        ) known
    )
WHERE root_id = :root_id
"""  # noqa: S608
REMOVE_EVENTS = """
DELETE FROM hf_state_events WHERE root_id = :root_id AND (sequence, key) IN (
    SELECT sequence, key FROM hf_state_events WHERE root_id = :root_id
    ORDER BY sequence, key LIMIT :limit
) RETURNING sequence
"""
REMOVE_ENTRIES = "DELETE FROM hf_state_entries WHERE root_id = :root_id"
REMOVE_RULES = "DELETE FROM hf_state_rules WHERE root_id = :root_id"
REMOVE_CONFLICTS = "DELETE FROM hf_state_conflicts WHERE root_id = :root_id"
WRONG = f"""
SELECT s.root_id FROM hf_state s
WHERE s.keys <> (
        SELECT count(*) FROM hf_state_entries e WHERE e.root_id = s.root_id AND e.value IS NOT NULL
    )
    OR s.floor > {TREE_SEQUENCE.format(root_id="s.root_id")}
    OR EXISTS (
        SELECT 1 FROM hf_state_entries e WHERE e.root_id = s.root_id AND NOT EXISTS (
            SELECT 1 FROM hf_state_events h
            WHERE h.root_id = e.root_id AND h.key = e.key AND h.sequence = e.sequence
                AND h.version = e.version
        )
    )
ORDER BY s.root_id LIMIT 10
"""  # noqa: S608
LOST_RULES = f"""
SELECT DISTINCT r.root_id FROM hf_state_rules r
WHERE {TREE_SEQUENCE.format(root_id="r.root_id")} IS NULL ORDER BY r.root_id LIMIT 10
"""  # noqa: S608
COUNT_STATE = "SELECT count(*) AS trees, coalesce(sum(keys), 0) AS keys FROM hf_state"


class StateNoun(Noun):
    """Shared state: it belongs to a tree, and is removed with the tree's root."""

    portable = StatePortable()
    any_record = "SELECT 1 AS found FROM hf_state_events LIMIT 1"

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the state of a deleted root: its keys at once, its history in passes."""
        root_id = sessions[0].root_id
        if all(each.id != root_id for each in sessions):
            return 0
        root = {"root_id": root_id, "limit": limit}
        removals = (KEEP_COUNTERS, REMOVE_ENTRIES, REMOVE_RULES, REMOVE_CONFLICTS, REMOVE_EVENTS)
        answers = yield from through_door(
            f"state of {root_id}", *(Query(removal, root) for removal in removals)
        )
        return len(answers[-1])

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove the old history of trees that have ended; their keys stay."""
        return (yield from prune_histories(runtime, retention))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Compare entries, counts and history."""
        return {"state": check_state}


def check_state() -> Op[list[Finding]]:
    """Look for entries that do not match their events, and for rules without a tree."""
    found = []
    for query, problem in (
        (WRONG, "Entries do not match their history in the shared state of"),
        (LOST_RULES, "There are rules for the shared state of missing trees"),
    ):
        if wrong := (yield from rows(query)):
            message = f"{problem}: {', '.join(row['root_id'] for row in wrong)}."
            advice = "Rows were changed by hand: restore a backup."
            found.append(Finding("state", "problem", message, advice))
    if found:
        return found
    [row] = yield from rows(COUNT_STATE)
    keys, trees = plural(row["keys"], "key"), plural(row["trees"], "tree")
    return [Finding("state", "ok", f"{keys} of shared state in {trees}.")]

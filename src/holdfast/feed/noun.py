"""The feed in the life-cycle of a store."""

from __future__ import annotations

from collections.abc import Callable

from ..formatting import plural
from ..kernel.nouns import Noun
from ..kernel.operation import Op, rows
from ..records import Finding
from .portable import FeedPortable

# Positions above the floor are unique integers, so count, minimum and maximum reveal every gap.
LIST_FEED_HOLES = """
SELECT hf_trees.root_id, hf_trees.position, count(hf_events.position) AS events,
    coalesce(min(hf_events.position), hf_trees.floor + 1) AS first,
    coalesce(max(hf_events.position), hf_trees.floor) AS last
FROM hf_trees LEFT JOIN hf_events ON hf_events.root_id = hf_trees.root_id
GROUP BY hf_trees.root_id, hf_trees.position, hf_trees.floor
HAVING count(hf_events.position) <> hf_trees.position - hf_trees.floor
    OR coalesce(min(hf_events.position), hf_trees.floor + 1) <> hf_trees.floor + 1
    OR coalesce(max(hf_events.position), hf_trees.floor) <> hf_trees.position
ORDER BY hf_trees.root_id
"""
COUNT_EVENTS = """
SELECT count(*) AS trees, (SELECT count(*) FROM hf_events) AS events FROM hf_trees
"""
TREES_SHOWN_MAX = 10


class FeedNoun(Noun):
    """Trees and their feeds; both are kept when their sessions are deleted."""

    portable = FeedPortable()
    any_record = "SELECT 1 AS found FROM hf_trees LIMIT 1"

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for gaps in feeds."""
        return {"feed": check_positions}


def check_positions() -> Op[list[Finding]]:
    """Look for trees whose events are not numbered without gaps from floor to position."""
    holes = yield from rows(LIST_FEED_HOLES)
    advice = "Events were removed or added manually: restore a backup."
    found = [
        Finding(
            "feed",
            "problem",
            f"Tree {row['root_id']!r} is at position {row['position']} and has "
            f"{plural(row['events'], 'event')}, from {row['first']} to {row['last']}.",
            advice,
        )
        for row in holes[:TREES_SHOWN_MAX]
    ]
    if more := len(holes) - len(found):
        message = f"{plural(more, 'more tree')} with gaps in the feed."
        found.append(Finding("feed", "problem", message, advice))
    if not found:
        [row] = yield from rows(COUNT_EVENTS)
        trees, events = plural(row["trees"], "tree"), plural(row["events"], "event")
        found.append(Finding("feed", "ok", f"No gaps: {trees}, {events}."))
    return found

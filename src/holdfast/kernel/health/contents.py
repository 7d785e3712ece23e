"""What must hold inside a store, on both databases."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import HoldfastError
from ...records import Finding
from ...words import plural
from ..marks import WRITER_KEPT_MS
from ..operation import Call, Op, Row, SyncDriver, one, query, rows
from ..schema import read_store_id

# Positions are whole numbers and each is there once, so these three tell of every hole.
HOLES = """
SELECT hf_trees.root_id, hf_trees.position, count(hf_events.position) AS events,
    coalesce(min(hf_events.position), 1) AS first,
    coalesce(max(hf_events.position), 0) AS last
FROM hf_trees LEFT JOIN hf_events ON hf_events.root_id = hf_trees.root_id
GROUP BY hf_trees.root_id, hf_trees.position
HAVING count(hf_events.position) <> hf_trees.position
    OR coalesce(min(hf_events.position), 1) <> 1
    OR coalesce(max(hf_events.position), 0) <> hf_trees.position
ORDER BY hf_trees.root_id
"""
TREES = """
SELECT count(*) AS trees, (SELECT count(*) FROM hf_events) AS events FROM hf_trees
"""
WRITERS = """
SELECT count(*) AS writers,
    coalesce(sum(CASE WHEN updated_at < :now - :age_ms THEN 1 ELSE 0 END), 0) AS abandoned
FROM hf_writers
"""
# The indexes of open and doubtful effects hold no others.
EFFECTS = """
SELECT (SELECT count(*) FROM hf_effects WHERE status = 'unknown') AS unknown,
    (SELECT count(*) FROM hf_effects WHERE status = 'issued') AS issued,
    (SELECT count(*) FROM hf_effects WHERE status = 'issued'
        AND lease_expires_at + settle_ms <= :now
        AND issued_at + timeout_ms + settle_ms <= :now) AS abandoned
"""
LEASES = """
SELECT (SELECT count(*) FROM hf_work WHERE state = 'in_progress') AS running,
    (SELECT count(*) FROM hf_work
        WHERE state = 'in_progress' AND lease_expires_at <= :now) AS items,
    (SELECT count(*) FROM hf_sessions WHERE holder IS NOT NULL) AS driven,
    (SELECT count(*) FROM hf_sessions
        WHERE holder IS NOT NULL AND lease_expires_at <= :now) AS sessions
"""
DOORS = "SELECT name FROM hf_doors ORDER BY name"
TREES_SHOWN_MAX = 10
WRITERS_MAX = 10_000


class ContentOps:
    """Reads what the checks compare."""

    @query
    def store_id(self) -> Op[str]:
        """Return the store's id."""
        return (yield from read_store_id())

    @query
    def holes(self) -> Op[list[Row]]:
        """Return the trees whose feed is not dense."""
        return (yield from rows(HOLES))

    @query
    def trees(self) -> Op[Row]:
        """Return how many trees and events there are."""
        return (yield from one(TREES)) or {"trees": 0, "events": 0}

    @query
    def doors(self) -> Op[list[str]]:
        """Return the doors for removing history that stand open."""
        return [row["name"] for row in (yield from rows(DOORS))]

    @query
    def writers(self, age_ms: int) -> Op[Row]:
        """Return how many writers there are, and how many have not written for that time."""
        return (yield from one(WRITERS, age_ms=age_ms)) or {"writers": 0, "abandoned": 0}

    @query
    def leases(self) -> Op[Row]:
        """Return how many items and sessions are held, and how many of the leases have expired."""
        return (yield from one(LEASES)) or {}

    @query
    def effects(self) -> Op[Row]:
        """Return how many effects are in doubt, under way, and left behind by dead owners."""
        return (yield from one(EFFECTS)) or {"unknown": 0, "issued": 0, "abandoned": 0}


def content_findings(driver: SyncDriver) -> list[Finding]:
    """Check the rows of a store."""
    return [
        *guarded("feed", lambda: feed_findings(driver)),
        *guarded("history", lambda: [history_finding(driver)]),
        *guarded("writers", lambda: [writers_finding(driver)]),
        *guarded("effects", lambda: effect_findings(driver)),
        *guarded("leases", lambda: lease_findings(driver)),
    ]


def feed_findings(driver: SyncDriver) -> list[Finding]:
    """Look for trees whose events are not numbered 1, 2, 3 … up to the tree's position."""
    holes = driver.run(Call(ContentOps.holes, ContentOps()))
    advice = "Events were removed or added by hand: restore a backup."
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
        message = f"{plural(more, 'more tree')} with holes in the feed."
        found.append(Finding("feed", "problem", message, advice))
    if not found:
        counts = driver.run(Call(ContentOps.trees, ContentOps()))
        trees, events = plural(counts["trees"], "tree"), plural(counts["events"], "event")
        found.append(Finding("feed", "ok", f"No holes: {trees}, {events}."))
    return found


def history_finding(driver: SyncDriver) -> Finding:
    """Make sure that the database refuses to remove history."""
    if doors := driver.run(Call(ContentOps.doors, ContentOps())):
        message = f"Anybody can remove history: hf_doors has {', '.join(doors)}."
        return Finding("history", "problem", message, "Empty the table hf_doors.")
    return Finding("history", "ok", "The database refuses to remove history.")


def writers_finding(driver: SyncDriver) -> Finding:
    """Count the connections that have written lately."""
    row = driver.run(Call(ContentOps.writers, ContentOps(), (WRITER_KEPT_MS,)))
    message = f"{plural(row['writers'], 'writer row')}, {row['abandoned']:,} older than 7 days."
    if row["writers"] - row["abandoned"] > WRITERS_MAX:
        advice = "Connections are opened too often: keep one store open in each process."
        return Finding("writers", "warning", message, advice)
    return Finding("writers", "ok", message)


def effect_findings(driver: SyncDriver) -> list[Finding]:
    """Look for effects that nobody knows the outcome of."""
    row = driver.run(Call(ContentOps.effects, ContentOps()))
    found = []
    if row["unknown"]:
        message = f"{plural(row['unknown'], 'effect')} in doubt: equal calls raise Unresolved."
        advice = "`holdfast effects list` shows them; resolve or verify each."
        found.append(Finding("effects", "warning", message, advice))
    if row["abandoned"]:
        message = f"{plural(row['abandoned'], 'effect')} left behind by an owner that is dead."
        advice = "Start what owns the tools; it verifies them. Or resolve each by hand."
        found.append(Finding("effects", "warning", message, advice))
    under_way = plural(row["issued"], "effect")
    return found or [Finding("effects", "ok", f"None in doubt, {under_way} under way.")]


def lease_findings(driver: SyncDriver) -> list[Finding]:
    """Look for work items and sessions whose holder died."""
    row = driver.run(Call(ContentOps.leases, ContentOps()))
    found = []
    if row["items"]:
        message = f"{plural(row['items'], 'work item')} with an expired lease: the worker died."
        advice = "A running worker requeues them, and so does `holdfast work sweep`."
        found.append(Finding("leases", "warning", message, advice))
    if row["sessions"]:
        message = f"{plural(row['sessions'], 'session')} with an expired lease: the driver died."
        advice = "Start the agent again; it resumes them."
        found.append(Finding("leases", "warning", message, advice))
    items, sessions = plural(row["running"], "work item"), plural(row["driven"], "session")
    return found or [Finding("leases", "ok", f"None has expired: {items}, {sessions}.")]


def guarded(check: str, examine: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of one check; a store that cannot be read is one too."""
    try:
        return examine()
    except HoldfastError as error:
        return [Finding(check, "problem", f"{error}.")]

"""Places in the feeds of all trees together, and reading what comes after one.

SQLite numbers events in commit order, because there is one writer. PostgreSQL has no such order:
transactions commit concurrently, and one that began early may commit late. There a place is a
horizon, a transaction id below which everything was delivered, and how far the trees with later
events were delivered. This works because a tree's events become visible in the order of their
positions: every reader sees a prefix of a tree. Transaction ids alone would not do: of two events
of one tree, the later one may have the smaller id.

Whoever starts without a cursor reads what is kept. From then on a place knows which prunes it has
seen, and any other that removes events behind it is an error, not a hole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypeAlias

import msgspec
from xxhash import xxh3_64_hexdigest

from ..dataclass import dataclass
from ..errors import Compacted, InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..wire import travels

READ_ROWS = """
SELECT number, root_id, position, session_id, kind, data, created_at FROM hf_events
WHERE number > :number ORDER BY number LIMIT :limit
"""
IDENTITY = "number, root_id, position, session_id, kind, created_at"
READ_LAST_NUMBER = "SELECT seq AS number FROM sqlite_sequence WHERE name = 'hf_events'"
READ_ROW = f"SELECT {IDENTITY} FROM hf_events WHERE number = :number"  # noqa: S608
READ_PRUNES = "SELECT coalesce(max(pruned_in), 0) AS prunes FROM hf_trees WHERE pruned_in > 0"
FIND_MISSED_ROWS = """
SELECT root_id FROM hf_trees
WHERE pruned_in > :prunes AND pruned_in > 0 AND pruned_number > :number LIMIT 1
"""

# The statements below are for PostgreSQL.
READ_SERVER = """
SELECT (SELECT system_identifier FROM pg_control_system()) AS server, c.oid::bigint AS events
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relname = 'hf_events'
"""
READ_HORIZON = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS horizon,
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next,
    ARRAY(
        SELECT running::text::bigint FROM pg_snapshot_xip(pg_current_snapshot()) AS running
    ) AS running,
    EXISTS (
        SELECT 1 FROM hf_trees WHERE pruned_transaction > 0 AND pruned_transaction >= :horizon
    ) AS is_pruned
"""
# The transaction that ends a window of about `limit` events.
READ_EDGE = """
SELECT transaction_id::text::bigint AS edge FROM hf_events
WHERE transaction_id >= CAST(:horizon AS text)::xid8
ORDER BY transaction_id OFFSET :limit LIMIT 1
"""
# For each tree that changed in a window of transactions, its undelivered events up to its last one
# in the window. What was delivered before the horizon ends with the last event below it. With a
# LIMIT for each tree, PostgreSQL finds out what was delivered before it reads the tree's events.
READ_WINDOW = """
SELECT e.root_id, e.position, e.session_id, e.kind, e.data, e.created_at,
    e.transaction_id::text::bigint AS transaction_id
FROM (
    SELECT changed.root_id, changed.last,
        greatest(
            known.position, coalesce(given.position::bigint, 0),
            CASE WHEN changed.root_id = CAST(:last_root_id AS text)
                THEN CAST(:last_position AS bigint) END
        ) AS delivered
    FROM (
        SELECT root_id, min(position) AS first, max(position) AS last FROM hf_events
        WHERE transaction_id >= CAST(:horizon AS text)::xid8
            AND transaction_id < CAST(:below AS text)::xid8
            AND root_id >= CAST(:last_root_id AS text)
        GROUP BY root_id
    ) AS changed
    LEFT JOIN json_each_text(CAST(:given AS text)::json) AS given (root_id, position)
        ON given.root_id = changed.root_id
    CROSS JOIN LATERAL (
        SELECT coalesce(max(before.position), 0) AS position FROM (
            SELECT position FROM hf_events
            WHERE root_id = changed.root_id AND position < changed.first
                AND transaction_id < CAST(:horizon AS text)::xid8
            ORDER BY position DESC LIMIT 1
        ) AS before
    ) AS known
) AS changed
CROSS JOIN LATERAL (
    SELECT * FROM hf_events
    WHERE root_id = changed.root_id AND position > changed.delivered AND position <= changed.last
    ORDER BY position LIMIT :limit
) AS e
ORDER BY e.root_id, e.position LIMIT :limit
"""
# Trees with pruned events at or above the horizon that were not delivered before they were pruned.
FIND_MISSED = """
SELECT t.root_id FROM hf_trees AS t
LEFT JOIN json_each_text(CAST(:given AS text)::json) AS given (root_id, position)
    ON given.root_id = t.root_id
WHERE t.pruned_transaction > 0 AND t.pruned_transaction >= :horizon
    AND t.floor > coalesce(given.position::bigint, 0)
    AND NOT (t.pruned_transaction < :below
        AND (t.root_id, t.floor) <= (CAST(:last_root_id AS text), CAST(:last_position AS bigint)))
    AND (t.pruned_in >= :next OR t.pruned_in IN (
        SELECT value::bigint FROM json_array_elements_text(CAST(:running AS text)::json) AS value
    ))
LIMIT 1
"""
TRANSACTION_MAX = 2**64 - 1

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# PostgreSQL has no text with a NUL.
Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]*\Z")]
Given: TypeAlias = tuple[tuple[Text, Number, Number], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Events read after a place, and the place after them all."""

    start: Place
    rows: list[Row]
    after: Place
    is_end: bool


@travels
@dataclass(frozen=True, slots=True)
class RowPlace:
    """A place on SQLite: the number of the last delivered event, and a digest of that event.

    A copy of the file that was written to gives the same numbers to other events.
    """

    number: Number = 0
    event: str = ""
    prunes: Number = 0
    """How many prunes of the store are known: what they removed was never to be read from here."""

    def require_readable(self) -> Op[None]:
        """Refuse a place that the store has not reached, or whose next events were pruned."""
        if self.number == 0:
            return
        last, found, missed = yield from batch(
            Query(READ_LAST_NUMBER, {}),
            Query(READ_ROW, {"number": self.number}),
            self._find_missed(),
        )
        if self.number > max((row["number"] for row in last), default=0):
            raise InvalidArgument(
                "after is a cursor ahead of this store, which is an older copy; start without a "
                "cursor"
            )
        if any(_digest(row) != self.event for row in found):
            raise InvalidArgument(
                "after is a cursor of another copy of this store, which has gone on differently; "
                "start without a cursor"
            )
        _require_kept(missed)

    def _find_missed(self) -> Query:
        return Query(FIND_MISSED_ROWS, {"number": self.number, "prunes": self.prunes})

    def end(self) -> Op[RowPlace]:
        """Return the place behind everything that is committed."""
        last = yield from one(READ_LAST_NUMBER)
        if last is None:
            return self
        row = yield from one(READ_ROW, number=last["number"])
        return RowPlace(last["number"]) if row is None else self.behind([row])

    def read(self, limit: int) -> Op[Found]:
        """Return the events after this place."""
        found, missed, [known] = yield from batch(
            Query(READ_ROWS, {"number": self.number, "limit": limit}),
            self._find_missed(),
            Query(READ_PRUNES, {}),
        )
        if self.number:
            _require_kept(missed)
        start = replace(self, prunes=known["prunes"])
        # At the end the place stays the same, so that all waiting followers share it.
        after = start.behind(found) if found else self
        return Found(start, found, after, is_end=len(found) < limit)

    def behind(self, given: Sequence[Row]) -> RowPlace:
        """Return the place after some of the events that were read here."""
        if not given:
            return self
        return RowPlace(given[-1]["number"], _digest(given[-1]), self.prunes)


def _digest(row: Row) -> str:
    """Return what tells an event from others of its number; its data may have been emptied."""
    names = ("root_id", "position", "session_id", "kind", "created_at")
    return xxh3_64_hexdigest("\0".join(str(row[name]) for name in names).encode())


def _require_kept(missed: Sequence[Row]) -> None:
    if missed:
        raise Compacted(
            f"events after this cursor have been pruned, also of {missed[0]['root_id']}; start "
            "without a cursor for those that are kept",
            oldest=None,
        )


@travels
@dataclass(frozen=True, slots=True)
class HorizonPlace:
    """A place on PostgreSQL."""

    horizon: Number = 0
    given: Given = ()
    """For each tree with delivered events at or above the horizon: the position reached, and the
    highest transaction among them."""
    below: Number | None = None
    """The end of a window of ended transactions that was delivered in part."""
    last: tuple[Text, Number] = ("", 0)
    """The tree and position delivered last in that window."""

    prunes: tuple[Number, tuple[Number, ...]] = (0, ())
    """Which prunes are known: those of transactions before one, but for some that were running."""

    def require_readable(self) -> Op[None]:
        """Refuse a place whose next events were pruned; a lagging replica will reach any place."""
        _require_kept((yield self._find_missed()))

    def _find_missed(self) -> Query:
        following, running = self.prunes
        return Query(
            FIND_MISSED,
            {
                "horizon": self.horizon,
                "below": self.below or 0,
                "next": following,
                "running": json.dumps(running),
                **self._delivered(),
            },
        )

    def _delivered(self) -> dict[str, object]:
        """Return parameters: what was delivered at or above the horizon."""
        return {
            "given": json.dumps({root_id: position for root_id, position, _ in self.given}),
            "last_root_id": self.last[0],
            "last_position": self.last[1],
        }

    def _knowing(self, snapshot: Row) -> HorizonPlace:
        """Return this place with the prunes of a snapshot, if they concern it."""
        if not snapshot["is_pruned"]:
            return replace(self, prunes=(0, ()))
        return replace(self, prunes=(snapshot["next"], tuple(snapshot["running"])))

    def end(self) -> Op[HorizonPlace]:
        """Return a place behind everything that ended transactions have committed."""
        row = yield from one(READ_HORIZON, horizon=0)
        assert row is not None
        return HorizonPlace(row["horizon"])._knowing(row)

    def read(self, limit: int) -> Op[Found]:
        """Return events after this place: those of a window, or all visible ones."""
        asked = {"horizon": str(self.horizon), "limit": limit}
        [snapshot], edge, missed = yield from batch(
            Query(READ_HORIZON, {"horizon": self.horizon}),
            Query(READ_EDGE, asked),
            self._find_missed(),
        )
        if self != HorizonPlace():
            _require_kept(missed)
        below = self.below
        # A window below the oldest running transaction can get no more events.
        if below is None and edge and edge[0]["edge"] <= snapshot["horizon"]:
            below = max(edge[0]["edge"], self.horizon + 1)
        found = yield from rows(
            READ_WINDOW,
            **asked,
            below=str(TRANSACTION_MAX if below is None else below),
            **self._delivered(),
        )
        start = replace(self._knowing(snapshot), below=below)
        after = start.behind(found)
        if len(found) < limit:
            after = after.at(snapshot["horizon"] if below is None else below)
        is_end = below is None and len(found) < limit
        # At the end the place stays the same, so that all waiting followers share it.
        return Found(start, found, after if found or not is_end else self, is_end)

    def behind(self, given: Sequence[Row]) -> HorizonPlace:
        """Return the place after some of the events that were read here."""
        known = {root_id: (position, last) for root_id, position, last in self.given}
        for row in given:
            root_id, transaction = row["root_id"], row["transaction_id"]
            if root_id in known or self.below is None or transaction >= self.below:
                latest = max(transaction, known.get(root_id, (0, 0))[1])
                known[root_id] = (row["position"], latest)
        last = self.last
        if given and self.below is not None:
            last = (given[-1]["root_id"], given[-1]["position"])
        everything = tuple(sorted((root_id, *reached) for root_id, reached in known.items()))
        return replace(self, given=everything, last=last)

    def at(self, horizon: int) -> HorizonPlace:
        """Return the place where everything below a transaction was delivered."""
        later = tuple(each for each in self.given if each[2] >= horizon)
        return HorizonPlace(horizon, later, prunes=self.prunes)


Place: TypeAlias = RowPlace | HorizonPlace

"""Nouns: the kinds of things that a store keeps, and what each does in the store's life-cycle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..records import Effect, EndedItem, Finding, Pruned, SessionRef, Swept
from .files import Archive
from .operation import Op, Query, Row, batch, one, rows
from .portable import Portable

if TYPE_CHECKING:
    from .flow import Flow
    from .operation import Runtime


SWEPT_PER_PASS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a prune keeps; ages are in milliseconds."""

    session: str | None = None
    """If given, only checkpoints of this session are pruned, and nothing of other nouns."""
    keep: int | None = None
    """How many checkpoints of each session to keep; None for all."""
    work_ms: int
    key_ms: int
    effect_ms: int
    history_ms: int | None = None
    """How long to keep state history and events of ended trees; None: no limit."""
    archive: Archive | None = None
    progress: Callable[[int], None] | None = None
    """Called with the number of checkpoints removed so far."""


class Noun:
    """One kind of thing, with tables that only its own package names.

    A method does nothing unless the noun overrides it. An `Op` is part of one transaction, which
    has locked the tree of its sessions and calls the nouns in reverse dependency order. A `Flow`
    runs transactions of its own.
    """

    portable: Portable = Portable()
    """Its part in export files."""
    name = ""
    """The name of one of its rows, if they can be leased."""
    guard = ""
    """The statement that locks a leased row, and returns nothing if the fence is old."""
    renewal = ""
    """The statement that renews a lease and returns its number, or nothing if the fence is old."""
    fencing = ""
    """The statement that revokes the leases of earlier boots, and returns a row for each."""
    leased = ""
    """The table and condition of leased rows, if others may take them over."""
    leased_to = ""
    """What the holder of such a lease is called."""
    advice = ""
    """What to do when a holder has died."""
    any_record = ""
    """A statement that returns a row if the store has a record that a cipher would encrypt."""
    due = ""
    """A query of the time at which the next of its rows is due, which workers then sweep."""
    item_types: frozenset[str] = frozenset()
    """The types of the work items that it submits, and whose end it has to know."""

    def schema(self) -> str:
        """Return the SQL that creates the tables; see `kernel/schema.sql`."""
        return Path(inspect.getfile(type(self))).with_name("schema.sql").read_text("utf-8")

    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Renew leases, given as fences by number; those missing from the answer are lost."""
        lease_ms = round(lease_seconds * 1000)
        # Everything that locks several rows does so in the order of their numbers.
        queries = [
            Query(self.renewal, {"number": number, "fence": fence, "lease_ms": lease_ms})
            for number, fence in sorted(held.items())
        ]
        return {row["number"]: row for found in (yield from batch(*queries)) for row in found}

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[Mapping[int, str]]:
        """Return, by number, why sessions cannot be deleted now: "is …" or "has …"."""
        yield from ()
        return {}

    def cancel(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Cancel up to `limit` rows of sessions that are cancelled or deleted; return how many.

        Fewer than the limit means that none is left.
        """
        yield from ()
        return 0

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove rows of sessions of one tree that are deleted, up to `limit` of each table.

        Return the number of one table, the highest; fewer than the limit means that none is left.
        Nothing else changes these rows: the sessions are `deleting`, or this transaction removes
        all of them. The nouns do this side by side, so none may touch what another one removes.
        """
        yield from ()
        return 0

    def rewind(
        self, runtime: Runtime, session: SessionRef, version: int, keeping: str | None
    ) -> Op[None]:
        """Fence whatever runs for a session that is rewound, except the item that rewinds it.

        What came after the version is left behind.
        """
        yield from ()

    def ended(self, runtime: Runtime, session: SessionRef, status: str) -> Op[None]:
        """Stop what belongs to a session that has ended by itself: completed, failed, cancelled."""
        yield from ()

    def turn_saved(self, runtime: Runtime, session: SessionRef) -> Op[None]:
        """Close what the next turn of a session ends; only told if the session's row awaits it."""
        yield from ()

    def item_looks(self, item: EndedItem) -> Sequence[Query]:
        """Return the queries whose rows `item_ended` needs; they run when the item has ended."""
        return ()

    def item_ended(
        self,
        runtime: Runtime,
        item: EndedItem,
        looked: Sequence[list[Row]],
        driving_fence: int | None,
    ) -> Op[bool]:
        """Follow up on a work item of one of its types that has ended.

        The ends of several items run side by side: what was read may have been changed since by
        the follow-up of another. `driving_fence` is that of the session's lease, if the item drove
        the session. Return whether that lease was released; otherwise the caller releases it.
        """
        yield from ()
        return False

    def settled(self, runtime: Runtime, effect_id: str) -> Op[None]:
        """Resume what waited for an effect that was resolved."""
        yield from ()

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Settle the effects of dead owners; return those settled, and those without a tool."""
        yield from ()
        return [], []

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Requeue up to `limit` rows whose lease has expired, and promote what is due."""
        yield from ()
        return Swept()

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove old rows that are not needed, a bounded number in each transaction."""
        yield from ()
        return Pruned()

    def checks(self) -> Mapping[str, Callable[[], Op[list[Finding]]]]:
        """Return the read-only checks of `doctor`, by name."""
        return {}


SHORT_CHARACTERS_MIN = 8
NUMBER_DIGITS_MAX = 18
SHOWN_MAX = 3


def find_row(noun: str, select: str, given: str) -> Op[Row | None]:
    """Return the row with this id, number or unique id prefix, or None.

    A prefix has at least 8 characters. `select` is a statement without its WHERE clause.
    """
    by_id, by_number = f"{select} WHERE id = :id", f"{select} WHERE number = :number"
    # Ids are ordered by bytes, so those with a common prefix are adjacent.
    beginning = f"{select} WHERE id >= :id ORDER BY id LIMIT {SHOWN_MAX}"
    row = yield from one(by_id, id=given)
    if row is None and given.isascii() and given.isdigit() and len(given) <= NUMBER_DIGITS_MAX:
        row = yield from one(by_number, number=int(given))
    if row is None and len(given) >= SHORT_CHARACTERS_MIN:
        found = yield from rows(beginning, id=given)
        found = [each for each in found if each["id"].startswith(given)]
        if len(found) > 1:
            ids = ", ".join(each["id"] for each in found)
            raise InvalidArgument(
                f"more than one {noun}'s id begins with {shown(given)}: {ids} …; give more of it, "
                "or the number"
            )
        row = found[0] if found else None
    return row

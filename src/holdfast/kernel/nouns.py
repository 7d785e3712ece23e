"""Nouns: the kinds of things that a store keeps, each with its part in the life of a store."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..errors import InvalidArgument
from ..records import Effect, Finding, Pruned, SessionRef, Swept
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
    """If given, only checkpoints of that one go, and nothing of other nouns."""
    keep: int | None = None
    """How many checkpoints of each session stay; None for all."""
    work_ms: int
    key_ms: int
    effect_ms: int
    history_ms: int | None = None
    """How long state history and events of ended trees stay; None for ever."""
    archive: Archive | None = None
    progress: Callable[[int], None] | None = None
    """Told how many checkpoints were removed."""


class Noun:
    """One kind of thing, with the tables that only its own package names.

    A method does nothing unless the noun overrides it. An `Op` is part of one transaction, in which
    the tree of the sessions it is about is locked; the nouns take part from the top of the store's
    list down. A `Flow` runs transactions of its own.
    """

    portable: Portable = Portable()
    """Its part in export files."""
    name = ""
    """What one of its rows is called, where leases are taken on them."""
    guard = ""
    """The statement that locks the row of a lease, and finds nothing once its fence is old."""
    renewal = ""
    """The statement that prolongs a lease, and returns its number unless its fence is old."""
    fencing = ""
    """The statement that takes leases away from earlier boots, and returns a row for each."""
    leased = ""
    """The table and condition of rows that are leased, if others may take them over."""
    leased_to = ""
    """Who holds such a lease."""
    advice = ""
    """What to do when a holder died."""
    any_record = ""
    """The statement that finds a record which a cipher would have encrypted, if there is any."""

    def schema(self) -> str:
        """Return the text that creates the tables; see `kernel/schema.sql`."""
        return Path(inspect.getfile(type(self))).with_name("schema.sql").read_text("utf-8")

    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Prolong leases, given as number and fence; those missing from the answer are lost."""
        lease_ms = round(lease_seconds * 1000)
        # Rows are locked by number, as everybody does who locks several.
        queries = [
            Query(self.renewal, {"number": number, "fence": fence, "lease_ms": lease_ms})
            for number, fence in sorted(held.items())
        ]
        return {row["number"]: row for found in (yield from batch(*queries)) for row in found}

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[Mapping[int, str]]:
        """Return, by number, why sessions cannot be deleted now; "is …" or "has …"."""
        yield from ()
        return {}

    def cancel(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Cancel up to `limit` rows of sessions that are about to be cancelled.

        Return how many; less than the limit means that nothing is left.
        """
        yield from ()
        return 0

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove up to `limit` rows of sessions that are deleted, all of one tree.

        Return how many; less than the limit means that nothing is left. Nobody else changes
        them: the sessions are `deleting`, or this transaction removes all of them.
        """
        yield from ()
        return 0

    def rewind(self, runtime: Runtime, session: SessionRef, keeping: str | None) -> Op[None]:
        """Fence what runs for a session that is rewound, except the item that rewinds it."""
        yield from ()

    def settled(self, runtime: Runtime, effect_id: str) -> Op[None]:
        """Go on with what waited for an effect that was resolved."""
        yield from ()

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Settle what dead owners left; return what is settled, and what lacks its tool."""
        yield from ()
        return [], []

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Take back up to `limit` rows whose lease ran out, and begin what is due."""
        yield from ()
        return Swept()

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove what is old and not needed, a bounded number of rows in each transaction."""
        yield from ()
        return Pruned()

    def checks(self) -> Mapping[str, Callable[[], Op[list[Finding]]]]:
        """Return what `doctor` looks at, by name; a check changes nothing."""
        return {}


SHORT_CHARACTERS_MIN = 8
NUMBER_DIGITS_MAX = 18
SHOWN_MAX = 3


def find_row(noun: str, select: str, given: str) -> Op[Row | None]:
    """Return the row that somebody means, if there is one; `select` names columns and the table.

    The first 8 characters of an id or more are enough if no other id begins with them.
    """
    by_id, by_number = f"{select} WHERE id = :id", f"{select} WHERE number = :number"
    # Ids are in the order of their bytes: those with a beginning stand together, from it on.
    beginning = f"{select} WHERE id >= :id ORDER BY id LIMIT {SHOWN_MAX}"
    row = yield from one(by_id, id=given)
    if row is None and given.isascii() and given.isdigit() and len(given) <= NUMBER_DIGITS_MAX:
        row = yield from one(by_number, number=int(given))
    if row is None and len(given) >= SHORT_CHARACTERS_MIN:
        found = yield from rows(beginning, id=given)
        found = [each for each in found if each["id"].startswith(given)]
        if len(found) > 1:
            ids = ", ".join(each["id"] for each in found)
            raise InvalidArgument(f"more than one {noun}'s id begins with {shown(given)}: {ids} …")
        row = found[0] if found else None
    return row

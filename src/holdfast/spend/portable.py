"""Spend in export files. It outlives its session, and counts for the tree."""

from __future__ import annotations

from ..arguments import require_text, shown
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import KeptSet, kept_set
from ..kernel.operation import Op, Row, batch, rows
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.portable import Export, Import, Portable, Record, Sealed, Seen
from ..sessions.portable import first_existing
from .ledger import SpendState, context, recounted

SPENT_MAX = 2**62
DETAILS = portable.Value(dict, "details that are no object")


class SpendRecord(Record, frozen=True, tag="spend"):
    """One attempt at a model call; its session number is 0 if the session is deleted."""

    sealed = Sealed(lambda row, name: context(row["id"]), details=DETAILS)
    counted = "spends"

    session_number: portable.Count
    session_id: portable.Name
    root_id: portable.Name
    id: portable.Name
    model: portable.Name
    source: portable.Name
    state: SpendState
    input_tokens: portable.Count
    output_tokens: portable.Count
    nano_usd: portable.Count | None
    created_at: portable.Time
    updated_at: portable.Time
    details: bytes | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that its session or tree precedes it, and that totals do not overflow."""
        spends, is_gone = seen.of(_Spends), not self.session_number
        is_placed = self.root_id in seen.trees if is_gone else seen.is_placed(self)
        if not is_placed or not seen.is_new(self):
            return f"spend {self.id!r} comes twice, or without its session"
        if is_gone:
            spends.gone.add(require_text("id", self.session_id))
        whole = seen.whole.of(_Spends)
        whole.sum += max(self.input_tokens, self.output_tokens, self.nano_usd or 0)
        return "the total of spend is too large" if whole.sum > SPENT_MAX else None

    def add(self, into: Import) -> Op[None]:
        """Add the attempt; the totals are computed at the end."""
        spends, number = into.of(_Spends), (yield from into.number(self.session_number))
        if self.root_id not in spends.trees:
            # Spend of deleted sessions is stored under old numbers, and moves to the new ones.
            found = yield from rows(PAYERS_OF_TREE, root_id=self.root_id)
            for row in found:
                spends.sessions.add(row["session_number"])
        spends.sessions.add(number)
        spends.trees.add(self.root_id)
        problem = f"spend {self.id!r} belongs to another session here"
        into.insert(ADD_SPEND, self.row(into.codec, session_number=number), problem)


@dataclass(slots=True)
class _Spends:
    sum: int = 0
    gone: KeptSet[str] = kept_set()
    sessions: KeptSet[int] = kept_set()
    trees: KeptSet[str] = kept_set()


SPENDS = OwnedRows(
    f"number, {SpendRecord.selected()}",
    "hf_spend",
    "root_id = {owner}",
    {"number": 0},
    owner="TEXT",
)
PAYERS_OF_TREE = "SELECT DISTINCT session_number FROM hf_spend WHERE root_id = :root_id"
# Spend of a deleted session may still be here, and becomes its own again. Its tree is not here in
# that case, because its root is in the file.
ADD_SPEND = Insert(
    "hf_spend",
    SpendRecord.columns(),
    """
    ON CONFLICT (id) DO UPDATE SET
        session_number = excluded.session_number, root_id = excluded.root_id
    WHERE hf_spend.session_id = excluded.session_id AND hf_spend.root_id = excluded.root_id
    RETURNING id
    """,
    key="id",
)


class SpendPortable(Portable):
    """Spend is exported with its tree, including that of deleted sessions."""

    records = (SpendRecord,)

    def export(self, out: Export) -> Op[None]:
        """Write the spend of the trees."""

        def write(row: Row) -> None:
            number = out.known(row["session_number"])
            out.write(SpendRecord.of(out.codec, row, session_number=number))

        yield from read_each(SPENDS, out.root_ids, write)

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Raise if spend of a deleted session would be listed under another session here."""
        gone = (id for id in seen.of(_Spends).gone if not seen.has("session", id))
        id = None if is_trusted else (yield from first_existing(gone))
        if id is not None:
            raise InvalidArgument(
                f"{label} has the spend of a deleted session {shown(id)}, and this store has "
                "another session of that id, where it would be listed; nothing was imported. If "
                "you trust where it comes from, import it with store_keys=True (--store-keys)",
                session_id=id,
            )

    def finish(self, into: Import) -> Op[None]:
        """Recompute the totals of sessions and trees."""
        spends = into.of(_Spends)
        for number in spends.sessions:
            if number > 0:
                yield from batch(*recounted(number))
        for root_id in spends.trees:
            yield from batch(*recounted(root_id=root_id))

"""Spend in export files: money outlives the session that paid it, and counts for its tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..arguments import require_text, shown
from ..errors import InvalidArgument
from ..kernel import portable
from ..kernel.operation import Op, Row, batch, rows
from ..kernel.portable import Export, Import, Portable, Record, Sealed, Seen, read_each
from ..sessions.portable import first_existing
from .ledger import SpendState, context, recounted

SPENT_MAX = 2**62
DETAILS = portable.Value(dict, "details that are no object")


class SpendRecord(Record, frozen=True, tag="spend"):
    """One attempt at a model; the number of its session is 0 if that is gone."""

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
        """Check that its session or tree came before it, and that all can be summed up."""
        spends, is_gone = seen.of(_Spends), not self.session_number
        is_placed = self.root_id in seen.trees if is_gone else seen.is_placed(self)
        if not is_placed or not seen.is_new(self):
            return f"spend {self.id!r} comes twice, or without its session"
        if is_gone:
            spends.gone.add(require_text("id", self.session_id))
        spends.sum += max(self.input_tokens, self.output_tokens, self.nano_usd or 0)
        return "what was spent is more than can be counted" if spends.sum > SPENT_MAX else None

    def add(self, into: Import) -> Op[None]:
        """Add the attempt; the totals are made when all are there."""
        spends, number = into.of(_Spends), (yield from into.number(self.session_number))
        if self.root_id not in spends.trees:
            # What deleted sessions paid is here under their old numbers, and moves to the new.
            found = yield from rows(PAYERS_OF_TREE, root_id=self.root_id)
            spends.sessions.update(row["session_number"] for row in found)
        spends.sessions.add(number)
        spends.trees.add(self.root_id)
        problem = f"spend {self.id!r} is that of another session here"
        into.later(ADD_SPEND, self.row(into.codec, session_number=number), problem)


@dataclass(slots=True)
class _Spends:
    sum: int = 0
    gone: set[str] = field(default_factory=set)
    sessions: set[int] = field(default_factory=set)
    trees: set[str] = field(default_factory=set)


SPENDS_OF_TREE = f"""
SELECT number, {SpendRecord.selected()} FROM hf_spend
WHERE root_id = :root_id AND number > :number ORDER BY number LIMIT :limit
"""  # noqa: S608
PAYERS_OF_TREE = "SELECT DISTINCT session_number FROM hf_spend WHERE root_id = :root_id"
# What a deleted session paid may be here still: it is its own again. Its tree is not here then,
# because its root is in the file.
ADD_SPEND = f"""
INSERT INTO hf_spend {SpendRecord.inserted()}
ON CONFLICT (id) DO UPDATE SET
    session_number = excluded.session_number, root_id = excluded.root_id
WHERE hf_spend.session_id = excluded.session_id AND hf_spend.root_id = excluded.root_id
RETURNING id
"""


class SpendPortable(Portable):
    """What a tree spent travels with it, that of its deleted sessions included."""

    records = (SpendRecord,)

    def export(self, out: Export) -> Op[None]:
        """Write what the trees spent."""

        def write(row: Row) -> None:
            number = out.known(row["session_number"])
            out.write(SpendRecord.of(out.codec, row, session_number=number))

        yield from read_each(SPENDS_OF_TREE, ({"root_id": id} for id in out.root_ids), write)

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Refuse spend that would be listed as that of a session it is not of."""
        gone = (id for id in sorted(seen.of(_Spends).gone) if not seen.has("session", id))
        id = None if is_trusted else (yield from first_existing(gone))
        if id is not None:
            raise InvalidArgument(
                f"{label} has the spend of a deleted session {shown(id)}, and this store has "
                "another session of that id, where it would be listed; nothing was imported. If "
                "you trust where it comes from, import it with store_keys=True (--store-keys)",
                session_id=id,
            )

    def finish(self, into: Import) -> Op[None]:
        """Count what sessions and trees have spent."""
        spends = into.of(_Spends)
        for number in sorted(number for number in spends.sessions if number > 0):
            yield from batch(*recounted(number))
        for root_id in sorted(spends.trees):
            yield from batch(*recounted(root_id=root_id))

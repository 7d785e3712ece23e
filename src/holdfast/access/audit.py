"""The audit trail: who decided what, in records that are chained by their digests.

A record is written in the transaction of the action that it reports. The row of the head is locked
until COMMIT, so records are numbered without gaps; only the rare actions that are audited wait for
it. Anyone who can write to the database can also recompute the chain: a head that was recorded
elsewhere reveals that.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Literal

from ..arguments import require_limit, require_text, require_text_or_none, require_whole, shown
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel.operation import (
    C,
    Handle,
    Op,
    Query,
    Row,
    batch,
    one,
    operation,
    query,
    rows,
    whole_query,
)
from ..records import Actor

Action = Literal[
    "token_created",
    "token_revoked",
    "effect_resolved",
    "approved",
    "rejected",
    "state_set",
    "session_rewound",
    "session_deleted",
    "work_released",
    "store_pruned",
    "refused",
]

RECORDS_PER_PAGE = 1_000
PROBLEMS_MAX = 10
# What the first record is chained to.
NO_DIGEST = ""
HEAD = re.compile(r"(0|[1-9][0-9]{0,17}):([0-9a-f]{64})?")

COLUMNS = "number, actor, token_id, action, subject, reason, count, created_at, digest"
NEXT_NUMBER = """
INSERT INTO hf_audit_head (id, number, digest) VALUES (1, 1, '')
ON CONFLICT (id) DO UPDATE SET number = hf_audit_head.number + 1
RETURNING number, digest, :now AS now
"""
ADD_RECORD = f"""
INSERT INTO hf_audit ({COLUMNS}) VALUES (
    :number, :actor, :token_id, :action, :subject, :reason, :count, :created_at, :digest
)
"""  # noqa: S608
MOVE_HEAD = "UPDATE hf_audit_head SET digest = :digest WHERE id = 1"
READ_HEAD = "SELECT number, digest FROM hf_audit_head WHERE id = 1"
LIST_RECORDS = f"""
SELECT {COLUMNS} FROM hf_audit WHERE number > :after ORDER BY number LIMIT :limit
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """What was decided: by whom, about which session, effect or token, and how often.

    `actor` is the name of a token and `token_id` its id; without a token it is "local".
    """

    number: int
    actor: str
    token_id: str | None
    action: Action
    subject: str | None
    reason: str | None
    count: int
    created_at: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """Whether the audit trail is intact; `head` is to be recorded elsewhere."""

    records: int
    head: str
    problems: tuple[str, ...]


def record(
    actor: Actor,
    action: Action,
    subject: str | None = None,
    reason: str | None = None,
    count: int = 1,
) -> Op[None]:
    """Record what this transaction does, and on whose behalf."""
    head = yield from one(NEXT_NUMBER)
    assert head is not None
    told = {
        "number": head["number"],
        "actor": actor.name,
        "token_id": actor.token_id,
        "action": action,
        "subject": subject,
        "reason": reason,
        "count": count,
        "created_at": head["now"],
    }
    told["digest"] = _chained(head["digest"], told)
    yield from batch(Query(ADD_RECORD, told), Query(MOVE_HEAD, {"digest": told["digest"]}))


def _chained(before: str, told: Row) -> str:
    """Return the digest of a record that follows another."""
    values = [before, *(told[name] for name in COLUMNS.split(", ")[:-1])]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Audit(Handle[C]):
    """The audit trail of a store."""

    @query
    def list(self, *, after: int = 0, limit: int = 100) -> Op[list[AuditRecord]]:
        """Return records in order; `after` is the number of the last one seen."""
        require_whole("after", after, 0)
        require_limit(limit, RECORDS_PER_PAGE)
        found = yield from rows(LIST_RECORDS, after=after, limit=limit)
        return [AuditRecord(**row) for row in found]

    @query
    def head(self) -> Op[str]:
        """Return the number and digest of the last record, to be recorded outside the store."""
        return (yield from _read_head())

    @whole_query
    def verify(self, head: str | None = None) -> Op[AuditCheck]:
        """Look for records that were edited, removed, reordered or added by hand.

        With a `head` that was recorded earlier, also for a chain that was recomputed.
        """
        noted = None if head is None else _parsed(head)
        return (yield from verify_chain(noted))

    @operation
    def refused(self, reason: str, *, count: int = 1, subject: str | None = None) -> Op[None]:
        """Record that calls were refused, many as one record: call it once a minute."""
        require_text("reason", reason)
        require_whole("count", count, 1)
        require_text_or_none("subject", subject)
        yield from record(self.runtime.actor, "refused", subject, reason, count)


def verify_chain(noted: tuple[int, str] | None = None) -> Op[AuditCheck]:
    """Recompute the chain and compare."""
    last, digest, records = 0, NO_DIGEST, 0
    problems: list[str] = []
    is_noted_found = noted is None or noted == (0, NO_DIGEST)
    while page := (yield from rows(LIST_RECORDS, after=last, limit=RECORDS_PER_PAGE)):
        for row in page:
            if row["number"] != last + 1:
                problems.append(f"{_records(last + 1, row['number'] - 1)} missing")
            elif row["digest"] != _chained(digest, row):
                problems.append(f"record {row['number']} does not continue the one before it")
            last, digest = row["number"], row["digest"]
            is_noted_found = is_noted_found or noted == (last, digest)
        records += len(page)
    head = yield from _read_head()
    if head != f"{last}:{digest}":
        problems.append(f"the last record is {last}, and the head names {head.partition(':')[0]}")
    if noted is not None and not is_noted_found:
        problems.append(f"record {noted[0]} does not have the digest that was recorded")
    return AuditCheck(records=records, head=head, problems=tuple(problems[:PROBLEMS_MAX]))


def _records(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"


def _read_head() -> Op[str]:
    row = yield from one(READ_HEAD)
    return f"0:{NO_DIGEST}" if row is None else f"{row['number']}:{row['digest']}"


def _parsed(head: object) -> tuple[int, str]:
    found = HEAD.fullmatch(head) if isinstance(head, str) else None
    if found is None:
        raise InvalidArgument(f"head must be a number and a digest, 7:0f3a…, not {shown(head)}")
    return int(found[1]), found[2] or NO_DIGEST

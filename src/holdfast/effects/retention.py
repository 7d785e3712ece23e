"""Forgetting effects that nobody can ask for again.

Never what is under way or in doubt, however old it is; and nothing of a session that is there, or
that a fork which is there came from, except what has expired.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from ..codec import Codec
from ..feed import by_tree, emit
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Retention
from ..kernel.operation import Lock, Op, Query, Row, batch, large_query, operation, rows
from ..records import Pruned
from ..sessions.retention import LINEAGES
from ..sessions.rows import ANY

EFFECTS_PER_PASS = 1_000
FORKS_PER_PAGE = 1_000

# A key that expired is free. Its rows stay a while, because a key that starts over would give its
# receiver an idempotency key that it may still remember.
UNREACHABLE = """(
    (ttl_ms IS NOT NULL AND ended_at + ttl_ms <= :now AND ended_at <= :now - :key_ms)
    OR (ended_at <= :now - :effect_ms AND unlinked_at <= :now - :effect_ms)
)"""
# For the owner of the items, who adds that no item of the chain is left.
OF_OLD_CHAINS = """ended_at <= :now - :effect_ms AND session_number IS NULL
    AND item_id IS NOT NULL AND ttl_ms IS NULL"""
FIND = f"""
SELECT number, session_number, session_id, ttl_ms,
    (SELECT s.root_id FROM {ANY} WHERE s.number = session_number) AS root_id
FROM hf_effects
WHERE number > :after AND status IN ('completed', 'failed') AND {{which}}
ORDER BY number LIMIT :limit
"""  # noqa: S608
FORGET = """
DELETE FROM hf_effects
WHERE number = :number AND status IN ('completed', 'failed') AND {which} RETURNING number
"""


class Forgetting:
    """The transactions that remove old effects."""

    def __init__(self, codec: Codec, retention: Retention, which: str) -> None:
        self.codec = codec
        self._find, self._forget = FIND.format(which=which), FORGET.format(which=which)
        self._ages = {"key_ms": retention.key_ms, "effect_ms": retention.effect_ms}

    @large_query
    def page(self, after: int) -> Op[list[Row]]:
        """Return the next effects that may be forgotten."""
        return (yield from rows(self._find, **self._ages, after=after, limit=EFFECTS_PER_PASS))

    @operation
    def forget(self, page: Sequence[Row]) -> Op[int]:
        """Remove those of one tree, or of none, that may still go; say how many went."""
        tree = page[0]["root_id"]
        root_id: str | None = tree if tree is not None and (yield Lock(tree)) else None
        # Looked at last: what is forked from a session before it is deleted is seen here.
        needed = yield from _origins_of_forks()
        doomed = [
            row for row in page if row["ttl_ms"] is not None or row["session_number"] not in needed
        ]
        answers = yield from batch(
            *(Query(self._forget, {**self._ages, "number": row["number"]}) for row in doomed)
        )
        counts = Counter(
            row["session_id"] for row, gone in zip(doomed, answers, strict=True) if gone
        )
        if root_id is not None:
            for session_id, count in counts.items():
                yield from emit(self.codec, root_id, session_id, "effects_pruned", {"count": count})
        return counts.total()


def _origins_of_forks() -> Op[set[int]]:
    """Return the numbers of the sessions whose effects a fork that is there looks back to."""
    needed: set[int] = set()
    after = 0
    while found := (yield from rows(LINEAGES, after=after, limit=FORKS_PER_PAGE)):
        for row in found:
            needed |= {number for _, number, _, _ in json.loads(row["lineage"])}
        after = found[-1]["number"]
    return needed


def forget_effects(codec: Codec, retention: Retention, which: str = UNREACHABLE) -> Flow[Pruned]:
    """Remove old effects, a bounded number in each transaction, and say how many went."""
    work = Forgetting(codec, retention, which)
    count = after = 0
    while page := (yield from perform(Forgetting.page, work, after)):
        for rows_of_tree in by_tree(page):
            count += yield from perform(Forgetting.forget, work, rows_of_tree)
        after = page[-1]["number"]
    return Pruned(effects=count)

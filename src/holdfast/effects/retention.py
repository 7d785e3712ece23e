"""Forgetting effects that nobody can ask for again.

Never what is under way or in doubt, however old it is; and nothing of a session that exists, or
that an existing fork came from, except what has expired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..codec import Codec
from ..feed import by_tree, emit
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Retention
from ..kernel.operation import Lock, Op, Query, Row, batch, large_query, operation, rows
from ..records import Pruned
from ..sessions.rows import ALL_SESSIONS

EFFECTS_PER_PASS = 1_000

# A key that expired is free. Its rows stay a while, because a key that starts over would give its
# receiver an idempotency key that it may still remember.
UNREACHABLE = """(
    (ttl_ms IS NOT NULL AND ended_at + ttl_ms <= :now AND ended_at <= :now - :key_ms)
    OR (ended_at <= :now - :effect_ms AND unlinked_at <= :now - :effect_ms)
)"""
# For the owner of the items, who adds that no item of the chain is left.
OF_OLD_CHAINS = """ended_at <= :now - :effect_ms AND session_number IS NULL
    AND item_id IS NOT NULL AND ttl_ms IS NULL"""
# What a fork looks back to stays, unless it has expired.
SETTLED_AND_UNNEEDED = """status IN ('completed', 'failed') AND (ttl_ms IS NOT NULL OR NOT EXISTS (
        SELECT 1 FROM hf_effect_origins o WHERE o.origin_number = hf_effects.session_number
    ))"""
FIND_OLD_EFFECTS = f"""
SELECT number, session_id,
    (SELECT s.root_id FROM {ALL_SESSIONS} WHERE s.number = session_number) AS root_id
FROM hf_effects WHERE number > :after AND {SETTLED_AND_UNNEEDED} AND {{which}}
ORDER BY number LIMIT :limit
"""  # noqa: S608
FORGET_EFFECT = f"""
DELETE FROM hf_effects WHERE number = :number AND {SETTLED_AND_UNNEEDED} AND {{which}}
RETURNING number
"""  # noqa: S608


class Forgetting:
    """The transactions that remove old effects."""

    def __init__(self, codec: Codec, retention: Retention, which: str) -> None:
        self._codec = codec
        self._find, self._forget = (
            text.format(which=which) for text in (FIND_OLD_EFFECTS, FORGET_EFFECT)
        )
        self._ages = {"key_ms": retention.key_ms, "effect_ms": retention.effect_ms}

    @large_query
    def page(self, after: int) -> Op[list[Row]]:
        """Return the next effects that may be forgotten."""
        return (yield from rows(self._find, **self._ages, after=after, limit=EFFECTS_PER_PASS))

    @operation
    def forget(self, page: Sequence[Row]) -> Op[int]:
        """Remove those of one tree, or of none, that may still go; return how many went."""
        tree: str | None = page[0]["root_id"]
        root_id = tree if tree is not None and (yield Lock(tree)) else None
        # Each looks at the forks itself: one made before its session was deleted is seen.
        answers = yield from batch(
            *(Query(self._forget, {**self._ages, "number": row["number"]}) for row in page)
        )
        gone = (row["session_id"] for row, found in zip(page, answers, strict=True) if found)
        counts = Counter(gone)
        if root_id is not None:
            for session_id, count in counts.items():
                data = {"count": count}
                yield from emit(self._codec, root_id, session_id, "effects_pruned", data)
        return counts.total()


def forget_effects(codec: Codec, retention: Retention, which: str = UNREACHABLE) -> Flow[Pruned]:
    """Remove old effects, a bounded number in each transaction, and return how many went."""
    work = Forgetting(codec, retention, which)
    count = after = 0
    while page := (yield from perform(Forgetting.page, work, after)):
        for rows_of_tree in by_tree(page):
            count += yield from perform(Forgetting.forget, work, rows_of_tree)
        after = page[-1]["number"]
    return Pruned(effects=count)

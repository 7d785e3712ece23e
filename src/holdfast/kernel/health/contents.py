"""What must hold inside a store, on both databases: what each noun checks of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...errors import HoldfastError
from ...records import Finding
from ...words import plural
from ..doors import check_doors
from ..driver import Runner
from ..marks import WRITER_KEPT_MS, WRITERS
from ..nouns import Noun
from ..operation import Call, Op, query, rows

LEASES = """
SELECT count(*) AS held, count(CASE WHEN lease_expires_at <= :now THEN 1 END) AS expired
FROM {leased}
"""
WRITERS_MAX = 10_000


class ContentOps:
    """Reads what the checks compare, each in one snapshot."""

    def __init__(self, nouns: Sequence[Noun]) -> None:
        self.nouns = nouns

    @query
    def check(self, check: Callable[[], Op[list[Finding]]]) -> Op[list[Finding]]:
        """Run one check of a noun."""
        return (yield from check())

    @query
    def writers(self) -> Op[list[Finding]]:
        """Count the connections that have written lately."""
        [row] = yield from rows(WRITERS, age_ms=WRITER_KEPT_MS)
        message = f"{plural(row['writers'], 'writer row')}, {row['abandoned']:,} older than 7 days."
        if row["writers"] - row["abandoned"] > WRITERS_MAX:
            advice = "Connections are opened too often: keep one store open in each process."
            return [Finding("writers", "warning", message, advice)]
        return [Finding("writers", "ok", message)]

    @query
    def leases(self) -> Op[list[Finding]]:
        """Look for rows of any noun whose holder died."""
        found = []
        held = []
        for noun in reversed([noun for noun in self.nouns if noun.leased]):
            [row] = yield from rows(LEASES.format(leased=noun.leased))
            held.append(plural(row["held"], noun.name))
            if row["expired"]:
                what = plural(row["expired"], noun.name)
                message = f"{what} with an expired lease: the {noun.leased_to} died."
                found.append(Finding("leases", "warning", message, noun.advice))
        return found or [Finding("leases", "ok", f"None has expired: {', '.join(held)}.")]


def content_findings(driver: Runner, nouns: Sequence[Noun]) -> list[Finding]:
    """Check the rows of a store."""
    ops = ContentOps(nouns)
    calls = {
        "writers": Call(ContentOps.writers, ops),
        "history": Call(ContentOps.check, ops, (check_doors,)),
    }
    for noun in nouns:
        for name, check in noun.checks().items():
            calls[name] = Call(ContentOps.check, ops, (check,))
    calls["leases"] = Call(ContentOps.leases, ops)
    found = []
    for name, call in calls.items():
        found += guarded(name, partial(driver.run, call))
    return found


def guarded(check: str, examine: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of one check; a store that cannot be read is one too."""
    try:
        return examine()
    except HoldfastError as error:
        return [Finding(check, "problem", f"{error}.")]

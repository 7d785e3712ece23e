"""The lifecycle of spend."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.nouns import Noun
from ..kernel.operation import Op, Runtime, rows
from ..records import SessionRef
from ..sessions.rows import numbers_of
from .ledger import REMOVE_SPEND_DETAILS
from .portable import SpendPortable


class SpendNoun(Noun):
    """Spend: attempts and totals, which outlive their sessions."""

    portable = SpendPortable()

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the details of sessions' attempts; their figures stay."""
        numbers = numbers_of(sessions)
        return len((yield from rows(REMOVE_SPEND_DETAILS, numbers=numbers, limit=limit)))

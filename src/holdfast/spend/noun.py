"""Spend in the life of a store."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.nouns import Noun
from ..kernel.operation import Op, Runtime, rows
from ..records import SessionRef
from ..sessions.rows import numbers_of
from .ledger import FORGET_SPEND_DETAILS
from .portable import SpendPortable


class SpendNoun(Noun):
    """Spend: what attempts cost, and the totals of sessions and trees, which stay."""

    portable = SpendPortable()

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Forget the details of what sessions spent."""
        numbers = numbers_of(sessions)
        return len((yield from rows(FORGET_SPEND_DETAILS, numbers=numbers, limit=limit)))

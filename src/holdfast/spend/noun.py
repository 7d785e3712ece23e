"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun


class SpendNoun(Noun):
    """Spend: what attempts cost, and the totals of sessions and trees."""

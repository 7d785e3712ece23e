"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun


class EffectsNoun(Noun):
    """Effects: they outlive their session for as long as retries of them may come."""

"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun


class SessionsNoun(Noun):
    """Sessions: the rows that everything else hangs on."""

"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun


class FeedNoun(Noun):
    """The feed, and the trees whose order it keeps."""

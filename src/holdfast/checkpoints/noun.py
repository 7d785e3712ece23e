"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun


class CheckpointsNoun(Noun):
    """Checkpoints: the versions of sessions, and the lines that they share."""

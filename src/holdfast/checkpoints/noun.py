"""Checkpoints in the life-cycle of a store: they are removed with their session."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.flow import Flow
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import AfterCommit, Op, Runtime
from ..records import Pruned, SessionRef
from .changes import Heads
from .deletion import remove_sessions
from .portable import CheckpointsPortable
from .removal import prune


class CheckpointsNoun(Noun):
    """Checkpoints: the versions of sessions, and the lines that they share."""

    portable = CheckpointsPortable()

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the versions of sessions, and the lines that only they use."""
        heads, numbers = Heads.of(runtime), [each.number for each in sessions]
        yield AfterCommit(lambda: heads.forget(*numbers))
        return (yield from remove_sessions(runtime, numbers, limit))

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove all but the newest and the protected versions of each session."""
        return (yield from prune(runtime, retention))

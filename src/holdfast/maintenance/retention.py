"""Retention: what is old goes, noun by noun, except what somebody still needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..arguments import require_seconds, require_text, require_whole
from ..kernel.commit_settlement import MarkOps
from ..kernel.files import Archive
from ..kernel.flow import Flow, flow, invoke, perform
from ..kernel.nouns import Retention
from ..kernel.operation import C, Handle, Op, query
from ..kernel.schema import read_store_id
from ..records import Pruned

KEEP = 100
KEEP_MAX = 2**32 - 1
WORK_DAYS = 30
KEY_DAYS = 7
EFFECT_DAYS = 90
HISTORY_DAYS = 30
DAYS_MAX = 36_525


class MaintenanceOps(Handle[C]):
    """What keeps a store small."""

    @flow
    def prune(
        self,
        *,
        session: object = None,
        keep: int = KEEP,
        work_days: float = WORK_DAYS,
        key_days: float = KEY_DAYS,
        effect_days: float = EFFECT_DAYS,
        history_days: float = HISTORY_DAYS,
        archive: str | Path | None = None,
        vacuum: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Flow[Pruned]:
        """Remove all but the newest `keep` checkpoints of each session, and work items that were
        finished longer than `work_days` ago, in small transactions. Effects go too: those whose
        key has expired `key_days` after they ended, those of deleted sessions after `effect_days`,
        never one that is under way or in doubt. Of trees whose sessions have all ended, events and
        the history of shared state go after `history_days`; who reads them gets Compacted. With
        `session`, only checkpoints of that one go.

        The latest, the resume point (of forks too), pinned and attested versions, fork points and
        approval points are never removed, and one written under a key not before it is `key_days`
        old. With `archive` each, and each event, is durable in that file before it goes. `vacuum`
        gives the space back; on SQLite other writers wait meanwhile. `progress` is told how many
        checkpoints were removed.
        """
        require_whole("keep", keep, 1, KEEP_MAX)
        if vacuum:
            self.runtime.driver.require_own("be vacuumed")
        only = None if session is None else require_text("session", getattr(session, "id", session))
        retention = Retention(
            session=only,
            keep=keep,
            work_ms=require_days(work_days),
            key_ms=require_days(key_days, "key_days"),
            effect_ms=require_days(effect_days, "effect_days"),
            history_ms=require_days(history_days, "history_days"),
            progress=progress,
        )
        book = None
        if archive is not None:
            store_id = yield from perform(MaintenanceOps._store_id, self)
            book = yield from invoke(Archive, archive, store_id)
        pruned = Pruned(is_vacuumed=vacuum)
        try:
            for noun in reversed(self.runtime.nouns):
                pruned += yield from noun.prune(self.runtime, replace(retention, archive=book))
        finally:
            if book is not None:
                book.close()
        if only is None:
            writers = yield from perform(MarkOps.forget, MarkOps())
            pruned = replace(pruned, writers=writers)
        if vacuum:
            yield from invoke(self.runtime.driver.vacuum)
        return pruned

    @query
    def _store_id(self) -> Op[str]:
        return (yield from read_store_id())


def require_days(days: object, name: str = "work_days") -> int:
    """Return an age in days as milliseconds."""
    return 86_400 * require_seconds(name, days, DAYS_MAX)

"""Retention: remove old data that is not needed any more, noun by noun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..access import record
from ..arguments import require_seconds, require_text, require_whole
from ..kernel.commit_settlement import forget_writers
from ..kernel.files import Archive
from ..kernel.flow import Flow, invoke, perform, served
from ..kernel.health import read_size
from ..kernel.nouns import Retention
from ..kernel.operation import C, Handle, Op, operation, query
from ..kernel.schema import read_store_id
from ..records import Pruned, StoreSize

KEEP = 100
KEEP_MAX = 2**32 - 1
WORK_DAYS = 30
KEY_DAYS = 7
EFFECT_DAYS = 90
HISTORY_DAYS = 30
DAYS_MAX = 36_525


class MaintenanceOps(Handle[C]):
    """The size of a store, and retention."""

    @query
    def size(self) -> Op[StoreSize]:
        """Return how large the database is."""
        return (yield from read_size(self.runtime.target))

    @served
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
        """Remove old data in small transactions; return how much.

        That is all but the newest `keep` checkpoints of each session, work items that finished more
        than `work_days` ago, closed peer calls and pauses after `key_days`, expired effects
        `key_days` after they ended, and effects of deleted sessions after `effect_days`, but none
        in flight or in doubt. In trees whose sessions have
        all ended, events and the history of shared state are removed after `history_days`; reading
        them raises Compacted. With `session`, only checkpoints of that session are removed.

        Never removed are the latest version, resume points (also of forks), pinned and attested
        versions, fork points, approval points, and a version with an idempotency key until it is
        `key_days` old. With `archive`, removed checkpoints and events are first durable in that
        file. `vacuum` returns the space to the system; on SQLite other writers wait for it.
        `progress` is called with the number of checkpoints removed.
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
        days = {"work": work_days, "key": key_days, "effect": effect_days, "history": history_days}
        asked = [f"keep={keep}", *(f"{name}_days={each:g}" for name, each in days.items())]
        archive_file = None
        if archive is not None:
            store_id = yield from perform(MaintenanceOps._store_id, self)
            archive_file = yield from invoke(Archive, archive, store_id)
            retention = replace(retention, archive=archive_file)
        pruned = Pruned(is_vacuumed=vacuum)
        try:
            yield from perform(MaintenanceOps._audit, self, only, ", ".join(asked))
            for noun in reversed(self.runtime.nouns):
                pruned += yield from noun.prune(self.runtime, retention)
        finally:
            if archive_file is not None:
                archive_file.close()
        if only is None:
            writers = yield from forget_writers()
            pruned = replace(pruned, writers=writers)
        if vacuum:
            yield from invoke(self.runtime.driver.vacuum)
        return pruned

    @operation
    def _audit(self, session_id: str | None, asked: str) -> Op[None]:
        yield from record(self.runtime.actor, "store_pruned", session_id, asked)

    @query
    def _store_id(self) -> Op[str]:
        return (yield from read_store_id())


def require_days(days: object, name: str = "work_days") -> int:
    """Return an age in days as milliseconds."""
    return 86_400 * require_seconds(name, days, DAYS_MAX)

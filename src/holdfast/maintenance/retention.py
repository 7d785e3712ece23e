"""Retention: old checkpoints go, except those that somebody still needs.

Each session is pruned in transactions of its own, so that others can write in between and a
process that is killed loses nothing: what is left is done by the next prune.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..arguments import require_seconds, require_text, require_whole
from ..checkpoints.collecting import prunable, release, remove_versions
from ..checkpoints.deltas import read_delta
from ..checkpoints.lines import SHIFT
from ..checkpoints.manifest import Manifest, checkpoint_context, unpack
from ..checkpoints.reading import ONE, header, resume_row
from ..codec import Codec
from ..errors import CorruptRecord, SessionNotFound
from ..feed import emit
from ..kernel.flow import Flow, flow, invoke, perform
from ..kernel.handle import C, Handle
from ..kernel.marks import MarkOps
from ..kernel.operation import Lock, Op, Row, large_query, one, operation, query, rows
from ..kernel.outside import require_own, vacuum_store
from ..kernel.schema import read_store_id
from ..sessions.rows import READ
from ..work import Watchdog
from ..work import prune as prune_items
from .archive import Archive, archive_line
from .forgetting import forget_effects

KEEP = 100
WORK_DAYS = 30
KEY_DAYS = 7
EFFECT_DAYS = 90
DAYS_MAX = 36_525
SESSIONS_PER_PAGE = 200
VERSIONS_PER_PASS = 1_000
ARCHIVED_CHARACTERS_PER_PASS = 16 * 2**20
LINES_PER_PASS = 1_000

# A session has at most as many checkpoints as versions, so most are left out here.
LONG_SESSIONS = """
SELECT number, id, root_id FROM hf_sessions
WHERE number > :after AND version > :keep AND (CAST(:only AS TEXT) IS NULL OR id = :only)
ORDER BY number LIMIT :limit
"""
FORKS = """
WITH RECURSIVE forks (member) AS (
    SELECT number FROM hf_sessions WHERE origin_number = :number
    UNION SELECT s.number FROM hf_sessions s JOIN forks ON s.origin_number = forks.member
)
SELECT member FROM forks
"""
ORPHANS = """
SELECT id FROM hf_lines WHERE id > :after
    AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = id)
ORDER BY id LIMIT :limit
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune removed, and the sessions it left alone because a record of them is damaged."""

    sessions: int
    checkpoints: int
    archived: int
    lines: int
    writers: int
    items: int = 0
    effects: int = 0
    is_vacuumed: bool
    damaged: tuple[str, ...]


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
        archive: str | Path | None = None,
        vacuum: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Flow[Pruned]:
        """Remove all but the newest `keep` checkpoints of each session, and work items that were
        finished longer than `work_days` ago, in small transactions. Effects go too: those whose
        key has expired `key_days` after they ended, those of deleted sessions after `effect_days`,
        never one that is under way or in doubt. With `session`, only checkpoints of that one go.

        The latest, the resume point (of forks too), pinned and attested versions, fork points and
        approval points are never removed, and one written under a key not before it is `key_days`
        old. With `archive` each is durable in that file before it goes. `vacuum` gives the space
        back; on SQLite other writers wait meanwhile. `progress` is told how many were removed.
        """
        require_whole("keep", keep, 1, SHIFT - 1)
        work_ms = require_days(work_days)
        key_ms = require_days(key_days, "key_days")
        effect_ms = require_days(effect_days, "effect_days")
        if vacuum:
            require_own(self.runtime.driver, "be vacuumed")
        only = None if session is None else require_text("session", getattr(session, "id", session))
        work = _Retention(self.runtime.codec, keep, key_ms, only)
        book = None
        if archive is not None:
            store_id = yield from perform(_Retention.store_id, work)
            book = yield from invoke(Archive, archive, store_id)
        try:
            counts, damaged = yield from _prune_sessions(work, book, progress)
        finally:
            if book is not None:
                book.close()
        rest = {"lines": 0, "writers": 0, "items": 0, "effects": 0}
        if only is None:
            watchdog = Watchdog(self.runtime)
            rest["lines"] = yield from _collect(work)
            rest["writers"] = yield from perform(MarkOps.forget, MarkOps())
            rest["items"] = yield from prune_items(watchdog, work_ms)
            rest["effects"] = yield from forget_effects(self.runtime.codec, key_ms, effect_ms)
        if vacuum:
            yield from invoke(vacuum_store, self.runtime.driver, self.runtime.target)
        return Pruned(**counts, **rest, is_vacuumed=vacuum, damaged=tuple(damaged))


def require_days(days: object, name: str = "work_days") -> int:
    """Return an age in days as milliseconds."""
    return 86_400 * require_seconds(name, days, DAYS_MAX)


def _prune_sessions(
    work: _Retention, book: Archive | None, progress: Callable[[int], None] | None
) -> Flow[tuple[dict[str, int], list[str]]]:
    counts = {"sessions": 0, "checkpoints": 0, "archived": 0}
    damaged: list[str] = []
    after = 0
    while page := (yield from perform(_Retention.page, work, after)):
        for session in page:
            try:
                removed, archived = yield from _prune_session(work, session, book)
            except CorruptRecord:
                damaged.append(session["id"])
                continue
            counts["sessions"] += removed > 0
            counts["checkpoints"] += removed
            counts["archived"] += archived
            if removed and progress is not None:
                yield from invoke(progress, counts["checkpoints"])
        after = page[-1]["number"]
    return counts, damaged


def _prune_session(work: _Retention, session: Row, book: Archive | None) -> Flow[tuple[int, int]]:
    removed = archived = 0
    while True:
        only: list[int] | None = None
        if book is not None:
            only, lines = yield from perform(_Retention.read, work, session)
            if not only:
                return removed, archived
            yield from invoke(book.append, lines)
            archived += len(lines)
        count = yield from perform(_Retention.remove, work, session, only)
        removed += count
        if only is None and count < VERSIONS_PER_PASS:
            return removed, archived


def _collect(work: _Retention) -> Flow[int]:
    """Remove lines without a use; a save that was overtaken leaves such lines behind."""
    count = after = 0
    while orphans := (yield from perform(_Retention.orphans, work, after)):
        yield from perform(_Retention.remove_lines, work, orphans)
        count += len(orphans)
        after = orphans[-1]
    return count


class _Retention:
    """The transactions of a prune."""

    def __init__(self, codec: Codec, keep: int, key_ms: int, only: str | None) -> None:
        self.codec = codec
        self._keep = keep
        self._key_ms = key_ms
        self._only = only

    @query
    def store_id(self) -> Op[str]:
        """Return the store's id."""
        return (yield from read_store_id())

    @query
    def page(self, after: int) -> Op[list[Row]]:
        """Return the next sessions that may have something to remove."""
        if self._only is not None and (yield from one(READ, id=self._only)) is None:
            raise SessionNotFound(f"there is no session {self._only!r}", id=self._only)
        wanted = {"only": self._only, "keep": self._keep, "limit": SESSIONS_PER_PAGE}
        return (yield from rows(LONG_SESSIONS, after=after, **wanted))

    @large_query
    def read(self, session: Row) -> Op[tuple[list[int], list[str]]]:
        """Return the next versions to remove, as keys and as lines of the archive."""
        keys: list[int] = []
        lines: list[str] = []
        before: Manifest = {}
        after: int | None = None
        size = 0
        for key in (yield from self._doomed(session["number"])):
            row = yield from one(ONE, key=key)
            if row is None or size > ARCHIVED_CHARACTERS_PER_PASS:
                break
            checkpoint = header(self.codec, session["id"], row)
            context = checkpoint_context(session["number"], checkpoint.version, "manifest")
            manifest = unpack(self.codec, row["manifest"], context)
            delta = yield from read_delta(self.codec, before, manifest, with_before=False)
            dropped = before.keys() - manifest.keys()
            line = archive_line(self.codec, checkpoint, after, delta, sorted(dropped))
            before, after = manifest, checkpoint.version
            keys.append(key)
            lines.append(line)
            size += len(line)
        return keys, lines

    @operation
    def remove(self, session: Row, only: Collection[int] | None) -> Op[int]:
        """Remove what may go now, of `only` these if given, and tell the feed."""
        yield Lock(session["root_id"])
        keys = yield from self._doomed(session["number"])
        if only is not None:
            # Since they were archived, one may have been pinned, attested or forked.
            keys = sorted(set(keys) & set(only))
        if keys:
            yield from remove_versions(self.codec, session["number"], keys)
            data = {"versions": _ranges([key % SHIFT for key in keys]), "count": len(keys)}
            root_id, session_id = session["root_id"], session["id"]
            yield from emit(self.codec, root_id, session_id, "checkpoints_pruned", data)
        return len(keys)

    @large_query
    def orphans(self, after: int) -> Op[list[int]]:
        """Return the next lines that no session uses; nothing can begin to use them."""
        found = yield from rows(ORPHANS, after=after, limit=LINES_PER_PASS)
        return [row["id"] for row in found]

    @operation
    def remove_lines(self, line_ids: list[int]) -> Op[None]:
        """Remove lines, with their items, that still nobody uses."""
        yield from release(0, line_ids)

    def _doomed(self, number: int) -> Op[list[int]]:
        """Return the keys of versions that may be removed, the oldest first, a bounded number."""
        own = yield from resume_row(number)
        protected = {own["key"]} if own is not None else set[int]()
        for fork in (yield from rows(FORKS, number=number)):
            # A fork may still resume from what lies before its fork point, in this session.
            row = yield from resume_row(fork["member"])
            if row is not None:
                protected.add(row["key"])
        protected = {key for key in protected if key // SHIFT == number}
        limit = VERSIONS_PER_PASS + len(protected)
        keys = yield from prunable(number, self._keep, self._key_ms, limit)
        return [key for key in keys if key not in protected][:VERSIONS_PER_PASS]


def _ranges(versions: list[int]) -> list[list[int]]:
    """Return ascending numbers as ranges, both ends included."""
    found = []
    for _, group in groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0]):
        members = [version for _, version in group]
        found.append([members[0], members[-1]])
    return found

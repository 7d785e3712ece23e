"""Retention of checkpoints: old ones go, except those that somebody still needs.

Each session is pruned in transactions of its own, so that others can write in between and a
process that is killed loses nothing: what is left is done by the next prune.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import groupby

from ..codec import Codec
from ..errors import CorruptRecord, SessionNotFound
from ..feed import emit
from ..kernel.files import Archive
from ..kernel.flow import Flow, invoke, perform
from ..kernel.nouns import Retention
from ..kernel.operation import Lock, Op, Row, large_query, one, operation, query, rows
from ..records import Pruned
from ..sessions.retention import FORKS, LONG
from ..sessions.rows import READ
from .archive import archive_line
from .deltas import read_delta
from .lines import SHIFT
from .manifest import Manifest, checkpoint_context, unpack
from .read import ONE, header, resume_row
from .removal import prunable, release, remove_versions

SESSIONS_PER_PAGE = 200
VERSIONS_PER_PASS = 1_000
ARCHIVED_CHARACTERS_PER_PASS = 16 * 2**20
LINES_PER_PASS = 1_000

ORPHANS = """
SELECT id FROM hf_lines WHERE id > :after
    AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = id)
ORDER BY id LIMIT :limit
"""


def prune(codec: Codec, retention: Retention) -> Flow[Pruned]:
    """Remove all but the newest checkpoints of each session, and lines that nothing uses."""
    if retention.keep is None:
        return Pruned()
    work = _Retention(codec, retention.keep, retention.key_ms, retention.session)
    pruned = yield from _prune_sessions(work, retention.archive, retention.progress)
    if retention.session is not None:
        return pruned
    return replace(pruned, lines=(yield from _collect(work)))


def _prune_sessions(
    work: _Retention, book: Archive | None, progress: Callable[[int], None] | None
) -> Flow[Pruned]:
    pruned = Pruned()
    after = 0
    while page := (yield from perform(_Retention.page, work, after)):
        for session in page:
            try:
                removed, archived = yield from _prune_session(work, session, book)
            except CorruptRecord:
                pruned += Pruned(damaged=(session["id"],))
                continue
            pruned += Pruned(sessions=removed > 0, checkpoints=removed, archived=archived)
            if removed and progress is not None:
                yield from invoke(progress, pruned.checkpoints)
        after = page[-1]["number"]
    return pruned


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
    def page(self, after: int) -> Op[list[Row]]:
        """Return the next sessions that may have something to remove."""
        if self._only is not None and (yield from one(READ, id=self._only)) is None:
            raise SessionNotFound(f"there is no session {self._only!r}", id=self._only)
        wanted = {"only": self._only, "keep": self._keep, "limit": SESSIONS_PER_PAGE}
        return (yield from rows(LONG, after=after, **wanted))

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

"""Reads of checkpoints: one version with its channels, many without, or a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from ..arguments import id_of_item, require_limit, require_one_of, require_whole
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import CheckpointNotFound, CorruptRecord, SessionNotFound
from ..kernel.operation import (
    C,
    Op,
    Query,
    Row,
    batch,
    large_query,
    one,
    query,
    rows,
    whole_query,
)
from ..records import KINDS, Checkpoint, Kind, LoadedCheckpoint, ResumePoint
from ..sessions.handle import SessionHandle
from ..sessions.rows import ALL_SESSIONS, ONE_SESSION
from ..wire import travels
from . import lines
from .diff import Diff, compare
from .keys import VERSIONS
from .lines import Entry, Inline, Manifest, Piece, Ref, Stored

HEADER_COLUMNS = """key, epoch, kind, item_id, idempotency_key, state_sequence, data, metadata,
    created_at"""
READ_VERSION = f"SELECT {HEADER_COLUMNS}, manifest FROM hf_checkpoints WHERE key = :key"  # noqa: S608
READ_NEWEST = f"""
SELECT {HEADER_COLUMNS}, manifest FROM hf_checkpoints
WHERE key = (SELECT s.number * {VERSIONS} + s.version FROM {ONE_SESSION})
"""  # noqa: S608
# Written so that the planner cannot choose the index on the kinds of all sessions.
LIST_VERSIONS = f"""
SELECT {HEADER_COLUMNS} FROM hf_checkpoints
WHERE key >= :low AND key <= :high AND (CAST(:kind AS TEXT) IS NULL OR kind = :kind)
    {{of_item}} ORDER BY key {{order}} LIMIT :limit
"""  # noqa: S608
READ_KEYED = f"""
SELECT {HEADER_COLUMNS} FROM hf_checkpoints
WHERE idempotency_key = :idempotency_key AND key >= :low AND key <= :high ORDER BY key LIMIT 1
"""  # noqa: S608
READ_ITERATION = f"""
SELECT {HEADER_COLUMNS}, iteration FROM hf_checkpoints
WHERE key >= :low AND key <= :high AND iteration IS NOT NULL ORDER BY key DESC LIMIT 1
"""  # noqa: S608
READ_ORIGIN = f"SELECT s.number, s.version, s.origin_number, s.origin_version FROM {ONE_SESSION}"  # noqa: S608
LIST_EPOCHS = """
SELECT first_version, target_version FROM hf_epochs
WHERE session_number = :number ORDER BY first_version DESC
"""
LIST_NEWEST = f"""
SELECT s.id AS session_id, {", ".join(f"c.{name.strip()}" for name in HEADER_COLUMNS.split(","))}
FROM hf_checkpoints c JOIN {ALL_SESSIONS} ON s.number = c.key / {VERSIONS}
WHERE c.kind = :kind AND c.created_at >= :since
ORDER BY c.created_at DESC, c.key DESC LIMIT :limit
"""  # noqa: S608
LIST_LONGEST = f"""
SELECT s.id AS session_id, grown.checkpoints, grown.newest, grown.first_at, grown.last_at
FROM (
    SELECT key / {VERSIONS} AS number, count(*) AS checkpoints, max(key % {VERSIONS}) AS newest,
        min(created_at) AS first_at, max(created_at) AS last_at
    FROM hf_checkpoints GROUP BY key / {VERSIONS}
    ORDER BY checkpoints DESC, number LIMIT :limit
) AS grown
JOIN {ALL_SESSIONS} ON s.number = grown.number
ORDER BY grown.checkpoints DESC, s.number
"""  # noqa: S608
COUNT_KINDS = """
SELECT kind, count(*) AS checkpoints FROM (
    SELECT kind FROM hf_checkpoints WHERE key > :low AND key <= :high
    ORDER BY key DESC LIMIT :limit
) AS counted GROUP BY kind
"""
FORKS_MAX = 1_000
HISTORY_MAX = 10_000

Span = tuple[int, int, int]
"""Versions `low` to `high` of a session: (session number, low, high)."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How many checkpoints a session has, and since when."""

    session_id: str
    checkpoints: int
    newest: int
    first_at: int
    last_at: int


@dataclass(slots=True)
class Delta:
    """The channels in which two versions may differ.

    `shared` counts equal items at the beginning of a list, which are not loaded.
    """

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)


class CheckpointReads(SessionHandle[C]):
    """What a session reads of its checkpoints."""

    @large_query
    def latest(
        self, *, kind: Kind | None = None, last: int | None = None
    ) -> Op[LoadedCheckpoint | None]:
        """Return the newest version on the path, or the newest of a kind; None if there is none."""
        require_kind(kind)
        if last is not None:
            require_whole("last", last, 1)
        if kind is None and (row := (yield from one(READ_NEWEST, number=self.number))):
            return (yield from load(self.runtime.codec, self.id, row, last))
        where = yield from spans(self.number, on_path=True)
        found = yield from listed(where, kind, None, 1)
        if not found:
            yield from require_session(self.number, self.id)
            return None
        return (yield from self._load(found[0]["key"] % VERSIONS, last))

    @large_query
    def at(self, version: int, *, last: int | None = None) -> Op[LoadedCheckpoint]:
        """Return a version with its channels, or raise CheckpointNotFound."""
        require_version(version)
        if last is not None:
            require_whole("last", last, 1)
        return (yield from self._load(version, last))

    @large_query
    def diff(self, before: int, after: int) -> Op[Diff]:
        """Compare the channels of two versions, at the cost of what differs between them."""
        require_version(before)
        require_version(after)
        old = yield from self._manifest(before)
        new = yield from self._manifest(after)
        with naming(self.id, after):
            delta = yield from read_delta(self.runtime.codec, old, new)
        return compare(delta.before, delta.after, delta.shared)

    @query
    def history(
        self,
        *,
        kind: Kind | None = None,
        item: object = None,
        before: int | None = None,
        after: int = 0,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> Op[list[Checkpoint]]:
        """Return versions without their channels, newest first, those of origins included.

        `before` and `after` are exclusive bounds.
        """
        require_kind(kind)
        require_limit(limit, HISTORY_MAX)
        if before is not None:
            require_version(before)
        if after != 0:
            require_version(after)
        where = yield from spans(self.number, on_path=False)
        bounds: dict[str, Any] = {"before": before, "after": after, "oldest_first": oldest_first}
        found = yield from listed(where, kind, id_of_item(item), limit, **bounds)
        if not found:
            yield from require_session(self.number, self.id)
        return [header(self.runtime.codec, self.id, row) for row in found]

    @whole_query
    def counts(self, *, at_most: int | None = None) -> Op[dict[str, int]]:
        """Return how many checkpoints the session has of each kind; it reads every one of them.

        With `at_most`, only that many of the newest are counted, at a bounded cost.
        """
        limit = VERSIONS if at_most is None else require_whole("at_most", at_most, 1, VERSIONS)
        low = self.number * VERSIONS
        found = yield from rows(COUNT_KINDS, low=low, high=low + VERSIONS - 1, limit=limit)
        if not found:
            yield from require_session(self.number, self.id)
        return {row["kind"]: int(row["checkpoints"]) for row in found}

    @query
    def resume_point(self) -> Op[ResumePoint]:
        """Return the iteration to run next and the checkpoint that says so; (1, None) at first."""
        row = yield from resume_row(self.number)
        if row is None:
            yield from require_session(self.number, self.id)
            return ResumePoint(iteration=1, checkpoint=None)
        step = 1 if row["kind"] == "iteration_end" else 0
        checkpoint = header(self.runtime.codec, self.id, row)
        return ResumePoint(iteration=row["iteration"] + step, checkpoint=checkpoint)

    def _load(self, version: int, last: int | None) -> Op[LoadedCheckpoint]:
        row = yield from find(self.number, self.id, version)
        return (yield from load(self.runtime.codec, self.id, row, last))

    def _manifest(self, version: int) -> Op[dict[str, Entry]]:
        row = yield from find(self.number, self.id, version)
        with naming(self.id, version):
            return lines.manifest_of(self.runtime.codec, row)


def spans(number: int, *, on_path: bool) -> Op[list[Span]]:
    """Return the spans of a session's history, newest first: its own, then its origins'.

    With `on_path`, versions that a rewind abandoned are left out.
    """
    found: list[Span] = []
    newest: int | None = None
    is_copied = False
    for _ in range(FORKS_MAX):
        row = yield from one(READ_ORIGIN, number=number)
        if row is None:
            break
        epochs = (yield from rows(LIST_EPOCHS, number=number)) if on_path else []
        top = row["version"] if newest is None else newest
        ranges, newest = path(epochs, row["origin_version"] or 1, top)
        if is_copied:
            # The fork has a copy of this version; its origin continues below it.
            ranges[0] = (ranges[0][0], top - 1)
        found += [(number, low, high) for low, high in ranges]
        if row["origin_number"] is None:
            break
        is_copied = newest is None
        number, newest = row["origin_number"], row["origin_version"] if is_copied else newest
    return found


def path(
    epochs: Sequence[Row], oldest: int, newest: int
) -> tuple[list[tuple[int, int]], int | None]:
    """Return the versions that lead to the newest, as ranges, the newest range first.

    If a rewind leads below the oldest, its target is returned too.
    """
    ranges = []
    high = newest
    for epoch in epochs:
        first, target = epoch["first_version"], epoch["target_version"]
        if oldest <= first <= high:
            ranges.append((first, high))
            high = target
    if high < oldest:
        return ranges, high
    return [*ranges, (oldest, high)], None


def find(number: int, session_id: str, version: int) -> Op[Row]:
    """Return the row of a version of the session or of an origin. Raises CheckpointNotFound."""
    row = yield from one(READ_VERSION, key=number * VERSIONS + version)
    if row is not None:
        return row
    for owner, low, high in (yield from spans(number, on_path=False)):
        if low <= version <= high and owner != number:
            row = yield from one(READ_VERSION, key=owner * VERSIONS + version)
            if row is not None:
                return row
    yield from require_session(number, session_id)
    raise CheckpointNotFound(
        f"session {session_id} has no version {version}: never written, or pruned",
        session_id=session_id,
        version=version,
    )


def require_session(number: int, session_id: str) -> Op[None]:
    """Raise SessionNotFound if the session does not exist."""
    if (yield from one(READ_ORIGIN, number=number)) is None:
        raise SessionNotFound(f"there is no session {session_id!r}", id=session_id)


def resume_row(number: int) -> Op[Row | None]:
    """Return the newest checkpoint on the path that starts or ends an iteration."""
    return (yield from _first_on_path(number, READ_ITERATION))


def keyed(codec: Codec, number: int, session_id: str, key: str) -> Op[Checkpoint | None]:
    """Return the version on a session's path that was written with a key, if any."""
    row = yield from _first_on_path(number, READ_KEYED, idempotency_key=key)
    return None if row is None else header(codec, session_id, row)


def _first_on_path(number: int, sql: str, **given: object) -> Op[Row | None]:
    for owner, low, high in (yield from spans(number, on_path=True)):
        row = yield from one(
            sql,
            low=owner * VERSIONS + low,
            high=owner * VERSIONS + high,
            **given,
        )
        if row is not None:
            return row
    return None


def load(codec: Codec, session_id: str, row: Row, last: int | None) -> Op[LoadedCheckpoint]:
    """Return a version with its channels; `last` loads only the end of each list."""
    channels: dict[str, Any] = {}
    left_out: dict[str, int] = {}
    with naming(session_id, row["key"] % VERSIONS):
        for channel, entry in lines.manifest_of(codec, row).items():
            is_window = last is not None and isinstance(entry, Ref) and entry.length > last
            start = entry.length - last if is_window else 0  # type: ignore[union-attr,operator]
            channels[channel] = yield from value_of(codec, entry, start)
            if start:
                left_out[channel] = start
    return LoadedCheckpoint(**_header(codec, session_id, row), channels=channels, left_out=left_out)


def value_of(codec: Codec, entry: Entry, start: int) -> Op[Any]:
    """Return a channel's value; of a list, the items from `start` on."""
    match entry:
        case Inline(body):
            return codec.decode(body)
        case Stored(line_id):
            return (yield from lines.values_of(codec, [Piece(line_id, 0, 1)]))[0]
        case Ref():
            pieces = yield from lines.pieces_of(codec, entry)
            return (yield from lines.values_of(codec, lines.cut(pieces, start, entry.length)))


def header(codec: Codec, session_id: str, row: Row) -> Checkpoint:
    """Return a row without its channels."""
    return Checkpoint(**_header(codec, session_id, row))


def _header(codec: Codec, session_id: str, row: Row) -> dict[str, Any]:
    key = row["key"]
    fields = {"session_id": session_id, "version": key % VERSIONS}
    fields |= {name: row[name] for name in _PLAIN}
    for part in ("data", "metadata"):
        fields[part] = None
        if row[part] is not None:
            with naming(session_id, key % VERSIONS):
                fields[part] = codec.unpack(row[part], context=lines.checkpoint_context(key, part))
    return fields


_PLAIN = ("epoch", "kind", "item_id", "idempotency_key", "state_sequence", "created_at")


def listed(
    where: Sequence[Span],
    kind: str | None,
    item_id: str | None,
    limit: int,
    *,
    before: int | None = None,
    after: int = 0,
    oldest_first: bool = False,
) -> Op[list[Row]]:
    """Return rows without manifests from spans, which are given newest first."""
    found: list[Row] = []
    named = {"kind": kind} if item_id is None else {"kind": kind, "item_id": item_id}
    of_item = "" if item_id is None else "AND item_id = :item_id"
    sql = LIST_VERSIONS.format(of_item=of_item, order="ASC" if oldest_first else "DESC")
    for owner, low, high in reversed(where) if oldest_first else where:
        bottom = max(low, after + 1)
        top = high if before is None else min(high, before - 1)
        if bottom <= top and len(found) < limit:
            bounds = {
                "low": owner * VERSIONS + bottom,
                "high": owner * VERSIONS + top,
            }
            found += yield from rows(sql, **named, **bounds, limit=limit - len(found))
    return found


@contextmanager
def naming(session_id: str, version: int) -> Iterator[None]:
    """Add to a CorruptRecord which version of which session is damaged, and what to do."""
    try:
        yield
    except CorruptRecord as error:
        if "session_id" in error.fields:
            raise
        raise CorruptRecord(
            f"version {version} of session {session_id} is damaged ({str(error).rstrip('.')}); "
            "rewind the session to an older version that loads, or restore a backup",
            **{**error.fields, "session_id": session_id, "version": version},
        ) from error


def newest_of_all(
    codec: Codec, kind: Kind | None, since_ms: int, limit: int
) -> Op[list[Checkpoint]]:
    """Return the newest checkpoints of all sessions without their channels, newest first."""
    kinds = KINDS if kind is None else (kind,)
    # One query per kind, each along the index; the newest of all are among the results.
    each_kind = ({"kind": each, "since": since_ms, "limit": limit} for each in kinds)
    found = yield from batch(*(Query(LIST_NEWEST, given) for given in each_kind))
    newest = sorted(
        (row for rows_of_kind in found for row in rows_of_kind),
        key=lambda row: (row["created_at"], row["key"]),
        reverse=True,
    )
    return [header(codec, row["session_id"], row) for row in newest[:limit]]


def growth(limit: int) -> Op[list[Growth]]:
    """Return the sessions with the most checkpoints."""
    return [Growth(**row) for row in (yield from rows(LIST_LONGEST, limit=limit))]


def read_delta(
    codec: Codec, before: Manifest, after: Manifest, *, with_before: bool = True
) -> Op[Delta]:
    """Load what differs between two manifests; with `with_before=False` only the newer side."""
    delta = Delta()
    for channel in sorted(before.keys() | after.keys()):
        old, new = before.get(channel), after.get(channel)
        if old is not None and new is not None and lines.closed(old) == lines.closed(new):
            continue
        shared = 0
        if isinstance(old, Ref) and isinstance(new, Ref):
            olds = yield from lines.pieces_of(codec, old)
            news = yield from lines.pieces_of(codec, new)
            shared = delta.shared[channel] = _shared(olds, news)
        if old is not None and with_before:
            delta.before[channel] = yield from value_of(codec, old, shared)
        if new is not None:
            delta.after[channel] = yield from value_of(codec, new, shared)
    return delta


def _shared(olds: Sequence[Piece], news: Sequence[Piece]) -> int:
    """Return how many items at the beginning of two lists are the same rows."""
    count = 0
    for old, new in zip(olds, news, strict=False):
        if (old.line_id, old.start) != (new.line_id, new.start):
            break
        count += min(old.length, new.length)
        if old.length != new.length:
            break
    return count


def require_kind(kind: object) -> None:
    """Refuse an unknown kind; None means any."""
    if kind is not None:
        require_one_of("kind", kind, KINDS)


def require_version(version: object) -> None:
    """Refuse an invalid version."""
    require_whole("version", version, 1, VERSIONS - 1)

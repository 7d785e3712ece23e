"""Reading checkpoints: one version with its channels, or many without them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..codec import Codec
from ..errors import CheckpointNotFound, CorruptRecord, SessionNotFound
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..records import KINDS, Checkpoint, Kind, LoadedCheckpoint
from ..sessions.rows import ANY, BY_NUMBER
from . import manifest as manifests
from .lines import SHIFT, Piece, Ref, cut, pieces_of, values_of
from .manifest import Entry, Inline, Stored, checkpoint_context

HEADER = """key, epoch, kind, item_id, idempotency_key, state_sequence, data, metadata,
    created_at"""
ONE = f"SELECT {HEADER}, manifest FROM hf_checkpoints WHERE key = :key"  # noqa: S608
NEWEST = f"""
SELECT {HEADER}, manifest FROM hf_checkpoints
WHERE key = (SELECT s.number * 4294967296 + s.version FROM {BY_NUMBER})
"""  # noqa: S608
# Written this way the kind cannot send the search along the index over all sessions' kinds.
LIST = f"""
SELECT {HEADER} FROM hf_checkpoints
WHERE key >= :low AND key <= :high AND (CAST(:kind AS TEXT) IS NULL OR kind = :kind)
"""  # noqa: S608
KEYED = f"""
SELECT {HEADER} FROM hf_checkpoints
WHERE idempotency_key = :idempotency_key AND key >= :low AND key <= :high ORDER BY key LIMIT 1
"""  # noqa: S608
ITERATION = f"""
SELECT {HEADER}, iteration FROM hf_checkpoints
WHERE key >= :low AND key <= :high AND iteration IS NOT NULL ORDER BY key DESC LIMIT 1
"""  # noqa: S608
WHERE_FROM = f"SELECT s.number, s.version, s.origin_number, s.origin_version FROM {BY_NUMBER}"  # noqa: S608
EPOCHS = """
SELECT first_version, target_version FROM hf_epochs
WHERE session_number = :number ORDER BY first_version DESC
"""
NEWEST_OF_ALL = f"""
SELECT s.id AS session_id, {", ".join(f"c.{name.strip()}" for name in HEADER.split(","))}
FROM hf_checkpoints c JOIN {ANY} ON s.number = c.key / 4294967296
WHERE c.kind = :kind AND c.created_at >= :since
ORDER BY c.created_at DESC, c.key DESC LIMIT :limit
"""  # noqa: S608
FORKS_MAX = 1_000

Span = tuple[int, int, int]
"""Versions `low` to `high` of a session: (session number, low, high)."""


def spans(number: int, *, on_path: bool) -> Op[list[Span]]:
    """Return where a session's history lies, newest first: its own rows, then its origins'.

    On the path, what a rewind left aside is skipped.
    """
    found: list[Span] = []
    newest: int | None = None
    is_copied = False
    for _ in range(FORKS_MAX):
        row = yield from one(WHERE_FROM, number=number)
        if row is None:
            break
        epochs = (yield from rows(EPOCHS, number=number)) if on_path else []
        top = row["version"] if newest is None else newest
        ranges, newest = path(epochs, row["origin_version"] or 1, top)
        if is_copied:
            # The fork has this version itself; its origin goes on below it.
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

    If a rewind leads below the oldest, the version it leads to comes with them.
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


def find(number: int, session_id: str, version: int) -> Op[tuple[int, Row]]:
    """Return the row of a version, from the session or from an origin it was forked from."""
    row = yield from one(ONE, key=number * SHIFT + version)
    if row is not None:
        return number, row
    for owner, low, high in (yield from spans(number, on_path=False)):
        if low <= version <= high and owner != number:
            row = yield from one(ONE, key=owner * SHIFT + version)
            if row is not None:
                return owner, row
    yield from require_session(number, session_id)
    raise CheckpointNotFound(
        f"session {session_id} has no version {version}: never written, or pruned",
        session_id=session_id,
        version=version,
    )


def require_session(number: int, session_id: str) -> Op[None]:
    """Nothing was found: raise SessionNotFound if that is because the session is gone."""
    if (yield from one(WHERE_FROM, number=number)) is None:
        raise SessionNotFound(f"there is no session {session_id!r}", id=session_id)


def newest(number: int) -> Op[Row | None]:
    """Return the row of the newest version, which is a session's own and always on its path."""
    return (yield from one(NEWEST, number=number))


def resume_row(number: int) -> Op[Row | None]:
    """Return the newest record on the path that starts or ends an iteration."""
    for owner, low, high in (yield from spans(number, on_path=True)):
        row = yield from one(ITERATION, low=owner * SHIFT + low, high=owner * SHIFT + high)
        if row is not None:
            return row
    return None


def load(
    codec: Codec, session_id: str, owner: int, row: Row, last: int | None
) -> Op[LoadedCheckpoint]:
    """Return a version with its channels; `last` loads only the end of each list."""
    version = row["key"] % SHIFT
    context = checkpoint_context(owner, version, "manifest")
    channels: dict[str, Any] = {}
    left_out: dict[str, int] = {}
    with naming(session_id, version):
        for channel, entry in manifests.unpack(codec, row["manifest"], context).items():
            channels[channel], missing = yield from value_of(codec, entry, last)
            if missing:
                left_out[channel] = missing
    return LoadedCheckpoint(
        **_header(codec, session_id, owner, row), channels=channels, left_out=left_out
    )


def value_of(codec: Codec, entry: Entry, last: int | None) -> Op[tuple[Any, int]]:
    """Return a channel's value, and how many items at its beginning a window left out."""
    match entry:
        case Inline(body):
            return codec.decode(body), 0
        case Stored(line_id):
            (value,) = yield from values_of(codec, [Piece(line_id, 0, 1)])
            return value, 0
        case Ref():
            start = max(0, entry.length - last) if last is not None else 0
            pieces = yield from pieces_of(codec, entry)
            values = yield from values_of(codec, cut(pieces, start, entry.length))
            return values, start


def header(codec: Codec, session_id: str, row: Row) -> Checkpoint:
    """Return a row without its channels."""
    return Checkpoint(**_header(codec, session_id, row["key"] // SHIFT, row))


def _header(codec: Codec, session_id: str, owner: int, row: Row) -> dict[str, Any]:
    version = row["key"] % SHIFT

    def unsealed(part: str) -> Any:
        if row[part] is None:
            return None
        with naming(session_id, version):
            return codec.unpack(row[part], context=checkpoint_context(owner, version, part))

    return {
        "session_id": session_id,
        "version": version,
        "epoch": row["epoch"],
        "kind": row["kind"],
        "data": unsealed("data"),
        "metadata": unsealed("metadata"),
        "item_id": row["item_id"],
        "idempotency_key": row["idempotency_key"],
        "state_sequence": row["state_sequence"],
        "created_at": row["created_at"],
    }


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
    """Return headers' rows of some spans, which are given newest first."""
    found: list[Row] = []
    text = _listing(item_id is not None, oldest_first)
    named = {"kind": kind} if item_id is None else {"kind": kind, "item_id": item_id}
    for owner, low, high in reversed(where) if oldest_first else where:
        bottom = max(low, after + 1)
        top = high if before is None else min(high, before - 1)
        if bottom <= top and len(found) < limit:
            bounds = {"low": owner * SHIFT + bottom, "high": owner * SHIFT + top}
            found += yield from rows(text, **named, **bounds, limit=limit - len(found))
    return found


@functools.cache
def _listing(of_item: bool, oldest_first: bool) -> str:
    condition = "AND item_id = :item_id" if of_item else ""
    return f"{LIST}{condition} ORDER BY key {'ASC' if oldest_first else 'DESC'} LIMIT :limit"


def keyed(codec: Codec, number: int, session_id: str, key: str) -> Op[Checkpoint | None]:
    """Return the version on a session's path that was written under a key, if there is one."""
    for owner, low, high in (yield from spans(number, on_path=True)):
        bounds = {"low": owner * SHIFT + low, "high": owner * SHIFT + high}
        row = yield from one(KEYED, idempotency_key=key, **bounds)
        if row is not None:
            return header(codec, session_id, row)
    return None


@contextmanager
def naming(session_id: str, version: int) -> Iterator[None]:
    """Let damage say which version of which session it is in, and what to do."""
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
    # One look per kind, each along the index; the newest of all are among them.
    looks = ({"kind": each, "since": since_ms, "limit": limit} for each in kinds)
    found = yield from batch(*(Query(NEWEST_OF_ALL, given) for given in looks))
    newest = sorted(
        (row for rows_of_kind in found for row in rows_of_kind),
        key=lambda row: (row["created_at"], row["key"]),
        reverse=True,
    )
    return [header(codec, row["session_id"], row) for row in newest[:limit]]

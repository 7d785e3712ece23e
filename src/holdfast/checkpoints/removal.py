"""Pruning of history, and of lines that are not needed any more.

Two operations may remove checkpoints: pruning, and deleting a session (`deletion.py`). They open a
door past the append-only triggers and close it before COMMIT. A line is removed with its last use;
from other lines, items beyond the longest reference are removed.

Each session is pruned in its own transactions, so that others can write in between, and a prune
that is killed loses nothing: the next one does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import groupby

from ..codec import Codec
from ..dataclass import dataclass
from ..errors import CorruptRecord, SessionNotFound
from ..feed import emit
from ..kernel.append_only import through_door
from ..kernel.flow import Flow, invoke, let_others_write, perform
from ..kernel.nouns import Retention
from ..kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    one,
    operation,
    rows,
    whole_query,
)
from ..kernel.sql import among, given
from ..records import Pruned
from ..sessions.retention import FORK_POINTS, FORKS, LIST_LONG_SESSIONS
from ..sessions.rows import ALL_SESSIONS, READ_SESSION
from .archive import archive_line
from .keys import ITEMS, VERSIONS
from .lines import (
    RUN_ITEMS,
    Manifest,
    cut_run,
    manifest_of,
)
from .needs import (
    LineNeeds,
    NeedsCache,
    each_row,
    perform_reading_ahead,
    read_behind,
)
from .read import READ_VERSION, header, read_delta, resume_row

SESSIONS_PER_PAGE = 200
VERSIONS_PER_PASS = 100
ARCHIVED_CHARACTERS_PER_PASS = 16 * 2**20
LINES_PER_PASS = 1_000
LINES_PER_BATCH = 100

REMOVE_VERSION = "DELETE FROM hf_checkpoints WHERE key = :key"
LIST_USES = "SELECT line_id FROM hf_uses WHERE session_number = :number ORDER BY line_id"
# The line is locked first, so that of two sessions releasing it, the second sees the first.
RELEASE_LINE = (
    "SELECT id FROM hf_lines WHERE id = :line_id /*pg FOR UPDATE */",
    "DELETE FROM hf_uses WHERE line_id = :line_id AND session_number = :number",
    """
    DELETE FROM hf_items WHERE key >= :low AND key < :high
        AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = :line_id)
    """,
    """
    DELETE FROM hf_lines WHERE id = :line_id
        AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = :line_id)
    """,
)
LIST_USERS = f"""
SELECT s.number, s.root_id, s.version - coalesce(s.origin_version, 0) AS versions
FROM hf_uses u JOIN {ALL_SESSIONS} ON s.number = u.session_number
WHERE u.line_id = :line_id
"""  # noqa: S608
FIND_TAIL = """
SELECT key FROM hf_items WHERE key >= :run AND key < :high AND key + count > :low
ORDER BY key LIMIT 1
"""
REMOVE_TAIL = "DELETE FROM hf_items WHERE key >= :low AND key < :high"
KEEP_ITEMS = "INSERT INTO hf_items (key, count, data) VALUES (:key, :count, :data)"
# The one place that excludes what retention must keep.
_PRUNABLE = f"""
SELECT key FROM hf_checkpoints c
WHERE {{chosen}} AND kind <> 'approval_point'
    AND key < (
        SELECT min(key) FROM (
            SELECT key FROM hf_checkpoints WHERE key >= :low AND key < :high
            ORDER BY key DESC LIMIT :keep
        ) AS newest
    )
    AND (idempotency_key IS NULL OR created_at <= :now - :key_ms)
    AND NOT EXISTS (SELECT 1 FROM hf_pins p WHERE p.key = c.key)
    AND NOT EXISTS (SELECT 1 FROM hf_attestations a WHERE a.key = c.key)
    AND c.key - :low NOT IN ({FORK_POINTS})
ORDER BY key
"""  # noqa: S608
LIST_PRUNABLE = _PRUNABLE.format(chosen="key > :low + :after AND key < :high") + "LIMIT :limit"
STILL_PRUNABLE = _PRUNABLE.format(chosen=f"key {among('keys', 'INTEGER')}")
# Of forks that have no resume point of their own, and were not rewound, one for each fork point;
# and all that were rewound.
LIST_RESUMING_FORKS = f"""
{FORKS}
SELECT min(member) AS member FROM forks
WHERE NOT EXISTS (SELECT 1 FROM hf_epochs e WHERE e.session_number = member)
    AND NOT EXISTS (
        SELECT 1 FROM hf_checkpoints c
        WHERE c.key >= member * {VERSIONS} AND c.key < (member + 1) * {VERSIONS}
            AND c.iteration IS NOT NULL
    )
GROUP BY origin_number, origin_version
UNION ALL SELECT member FROM forks
WHERE EXISTS (SELECT 1 FROM hf_epochs e WHERE e.session_number = member)
"""  # noqa: S608
LIST_UNUSED = """
SELECT id FROM hf_lines WHERE id > :after
    AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = id)
ORDER BY id LIMIT :limit
"""


def bounds_of(number: int) -> dict[str, int]:
    """Return the range of a session's keys."""
    low = number * VERSIONS
    return {"number": number, "low": low, "high": low + VERSIONS}


def bounds_of_line(line_id: int) -> dict[str, int]:
    """Return the range of the keys of a line's items."""
    low = line_id * ITEMS
    return {"line_id": line_id, "low": low, "high": low + ITEMS}


def release_lines(number: int, line_ids: Sequence[int]) -> Op[None]:
    """Remove a session's uses of lines, and the lines that are then unused."""
    for start in range(0, len(line_ids), LINES_PER_BATCH):
        removals = [
            Query(statement, {**bounds_of_line(line_id), "number": number})
            for line_id in line_ids[start : start + LINES_PER_BATCH]
            for statement in RELEASE_LINE
        ]
        yield from through_door(f"release {number}", *removals)


def cut_tails(
    runtime: Runtime, line_ids: Sequence[int], known: Mapping[int, LineNeeds] | None = None
) -> Op[None]:
    """Remove the items beyond the longest reference of any checkpoint to these lines.

    `known` maps session numbers to needs. Raises MustReadAhead if there is too much to read while
    the trees are locked.
    """
    codec = runtime.codec
    users: dict[int, Row] = {}
    while True:
        found = yield from each_row(LIST_USERS, [{"line_id": line_id} for line_id in line_ids])
        if users == (users := {row["number"]: row for row in found}):
            break
        # Locking the trees of all users of a line prevents new references to it.
        for root_id in sorted({row["root_id"] for row in users.values()}):
            yield Lock(root_id)
    try:
        versions = {number: row["versions"] for number, row in users.items()}
        ends = yield from NeedsCache.of(runtime).ends(codec, versions, known or {})
        cuts: list[Query] = []
        for line_id in line_ids:
            if line_id in ends:
                cuts += yield from _cut(codec, line_id, ends[line_id])
    except CorruptRecord:
        return  # A damaged version may refer to anything.
    if cuts:
        yield from through_door(f"cut {line_ids[0]}", *cuts)


def _cut(codec: Codec, line_id: int, end: int) -> Op[list[Query]]:
    """Return the queries that remove a line's items from `end` on, splitting a packed run."""
    instead = yield from cut_run(codec, line_id, end)
    low, high = (line_id * ITEMS + end, (line_id + 1) * ITEMS)
    if instead is None:
        return [Query(REMOVE_TAIL, {"low": low, "high": high})]
    low, high = instead.replaced or (low, high)
    kept = ({"key": key, "count": count, "data": data} for key, count, data in instead.rows)
    removal = Query(REMOVE_TAIL, {"low": low, "high": high})
    return [removal, *(Query(KEEP_ITEMS, row) for row in kept)]


def prune(runtime: Runtime, retention: Retention) -> Flow[Pruned]:
    """Remove all but the newest checkpoints of each session, and unused lines."""
    pruned = Pruned()
    if retention.keep is None:
        return pruned
    after = 0
    while page := (yield from perform(list_long, runtime, retention, after)):
        for session in page:
            try:
                removed, archived = yield from _prune_session(runtime, retention, session)
            except CorruptRecord:
                pruned += Pruned(damaged=(session["id"],))
                continue
            pruned += Pruned(sessions=removed > 0, checkpoints=removed, archived=archived)
            if removed and retention.progress is not None:
                yield from invoke(retention.progress, pruned.checkpoints)
        after = page[-1]["number"]
    if retention.session is not None:
        return pruned
    # Left behind by a save that lost a race; nothing can start to use them.
    count = after = 0
    while unused := (yield from perform(list_unused, runtime, after)):
        yield from perform(remove_unused, runtime, unused)
        count += len(unused)
        after = unused[-1]
    return replace(pruned, lines=count)


def _prune_session(runtime: Runtime, retention: Retention, session: Row) -> Flow[tuple[int, int]]:
    """Prune one session; return how many versions were removed, and how many archived.

    Lines are released with the last versions: if the process is killed before, versions are left,
    and the next prune gets to the lines too.
    """
    removed = archived = 0
    before: PrunePlan | None = None
    while plan := (yield from perform(read_plan, runtime, retention, session, before)):
        if retention.archive is not None:
            yield from invoke(retention.archive.append, plan.lines)
            archived += len(plan.lines)
        for start in range(0, len(plan.unused), LINES_PER_BATCH):
            some = plan.unused[start : start + LINES_PER_BATCH]
            yield from perform(release_unused, runtime, session, plan, some)
        removed += yield from perform_reading_ahead(
            runtime, remove_planned, runtime, retention, session, plan
        )
        yield from let_others_write(runtime)
        if plan.is_last:
            break
        before = plan
    NeedsCache.of(runtime).clear()
    return removed, archived


@dataclass(slots=True)
class PrunePlan:
    """What one pass removes from a session."""

    keys: list[int]
    lines: list[str] = field(default_factory=list)
    """The versions as lines of the archive."""
    archived: Manifest = field(default_factory=dict)
    """The channels of the last of these lines; the next pass archives what differs from them."""
    is_last: bool = False
    newest: int = 0
    """The key of the last version that was read; later ones may need any line."""
    staying: LineNeeds = field(default_factory=LineNeeds)
    """The needs of the versions that stay."""
    unused: list[int] = field(default_factory=list)
    """Lines that no version needs any more."""
    going: list[int] = field(default_factory=list)
    """Lines that only the versions of this pass need."""
    tails: list[int] = field(default_factory=list)
    """Lines with items that the versions that stay do not need."""


@whole_query
def read_plan(
    runtime: Runtime, retention: Retention, session: Row, before: PrunePlan | None
) -> Op[PrunePlan | None]:
    """Return what a pass removes after another one, or None; takes no locks."""
    codec, number = runtime.codec, session["number"]
    after = 0 if before is None else before.keys[-1] % VERSIONS
    keys = yield from prunable(retention, number, after, VERSIONS_PER_PASS + 1)
    plan = PrunePlan(keys[:VERSIONS_PER_PASS])
    if retention.archive is not None:
        channels = {} if before is None else before.archived
        yield from _archive(codec, session["id"], plan, after, channels)
    plan.is_last = len(plan.keys) == len(keys)
    if not plan.keys:
        return None
    if not plan.is_last:
        if not after:
            # Raises before anything is removed if a version is damaged.
            yield from LineNeeds().read(codec, [number])
        return plan
    staying, leaving, chosen = plan.staying, LineNeeds(), frozenset(plan.keys)
    plan.newest = yield from read_behind(
        codec, number * VERSIONS, lambda key: leaving if key in chosen else staying
    )
    used = {row["line_id"] for row in (yield from rows(LIST_USES, number=number))}
    plan.unused = sorted(used - staying.ends.keys() - leaving.ends.keys())
    plan.going = sorted((used & leaving.ends.keys()) - staying.ends.keys())
    tails = []
    for line_id, end in staying.ends.items():
        low, run = line_id * ITEMS, end // RUN_ITEMS * RUN_ITEMS
        tails.append({"run": low + run, "low": low + end, "high": low + ITEMS})
    plan.tails = [row["key"] // ITEMS for row in (yield from each_row(FIND_TAIL, tails))]
    return plan


@operation
def release_unused(
    runtime: Runtime, session: Row, plan: PrunePlan, line_ids: Sequence[int]
) -> Op[None]:
    """Release lines that no version needed when the plan was made, unless one does now."""
    yield Lock(session["root_id"])
    yield from _release(runtime.codec, session["number"], plan, line_ids, [])


@operation
def remove_planned(
    runtime: Runtime, retention: Retention, session: Row, plan: PrunePlan
) -> Op[int]:
    """Remove the versions of a plan that may still be removed, their lines too; emit an event."""
    yield Lock(session["root_id"])
    # Since they were chosen, one may have been pinned, attested or forked.
    number, planned = session["number"], set(plan.keys)
    keys = yield from still_prunable(retention, number, plan.keys)
    if not keys:
        return 0
    removals = (Query(REMOVE_VERSION, {"key": key}) for key in keys)
    yield from through_door(f"prune {number}", *removals)
    if plan.is_last:
        spared = planned.difference(keys)
        later = yield from _release(runtime.codec, number, plan, plan.going, spared)
        later.include(plan.staying)
        yield from cut_tails(runtime, plan.tails, {number: later})
    data = {"versions": _ranges([key % VERSIONS for key in keys]), "count": len(keys)}
    where = (session["root_id"], session["id"])
    yield from emit(runtime.codec, *where, "checkpoints_pruned", data)
    return len(keys)


def _release(
    codec: Codec, number: int, plan: PrunePlan, line_ids: Sequence[int], spared: Iterable[int]
) -> Op[LineNeeds]:
    """Release lines except those that later and spared versions need; return these needs."""
    needs = LineNeeds()
    yield from read_behind(codec, plan.newest, lambda _: needs)
    for key in spared:
        row = yield from one(READ_VERSION, key=key)
        if row is not None:
            yield from needs.add(codec, manifest_of(codec, row))
    yield from release_lines(number, [id for id in line_ids if id not in needs.ends])
    return needs


@whole_query
def list_long(_: Runtime, retention: Retention, after: int) -> Op[list[Row]]:
    """Return the next sessions that may have versions to remove."""
    only = retention.session
    if only is not None and (yield from one(READ_SESSION, id=only)) is None:
        raise SessionNotFound(f"there is no session {only!r}", id=only)
    wanted = {"only": only, "keep": retention.keep, "limit": SESSIONS_PER_PAGE}
    return (yield from rows(LIST_LONG_SESSIONS, after=after, **wanted))


def _archive(
    codec: Codec, session_id: str, plan: PrunePlan, after: int, before: Manifest
) -> Op[None]:
    """Add the archive lines to a plan, and limit it to as many versions as fit into one pass.

    The first line continues version `after`, if there is one, whose channels were `before`.
    """
    chosen, plan.keys, size = plan.keys, [], 0
    for key in chosen:
        row = yield from one(READ_VERSION, key=key)
        if row is None or size > ARCHIVED_CHARACTERS_PER_PASS:
            break
        checkpoint = header(codec, session_id, row)
        manifest = manifest_of(codec, row)
        delta = yield from read_delta(codec, before, manifest, with_before=False)
        dropped = before.keys() - manifest.keys()
        line = archive_line(codec, checkpoint, after or None, delta, sorted(dropped))
        before, after = manifest, checkpoint.version
        plan.keys.append(key)
        plan.lines.append(line)
        size += len(line)
    plan.archived = before


@whole_query
def list_unused(_: Runtime, after: int) -> Op[list[int]]:
    """Return the next lines that no session uses."""
    return [row["id"] for row in (yield from rows(LIST_UNUSED, after=after, limit=LINES_PER_PASS))]


@operation
def remove_unused(_: Runtime, line_ids: list[int]) -> Op[None]:
    """Remove lines, with their items, that are still unused."""
    yield from release_lines(0, line_ids)


def prunable(retention: Retention, number: int, after: int, limit: int) -> Op[list[int]]:
    """Return up to `limit` keys of versions after one that may be removed, oldest first."""
    protected = yield from _resume_points(number)
    wanted = {"after": after, "limit": limit + len(protected)}
    found = yield from rows(LIST_PRUNABLE, **_kept(retention, number), **wanted)
    return [row["key"] for row in found if row["key"] not in protected][:limit]


def still_prunable(retention: Retention, number: int, keys: Sequence[int]) -> Op[list[int]]:
    """Return which of the given versions may be removed, oldest first."""
    protected = yield from _resume_points(number)
    found = yield from rows(STILL_PRUNABLE, **_kept(retention, number), keys=given(keys))
    return [row["key"] for row in found if row["key"] not in protected]


def _kept(retention: Retention, number: int) -> dict[str, int | None]:
    return {**bounds_of(number), "keep": retention.keep, "key_ms": retention.key_ms}


def _resume_points(number: int) -> Op[set[int]]:
    """Return the keys of versions of a session from which it or a fork may resume."""
    found = set()
    forks = yield from rows(LIST_RESUMING_FORKS, number=number)
    for member in (number, *(fork["member"] for fork in forks)):
        row = yield from resume_row(member)
        if row is not None and row["key"] // VERSIONS == number:
            found.add(row["key"])
    return found


def _ranges(versions: list[int]) -> list[list[int]]:
    """Return ascending numbers as inclusive ranges."""
    found = []
    for _, group in groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0]):
        members = [version for _, version in group]
        found.append([members[0], members[-1]])
    return found

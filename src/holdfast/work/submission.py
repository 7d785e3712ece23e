"""Submission of items: one, many at once, or as follow-ups of a completed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import milliseconds_of, require_text
from ..codec import Codec
from ..errors import InvalidArgument, Refused, RequestMismatch, StoreBusy
from ..feed import event
from ..kernel.operation import (
    AfterCommit,
    Decide,
    Emit,
    FreshId,
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    one,
    rows,
)
from ..kernel.signals import Signals
from ..leases import Keeper
from ..sessions.access import Place, require_fence, require_open
from ..sessions.rows import NUMBER_OF_SESSION, ONE_SESSION, read_place
from .items import ITEM_COLUMNS, READ_ITEM, SELECT_ITEMS, Item, Submission, context, require_delay

SUBMISSIONS_MAX = 10_000
ROWS_PER_BATCH = 500
TRIES_MAX = 20

_ADD = f"""
INSERT INTO hf_work (
    id, session_number, session_id, root_id, type, queue, state, priority, key, on_crash,
    max_retries, redriven_from, first_id, input, available_at, created_at, updated_at
)
SELECT CAST(:id AS TEXT), coalesce(
        CAST(:session_number AS INTEGER), {NUMBER_OF_SESSION.format(id="CAST(:session_id AS TEXT)")}
    ), CAST(:session_id AS TEXT), CAST(:root_id AS TEXT), CAST(:type AS TEXT), CAST(:queue AS TEXT),
    CASE WHEN at.due > :now THEN 'scheduled' ELSE 'pending' END, CAST(:priority AS INTEGER),
    CAST(:key AS TEXT), CAST(:on_crash AS TEXT), CAST(:max_retries AS INTEGER),
    CAST(:redriven_from AS TEXT), CAST(:first_id AS TEXT), CAST(:input AS BLOB), at.due, :now, :now
FROM (
    SELECT coalesce(CAST(:available_at AS INTEGER), :now + CAST(:delay_ms AS INTEGER)) AS due
) AS at
WHERE true
ON CONFLICT DO NOTHING
RETURNING {{columns}}
"""  # noqa: S608
ADD_ITEM = _ADD.format(columns=ITEM_COLUMNS)
# For a noun, which reads nothing of the item: without the other columns, PostgreSQL takes a sixth
# less time.
ADD_ITEM_ALONE = _ADD.format(columns="id, session_id, root_id, type, queue, state")
LIVE_WITH_KEY = f"""
{SELECT_ITEMS} WHERE queue = :queue AND key = :key AND key IS NOT NULL
    AND state IN ('scheduled', 'pending', 'in_progress', 'review')
"""
READ_REDRIVEN = f"""
{SELECT_ITEMS} WHERE redriven_from = :redriven_from AND redriven_from IS NOT NULL
"""
READ_SESSION_STATUS = f"SELECT s.status, s.fence, s.holder FROM {ONE_SESSION} AND s.id = :id"  # noqa: S608


def submit_all(
    runtime: Runtime,
    wanted: Sequence[Submission],
    *,
    default: Place | None = None,
    redriven: Item[Any] | None = None,
    is_checked: bool = False,
) -> Op[list[Row]]:
    """Submit items and return the row of each; the existing one if its id or key is taken.

    `is_checked` says that this transaction has locked the tree of the default place, and knows
    that its session is open; the session of a place without a number is found by its id. The rows
    of new items then have only the columns that are needed here.
    """
    codec = runtime.codec
    bodies = []
    for submission in wanted:
        if not isinstance(submission, Submission):
            raise InvalidArgument(
                f"a work item is submitted as a Submission, not {type(submission).__name__}"
            )
        submission.check()
        bodies.append(codec.encode(submission.input, name="input"))
    places: dict[Any, Place | None] = {None: default}
    for submission in wanted:
        if _key(submission.session) not in places:
            places[_key(submission.session)] = yield from _place_of(submission.session)
    if not is_checked:
        named = [place for place in places.values() if place is not None]
        yield from _lock(Keeper.of(runtime), named)
    drafts = []
    for submission, body in zip(wanted, bodies, strict=True):
        draft = _draft(submission, places[_key(submission.session)], redriven)
        draft["id"] = submission.id or (yield FreshId())
        draft["input"] = codec.seal(body, context=context(draft["id"], "input"))
        drafts.append(draft)
    found: list[Row] = []
    ready = set()
    add = ADD_ITEM_ALONE if is_checked else ADD_ITEM
    for start in range(0, len(drafts), ROWS_PER_BATCH):
        page = drafts[start : start + ROWS_PER_BATCH]
        for draft, answer in zip(page, (yield from _insert(page, add)), strict=True):
            row, is_new = yield from _row_of(codec, wanted[len(found)], draft, answer)
            found.append(row)
            if is_new and row["state"] == "pending":
                ready.add(row["queue"])
            if is_new and row["root_id"] is not None:
                yield _submitted(codec, row)
    yield from ring(runtime.signals, ready)
    return found


def new_item(codec: Codec, id: str, submission: Submission, place: Place) -> tuple[Query, Emit]:
    """Return the statement that adds an item with a new id, ready to run, and its event.

    The tree is locked, and the session of the place is open.
    """
    body = codec.encode(submission.input, name="input")
    draft = {**_draft(submission, place, None), "id": id}
    draft["input"] = codec.seal(body, context=context(id, "input"))
    return Query(ADD_ITEM_ALONE, draft), _submitted(codec, draft)


def _submitted(codec: Codec, row: Row) -> Emit:
    data = {"item": row["id"], "type": row["type"], "queue": row["queue"]}
    return event(codec, row["root_id"], row["session_id"], "work_submitted", data)


def _insert(page: Sequence[Row], add: str) -> Op[list[list[Row]]]:
    """Insert items; a single one in one round trip on PostgreSQL if the call starts with it."""
    inserts = [Query(add, draft) for draft in page]
    if len(inserts) > 1:
        return (yield from batch(*inserts))
    found: list[list[Row]] = yield Decide(inserts, again=Query(READ_ITEM, {"id": page[0]["id"]}))
    return found


def _key(session: Any) -> Any:
    """Return a dictionary key for a session; two handles of one may have different guards."""
    return session if session is None or isinstance(session, str) else id(session)


def _place_of(session: Any) -> Op[Place]:
    """Return the place of a session, given as a handle or by its id."""
    if not isinstance(session, str):
        number = getattr(session, "number", None)
        if type(number) is not int or not isinstance(getattr(session, "root_id", None), str):
            raise InvalidArgument(
                f"session must be a session or its id, not {type(session).__name__}"
            )
        lease = (getattr(session, "fence", None), getattr(session, "guard", None))
        return Place(session.id, number, session.root_id, *lease)
    require_text("session", session)
    row = yield from read_place(session)
    return Place(row["id"], row["number"], row["root_id"], None)


def _lock(keeper: Keeper, places: Sequence[Place]) -> Op[None]:
    """Lock the trees, in order, and check that each session is open and its handle not fenced."""
    locks = [Lock(root_id) for root_id in sorted({place.root_id for place in places})]
    looks = []
    for place in places:
        looks += keeper.looks(place.guard)
        looks.append(Query(READ_SESSION_STATUS, {"number": place.number, "id": place.session_id}))
    if not places:
        return
    answers = (yield from batch(*locks, *looks))[len(locks) :]
    for place in places:
        found, *answers = keeper.require(place.guard, answers)
        for row in found:
            require_fence(place, row)
        require_open(place, found)


def _draft(submission: Submission, place: Place | None, redriven: Item[Any] | None) -> Row:
    at, delay = submission.available_at, submission.delay_seconds
    names = ("type", "priority", "key", "on_crash", "max_retries")
    return {
        "session_number": None if place is None else place.number or None,
        "session_id": None if place is None else place.session_id,
        "root_id": None if place is None else place.root_id,
        "queue": submission.queue or submission.type,
        "available_at": None if at is None else milliseconds_of("available_at", at),
        "delay_ms": 0 if delay is None else require_delay("delay_seconds", delay),
        "redriven_from": None if redriven is None else redriven.id,
        "first_id": None if redriven is None else redriven.first_id or redriven.id,
        **{name: getattr(submission, name) for name in names},
    }


def _row_of(
    codec: Codec, submission: Submission, draft: Row, answer: list[Row]
) -> Op[tuple[Row, bool]]:
    """Return the new row, or the existing one that it conflicts with, and whether it is new."""
    redriven_from = draft["redriven_from"]
    for _ in range(TRIES_MAX):
        if answer:
            return answer[0], True
        if submission.id is not None and (row := (yield from one(READ_ITEM, id=submission.id))):
            return _require_same(codec, submission, draft, row), False
        if redriven_from is not None and (row := (yield from one(READ_REDRIVEN, **draft))):
            return row, False
        if draft["key"] is not None and (row := (yield from one(LIVE_WITH_KEY, **draft))):
            if redriven_from is not None:
                raise Refused(
                    f"work item {row['id']} now has the key {row['key']!r} of {redriven_from}; "
                    f"redrive {redriven_from} once {row['id']} has ended",
                    id=redriven_from,
                    living=row["id"],
                )
            return row, False
        # It ended between the two statements, so its key is free now.
        answer = yield from rows(ADD_ITEM, **draft)
    raise StoreBusy(f"items with key {draft['key']!r} are submitted and end too fast; try again")


def _require_same(codec: Codec, submission: Submission, draft: Row, row: Row) -> Row:
    """Return the item of this id, or raise RequestMismatch if it was submitted differently."""
    names = ("type", "queue", "session_id")
    is_alike = all(row[name] == draft[name] for name in names)
    if is_alike and codec.unpack(row["input"], context=context(row["id"], "input")) == (
        submission.input
    ):
        return row
    raise RequestMismatch(
        f"work item {row['id']} was submitted with another type, queue, session or input; use a "
        "new id for a new item",
        id=row["id"],
    )


def ring(signals: Signals, queues: set[str]) -> Op[None]:
    """Wake the workers of some queues once the change is durable."""
    for queue in sorted(queues):
        yield AfterCommit(lambda queue=queue: signals.ring(topic(queue)))  # type: ignore[misc]


def topic(queue: str) -> str:
    """Return the signal topic on which ready items of a queue are announced."""
    return f"work:{queue}"

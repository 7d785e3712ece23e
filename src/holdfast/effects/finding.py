"""Finding the row that answers a call: the call's own first, then that of an equal one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..codec import Limits
from ..kernel.operation import Op, Query, Row, batch, one, rows
from .identity import Past, counting, key_within, read_past, scope_of
from .rows import (
    BY_CALL,
    BY_KEY,
    NEWEST_CHANGE,
    NEWEST_CHANGE_IN_CHAIN,
    ORIGINAL,
    PAST_ROWS_MAX,
    Wanted,
    mismatch,
)
from .salts import Salts

VERSION_MAX = 2**62
OF_SESSION = frozenset({"session", "latest", "call"})
"""Policies under which a call is equal only to one of the same session's history."""


@dataclass(slots=True)
class Found:
    """What the ledger holds of a request."""

    row: Row | None
    """The row that counts."""
    newest: Row | None
    """The newest attempt under the same key, which may not count."""
    is_same_call: bool
    """Whether the same call id was there before, whatever came of it."""
    is_own: bool
    """Whether the row that counts is that call's own."""
    is_inherited: bool
    """Whether it was left by another session: an earlier one of the same id, or one before a fork.

    Neither a fork of this session nor a new one of its id would find it there.
    """
    past: Past | None
    """The history of a session that was rewound or forked."""


def looks_for(wanted: Wanted) -> list[Query]:
    """Return the statements whose answers `find` is given."""
    request, identity = wanted.request, wanted.identity
    looks = [Query(BY_KEY, {"key": identity.key, "limit": 1})]
    if request.call_id is not None:
        call = {"scope": identity.scope, "call_id": request.call_id, "limit": 1}
        looks.insert(0, Query(BY_CALL, call))
    return looks


def find(
    salts: Salts,
    limits: Limits,
    wanted: Wanted,
    session: Row | None,
    answers: Sequence[Sequence[Row]],
) -> Op[Found]:
    """Return what counts for a request; raise RequestMismatch if that is another's."""
    own, equal = answers if len(answers) > 1 else ([], answers[0])
    newest, past = next(iter(equal), None), None
    is_branched = session is not None and (
        session["epoch"] > 1 or session["origin_number"] is not None
    )
    # A key of the caller's counts in the whole store, whatever becomes of a session.
    if is_branched and session is not None and wanted.request.policy != "once":
        past = yield from read_past(session["number"])
        own, equal = yield from _in_the_past(salts, limits, past, wanted, newest)
    own, equal = [row for row in own if _counts(row)], [row for row in equal if _counts(row)]
    row = None
    for row in counting(own, equal):
        if not salts.is_of(limits, row, wanted):
            raise mismatch(row, wanted.request)
    is_inherited = row is not None and _is_inherited(wanted, row)
    is_own = not is_inherited and any(row is each for each in own)
    return Found(row, newest, bool(own), is_own, is_inherited, past)


def _is_inherited(wanted: Wanted, row: Row) -> bool:
    """Whether a row is another session's that counts in this one's calls."""
    if wanted.place is None or wanted.request.chain_id is not None:
        return False
    return wanted.request.policy in OF_SESSION and row["session_number"] != wanted.place.number


def find_call(number: int, session_id: str, call_id: str) -> Op[Row | None]:
    """Return the row of a call that counts in a session's history, known by its id alone."""
    past = yield from read_past(number)
    for scope, is_held in _scopes(past, scope_of(session_id)):
        found = yield from rows(BY_CALL, scope=scope, call_id=call_id, limit=PAST_ROWS_MAX)
        for row in found:
            if is_held(row) and _counts(row):
                return row
    return None


def is_latest(wanted: Wanted, found: Found) -> Op[bool]:
    """Whether nothing has been written since the row that was found."""
    assert found.row is not None
    looks = [Query(NEWEST_CHANGE_IN_CHAIN, {"scope": wanted.identity.scope})]
    if wanted.place is not None:
        ends = {} if found.past is None else found.past.ends
        looks = [
            Query(NEWEST_CHANGE, {"session_number": number, "before": before})
            for number, before in {wanted.place.number: VERSION_MAX, **ends}.items()
        ]
    number = found.row["number"]
    if found.row["replay_of"] is not None:
        original = yield from one(ORIGINAL, id=found.row["replay_of"])
        number = -1 if original is None else original["number"]
    answers = yield from batch(*looks)
    newest = max(row["number"] or 0 for (row,) in answers)
    return bool(newest < number if wanted.request.effect == "read" else newest == number)


def _counts(row: Row) -> bool:
    return row["undone_by"] is None and not row["is_expired"]


def _in_the_past(
    salts: Salts, limits: Limits, past: Past, wanted: Wanted, newest: Row | None
) -> Op[tuple[list[Row], list[Row]]]:
    """Return a call's own rows and those of equal calls in a history of several parts."""
    request = wanted.request
    known = salts.of(wanted.belief, request) if request.policy in OF_SESSION else ()
    own: list[Row] = []
    equal: list[Row] = []
    scopes = _scopes(past, wanted.identity.scope)
    for place, (scope, is_held) in enumerate(scopes[:1] if request.chain_id else scopes):
        keys = [key_within(salt, limits, scope, request) for salt in known] if place else []
        if not place and newest is not None:
            keys = [newest["key"]]
        if request.call_id is not None:
            call = {"scope": scope, "call_id": request.call_id, "limit": PAST_ROWS_MAX}
            own += filter(is_held, (yield from rows(BY_CALL, **call)))
        for key in keys:
            equal += filter(is_held, (yield from rows(BY_KEY, key=key, limit=PAST_ROWS_MAX)))
    return own, equal


def _scopes(past: Past, own: str) -> list[tuple[str, Callable[[Row], bool]]]:
    """Return where the calls of a history count, the session's own first, and which rows do."""
    origins = [(scope_of(each[0]), partial(past.holds_of_origin, each)) for each in past.origins]
    return [(own, past.holds), *origins]

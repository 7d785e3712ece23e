"""Which rows of the ledger answer a call of a session, also after forks and rewinds.

A call is answered by its own row first, then by that of an identical call. A fork also finds the
effects of its origins from before the fork. A rewound session finds those on its current path, and
abandoned ones that must not be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..checkpoints.read import LIST_EPOCHS, path
from ..dataclass import dataclass
from ..errors import RequestMismatch
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..sessions.rows import ONE_SESSION
from .requests import EffectRequest, Salts, key_within, scope_of
from .statements import BY_WORLD, EFFECT_BY_CALL, EFFECT_BY_KEY, IS_IN_WORLD, SELECT_EFFECTS

PAST_ROWS_MAX = 1_000
VERSION_MAX = 2**62
SESSION_POLICIES = frozenset({"session", "latest", "call"})
"""Policies under which calls are compared within one session's history only."""

SESSION_VERSIONS = f"SELECT s.version, s.origin_version FROM {ONE_SESSION}"  # noqa: S608
READ_ORIGINS = """
SELECT origin_id, origin_number, first_version, last_version FROM hf_effect_origins
WHERE session_number = :number ORDER BY position
"""
ADD_ORIGIN = """
INSERT INTO hf_effect_origins (
    session_number, position, origin_id, origin_number, first_version, last_version
) VALUES (:number, :position, :id, :origin, :first, :last)
"""
COPY_SESSION_SALT = """
INSERT INTO hf_effect_sessions (session_number, salt_number)
SELECT CAST(:fork AS INTEGER), salt_number FROM hf_effect_sessions WHERE session_number = :number
"""
# Unlike an undo, a world that went back has left nothing of what was changed.
IS_CHANGE = f"effect IN ('write', 'mutate') AND replay_of IS NULL AND {IS_IN_WORLD}"
NEWEST_CHANGE = f"""
SELECT max(number) AS number FROM hf_effects
WHERE session_number = :session_number AND issued_version < :before AND {IS_CHANGE}
"""  # noqa: S608
NEWEST_CHANGE_IN_CHAIN = f"""
SELECT max(number) AS number FROM hf_effects
WHERE scope = :scope AND session_number IS NULL AND item_id IS NOT NULL AND {IS_CHANGE}
"""  # noqa: S608
ABANDONED_UNDER_KEY = """
SELECT number FROM hf_effects
WHERE key = :key AND idempotency_key = :idempotency_key AND reason = 'abandoned' LIMIT 1
"""
EFFECT_NUMBER = "SELECT number FROM hf_effects WHERE id = :id"
# Includes abandoned epochs: an effect that a rewind did not undo can be undone later.
STANDING_EFFECTS = f"""{SELECT_EFFECTS} WHERE session_number = :number
    AND issued_version >= :version AND effect IN ('write', 'mutate')
    AND (status <> 'failed' OR reason = 'given_up')
    AND undone_by IS NULL AND undoes IS NULL AND replay_of IS NULL
ORDER BY number DESC"""

Origin = tuple[str, int, int, int]
"""Versions that a fork shares with its origin: the origin's id, number, first and last version."""


class History:
    """Which effects belong to a session's history: its own, and those of its origins."""

    def __init__(
        self,
        number: int,
        own: Sequence[tuple[int, int]] = (),
        origins: Sequence[Origin] = (),
        ends: dict[int, int] | None = None,
    ) -> None:
        self._number = number
        self._own = own
        self._parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for id, origin, low, high in origins:
            self._parts.setdefault((id, origin), []).append((low, high))
        self.ends = ends or {}
        """The version at which each origin was forked, whatever was rewound since."""

    @property
    def origins(self) -> list[tuple[str, int]]:
        """The id and number of each session that this one was forked from, nearest first."""
        return list(self._parts)

    def holds(self, row: Row) -> bool:
        """Whether a row of this session is part of its history.

        An effect that must not be repeated and was not undone remains part of it after a rewind.
        Rows of an earlier session of the same id count, for late retries.
        """
        if row["session_number"] != self._number:
            return True
        return _stands(row) or any(low <= row["issued_version"] <= high for low, high in self._own)

    def holds_of_origin(self, origin: tuple[str, int], row: Row) -> bool:
        """Whether a row of an origin is from before the fork.

        Effects that must not be repeated count also if either session has rewound past them.
        """
        version, parts = row["issued_version"], self._parts[origin]
        if row["session_number"] != origin[1] or version >= max(high for _, high in parts):
            return False
        return _stands(row) or any(low <= version < high for low, high in parts)

    def scopes(self, own: str) -> list[tuple[str, Callable[[Row], bool]]]:
        """Return each scope to search, the session's own first, with a filter for its rows."""
        others = [(scope_of(each[0]), partial(self.holds_of_origin, each)) for each in self.origins]
        return [(own, self.holds), *others]

    def inherited(self, sql: str, **given: Any) -> Op[list[Row]]:
        """Run a statement for each origin; return the rows from before the fork."""
        found: list[Row] = []
        for id, number in self.origins:
            there = yield from rows(sql, number=number, session_id=id, **given)
            found += filter(partial(self.holds_of_origin, (id, number)), there)
        return found


def _stands(row: Row) -> bool:
    """Whether an effect must not be repeated, may have happened, and was not undone.

    An abandoned attempt counts: it is retried under the key that its receiver may know.
    """
    may_have_happened = row["status"] != "failed" or row["reason"] in {"abandoned", "given_up"}
    return bool(row["effect"] == "mutate" and may_have_happened and row["undone_by"] is None)


def _read_history_rows(number: int) -> Op[tuple[Row, list[Row], list[Origin]] | None]:
    texts = (SESSION_VERSIONS, LIST_EPOCHS, READ_ORIGINS)
    found, epochs, origins = yield from batch(*(Query(text, {"number": number}) for text in texts))
    if not found:
        return None
    return found[0], epochs, [origin_of(row) for row in origins]


def origin_of(row: Row) -> Origin:
    """Return an origin from its row."""
    return row["origin_id"], row["origin_number"], row["first_version"], row["last_version"]


def read_history(number: int) -> Op[History]:
    """Return the history of a session."""
    found = yield from _read_history_rows(number)
    if found is None:
        return History(number)
    session, epochs, origins = found
    ranges, below = path(epochs, session["origin_version"] or 0, session["version"])
    # An effect belongs to the version that was current when it was issued. Those issued at the
    # target of a rewind came after the target.
    own = [ranges[0], *((low, high - 1) for low, high in ranges[1:])] if ranges else []
    ends: dict[int, int] = {}
    for _, origin, _, high in origins:
        ends[origin] = max(high, ends.get(origin, 0))
    return History(number, own, _cut(origins, below), ends)


def _cut(origins: list[Origin], below: int | None) -> list[Origin]:
    """Return origins, cut where a rewind went back to before the fork.

    A part that was cut off is kept as an empty range at its end, because effects there that must
    not be repeated still count.
    """
    if below is None:
        return origins
    cut = [(id, number, low, min(high, below)) for id, number, low, high in origins if low < below]
    return cut + [(id, number, high, high) for id, number, _, high in origins if high > below]


def inherit(number: int, id: str, version: int, fork: int) -> Op[None]:
    """Let a fork of a version find the effects from before it."""
    found = yield from _read_history_rows(number)
    assert found is not None
    session, epochs, origins = found
    ranges, below = path(epochs, session["origin_version"] or 0, version)
    lineage = [*((id, number, low, high) for low, high in ranges), *_cut(origins, below)]
    yield from batch(
        Query(COPY_SESSION_SALT, {"number": number, "fork": fork}),
        *(Query(ADD_ORIGIN, origin_row(fork, at, each)) for at, each in enumerate(lineage, 1)),
    )


def origin_row(number: int, position: int, origin: Origin) -> dict[str, Any]:
    """Return the parameters that insert one of a session's origins."""
    given = zip(("id", "origin", "first", "last"), origin, strict=True)
    return {"number": number, "position": position, **dict(given)}


def effects_after(number: int, version: int) -> Op[list[Row]]:
    """Return the effects since a version that may have happened and were not undone, newest first.

    Includes those of its origins from before the fork.
    """
    found = yield from rows(STANDING_EFFECTS, number=number, version=version)
    history = yield from read_history(number)
    found += yield from history.inherited(STANDING_EFFECTS, version=version)
    return sorted(found, key=lambda row: -row["number"])


@dataclass(slots=True)
class Found:
    """What the ledger has for a request."""

    row: Row | None
    """The row that answers the call, if any."""
    newest: Row | None
    """The newest attempt under the same key, even if it does not answer the call."""
    is_same_call: bool
    """Whether the same call id was found, unless that call is known not to have happened."""
    is_own: bool
    """Whether `row` is that call's own."""
    is_inherited: bool
    """Whether `row` is of another session: an earlier one of the same id, or an origin.

    A fork of this session, or a new session of its id, would not find it there.
    """
    history: History | None
    """The history of a session that was rewound or forked."""

    def needs_row(self, request: EffectRequest) -> bool:
        """Whether the call needs a row of its own that records the answer."""
        return not self.is_own and (request.call_id is not None or self.is_inherited)


def lookups(request: EffectRequest, limit: int = 1) -> list[Query]:
    """Return the statements whose answers `find` takes."""
    looks = [Query(EFFECT_BY_KEY, {"key": request.identity.key, "limit": limit})]
    if request.call_id is not None:
        call = {"scope": request.identity.scope, "call_id": request.call_id, "limit": limit}
        looks.insert(0, Query(EFFECT_BY_CALL, call))
    return looks


def find(
    salts: Salts, request: EffectRequest, session: Row | None, answers: Sequence[Sequence[Row]]
) -> Op[Found]:
    """Return the row that answers a request; raise RequestMismatch if it is of another request."""
    own, equal = answers if len(answers) > 1 else ([], answers[0])
    newest, history = next(iter(equal), None), None
    is_branched = session is not None and (
        session["epoch"] > 1 or session["origin_number"] is not None
    )
    # A caller's own key counts in the whole store, whatever happens to a session.
    if is_branched and request.place is not None and request.policy != "once":
        history = yield from read_history(request.place.number)
        own, equal = yield from _find_in_history(salts, history, request, newest)
    elif any(row["undone_by"] == BY_WORLD for row in (*own, *equal)):
        # A world that went forth again has left a newer row than the one that counts.
        past = yield from batch(*lookups(request, PAST_ROWS_MAX))
        own, equal = past if len(past) > 1 else ([], past[0])
    own, equal = [row for row in own if _counts(row)], [row for row in equal if _counts(row)]
    row = None
    for row in _deciding(own, equal):
        if not salts.matches(row, request):
            raise _mismatch(row, request)
    is_inherited = row is not None and _is_inherited(request, row)
    is_own = not is_inherited and any(row is each for each in own)
    is_same_call = any(each["reason"] != "not_landed" for each in own)
    return Found(row, newest, is_same_call, is_own, is_inherited, history)


def _is_inherited(request: EffectRequest, row: Row) -> bool:
    if request.place is None or request.chain_id is not None:
        return False
    is_of_session = request.policy in SESSION_POLICIES
    return is_of_session and bool(row["session_number"] != request.place.number)


def _counts(row: Row) -> bool:
    return row["undone_by"] is None and not row["is_expired"]


def _deciding(own: Sequence[Row], equal: Sequence[Row]) -> list[Row]:
    """Return the first row and, if that attempt failed, the newest one after it."""
    found = [*own, *equal][:1]
    if found and found[0]["status"] == "failed":
        # In a fork it may have another key: that of the session that issued it.
        later = (row for row in equal if row["number"] > found[0]["number"])
        found += sorted(later, key=lambda row: row["number"])[-1:]
    return found


def _find_in_history(
    salts: Salts, history: History, request: EffectRequest, newest: Row | None
) -> Op[tuple[list[Row], list[Row]]]:
    """Return a call's own rows, and those of identical calls, from a rewound or forked history."""
    known = salts.of(request) if request.policy in SESSION_POLICIES else ()
    own: list[Row] = []
    equal: list[Row] = []
    scopes = history.scopes(request.identity.scope)
    for place, (scope, is_held) in enumerate(scopes[:1] if request.chain_id else scopes):
        asked = (salts.limits, scope, request.tool.name, request.distinct)
        keys = [key_within(salt, *asked) for salt in known] if place else []
        if not place and newest is not None:
            keys = [newest["key"]]
        if request.call_id is not None:
            call = {"scope": scope, "call_id": request.call_id, "limit": PAST_ROWS_MAX}
            own += filter(is_held, (yield from rows(EFFECT_BY_CALL, **call)))
        for key in keys:
            there = yield from rows(EFFECT_BY_KEY, key=key, limit=PAST_ROWS_MAX)
            equal += filter(is_held, there)
    return own, equal


def find_call(number: int, session_id: str, call_id: str) -> Op[Row | None]:
    """Return the row of a call id in a session's history, or None."""
    history = yield from read_history(number)
    for scope, is_held in history.scopes(scope_of(session_id)):
        given = {"scope": scope, "call_id": call_id, "limit": PAST_ROWS_MAX}
        for row in (yield from rows(EFFECT_BY_CALL, **given)):
            if is_held(row) and _counts(row):
                return row
    return None


def is_superseded(request: EffectRequest, found: Found) -> Op[bool]:
    """Whether the found row is stale because something else was written since, under `latest`."""
    if request.policy != "latest" or found.is_same_call:
        return False
    assert found.row is not None
    looks = [Query(NEWEST_CHANGE_IN_CHAIN, {"scope": request.identity.scope})]
    if request.place is not None:
        ends = {} if found.history is None else found.history.ends
        looks = [
            Query(NEWEST_CHANGE, {"session_number": number, "before": before})
            for number, before in {request.place.number: VERSION_MAX, **ends}.items()
        ]
    number = found.row["number"]
    if found.row["replay_of"] is not None:
        original = yield from one(EFFECT_NUMBER, id=found.row["replay_of"])
        number = -1 if original is None else original["number"]
    answers = yield from batch(*looks)
    newest = max(row["number"] or 0 for (row,) in answers)
    return bool(newest >= number if request.tool.effect == "read" else newest != number)


def keeps_key(before: Row) -> Op[bool]:
    """Whether the next attempt uses the same idempotency key.

    It does if an attempt under that key may have reached the receiver. After a known failure it
    gets a new key, or the receiver could answer with that failure; unless an earlier attempt under
    the old key was abandoned.
    """
    if before["reason"] != "raised":
        return True
    given = {"key": before["key"], "idempotency_key": before["idempotency_key"]}
    return before["attempt"] > 1 and (yield from one(ABANDONED_UNDER_KEY, **given)) is not None


def _mismatch(row: Row, request: EffectRequest) -> RequestMismatch:
    what = f"key {row['key']!r}"
    if request.call_id is not None and row["call_id"] == request.call_id:
        what = f"call id {request.call_id!r}"
    return RequestMismatch(
        f"{what} belongs to another request of {row['tool']} (effect {row['id']}, "
        f"{row['status']}); nothing was run. Use a new one for a new request",
        effect_id=row["id"],
        status=row["status"],
    )

"""Spend: the cost of model calls, attempt by attempt, so that a budget survives a crash.

An attempt is recorded before the request is sent, with the model's own estimate. Its actual cost
replaces the estimate in the commit that stores the answer. An attempt left open by a dead process
keeps its estimate and is marked uncertain: cost may be overstated, but never lost. Every change of
an attempt updates the totals of its session and its tree in the same commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal, get_args

from ..arguments import (
    require_limit,
    require_new_id,
    require_one_of,
    require_text,
    require_whole,
    shown,
)
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import InvalidArgument, NotFound, RequestMismatch, SessionBusy
from ..feed import emit
from ..kernel.operation import (
    C,
    Handle,
    Lock,
    Op,
    Query,
    Row,
    batch,
    fresh_id,
    listed,
    one,
    operation,
    query,
    rows,
    whole_query,
)
from ..kernel.sql import among, merged
from ..kernel.sql import given as given_as
from ..records import SessionInfo
from ..sessions.handle import SessionHandle
from ..sessions.rows import AMONG_NUMBERS, ONE_SESSION
from ..wire import travels
from .money import NUMBER_MAX, Money, dollars, nanos

SpendState = Literal["open", "settled", "failed", "uncertain"]
SPEND_STATES: tuple[SpendState, ...] = get_args(SpendState)

SPENDS_PER_PAGE_MAX = 10_000
COSTS_MAX = 1_000
EPOCH_DAY = date(1970, 1, 1).toordinal()

SPEND_COLUMNS = """number, id, session_id, model, source, state, input_tokens, output_tokens,
    nano_usd, details, created_at, updated_at"""
READ_SPEND = f"""
SELECT {SPEND_COLUMNS}, session_number, root_id FROM hf_spend WHERE id = :id
"""  # noqa: S608
# An outcome can be recorded only once.
_WRITE_SPEND = f"""
INSERT INTO hf_spend (
    id, session_number, session_id, root_id, model, source, state, input_tokens, output_tokens,
    nano_usd, details, created_at, updated_at
) VALUES (
    :id, :number, :session_id, :root_id, :model, :source, :state, :input_tokens, :output_tokens,
    CAST(:nano_usd AS INTEGER), {{details}}, :now, :now
)
ON CONFLICT (id) DO UPDATE SET
    model = excluded.model, source = excluded.source, state = excluded.state,
    input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens,
    nano_usd = excluded.nano_usd, details = excluded.details, updated_at = :now
WHERE hf_spend.state IN ('open', 'uncertain')
    AND hf_spend.session_number = excluded.session_number
RETURNING {SPEND_COLUMNS}
"""  # noqa: S608
CORRECT_SPEND = _WRITE_SPEND.format(details="CAST(:details AS BLOB)")
# If the session was deleted meanwhile, nothing is kept but what was spent.
WRITE_SPEND = _WRITE_SPEND.format(
    details=f"CASE WHEN EXISTS (SELECT 1 FROM {ONE_SESSION}) THEN CAST(:details AS BLOB) END"  # noqa: S608
)
SPEND_IN_DOUBT = "state IN ('open', 'uncertain')"
CLOSE_SPENDS = f"""
UPDATE hf_spend SET state = 'uncertain', updated_at = :now
WHERE session_number = :number AND state = 'open' RETURNING {SPEND_COLUMNS}
"""  # noqa: S608
LIST_SPENDS = f"SELECT {SPEND_COLUMNS} FROM hf_spend WHERE number > :after"  # noqa: S608
SUMS = (
    "attempts", "input_tokens", "output_tokens", "nano_usd", "uncertain_nano_usd", "unpriced",
)  # fmt: skip
FIGURES = ("attempts", "input_tokens", "output_tokens", "nano_usd", "unpriced")
ADD_TO_TOTALS = f"""
INSERT INTO hf_spend_totals (scope, model, source, state, {", ".join(FIGURES)})
VALUES (:scope, :model, :source, :state, {", ".join(f":{name}" for name in FIGURES)})
ON CONFLICT (scope, model, source, state) DO UPDATE SET
    {", ".join(f"{name} = hf_spend_totals.{name} + excluded.{name}" for name in FIGURES)}
"""  # noqa: S608
READ_TOTALS = f"""
SELECT model, source, state, {", ".join(FIGURES)} FROM hf_spend_totals
WHERE scope = :scope AND attempts > 0 ORDER BY model, source, state
"""  # noqa: S608
REMOVE_SPEND_DETAILS = f"""
UPDATE hf_spend SET details = NULL WHERE number IN (
    SELECT number FROM hf_spend WHERE session_number {AMONG_NUMBERS} AND details IS NOT NULL
    LIMIT :limit
) RETURNING number
"""  # noqa: S608
REMOVE_TOTALS = "DELETE FROM hf_spend_totals WHERE scope = :scope"
RECOUNT_TOTALS = f"""
INSERT INTO hf_spend_totals (scope, model, source, state, {", ".join(FIGURES)})
SELECT CAST(:scope AS TEXT), model, source, state, count(*), sum(input_tokens), sum(output_tokens),
    coalesce(sum(nano_usd), 0), sum(CASE WHEN nano_usd IS NULL THEN 1 ELSE 0 END)
FROM hf_spend WHERE {{owner}} = :owner GROUP BY model, source, state
"""  # noqa: S608
SPEND_DAY = "created_at / 86400000"
SPEND_GROUPS = {"session": "session_id", "model": "model", "day": SPEND_DAY}
SUMMED = f"""count(*) AS attempts, sum(input_tokens) AS input_tokens,
    sum(output_tokens) AS output_tokens, sum(nano_usd) AS nano_usd,
    sum(CASE WHEN {SPEND_IN_DOUBT} THEN nano_usd ELSE 0 END) AS uncertain_nano_usd,
    sum(CASE WHEN nano_usd IS NULL AND state <> 'failed' THEN 1 ELSE 0 END) AS unpriced"""
SUM_SPENDS = f"""
SELECT session_id AS name, {SUMMED}
FROM hf_spend WHERE {{where}} GROUP BY session_id ORDER BY session_id LIMIT :limit
"""  # noqa: S608
# Grouped twice: the first time along an index, which leaves few rows to be sorted.
SUM_SPENDS_AGAIN = f"""
SELECT {{name}} AS name, {", ".join(f"sum({name}) AS {name}" for name in SUMS)} FROM (
    SELECT {SPEND_DAY} AS day, model, {SUMMED} FROM hf_spend WHERE {{where}}
    GROUP BY {SPEND_DAY}, model, state
) AS found GROUP BY {{name}} ORDER BY {{name}} LIMIT :limit
"""  # noqa: S608
READ_COSTS = f"""
SELECT scope, sum(nano_usd) AS nano_usd FROM hf_spend_totals
WHERE scope {among("scopes")} GROUP BY scope
"""  # noqa: S608
SESSION_DRIVER = f"""
SELECT s.holder FROM {ONE_SESSION} AND s.holder IS NOT NULL AND s.lease_expires_at > :now
"""  # noqa: S608


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """One attempt at a model call, with its actual or estimated cost; `usd` None: no price."""

    id: str
    number: int
    session_id: str
    model: str
    source: str
    state: SpendState
    input_tokens: int
    output_tokens: int
    usd: Decimal | None
    details: Any
    created_at: int
    updated_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class SpendSum:
    """The spend on one model from one source."""

    model: str
    source: str
    attempts: int
    input_tokens: int
    output_tokens: int
    usd: Decimal


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class SpendGroup:
    """The spend of one session, on one model or on one day; `name` says which."""

    name: str
    attempts: int
    input_tokens: int
    output_tokens: int
    usd: Decimal
    uncertain_usd: Decimal
    unpriced: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCost:
    """What a session spent, and what the tree that it belongs to spent."""

    usd: Decimal
    tree_usd: Decimal


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The spend of a session, in total and by model and source.

    `uncertain_usd` and `uncertain_attempts` are the part based on estimates; `unpriced` counts
    attempts without a known price, which `usd` does not include.
    """

    usd: Decimal
    input_tokens: int
    output_tokens: int
    attempts: int
    failed_attempts: int
    uncertain_attempts: int
    uncertain_usd: Decimal
    unpriced: int
    by: tuple[SpendSum, ...]

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.input_tokens + self.output_tokens


class SpendOps(SessionHandle[C]):
    """The spend of a session."""

    @operation
    def spend(
        self,
        model: str,
        *,
        source: str = "agent",
        input_tokens: int = 0,
        output_tokens: int = 0,
        usd: Money | None = None,
        state: SpendState = "settled",
        id: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Op[Spend]:
        """Record what an attempt cost; with the `id` of an open one, record its outcome, once.

        An open attempt has its estimate, and requires the session's lease if it is driven. An
        outcome is accepted from any process.
        """
        spend_id = require_new_id("id", id) if id is not None else (yield from fresh_id())
        require_one_of("state", state, SPEND_STATES)
        given: dict[str, Any] = {
            "model": require_text("model", model),
            "source": require_text("source", source),
            "state": state,
            "input_tokens": require_whole("input_tokens", input_tokens, 0, NUMBER_MAX),
            "output_tokens": require_whole("output_tokens", output_tokens, 0, NUMBER_MAX),
            "nano_usd": nanos(usd),
        }
        packed = None
        if details is not None:
            if not isinstance(details, Mapping):
                raise InvalidArgument(f"details must be a dict, not {type(details).__name__}")
            redacted = self.runtime.redactor.redact(dict(details))
            packed = self.runtime.codec.pack(redacted, context=context(spend_id), name="details")
        looks = [] if id is None else [Query(READ_SPEND, {"id": id})]
        if state == "open":
            yield from self._lock()
            found = yield from batch(*looks)
        else:
            _, *found = yield from batch(Lock(self.root_id), *looks)
        before = next((row for known in found for row in known), None)
        if before is not None and (
            before["session_number"] != self.number or before["state"] not in {"open", "uncertain"}
        ):
            return _unchanged(self.runtime.codec, before, self.number, given)
        owner = {"session_number": self.number, "session_id": self.id, "root_id": self.root_id}
        return (yield from _write(self.runtime.codec, owner, before, spend_id, given, packed))

    @operation
    def close_spend(self) -> Op[list[Spend]]:
        """Mark attempts left open by a dead process as uncertain; they keep their estimates."""
        yield from self._lock()
        found = yield from rows(CLOSE_SPENDS, number=self.number)
        for row in sorted(found, key=lambda row: int(row["number"])):
            opened = {**row, "state": "open"}
            yield from batch(*counted(self.number, self.root_id, (opened, -1), (row, 1)))
            yield from _emit(self.runtime.codec, self.root_id, row)
        return [_spend(self.runtime.codec, row) for row in found]

    @query
    def spent(self, *, tree: bool = False) -> Op[Spent]:
        """Return the spend of this session, or of its whole tree, in constant time."""
        scope = scopes(self.number, self.root_id)[int(tree)]
        return _total((yield from rows(READ_TOTALS, scope=scope)))

    @query
    def spends(
        self, *, state: SpendState | None = None, after: int = 0, limit: int = 100
    ) -> Op[list[Spend]]:
        """Return this session's attempts, oldest first; `after` is the last `number` seen."""
        where = {"session_number": self.number}
        return (yield from _listed(self.runtime.codec, where, state, after, limit))


class StoreSpend(Handle[C]):
    """The spend of all sessions of a store."""

    @query
    def spends(
        self,
        *,
        session: object = None,
        state: SpendState | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> Op[list[Spend]]:
        """Return attempts, oldest first, including those of deleted sessions.

        `after` is the last `number` seen.
        """
        return (yield from _listed(self.runtime.codec, _of_session(session), state, after, limit))

    @whole_query
    def spending(
        self,
        by: Literal["session", "model", "day"] = "model",
        *,
        session: object = None,
        root: object = None,
        after: str | None = None,
        limit: int = SPENDS_PER_PAGE_MAX,
    ) -> Op[list[SpendGroup]]:
        """Return the spend by session, model or day (UTC), in order of names. Reads every attempt.

        `root` is a session tree, by its root's id or any of its sessions. `after` is the last
        `name` seen.
        """
        require_one_of("by", by, SPEND_GROUPS)
        require_limit(limit, SPENDS_PER_PAGE_MAX)
        given = _of_session(session)
        if root is not None:
            given["root_id"] = require_text("root", getattr(root, "root_id", root))
        conditions = [f"{column} = :{column}" for column in given]
        if after is not None:
            conditions.append(f"{SPEND_GROUPS[by]} > :after")
            given["after"] = _day(after) if by == "day" else require_text("after", after)
        text = SUM_SPENDS if by == "session" else SUM_SPENDS_AGAIN
        text = text.format(name=by, where=" AND ".join(conditions) or "1 = 1")
        return [_group(by, row) for row in (yield from rows(text, **given, limit=limit))]

    @query
    def costs(self, sessions: Sequence[SessionInfo]) -> Op[dict[str, SessionCost]]:
        """Return by id what each of some sessions cost, in one read of running totals."""
        if len(sessions) > COSTS_MAX:
            raise InvalidArgument(f"costs are read of up to {COSTS_MAX:,} sessions at once")
        both = {each.id: scopes(each.number, each.root_id) for each in sessions}
        wanted = given_as(scope for pair in both.values() for scope in pair)
        found = (yield from rows(READ_COSTS, scopes=wanted)) if both else []
        known = {row["scope"]: dollars(int(row["nano_usd"])) for row in found}
        return {
            id: SessionCost(usd=known.get(alone, Decimal(0)), tree_usd=known.get(tree, Decimal(0)))
            for id, (alone, tree) in both.items()
        }

    @operation
    def correct_spend(
        self,
        id: str,
        *,
        usd: Money | None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        by: str | None = None,
        note: str | None = None,
    ) -> Op[Spend]:
        """Settle an attempt with an unknown outcome by its actual cost, once.

        Raises SessionBusy while its session is driven, RequestMismatch if it has an outcome.
        """
        require_text("id", id)
        remarks = {"corrected_by": by, "note": note}
        for name, text in remarks.items():
            if text is not None:
                require_text(name, text)
        asked = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        tokens = {
            name: require_whole(name, n, 0, NUMBER_MAX)
            for name, n in asked.items()
            if n is not None
        }
        nano_usd = nanos(usd)
        row = yield from one(READ_SPEND, id=id)
        if row is None:
            raise NotFound(f"there is no attempt {id!r} in the ledger of spend", id=id)
        has_tree = yield Lock(row["root_id"])
        row = yield from one(READ_SPEND, id=id)
        assert row is not None
        given = {name: row[name] for name in ("model", "source", "input_tokens", "output_tokens")}
        given |= {**tokens, "nano_usd": nano_usd, "state": "settled"}
        if row["state"] not in {"open", "uncertain"}:
            return _unchanged(self.runtime.codec, row, row["session_number"], given)
        driven = yield from one(SESSION_DRIVER, number=row["session_number"])
        if row["state"] == "open" and driven is not None:
            raise SessionBusy(
                f"session {row['session_id']} is driven by {driven['holder']!r}, which will record "
                "the cost of the attempt; correct it afterwards if it does not",
                session_id=row["session_id"],
                holder=driven["holder"],
            )
        estimate = None if row["nano_usd"] is None else str(dollars(row["nano_usd"]))
        remarks = self.runtime.redactor.redact(remarks)
        old = _details(self.runtime.codec, row) or {}
        details = {**old, **remarks, "estimate_usd": estimate}
        packed = self.runtime.codec.pack(details, context=context(id), name="details")
        how: dict[str, Any] = {"statement": CORRECT_SPEND, "emits": bool(has_tree)}
        return (yield from _write(self.runtime.codec, row, row, id, given, packed, **how))


def _write(
    codec: Codec,
    owner: Mapping[str, Any],
    before: Row | None,
    spend_id: str,
    given: Mapping[str, Any],
    packed: bytes | None,
    *,
    statement: str = WRITE_SPEND,
    emits: bool = True,
) -> Op[Spend]:
    """Write an attempt or its outcome, and update the totals; its tree is locked."""
    number, root_id = owner["session_number"], owner["root_id"]
    names = {"number": number, "session_id": owner["session_id"], "root_id": root_id}
    changes = [] if before is None else [(before, -1)]
    written, *_ = yield from batch(
        Query(statement, {"id": spend_id, "details": packed, **names, **given}),
        *counted(number, root_id, *changes, (given, 1)),
    )
    if not written:
        # A session of another tree has written an attempt of this id since it was read.
        raise _mismatch(spend_id, "there")
    if emits:
        yield from _emit(codec, root_id, written[0])
    return _spend(codec, written[0])


def _unchanged(codec: Codec, row: Row, number: int, given: Mapping[str, Any]) -> Spend:
    """Return the recorded attempt if its figures are the same, or raise RequestMismatch."""
    if row["session_number"] != number or any(row[name] != given[name] for name in given):
        raise _mismatch(row["id"], row["state"])
    return _spend(codec, row)


def _mismatch(spend_id: str, state: str) -> RequestMismatch:
    return RequestMismatch(
        f"spend {spend_id} is {state} already, with other figures or in another session; an "
        "outcome is recorded only once",
        id=spend_id,
    )


def scopes(number: int, root_id: str) -> tuple[str, str]:
    """Return the keys under which a session and its tree are totalled."""
    return f"session {number}", f"tree {root_id}"


def counted(number: int, root_id: str, *changes: tuple[Mapping[str, Any], int]) -> list[Query]:
    """Return the statements that add attempts to their totals, or with -1 subtract them."""
    return [
        Query(
            ADD_TO_TOTALS,
            {
                "scope": scope,
                **{name: row[name] for name in ("model", "source", "state")},
                "attempts": sign,
                "input_tokens": sign * row["input_tokens"],
                "output_tokens": sign * row["output_tokens"],
                "nano_usd": sign * (row["nano_usd"] or 0),
                "unpriced": sign * (row["nano_usd"] is None),
            },
        )
        for scope in scopes(number, root_id)
        for row, sign in changes
    ]


def recounted(number: int | None = None, root_id: str = "") -> list[Query]:
    """Return the statements that recompute the totals of a session, or of a tree."""
    column, scope = "root_id", scopes(0, root_id)[1]
    owner: int | str = root_id
    if number is not None:
        column, owner, scope = "session_number", number, scopes(number, "")[0]
    recount = RECOUNT_TOTALS.format(owner=column)
    remove = Query(REMOVE_TOTALS, {"scope": scope})
    return [remove, Query(recount, {"scope": scope, "owner": owner})]


def _listed(
    codec: Codec, where: Mapping[str, Any], state: str | None, after: int, limit: int
) -> Op[list[Spend]]:
    if state is not None:
        require_one_of("state", state, SPEND_STATES)
    require_whole("after", after, 0)
    require_limit(limit, SPENDS_PER_PAGE_MAX)
    # The SQL has only the given conditions, so that each can use its index. All begin with the
    # state, or with a session and the state.
    base = " AND ".join([LIST_SPENDS, *(f"{column} = :{column}" for column in where)])
    states = [state] if state else SPEND_STATES if where else []
    rare = "" if where or state == "settled" else " AND state <> 'settled'"
    branches = [f"{base} AND state = '{each}'{rare}" for each in states] or [base]
    found = yield from listed(merged(branches), **where, after=after, limit=limit)
    return [_spend(codec, row) for row in found]


def _of_session(session: object) -> dict[str, Any]:
    session_id = getattr(session, "id", session)
    return {} if session_id is None else {"session_id": require_text("session", session_id)}


def _day(name: str) -> int:
    """Return the number of a day."""
    try:
        return date.fromisoformat(require_text("after", name)).toordinal() - EPOCH_DAY
    except ValueError:
        raise InvalidArgument(f"after must be a day like 2026-07-31, not {shown(name)}") from None


def _emit(codec: Codec, root_id: str, row: Row) -> Op[None]:
    names = ("id", "model", "source", "state", "input_tokens", "output_tokens", "nano_usd")
    data = {name: row[name] for name in names}
    yield from emit(codec, root_id, row["session_id"], "spend_recorded", data)


def _total(found: list[Row]) -> Spent:
    by: dict[tuple[str, str], Counter[str]] = {}
    for row in found:
        sums = {name: int(row[name] or 0) for name in FIGURES}
        by.setdefault((row["model"], row["source"]), Counter()).update(sums)
    total = sum(by.values(), Counter[str]())
    in_doubt = [row for row in found if row["state"] in {"open", "uncertain"}]
    return Spent(
        usd=dollars(total["nano_usd"]),
        input_tokens=total["input_tokens"],
        output_tokens=total["output_tokens"],
        attempts=total["attempts"],
        failed_attempts=sum(int(row["attempts"]) for row in found if row["state"] == "failed"),
        uncertain_attempts=sum(int(row["attempts"]) for row in in_doubt),
        uncertain_usd=dollars(sum(int(row["nano_usd"] or 0) for row in in_doubt)),
        unpriced=sum(int(row["unpriced"]) for row in found if row["state"] != "failed"),
        by=tuple(
            SpendSum(
                model=model,
                source=source,
                usd=dollars(sums["nano_usd"]),
                **{name: sums[name] for name in FIGURES[:3]},
            )
            for (model, source), sums in by.items()
        ),
    )


def _group(by: str, row: Row) -> SpendGroup:
    day = datetime.fromtimestamp(row["name"] * 86_400, UTC) if by == "day" else None
    return SpendGroup(
        name=str(row["name"]) if day is None else day.date().isoformat(),
        attempts=int(row["attempts"]),
        input_tokens=int(row["input_tokens"]),
        output_tokens=int(row["output_tokens"]),
        usd=dollars(int(row["nano_usd"] or 0)),
        uncertain_usd=dollars(int(row["uncertain_nano_usd"] or 0)),
        unpriced=int(row["unpriced"]),
    )


def _spend(codec: Codec, row: Row) -> Spend:
    names = Spend.__dataclass_fields__.keys() - {"usd", "details"}
    usd = None if row["nano_usd"] is None else dollars(row["nano_usd"])
    return Spend(**{name: row[name] for name in names}, usd=usd, details=_details(codec, row))


def _details(codec: Codec, row: Row) -> Any:
    if row["details"] is None:
        return None
    return codec.unpack(bytes(row["details"]), context=context(row["id"]))


def context(spend_id: str) -> tuple[str, str]:
    """Return the context that an attempt's encrypted details are bound to."""
    return "hf_spend", spend_id

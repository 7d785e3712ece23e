"""Spend: what sessions paid for models, attempt by attempt, so that a budget survives a crash.

An attempt is written before the request is sent, with the model's own estimate. Its outcome takes
the estimate's place, in the commit that stores the answer. What a dead process left open keeps its
estimate and is flagged as uncertain: money may be counted too high, never forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any, Literal, TypeAlias, get_args

from .checkpoints.ops import CheckpointOps
from .codec import Codec
from .errors import InvalidArgument, RequestMismatch
from .feed import emit
from .kernel.operation import Lock, Op, Row, fresh_id, one, operation, query, rows

SpendState = Literal["open", "settled", "failed", "uncertain"]
SPEND_STATES: tuple[SpendState, ...] = get_args(SpendState)
Money: TypeAlias = Decimal | float | str

LABEL_CHARACTERS_MAX = 256
SPENDS_PER_PAGE_MAX = 10_000
NANOS = 1_000_000_000
NUMBER_MAX = 2**62

COLUMNS = """number, id, session_id, model, source, state, input_tokens, output_tokens, nano_usd,
    details, created_at, updated_at"""
READ = f"SELECT {COLUMNS} FROM hf_spend WHERE id = :id"  # noqa: S608
# Only what has no outcome yet can be given one.
WRITE = f"""
INSERT INTO hf_spend (
    id, session_number, session_id, root_id, model, source, state, input_tokens, output_tokens,
    nano_usd, details, created_at, updated_at
) VALUES (
    :id, :number, :session_id, :root_id, :model, :source, :state, :input_tokens, :output_tokens,
    CAST(:nano_usd AS INTEGER), CAST(:details AS BLOB), :now, :now
)
ON CONFLICT (id) DO UPDATE SET
    model = excluded.model, source = excluded.source, state = excluded.state,
    input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens,
    nano_usd = excluded.nano_usd, details = excluded.details, updated_at = :now
WHERE hf_spend.state IN ('open', 'uncertain')
    AND hf_spend.session_number = excluded.session_number
RETURNING {COLUMNS}
"""  # noqa: S608
CLOSE = f"""
UPDATE hf_spend SET state = 'uncertain', updated_at = :now
WHERE session_number = :number AND state = 'open' RETURNING {COLUMNS}
"""  # noqa: S608
LIST = f"""
SELECT {COLUMNS} FROM hf_spend WHERE session_number = :number AND number > :after
ORDER BY number LIMIT :limit
"""  # noqa: S608
SUMS = """
SELECT model, source, state, count(*) AS attempts, sum(input_tokens) AS input_tokens,
    sum(output_tokens) AS output_tokens, sum(nano_usd) AS nano_usd,
    sum(CASE WHEN nano_usd IS NULL THEN 1 ELSE 0 END) AS unpriced
FROM hf_spend WHERE {where} GROUP BY model, source, state ORDER BY model, source, state
"""
SUMS_OF_SESSION = SUMS.format(where="session_number = :number")
SUMS_OF_TREE = SUMS.format(where="root_id = :root_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """One attempt at a model: what it cost, or is estimated to have cost. `usd` None: no price."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendSum:
    """What was spent on one model from one source."""

    model: str
    source: str
    attempts: int
    input_tokens: int
    output_tokens: int
    usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a session spent: the sum of everything, and by model and source.

    `uncertain_usd` and `uncertain_attempts` are the part that stands on estimates; `unpriced`
    counts attempts for which no price is known, which `usd` leaves out.
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


class SpendOps(CheckpointOps):
    """What a session does with its ledger of spend."""

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
        """Write down what an attempt cost; an `id` gives one that is open its outcome, once.

        An open attempt carries its estimate and needs the session's lease, if it is driven. Its
        outcome is a fact and is taken from anybody.
        """
        spend_id = _require_label("id", id) if id is not None else (yield from fresh_id())
        if state not in SPEND_STATES:
            raise InvalidArgument(f"state must be one of {', '.join(SPEND_STATES)}, not {state!r}")
        given: dict[str, Any] = {
            "model": _require_label("model", model),
            "source": _require_label("source", source),
            "state": state,
            "input_tokens": _require_count("input_tokens", input_tokens),
            "output_tokens": _require_count("output_tokens", output_tokens),
            "nano_usd": nanos(usd),
        }
        packed = None
        if details is not None:
            packed = self.codec.pack(dict(details), context=_context(spend_id), name="details")
        if state == "open":
            yield from self._lock()
        else:
            yield Lock(self.root_id)
        place = {"number": self.number, "session_id": self.id, "root_id": self.root_id}
        row = yield from one(WRITE, id=spend_id, details=packed, **place, **given)
        if row is None:
            return (yield from self._unchanged(spend_id, given))
        yield from self._tell(row)
        return _spend(self.codec, row)

    def _unchanged(self, spend_id: str, given: dict[str, Any]) -> Op[Spend]:
        """Return what stands there already, if it says the same."""
        row = yield from one(READ, id=spend_id)
        assert row is not None
        if row["session_id"] != self.id or any(row[name] != given[name] for name in given):
            raise RequestMismatch(
                f"spend {spend_id} is {row['state']} already, with other figures or in another "
                "session; an outcome is written once",
                id=spend_id,
            )
        return _spend(self.codec, row)

    @operation
    def close_spend(self) -> Op[list[Spend]]:
        """Flag attempts that a dead process left open as uncertain; they keep their estimates."""
        yield from self._lock()
        found = yield from rows(CLOSE, number=self.number)
        for row in sorted(found, key=lambda row: int(row["number"])):
            yield from self._tell(row)
        return [_spend(self.codec, row) for row in found]

    @query
    def spent(self, *, tree: bool = False) -> Op[Spent]:
        """Return what this session spent, or its whole tree, from the ledger alone."""
        if tree:
            found = yield from rows(SUMS_OF_TREE, root_id=self.root_id)
        else:
            found = yield from rows(SUMS_OF_SESSION, number=self.number)
        return _total(found)

    @query
    def spends(self, *, after: int = 0, limit: int = 100) -> Op[list[Spend]]:
        """Return this session's attempts, oldest first; `after` is the last `number` seen."""
        _require_count("after", after)
        if type(limit) is not int or not 0 < limit <= SPENDS_PER_PAGE_MAX:
            raise InvalidArgument(f"limit must be 1 to {SPENDS_PER_PAGE_MAX}, not {limit!r}")
        found = yield from rows(LIST, number=self.number, after=after, limit=limit)
        return [_spend(self.codec, row) for row in found]

    def _tell(self, row: Row) -> Op[None]:
        names = ("id", "model", "source", "state", "input_tokens", "output_tokens", "nano_usd")
        data = {name: row[name] for name in names}
        yield from emit(self.codec, self.root_id, self.id, "spend_recorded", data)


def nanos(usd: Money | None) -> int | None:
    """Return dollars as whole billionths, rounded; None stays None."""
    if usd is None:
        return None
    try:
        if isinstance(usd, bool):
            raise InvalidOperation
        amount = Decimal(str(usd)) * NANOS
        whole = int(amount.to_integral_value(ROUND_HALF_UP))
    except (InvalidOperation, ValueError, OverflowError):
        raise InvalidArgument(f"usd must be an amount of money, not {usd!r}") from None
    if not 0 <= whole <= NUMBER_MAX:
        raise InvalidArgument(f"usd must be 0 or more, and not {usd!r}")
    return whole


def dollars(nano_usd: int) -> Decimal:
    """Return billionths of a dollar as dollars."""
    return Decimal(nano_usd) / NANOS


def _total(found: list[Row]) -> Spent:
    by: dict[tuple[str, str], list[int]] = {}
    in_doubt = [row for row in found if row["state"] in {"open", "uncertain"}]
    for row in found:
        sums = by.setdefault((row["model"], row["source"]), [0, 0, 0, 0])
        for place, name in enumerate(("attempts", "input_tokens", "output_tokens", "nano_usd")):
            sums[place] += int(row[name] or 0)
    return Spent(
        usd=dollars(sum(sums[3] for sums in by.values())),
        input_tokens=sum(sums[1] for sums in by.values()),
        output_tokens=sum(sums[2] for sums in by.values()),
        attempts=sum(sums[0] for sums in by.values()),
        failed_attempts=sum(int(row["attempts"]) for row in found if row["state"] == "failed"),
        uncertain_attempts=sum(int(row["attempts"]) for row in in_doubt),
        uncertain_usd=dollars(sum(int(row["nano_usd"] or 0) for row in in_doubt)),
        unpriced=sum(int(row["unpriced"]) for row in found if row["state"] != "failed"),
        by=tuple(
            SpendSum(
                model=model,
                source=source,
                attempts=sums[0],
                input_tokens=sums[1],
                output_tokens=sums[2],
                usd=dollars(sums[3]),
            )
            for (model, source), sums in by.items()
        ),
    )


def _spend(codec: Codec, row: Row) -> Spend:
    fields = {name: value for name, value in row.items() if name != "nano_usd"}
    fields["usd"] = None if row["nano_usd"] is None else dollars(row["nano_usd"])
    if row["details"] is not None:
        fields["details"] = codec.unpack(bytes(row["details"]), context=_context(row["id"]))
    return Spend(**fields)


def _context(spend_id: str) -> tuple[str, str]:
    return "hf_spend", spend_id


def _require_label(name: str, label: object) -> str:
    is_text = isinstance(label, str) and 0 < len(label) <= LABEL_CHARACTERS_MAX
    if not is_text or not str(label).isprintable():
        raise InvalidArgument(
            f"{name} must be text of 1 to {LABEL_CHARACTERS_MAX} printable characters, "
            f"not {label!r}"
        )
    return str(label)


def _require_count(name: str, count: object) -> int:
    if type(count) is not int or not 0 <= count <= NUMBER_MAX:
        raise InvalidArgument(f"{name} must be a whole number, 0 or more, not {count!r}")
    return count

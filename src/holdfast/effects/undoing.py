"""Taking effects back: undos are effects of their own, run in reverse order, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.writing import Place
from ..kernel.flow import Flow, perform
from ..kernel.operation import Op, Query, Row, batch, query, rows
from ..records import Checkpoint, Effect
from .calls import Calling, prepare
from .doubt import describe
from .identity import read_past
from .ledger import Ledger
from .rows import SELECT
from .tools import Tool

AFTER = f"""{SELECT} WHERE session_number = :number AND issued_version >= :version
    AND effect IN ('write', 'mutate') AND status IN ('issued', 'completed', 'unknown')
    AND undone_by IS NULL AND undoes IS NULL
ORDER BY number DESC"""
EPOCH = "SELECT epoch FROM hf_sessions WHERE number = :number"
ABANDON = """
UPDATE hf_effects SET status = 'unknown', reason = 'rewound', fence = fence + 1, ended_at = :now
WHERE number = :number AND status = 'issued'
"""
STANDS = "UPDATE hf_effects SET is_irreversible = 1 WHERE number = :number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation:
    """What was taken back, newest first, and what was not.

    `irreversible` cannot be undone, `failed` could not be, with the reason; `in_flight` is in
    doubt.
    """

    undone: tuple[Effect, ...] = ()
    irreversible: tuple[Effect, ...] = ()
    failed: tuple[tuple[Effect, str], ...] = ()
    in_flight: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Checkpoint):
    """The record of a rewind, and what it left in the world.

    Equal calls get the results of `irreversible` effects, which still stand; those `in_flight`
    are in doubt; all others may run again.
    """

    undone: tuple[Effect, ...]
    irreversible: tuple[Effect, ...]
    failed: tuple[tuple[Effect, str], ...]
    in_flight: tuple[Effect, ...]


class Standing:
    """Reads which effects a session made after a version."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger = ledger
        self._number = number

    @query
    def after(self, version: int) -> Op[list[Effect]]:
        """Return the effects that stand or may stand, newest first."""
        found = yield from effects_after(self._number, version)
        return [self._ledger.effect(row) for row in found]


def effects_after(number: int, version: int) -> Op[list[Row]]:
    """Return a session's effects issued at or after a version of its present history."""
    found, session = yield from batch(
        Query(AFTER, {"number": number, "version": version}), Query(EPOCH, {"number": number})
    )
    if session and session[0]["epoch"] > 1:
        past = yield from read_past(number)
        found = [row for row in found if past.is_on_path(row)]
    return found


def leave_behind(ledger: Ledger, number: int, found: Sequence[Row]) -> Op[Compensation]:
    """Settle what a rewind leaves behind: what stands stays known, what runs is in doubt."""
    in_flight, standing = [], []
    for row in found:
        if row["status"] != "completed":
            yield from rows(ABANDON, number=row["number"])
            in_flight.append(ledger.effect(row))
        elif row["effect"] == "mutate":
            standing.append(ledger.effect(row))
        if row["effect"] == "mutate":
            # What was not undone stands, or may: an equal call must not do it again.
            yield from rows(STANDS, number=row["number"])
    return Compensation(irreversible=tuple(standing), in_flight=tuple(in_flight))


def undo_after(
    ledger: Ledger, place: Place, version: int, tools: dict[str, Tool[..., Any]], holder: str | None
) -> Flow[Compensation]:
    """Undo what was done after a version, newest first; what fails is reported, not raised."""
    standing = Standing(ledger, place.number)
    undone, irreversible, failed, in_flight = [], [], [], []
    for effect in (yield from perform(Standing.after, standing, version)):
        tool = tools.get(effect.tool)
        if effect.status != "completed":
            in_flight.append(effect)
        elif tool is not None and tool.undo is not None:
            try:
                yield from _undo(ledger, place, tool, effect, holder).run()
                undone.append(effect)
            except Exception as error:
                failed.append((effect, describe(error)))
        elif effect.effect == "mutate":
            irreversible.append(effect)
    return Compensation(
        undone=tuple(undone),
        irreversible=tuple(irreversible),
        failed=tuple(failed),
        in_flight=tuple(in_flight),
    )


def _undo(
    ledger: Ledger, place: Place, tool: Tool[..., Any], effect: Effect, holder: str | None
) -> Calling:
    undo = tool.undo
    assert undo is not None

    def function(*, idempotency_key: str) -> Any:
        return undo(effect.arguments, effect.result, idempotency_key)

    rules: dict[str, Any] = {}
    if isinstance(undo, Tool):
        names = ("verify", "atomic", "on_unknown", "max_attempts", "timeout_seconds")
        rules = {name: getattr(undo, name) for name in (*names, "settle_seconds")}
    made = Tool(
        function=function, name=f"{tool.name}.undo", effect="mutate", dedupe="global", **rules
    )
    given: dict[str, Any] = {"call_id": None, "item": None, "wait_seconds": None}
    calling = prepare(ledger, place, made, {}, **given, holder=holder)
    return calling.asking(
        policy="undo",
        distinct=effect.id,
        arguments={"effect_id": effect.id},
        undoes=effect.id,
    )

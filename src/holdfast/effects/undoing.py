"""Taking effects back: undos are effects of their own, run in reverse order, each once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..kernel.flow import Flow, is_async, needs_async_store, perform
from ..kernel.operation import Op, Row, query, rows
from ..records import Checkpoint, Effect
from ..sessions.access import Place
from .calls import Calling, prepare
from .doubt import describe
from .identity import inherited_past
from .ledger import Ledger
from .rows import SELECT, Outcome
from .tools import Tool

# Those of abandoned epochs too: what was not undone when they were left can be undone later.
AFTER = f"""{SELECT} WHERE session_number = :number AND issued_version >= :version
    AND effect IN ('write', 'mutate') AND (status <> 'failed' OR reason = 'given_up')
    AND undone_by IS NULL AND undoes IS NULL AND replay_of IS NULL
ORDER BY number DESC"""
ABANDON = """
UPDATE hf_effects SET status = 'unknown', reason = 'rewound', fence = fence + 1, ended_at = :now
WHERE number = :number AND status = 'issued' RETURNING id
"""
NOT_GIVEN = "its undo hook was not given; compensate with the tool, or rewind with it"
INHERITED = "session {id} did it, which this one was forked from; compensate it there"
NO_HOOK = "the tool has no undo hook any more"
NOT_WHOLE = (
    "its stored arguments lack their secrets, or the store was opened without its key, so its "
    "undo hook was not run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation:
    """What was taken back, newest first, and what was not.

    `irreversible` cannot be undone; `not_undone` could be, with the reason why it was not;
    `in_flight` is in doubt; `given_up` failed for good without anyone knowing whether it happened.
    """

    undone: tuple[Effect, ...] = ()
    irreversible: tuple[Effect, ...] = ()
    not_undone: tuple[tuple[Effect, str], ...] = ()
    in_flight: tuple[Effect, ...] = ()
    given_up: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Checkpoint):
    """The record of a rewind, and what it left in the world.

    Equal calls get the results of `irreversible` and `not_undone` effects, which still stand, and
    the failure of those `given_up`, which may have happened; those `in_flight` are in doubt; all
    others may run again. `session.compensate` undoes later what was `not_undone`. What a fork left
    behind of the sessions that it was forked from is listed too, and is theirs to undo.
    """

    undone: tuple[Effect, ...]
    irreversible: tuple[Effect, ...]
    not_undone: tuple[tuple[Effect, str], ...]
    in_flight: tuple[Effect, ...]
    given_up: tuple[Effect, ...]


class Standing:
    """Reads which effects a session made after a version."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger = ledger
        self._number = number

    @query
    def after(self, version: int) -> Op[list[tuple[Effect, bool]]]:
        """Return the effects that stand or may stand, newest first, and whether all their
        arguments were stored.
        """
        yield from self._ledger.salts.look()
        found = yield from effects_after(self._number, version)
        return [(self._ledger.effect(row), self._ledger.is_whole(row)) for row in found]


def effects_after(number: int, version: int) -> Op[list[Row]]:
    """Return what a session did at or after a version and did not undo, newest first.

    Of the sessions that it was forked from, what came before the fork.
    """
    found = yield from rows(AFTER, number=number, version=version)
    past = yield from inherited_past(number)
    if past is None:
        return found
    for origin in past.origins:
        there = yield from rows(AFTER, number=origin[1], version=version)
        found += filter(partial(past.holds_of_origin, origin), there)
    return sorted(found, key=lambda row: -row["number"])


def leave_behind(ledger: Ledger, place: Place, version: int) -> Op[Compensation]:
    """Say what stands when a session is rewound; what runs is in doubt from now on."""
    left = _Left(place)
    for row in (yield from effects_after(place.number, version)):
        effect = ledger.effect(row)
        is_running = effect.status == "issued" and row["session_number"] == place.number
        if is_running and (yield from rows(ABANDON, number=effect.number)):
            rewound = Outcome("unknown", "rewound")
            yield ledger.pen.event(place, effect.id, effect.tool, effect.call_id, rewound)
        left.add(effect, NOT_GIVEN)
    return left.compensation()


def undo_after(
    ledger: Ledger, place: Place, version: int, tools: dict[str, Tool[..., Any]], holder: str | None
) -> Flow[Compensation]:
    """Undo what was done after a version, newest first; what fails is reported, not raised."""
    standing = Standing(ledger, place.number)
    left = _Left(place)
    undone = []
    for effect, is_whole in (yield from perform(Standing.after, standing, version)):
        tool = tools.get(effect.tool)
        is_ours = effect.status == "completed" and effect.session_id == place.session_id
        if is_ours and tool is not None and tool.undo is not None:
            why = yield from _undo(ledger, place, tool, effect, holder, is_whole=is_whole)
            if why is None:
                undone.append(effect)
            else:
                left.not_undone.append((effect, why))
        else:
            left.add(effect, NOT_GIVEN if tool is None else NO_HOOK)
    return replace(left.compensation(), undone=tuple(undone))


@dataclass(slots=True)
class _Left:
    """What stands or may stand of a session's effects, sorted by what can be done about it."""

    place: Place
    irreversible: list[Effect] = field(default_factory=list)
    not_undone: list[tuple[Effect, str]] = field(default_factory=list)
    in_flight: list[Effect] = field(default_factory=list)
    given_up: list[Effect] = field(default_factory=list)

    def add(self, effect: Effect, why: str) -> None:
        """Add one; `why` it was not undone, if it can be."""
        if effect.status == "failed":
            self.given_up.append(effect)
        elif effect.status != "completed":
            self.in_flight.append(effect)
        elif effect.is_irreversible:
            self.irreversible.append(effect)
        elif effect.effect == "mutate":
            is_own = effect.session_id == self.place.session_id
            self.not_undone.append(
                (effect, why if is_own else INHERITED.format(id=effect.session_id))
            )

    def compensation(self) -> Compensation:
        return Compensation(
            irreversible=tuple(self.irreversible),
            not_undone=tuple(self.not_undone),
            in_flight=tuple(self.in_flight),
            given_up=tuple(self.given_up),
        )


def _undo(
    ledger: Ledger,
    place: Place,
    tool: Tool[..., Any],
    effect: Effect,
    holder: str | None,
    *,
    is_whole: bool,
) -> Flow[str | None]:
    """Undo one effect; return why it was not undone, if it was not."""
    if not is_whole:
        return NOT_WHOLE
    assert tool.undo is not None
    if is_async(tool.undo) and not ledger.runtime.is_async:
        return str(needs_async_store(tool.undo))
    try:
        yield from _undoing(ledger, place, tool, effect, holder).run()
    except Exception as error:
        return ledger.pen.tidied(describe(error))
    return None


def _undoing(
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

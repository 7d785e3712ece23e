"""Undoing effects: undos are effects of their own, run in reverse order, each once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..dataclass import dataclass
from ..kernel.flow import Flow, is_async, needs_async_store, perform
from ..kernel.operation import Op, rows
from ..records import Checkpoint, Effect
from ..sessions.access import Place
from ..wire import travels
from .calls import prepare
from .history import effects_after
from .ledger import Ledger
from .statements import EffectOutcome
from .tools import Tool
from .verification import describe

ABANDON_EFFECT = """
UPDATE hf_effects SET status = 'unknown', reason = 'rewound', fence = fence + 1, ended_at = :now
WHERE number = :number AND status = 'issued' RETURNING id
"""
NOT_GIVEN = "its tool was not given; pass it to compensate or rewind"
INHERITED = "it belongs to session {id}, which this one was forked from; compensate it there"
NO_HOOK = "the tool no longer has an undo hook"
REDACTED = (
    "its stored arguments are redacted, or the store was opened without its key, so its undo hook "
    "was not run"
)
UNDO_RULES = (
    "verify", "atomic", "on_unknown", "max_attempts", "timeout_seconds", "settle_seconds",
)  # fmt: skip


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation:
    """Which effects were undone, newest first, and which were not.

    `irreversible` cannot be undone; `not_undone` could be, each with the reason why it was not;
    `in_flight` are in doubt; `given_up` failed permanently with an unknown outcome.
    """

    undone: tuple[Effect, ...] = ()
    irreversible: tuple[Effect, ...] = ()
    not_undone: tuple[tuple[Effect, str], ...] = ()
    in_flight: tuple[Effect, ...] = ()
    given_up: tuple[Effect, ...] = ()


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Checkpoint):
    """The record of a rewind, and the effects that it left in place.

    Equal calls get the results of `irreversible` and `not_undone` effects, and the failure of those
    `given_up`, which may have happened; those `in_flight` are in doubt; all others may run again.
    `session.compensate` can undo `not_undone` ones later. In a fork, effects of its origins are
    listed too; they have to be undone there.
    """

    undone: tuple[Effect, ...]
    irreversible: tuple[Effect, ...]
    not_undone: tuple[tuple[Effect, str], ...]
    in_flight: tuple[Effect, ...]
    given_up: tuple[Effect, ...]


def leave_behind(ledger: Ledger, place: Place, version: int) -> Op[Compensation]:
    """Return the effects that a rewind leaves in place; mark those in flight as in doubt."""
    standing = []
    for row in (yield from effects_after(place.number, version)):
        effect = ledger.effect(row)
        is_running = effect.status == "issued" and row["session_number"] == place.number
        if is_running and (yield from rows(ABANDON_EFFECT, number=effect.number)):
            outcome = EffectOutcome("unknown", "rewound")
            yield from ledger.statements.events(
                place, effect.id, effect.tool, effect.call_id, outcome
            )
        standing.append((effect, NOT_GIVEN, False))
    return _sorted(place, standing)


def undo_after(
    ledger: Ledger, place: Place, version: int, tools: dict[str, Tool[..., Any]], holder: str | None
) -> Flow[Compensation]:
    """Undo the effects after a version, newest first; failures are reported, not raised."""
    undone: list[Effect] = []
    left: list[tuple[Effect, str, bool]] = []
    standing = yield from perform(Ledger.standing, ledger, place, version)
    for effect, is_unredacted in standing:
        tool = tools.get(effect.tool)
        is_ours = effect.status == "completed" and effect.session_id == place.session_id
        if not is_ours or tool is None or tool.undo is None:
            left.append((effect, NOT_GIVEN if tool is None else NO_HOOK, False))
            continue
        why = REDACTED
        if is_unredacted:
            why = yield from _undo(ledger, place, tool, effect, holder)
        if why:
            left.append((effect, why, True))
        else:
            undone.append(effect)
    return replace(_sorted(place, left), undone=tuple(undone))


def _sorted(place: Place, left: Iterable[tuple[Effect, str, bool]]) -> Compensation:
    """Sort effects by what can be done about them.

    Each comes with the reason why it was not undone, and whether an undo was tried.
    """
    found: dict[str, list[Any]] = {
        "irreversible": [], "not_undone": [], "in_flight": [], "given_up": [],
    }  # fmt: skip
    for effect, why, was_tried in left:
        if was_tried:
            found["not_undone"].append((effect, why))
        elif effect.status == "failed":
            found["given_up"].append(effect)
        elif effect.status != "completed":
            found["in_flight"].append(effect)
        elif effect.is_irreversible:
            found["irreversible"].append(effect)
        elif effect.effect == "mutate":
            is_own = effect.session_id == place.session_id
            reason = why if is_own else INHERITED.format(id=effect.session_id)
            found["not_undone"].append((effect, reason))
    return Compensation(**{name: tuple(effects) for name, effects in found.items()})


def _undo(
    ledger: Ledger, place: Place, tool: Tool[..., Any], effect: Effect, holder: str | None
) -> Flow[str]:
    """Undo one effect; return '', or why it was not undone."""
    undo = tool.undo
    assert undo is not None
    if is_async(undo) and not ledger.runtime.is_async:
        return str(needs_async_store(undo))

    def function(*, idempotency_key: str) -> Any:
        return undo(effect.arguments, effect.result, idempotency_key)

    rules: dict[str, Any] = {}
    if isinstance(undo, Tool):
        rules = {name: getattr(undo, name) for name in UNDO_RULES}
    try:
        made = Tool(
            function=function,
            name=f"{tool.name}.undo",
            effect="mutate",
            dedupe="global",
            outside=tool.outside,
            **rules,
        )
        call = prepare(
            ledger,
            made,
            {},
            place=place,
            holder=holder,
            policy="undo",
            distinct=effect.id,
            arguments={"effect_id": effect.id},
            undoes=effect.id,
        )
        yield from call.run()
    except Exception as error:
        return ledger.statements.storable_text(describe(error))
    return ""

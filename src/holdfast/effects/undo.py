"""Undoing effects: undos are effects of their own, run in reverse order, each once.

Effects of a store that is rolled back as part of a world are not undone one by one: what they had
done goes back with the other systems of the world. They are marked as undone, by nobody's call, and
when the world goes forth again, so do they. Effects of tools that act outside stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from ..dataclass import dataclass
from ..errors import described
from ..kernel.flow import Flow, is_async, needs_async_store, perform
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..kernel.sql import given
from ..records import Checkpoint, Effect
from ..sessions.access import Place
from ..sessions.rows import ALL_SESSIONS, AMONG_NUMBERS
from ..wire import travels
from .calls import prepare
from .history import effects_after
from .ledger import Ledger
from .statements import BY_WORLD, IS_ABANDONED, SELECT_EFFECTS, EffectOutcome
from .tools import Tool

ABANDON_EFFECT = """
UPDATE hf_effects SET status = 'unknown', reason = 'rewound', fence = fence + 1, ended_at = :now
WHERE number = :number AND status = 'issued' RETURNING id
"""
LAST_EFFECT = "SELECT coalesce(max(number), 0) AS number FROM hf_effects"
FIND_RUNNING = f"""
SELECT id, tool, status FROM hf_effects
WHERE status = 'issued' AND NOT {IS_ABANDONED} AND undone_by IS NULL ORDER BY number LIMIT 1
"""  # noqa: S608
FIND_IN_FLIGHT, FIND_IN_DOUBT = (
    f"""
    SELECT id, tool, status FROM hf_effects
    WHERE status = '{status}' AND undone_by IS NULL ORDER BY number LIMIT 1
    """  # noqa: S608
    for status in ("issued", "unknown")
)
# A rewind to the newest version of a session would lose the effects that were issued since.
SESSIONS_WITH_NEWER = f"""
SELECT s.number FROM {ALL_SESSIONS} WHERE s.number {AMONG_NUMBERS} AND s.version <= coalesce((
    SELECT e.issued_version FROM hf_effects e WHERE e.session_number = s.number
    ORDER BY e.number DESC LIMIT 1
), 0)
"""  # noqa: S608
SESSIONS_OF_EFFECTS = """
SELECT DISTINCT session_number AS number FROM hf_effects
WHERE number > :after AND session_number IS NOT NULL
"""
WITHOUT_SESSION = f"""{SELECT_EFFECTS} WHERE session_number IS NULL AND number > :after
ORDER BY number LIMIT :limit"""
WHICH = "{each}.number > :after AND {each}.number <= :upto AND {each}.{whose}"
UNDOES = """SELECT u.{what} FROM hf_effects u
    WHERE {which} AND u.undoes IS NOT NULL AND u.is_outside = 0"""
UNDO = (
    f"""
    UPDATE hf_effects SET undone_by = NULL
    WHERE id IN ({UNDOES.format(what="undoes", which="{undo}")}) AND undone_by <> '{BY_WORLD}'
    """,  # noqa: S608
    f"""
    UPDATE hf_effects AS e SET undone_by = '{BY_WORLD}'
    WHERE {{effect}} AND e.undone_by IS NULL AND e.is_outside = 0
    """,  # noqa: S608
)
REDO = (
    f"UPDATE hf_effects AS e SET undone_by = NULL WHERE {{effect}} AND e.undone_by = '{BY_WORLD}'",  # noqa: S608
    f"""
    UPDATE hf_effects AS e SET undone_by = (
        {UNDOES.format(what="id", which="{undo}")} AND u.undoes = e.id
    ) WHERE e.id IN (
        {UNDOES.format(what="undoes", which="{undo}")} AND u.status = 'completed'
    )
    """,  # noqa: S608
)
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

Range = tuple[int, int]
"""Effects by number: after the first, up to the second."""


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
        return ledger.statements.storable_text(described(error))
    return ""


def _texts(whose: str) -> tuple[list[str], list[str]]:
    which = {name: WHICH.format(each=name[0], whose=whose) for name in ("undo", "effect")}
    undo, redo = ([text.format(**which) for text in texts] for texts in (UNDO, REDO))
    return undo, redo


OF_NO_SESSION = _texts("session_number IS NULL")
OF_SESSIONS = _texts(f"session_number {AMONG_NUMBERS}")


def last_effect() -> Op[int]:
    """Return the number of the newest effect."""
    row = yield from one(LAST_EFFECT)
    assert row is not None
    return int(row["number"])


def find_running() -> Op[Row | None]:
    """Return an effect that its owner may still be running."""
    return (yield from one(FIND_RUNNING))


def find_unsettled() -> Op[Row | None]:
    """Return an effect that is in flight or in doubt."""
    in_flight = yield from one(FIND_IN_FLIGHT)
    return in_flight or (yield from one(FIND_IN_DOUBT))


def sessions_with_newer_effects(numbers: Collection[int]) -> Op[set[int]]:
    """Return those sessions that have no version after their newest effect, or none at all."""
    found = yield from rows(SESSIONS_WITH_NEWER, numbers=given(numbers))
    return {row["number"] for row in found}


def sessions_of_effects(after: int) -> Op[set[int]]:
    """Return the sessions of the effects after a number."""
    return {row["number"] for row in (yield from rows(SESSIONS_OF_EFFECTS, after=after))}


def set_undone_by_world(
    undone: Iterable[Range], redone: Iterable[Range], sessions: Collection[int] | None
) -> Op[None]:
    """Mark effects of sessions, or without a session, as undone, and others as standing again."""
    undo, redo = OF_NO_SESSION if sessions is None else OF_SESSIONS
    others = {} if sessions is None else {"numbers": given(sessions)}
    yield from batch(
        *(
            Query(statement, {"after": after, "upto": upto, **others})
            for statements, ranges in ((undo, undone), (redo, redone))
            for after, upto in ranges
            for statement in statements
        )
    )

"""Effects of a store that is rolled back as part of a world.

What they had done goes back with the other systems of the world, so they are marked as undone, by
nobody's call; when the world goes forth again, so do they. Effects of tools that act outside stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..kernel.sql import given
from ..sessions.rows import ALL_SESSIONS, GIVEN_NUMBERS
from .statements import BY_WORLD, IS_ABANDONED, SELECT_EFFECTS

Range = tuple[int, int]
"""Effects by number: after the first, up to the second."""

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
SELECT s.number FROM {ALL_SESSIONS} WHERE s.number IN {GIVEN_NUMBERS} AND s.version <= coalesce((
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


def _texts(whose: str) -> tuple[list[str], list[str]]:
    which = {name: WHICH.format(each=name[0], whose=whose) for name in ("undo", "effect")}
    undo, redo = ([text.format(**which) for text in texts] for texts in (UNDO, REDO))
    return undo, redo


OF_NO_SESSION = _texts("session_number IS NULL")
OF_SESSIONS = _texts(f"session_number IN {GIVEN_NUMBERS}")


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

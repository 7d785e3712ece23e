"""The CHECK constraints of a table as one trigger, for PostgreSQL.

It parses and plans the CHECK constraints of a table anew in each statement that writes to it: with
eleven of them, that is nearly half of an INSERT. What a trigger's function has planned is kept as
long as the connection.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TABLE = re.compile(r"\s*CREATE TABLE (hf_\w+) \(\n")
_COLUMN = re.compile(r"^    ([a-z_]+) [A-Z]", re.MULTILINE)
# With a constraint of the whole table goes the comma before it.
_CHECK = re.compile(r",?\s*\bCHECK \(")
_QUOTED_OR_BRACKET = re.compile(r"'[^']*'|[()]")
_TRIGGER = """CREATE FUNCTION {table}_check() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF ({conditions}) IS FALSE THEN
        RAISE EXCEPTION 'a row of % violates CHECK (%)', TG_TABLE_NAME, CASE
            {violated}
        END USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;
"""
_CREATE_TRIGGER = """CREATE TRIGGER check_row BEFORE INSERT OR UPDATE ON {table}
FOR EACH ROW EXECUTE FUNCTION {table}_check();
"""


class Checks(NamedTuple):
    """A CREATE TABLE without its CHECK constraints, and their conditions."""

    statement: str
    conditions: list[str]


def with_check_trigger(statement: str) -> list[str]:
    """Return a statement of a schema; of a CREATE TABLE, with a trigger in place of its CHECKs."""
    table = _TABLE.match(statement)
    if table is None:
        return [statement]
    rest, conditions = _without_checks(statement)
    if not conditions:
        return [statement]
    names = "|".join(_COLUMN.findall(statement))
    of_row = re.compile(rf"'[^']*'|\b(?:{names})\b")
    sound = [of_row.sub(_of_new_row, condition) for condition in conditions]
    function = _TRIGGER.format(
        table=table[1],
        conditions="\n        AND ".join(f"({each})" for each in sound),
        violated="\n            ".join(map(_when_violated, sound, conditions)),
    )
    return [rest, function, _CREATE_TRIGGER.format(table=table[1])]


def _of_new_row(token: re.Match[str]) -> str:
    return token[0] if token[0].startswith("'") else f"NEW.{token[0]}"


def _when_violated(sound: str, condition: str) -> str:
    text = " ".join(condition.split()).replace("'", "''")
    return f"WHEN ({sound}) IS FALSE THEN '{text}'"


def _without_checks(statement: str) -> Checks:
    """Return a statement without its CHECK constraints, and their conditions."""
    kept: list[str] = []
    conditions: list[str] = []
    start = 0
    while check := _CHECK.search(statement, start):
        end = _closing_bracket(statement, check.end())
        kept.append(statement[start : check.start()])
        conditions.append(statement[check.end() : end].strip())
        start = end + 1
    return Checks("".join([*kept, statement[start:]]), conditions)


def _closing_bracket(text: str, start: int) -> int:
    """Return where the bracket that was opened just before `start` is closed."""
    depth = 1
    for token in _QUOTED_OR_BRACKET.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    raise ValueError(f"a CHECK without an end: {text}")

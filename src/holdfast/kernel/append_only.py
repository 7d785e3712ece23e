"""Append-only tables, enforced by triggers, and the doors that let a transaction past them.

An operation that may remove history opens a door (a row), removes, and closes the door before
COMMIT, so that no other transaction ever sees it open.
"""

from __future__ import annotations

import re

from ..records import Finding
from .operation import Op, Query, Row, batch, rows

OPEN_DOOR = "INSERT INTO hf_doors (name) VALUES (:name)"
CLOSE_DOOR = "DELETE FROM hf_doors WHERE name = :name"
LIST_DOORS = "SELECT name FROM hf_doors ORDER BY name"
_APPEND_ONLY = re.compile(
    r"^--\[append-only(?P<updates> but for updates)?(?P<door> through a door)?\] "
    r"(?P<table>hf_\w+)(?: \((?P<key>[\w, ]+)\))?$",
    re.MULTILINE,
)


def open_door(name: str, source: str) -> str:
    """Return the statement that opens a door if `source` has a row; both are SQL."""
    return f"INSERT INTO hf_doors (name) SELECT {name} FROM {source}"  # noqa: S608


def through_door(name: str, *removals: Query) -> Op[list[list[Row]]]:
    """Run statements that the append-only triggers would refuse, then close the door."""
    door = {"name": name}
    _, *answers, _ = yield from batch(Query(OPEN_DOOR, door), *removals, Query(CLOSE_DOOR, door))
    return answers


def check_doors() -> Op[list[Finding]]:
    """Check that the triggers are in force: no door may be open."""
    if doors := [row["name"] for row in (yield from rows(LIST_DOORS))]:
        message = f"History is not protected: hf_doors contains {', '.join(doors)}."
        return [Finding("history", "problem", message, "Empty the table hf_doors.")]
    return [Finding("history", "ok", "The database refuses to remove history.")]


def with_triggers(text: str) -> str:
    """Return a schema text with the triggers that its append-only lines stand for."""
    return _APPEND_ONLY.sub(_triggers, text)


def _triggers(line: re.Match[str]) -> str:
    table, key = line["table"], line["key"]
    refused = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END;"
    outside = "WHEN NOT EXISTS (SELECT 1 FROM hf_doors)"
    sqlite = {"delete": outside}
    postgres = {"delete": "outside", "truncate": "always"}
    if not line["updates"] or line["door"]:
        sqlite["update"] = outside if line["door"] else ""
        postgres["update"] = "outside" if line["door"] else "always"
    if key:
        same = " AND ".join(f"{column} = NEW.{column}" for column in key.split(", "))
        sqlite["replace"] = f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {same})"  # noqa: S608
    found = ["--[sqlite]"]
    for name, when in sqlite.items():
        event = "INSERT" if name == "replace" else name.upper()
        create = f"CREATE TRIGGER {table}_no_{name} BEFORE {event} ON {table}"
        found.append(f"{create} {when}\n{refused}\n")
    found.append("--[postgres]")
    for name, when in postgres.items():
        create = f"CREATE TRIGGER no_{name} BEFORE {name.upper()} ON {table}"
        each = "STATEMENT" if name == "truncate" else "ROW"
        found.append(f"{create}\nFOR EACH {each} EXECUTE FUNCTION hf_refuse_{when}();\n")
    return "\n".join(found)

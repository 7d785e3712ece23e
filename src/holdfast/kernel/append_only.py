"""Append-only tables, enforced by triggers, and the doors that let a transaction past them.

An operation that may remove history opens a door (a row), removes, and closes the door before
COMMIT, so that no other transaction ever sees it open.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from ..records import Finding
from .operation import Op, Query, Row, batch, rows

OPEN_DOOR = "INSERT INTO hf_doors (name) VALUES (:name)"
CLOSE_DOOR = "DELETE FROM hf_doors WHERE name = :name"
LIST_DOORS = "SELECT name FROM hf_doors ORDER BY name"
_APPEND_ONLY = re.compile(
    r"^--\[append-only(?P<updates> but for updates)?(?P<door> through a door)?\] "
    r"(?P<table>hf_\w+)(?: \((?P<key>[\w, ]+)\))?(?P<skips>, skips taken keys)?$",
    re.MULTILINE,
)
_KEY_COLUMN = re.compile(r"^    (\w+) [A-Z][^,\n]*\b(?:PRIMARY KEY|UNIQUE)\b", re.MULTILINE)
_KEY_OF_TABLE = re.compile(r"^    (?:PRIMARY KEY|UNIQUE) \(([\w, ]+)\)", re.MULTILINE)
# Names are in lower case, keywords in capitals.
_NAME = re.compile(r"'[^']*'|\b[a-z_]+\b")


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
    return _APPEND_ONLY.sub(partial(_triggers, text), text)


def _triggers(text: str, line: re.Match[str]) -> str:
    table, key = line["table"], line["key"]
    refused = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END;"
    outside = "WHEN NOT EXISTS (SELECT 1 FROM hf_doors)"
    sqlite = [("delete", "DELETE", outside, refused)]
    postgres = {"delete": "outside", "truncate": "always"}
    if not line["updates"] or line["door"]:
        sqlite.append(("update", "UPDATE", outside if line["door"] else "", refused))
        postgres["update"] = "outside" if line["door"] else "always"
    if key:
        # Other programs do not run the triggers of a row that REPLACE deletes.
        columns = key.split(", ")
        others = [
            each
            for each in unique_keys(text, table)
            if set(each.columns.split(", ")) != set(columns)
        ]
        own, *rest = [_is_taken(table, each) for each in (Key(key), *others)]
        ending = refused
        if line["skips"]:
            ending = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only') WHERE {own};\n"
            ending += "SELECT RAISE(IGNORE); END;"
        sqlite.append(("replace", "INSERT", f"WHEN {' OR '.join([own, *rest])}", ending))
        if line["updates"] and not line["door"]:
            changed = ", ".join([key, *(each.columns for each in others)])
            sqlite.append(("replace_by_update", f"UPDATE OF {changed}", "", refused))
    found = ["--[sqlite]"]
    for name, event, when, ending in sqlite:
        create = f"CREATE TRIGGER {table}_no_{name} BEFORE {event} ON {table}"
        found.append(f"{create} {when}\n{ending}\n")
    found.append("--[postgres]")
    for name, when in postgres.items():
        create = f"CREATE TRIGGER no_{name} BEFORE {name.upper()} ON {table}"
        each = "STATEMENT" if name == "truncate" else "ROW"
        found.append(f"{create}\nFOR EACH {each} EXECUTE FUNCTION hf_refuse_{when}();\n")
    return "\n".join(found)


class Key(NamedTuple):
    """The columns of a unique key, and which rows it concerns."""

    columns: str
    where: str = ""


def unique_keys(text: str, table: str) -> list[Key]:
    """Return the unique keys that a schema text gives to a table of SQLite."""
    found: list[Key] = []
    for body in re.findall(rf"^CREATE TABLE {table} \((.*?)^\)", text, re.MULTILINE | re.DOTALL):
        # Of a table that both databases create differently, the text for SQLite comes first.
        if not found:
            found += [Key(name) for name in _KEY_COLUMN.findall(body)]
            found += [Key(columns) for columns in _KEY_OF_TABLE.findall(body)]
    indexes = rf"^CREATE UNIQUE INDEX \w+ ON {table} \(([\w, ]+)\)(?:\s+WHERE ([^;]+))?;"
    return found + [Key(*each) for each in re.findall(indexes, text, re.MULTILINE)]


def _is_taken(table: str, key: Key) -> str:
    """Return the condition that another row has the key of a new one."""
    same = [f"{column} = NEW.{column}" for column in key.columns.split(", ")]
    concerned = []
    if key.where:
        new = _NAME.sub(lambda name: f"NEW.{name[0]}" if name[0][0] != "'" else name[0], key.where)
        same.append(key.where)
        concerned = [new]
    found = f"EXISTS (SELECT 1 FROM {table} WHERE {' AND '.join(same)})"  # noqa: S608
    return f"({' AND '.join([*concerned, found])})"

"""The schema: format 1 as the tables of each noun, later formats as numbered migrations.

What a store lacks is applied in one transaction, forward only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from ..errors import NotFound, SchemaMismatch
from .operation import Op, Row, one, operation, query, rows

# Written into every SQLite file, so that a foreign database is never taken for a store.
APPLICATION_ID = 0x486F6C64

# Until the first release format 1 is edited in place; a later format is a file
# `migrations/NNNN_words.sql`.
TABLES = ("kernel", "feed", "sessions", "effects", "work", "spend")
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_SECTION = re.compile(r"^--\[(both|sqlite|postgres)\]$", re.MULTILINE)
_STATEMENT_END = re.compile(r";[ \t]*\n(?:[ \t]*\n|\Z)")

HAS_TABLES = {
    "sqlite": "SELECT 1 AS found FROM sqlite_master WHERE name = 'hf_migrations'",
    "postgres": (
        "SELECT 1 AS found FROM pg_tables "
        "WHERE schemaname = :schema AND tablename = 'hf_migrations'"
    ),
}
# Ten processes may open a new database at once. SQLite's writer lock serves them in turn; on
# PostgreSQL this lock lasts until the transaction ends, behind a pooler too.
SERIALIZE = "SELECT pg_advisory_xact_lock(7237115018846236000)"
APPLIED = "SELECT version, name, applied_at FROM hf_migrations ORDER BY version"
RECORD = "INSERT INTO hf_migrations (version, name, applied_at) VALUES (:version, :name, :now)"
REMEMBER = "INSERT INTO hf_meta (name, value) VALUES (:name, :value)"
RECALL = "SELECT value FROM hf_meta WHERE name = :name"


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    version: int
    name: str
    text: str

    def statements(self, dialect: str) -> list[str]:
        """Return the statements for one database; each ends with `;` and an empty line."""
        parts = _SECTION.split(self.text)[1:]
        sections = zip(parts[::2], parts[1::2], strict=True)
        wanted = [body for section, body in sections if section in {"both", dialect}]
        found = [part for body in wanted for part in _STATEMENT_END.split(body)]
        return [statement for statement in found if statement.strip()]


@functools.cache
def migrations() -> tuple[Migration, ...]:
    """Return every migration, oldest first."""
    folder = resources.files("holdfast.kernel").joinpath("tables")
    tables = [folder.joinpath(f"{name}.sql").read_text("utf-8") for name in TABLES]
    first = Migration(1, "tables", "\n".join(tables))
    return (first, *sorted(later_migrations(), key=lambda migration: migration.version))


def later_migrations() -> Iterator[Migration]:
    """Read what came after format 1, in no order."""
    folder = resources.files("holdfast.kernel").joinpath("migrations")
    for file in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(file.name):
            yield Migration(int(match[1]), match[2], file.read_text("utf-8"))


def newest() -> int:
    """Return the format this version of Holdfast writes."""
    return migrations()[-1].version


def missing(current: int, *, where: str, allowed: bool) -> Sequence[Migration]:
    """Return the migrations a store still needs; refuse a newer store, or any if not allowed."""
    if current > newest():
        raise SchemaMismatch(
            f"{where} has format {current} and this Holdfast knows formats up to {newest()}; "
            "install a newer Holdfast",
            current=current,
            newest=newest(),
        )
    if current == 0 and not allowed:
        raise NotFound(f"there is no store in {where}; `holdfast migrate` creates it")
    needed = [migration for migration in migrations() if migration.version > current]
    if needed and not allowed:
        raise SchemaMismatch(
            f"{where} has format {current} and this Holdfast needs format {newest()}; "
            "run `holdfast migrate`",
            current=current,
            newest=newest(),
        )
    return needed


def read_store_id() -> Op[str]:
    """Return the id that the store was given when it was made."""
    row = yield from one(RECALL, name="store_id")
    return "" if row is None else str(row["value"])


def read_now_ms() -> Op[int]:
    """Return the store's time."""
    row = yield from one("SELECT :now AS now_ms")
    assert row is not None
    return int(row["now_ms"])


class SchemaOps:
    """Reads and raises the format of one store."""

    def __init__(self, schema: str | None, where: str) -> None:
        self.dialect = "sqlite" if schema is None else "postgres"
        self.schema = schema
        self.where = where

    @query
    def format(self) -> Op[int]:
        """Return the store's format; 0 when it has no tables yet."""
        return (yield from self._format())

    @query
    def store_id(self) -> Op[str]:
        """Return the store's id."""
        return (yield from read_store_id())

    @query
    def applied(self) -> Op[list[Row]]:
        """Return the applied migrations, oldest first."""
        return (yield from rows(APPLIED)) if (yield from self._format()) else []

    @operation
    def migrate(self, store_id: str) -> Op[list[Migration]]:
        """Apply what is missing, all or nothing; who comes second finds nothing to do."""
        if self.dialect == "postgres":
            yield from rows(SERIALIZE)
        current = yield from self._format()
        needed = missing(current, where=self.where, allowed=True)
        if needed and self.schema is not None:
            yield from rows(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"')
        for migration in needed:
            for statement in migration.statements(self.dialect):
                yield from rows(statement)
            yield from rows(RECORD, version=migration.version, name=migration.name)
        if current == 0:
            yield from rows(REMEMBER, name="store_id", value=store_id)
        if needed and self.dialect == "sqlite":
            yield from rows(f"PRAGMA application_id = {APPLICATION_ID}")
            yield from rows(f"PRAGMA user_version = {newest()}")
        return list(needed)

    def _format(self) -> Op[int]:
        if (yield from one(HAS_TABLES[self.dialect], schema=self.schema)) is None:
            return 0
        applied = yield from rows(APPLIED)
        return max((row["version"] for row in applied), default=0)

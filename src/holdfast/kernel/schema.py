"""The schema: format 1 is the tables of all nouns, later formats are numbered migrations.

Pending migrations are applied in one transaction, forward only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..dataclass import dataclass
from ..errors import NotFound, SchemaMismatch, StoreError
from .append_only import with_triggers
from .checks import with_check_trigger
from .nouns import Noun
from .operation import Op, Query, Row, batch, one, operation, query, rows, unmarked

# Written into every SQLite file, to tell a store from another program's database.
APPLICATION_ID = 0x486F6C64

# Until the first release format 1 is edited in place; a later format is a file
# `migrations/NNNN_words.sql`.
FIRST = 1
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_SECTION = re.compile(r"^--\[(both|sqlite|postgres)\]$", re.MULTILINE)
_STATEMENT_END = re.compile(r";[ \t]*\n(?:[ \t]*\n|\Z)")

FIND_MIGRATIONS = {
    "sqlite": "SELECT 1 AS found FROM sqlite_master WHERE name = 'hf_migrations'",
    # A new connection has to read much of the catalog before it can read the view `pg_tables`.
    "postgres": (
        "SELECT 1 AS found "
        "WHERE to_regclass(format('%I.hf_migrations', CAST(:schema AS TEXT))) IS NOT NULL"
    ),
}
# Several processes may open a new database at once. SQLite's write lock serialises them; on
# PostgreSQL this transaction-level lock does, which also works behind a pooler.
LOCK_MIGRATIONS = "SELECT pg_advisory_xact_lock(7237115018846236000)"
LIST_MIGRATIONS = "SELECT version, name, applied_at FROM hf_migrations ORDER BY version"
RECORD_MIGRATION = (
    "INSERT INTO hf_migrations (version, name, applied_at) VALUES (:version, :name, :now)"
)
ADD_META = "INSERT INTO hf_meta (name, value) VALUES (:name, :value)"
READ_META = "SELECT value FROM hf_meta WHERE name = :name"


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    version: int
    name: str
    text: str

    def statements(self, dialect: str) -> list[str]:
        """Return the statements for one database; each ends with `;` and an empty line."""
        parts = _SECTION.split(with_triggers(self.text))[1:]
        sections = zip(parts[::2], parts[1::2], strict=True)
        wanted = [body for section, body in sections if section in {"both", dialect}]
        found = [part for body in wanted for part in _STATEMENT_END.split(body)]
        statements = [statement for statement in found if statement.strip()]
        if dialect == "sqlite":
            return statements
        return [part for each in statements for part in with_check_trigger(each)]


def migrations(nouns: Sequence[Noun]) -> list[Migration]:
    """Return every migration, oldest first; the first creates the tables of all nouns."""
    own = Path(__file__).with_name("schema.sql").read_text("utf-8")
    tables = "\n".join([own, *(noun.schema() for noun in nouns)])
    return [Migration(FIRST, "tables", tables), *later_migrations()]


def later_migrations() -> list[Migration]:
    """Return the migrations after format 1, oldest first."""
    folder = Path(__file__).with_name("migrations")
    found = []
    for file in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(file.name):
            found.append(Migration(int(match[1]), match[2], file.read_text("utf-8")))
    return sorted(found, key=lambda migration: migration.version)


def formats() -> dict[int, str]:
    """Return the number and the name of every format, oldest first."""
    return {FIRST: "tables"} | {each.version: each.name for each in later_migrations()}


def newest() -> int:
    """Return the newest format this version of Holdfast knows."""
    return max(formats())


def no_store(where: str) -> NotFound:
    """Return the error for a place without a store."""
    return NotFound(
        f"there is no store in {where}; name another place, or create one here with "
        "`holdfast migrate`"
    )


def is_behind(current: int, *, where: str, allowed: bool) -> bool:
    """Whether a store must be migrated; refuse a newer one, or any migration if not allowed."""
    if current > newest():
        raise SchemaMismatch(
            f"{where} has format {current} and this Holdfast knows formats up to {newest()}; "
            "install a newer Holdfast",
            current=current,
            newest=newest(),
        )
    if current == 0 and not allowed:
        raise no_store(where)
    if current < newest() and not allowed:
        raise SchemaMismatch(
            f"{where} has format {current} and this Holdfast needs format {newest()}; "
            "run `holdfast migrate`",
            current=current,
            newest=newest(),
        )
    return current < newest()


def read_store_id() -> Op[str]:
    """Return the id that the store was created with."""
    row = yield from one(READ_META, name="store_id")
    return "" if row is None else str(row["value"])


def read_now_ms() -> Op[int]:
    """Return the store's current time."""
    row = yield from one("SELECT :now AS now_ms")
    assert row is not None
    return int(row["now_ms"])


class SchemaOps:
    """Reads and migrates the format of one store."""

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
        return (yield from rows(LIST_MIGRATIONS)) if (yield from self._format()) else []

    @unmarked
    def migrate(self, store_id: str, nouns: Sequence[Noun]) -> Op[None]:
        """Apply pending migrations, all or nothing; does nothing if another process was first."""
        if self.dialect == "postgres":
            yield from rows(LOCK_MIGRATIONS)
        current = yield from self._format()
        if not is_behind(current, where=self.where, allowed=True):
            return
        if self.schema is not None:
            yield from rows(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"')
        for migration in migrations(nouns):
            if migration.version > current:
                named = {"version": migration.version, "name": migration.name}
                statements = [Query(text, {}) for text in migration.statements(self.dialect)]
                yield from batch(*statements, Query(RECORD_MIGRATION, named))
        if current == 0:
            yield from rows(ADD_META, name="store_id", value=store_id)
        if self.dialect == "sqlite":
            yield from rows(f"PRAGMA application_id = {APPLICATION_ID}")
            yield from rows(f"PRAGMA user_version = {newest()}")

    def _format(self) -> Op[int]:
        if (yield from one(FIND_MIGRATIONS[self.dialect], schema=self.schema)) is None:
            return 0
        applied = yield from rows(LIST_MIGRATIONS)
        return max((row["version"] for row in applied), default=0)


CIPHER_KEYS = "cipher_keys"
REPLACE_META = """
INSERT INTO hf_meta (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
WHERE hf_meta.value = CAST(:before AS TEXT)
RETURNING value
"""


class CipherKeys:
    """The cipher keys of the process that opens a store: fingerprints, the current key last."""

    def __init__(self, fingerprints: Sequence[str], nouns: Sequence[Noun]) -> None:
        self._ours = list(fingerprints)
        self._nouns = nouns

    @query
    def are_noted(self) -> Op[bool]:
        """Whether the store has recorded our current key. Raises StoreError if we lack its key."""
        return (yield from self._change()) is None

    @operation
    def note(self) -> Op[None]:
        """Record our current key as the store's, unless another process recorded its own."""
        while (change := (yield from self._change())) is not None:
            before, value = change
            if (
                yield from one(REPLACE_META, name=CIPHER_KEYS, before=before, value=value)
            ) is not None:
                return

    def _change(self) -> Op[tuple[str, str] | None]:
        """Return the recorded keys and their new value, or None if nothing is to be recorded."""
        row = yield from one(READ_META, name=CIPHER_KEYS)
        noted = [] if row is None else str(row["value"]).split()
        if noted and noted[-1] not in self._ours:
            raise StoreError(
                "this store is encrypted and was opened without its current key (no cipher, other "
                "keys, or another key of the same id); open it with its cipher"
            )
        if not self._ours or self._ours[-1] in noted:
            return None
        if not noted and not (yield from self._is_empty()):
            raise StoreError(
                "this store is not encrypted but was opened with a cipher; export its sessions and "
                "import them into a new store opened with the cipher"
            )
        return " ".join(noted), " ".join([*noted, self._ours[-1]])

    def _is_empty(self) -> Op[bool]:
        for noun in self._nouns:
            if noun.any_record and (yield from one(noun.any_record)) is not None:
                return False
        return True

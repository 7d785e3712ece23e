"""The tables of a PostgreSQL database: how their rows are captured, read and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

Connection = psycopg.Connection[Any]

# The key is the primary key, or else the first unique index whose columns are never NULL.
_TABLES: Final = """
SELECT c.oid, n.nspname, c.relname,
    array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attgenerated = ''),
    (SELECT array_agg(k.attname::text ORDER BY k.attnum) FROM pg_attribute k
        WHERE k.attrelid = c.oid AND k.attnum = ANY (key.columns)),
    md5(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull,
        a.attgenerated, a.attidentity), ',' ORDER BY a.attnum))
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN LATERAL (
    SELECT i.indkey::smallint[] AS columns FROM pg_index i
    WHERE i.indrelid = c.oid AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
        AND i.indimmediate AND i.indisvalid AND NOT EXISTS (
            SELECT 1 FROM pg_attribute x WHERE x.attrelid = c.oid
                AND x.attnum = ANY (i.indkey::smallint[]) AND NOT x.attnotnull)
    ORDER BY i.indisprimary DESC, i.indexrelid LIMIT 1
) key ON true
WHERE n.nspname = ANY (%s) AND c.relkind = 'r' AND c.relpersistence <> 't'
GROUP BY c.oid, n.nspname, c.relname, key.columns
ORDER BY n.nspname, c.relname
"""
_SEQUENCES: Final = """
SELECT c.oid::regclass::text, n.nspname, c.relname FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) AND c.relkind = 'S' ORDER BY 1
"""
# The transactions that last wrote the definitions of columns and of the triggers that capture
# changes: cheap, and unchanged if nothing was altered and no trigger disabled or enabled.
_DEFINITIONS: Final = """
SELECT md5(string_agg(concat_ws(' ', c.oid, c.relname, a.attnum, a.xmin), ','
    ORDER BY c.oid, a.attnum)),
    (SELECT md5(string_agg(concat_ws(' ', t.tgrelid, t.tgname, t.tgenabled, t.xmin, t.ctid), ','
        ORDER BY t.oid)) FROM pg_trigger t WHERE t.tgname = ANY (%s))
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relkind IN ('r', 'S') AND c.relnamespace IN (
    SELECT n.oid FROM pg_namespace n WHERE n.nspname = ANY (%s))
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its writable columns, its key, and a digest of its definition."""

    oid: int
    schema: str
    relation: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    definition: str

    @property
    def name(self) -> str:
        """The qualified name."""
        return f"{self.schema}.{self.relation}"

    @property
    def identifier(self) -> sql.Identifier:
        """The name in SQL."""
        return sql.Identifier(self.schema, self.relation)


def tables_in(connection: Connection, schemas: Sequence[str]) -> dict[int, Table]:
    """Return the tables of some schemas, partitions included, by their ids."""
    rows = connection.execute(_TABLES, (list(schemas),)).fetchall()
    return {
        oid: Table(oid, schema, name, tuple(columns or ()), tuple(key or ()), definition)
        for oid, schema, name, columns, key, definition in rows
    }


class Definitions(NamedTuple):
    """Digests that change with the definitions they stand for, and rarely otherwise."""

    columns: str
    triggers: str


def definitions_in(connection: Connection, schemas: Sequence[str], home: str) -> Definitions:
    """Return digests that show whether columns, or the capturing triggers, were altered."""
    given = (list(_triggers(home)), list(schemas))
    [found] = connection.execute(_DEFINITIONS, given).fetchall()
    return Definitions(*map(str, found))


def _triggers(home: str) -> tuple[str, str]:
    return f"{home}_rows", f"{home}_truncate"


def capture(connection: Connection, home: str, table: Table) -> None:
    """Have every change of a table's rows logged; a table without a key is not captured."""
    if not table.key:
        return
    rows, truncation = _triggers(home)
    parts = {
        "log": sql.Identifier(home, "log"),
        "capture": sql.Identifier(home, f"capture_{table.oid}"),
        "wipe": sql.Identifier(home, f"wipe_{table.oid}"),
        "table": table.identifier,
        "old": _key("OLD", table),
        "new": _key("NEW", table),
        "each": _key("each", table),
        "trigger": sql.Identifier(rows),
        "truncation": sql.Identifier(truncation),
    }
    create = sql.SQL(
        """
CREATE FUNCTION {capture}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres'
SET bytea_output = 'hex' SET extra_float_digits = 1 SET timezone = 'UTC' AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {log} (relation, new_key, after) VALUES (TG_RELID, {new}, NEW::text);
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {log} (relation, old_key, before) VALUES (TG_RELID, {old}, OLD::text);
    ELSIF OLD::text <> NEW::text THEN
        INSERT INTO {log} (relation, old_key, new_key, before, after)
        VALUES (TG_RELID, {old}, {new}, OLD::text, NEW::text);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION {wipe}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog SET datestyle = 'ISO, YMD' SET intervalstyle = 'postgres'
SET bytea_output = 'hex' SET extra_float_digits = 1 SET timezone = 'UTC' AS $$
BEGIN
    INSERT INTO {log} (relation, old_key, before)
    SELECT TG_RELID, {each}, each::text FROM {table} AS each;
    RETURN NULL;
END $$;
CREATE TRIGGER {trigger} AFTER INSERT OR UPDATE OR DELETE ON {table}
FOR EACH ROW EXECUTE FUNCTION {capture}();
CREATE TRIGGER {truncation} BEFORE TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION {wipe}();
"""
    ).format(**parts)
    connection.execute(create)


def captured(connection: Connection, home: str, table: Table, *, is_always: bool) -> None:
    """Capture changes even while triggers are silent, or only otherwise."""
    alter = sql.SQL("ALTER TABLE {} ENABLE {} TRIGGER {}").format(
        table.identifier,
        sql.SQL("ALWAYS") if is_always else sql.SQL(""),
        sql.Identifier(_triggers(home)[0]),
    )
    connection.execute(alter)


def content_of(connection: Connection, table: Table) -> list[str]:
    """Return the rows of a table as text, in order."""
    select = sql.SQL(
        'SELECT each::text FROM ONLY {} AS each ORDER BY each::text COLLATE "C"'
    ).format(table.identifier)
    return [row for (row,) in connection.execute(select)]


def replace_rows(
    connection: Connection, table: Table, old: Sequence[str], new: Sequence[str]
) -> None:
    """Delete rows by their keys and insert others; without a key, all rows are replaced."""
    if old and table.key:
        same = sql.SQL(" AND ").join(
            sql.SQL("live.{0} = each.{0}").format(sql.Identifier(name)) for name in table.key
        )
        delete = sql.SQL("DELETE FROM ONLY {} AS live USING {} WHERE {}").format(
            table.identifier, _rows(table, old), same
        )
        connection.execute(delete)
    elif old:
        delete = sql.SQL("DELETE FROM ONLY {}").format(table.identifier)
        connection.execute(delete)
    if new:
        columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
        values = sql.SQL(", ").join(sql.Identifier("each", name) for name in table.columns)
        insert = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(
            table.identifier, columns, values, _rows(table, new)
        )
        connection.execute(insert)


def _rows(table: Table, images: Sequence[str]) -> sql.Composed:
    # No parameters, because the name of a column may contain something like a placeholder.
    return sql.SQL(
        "unnest({}::text[]) AS given (image), LATERAL (SELECT (image::{}).*) AS each"
    ).format(sql.Literal(list(images)), table.identifier)


def read_sequences(connection: Connection, schemas: Sequence[str]) -> dict[str, tuple[int, bool]]:
    """Return the value of every sequence."""
    names = connection.execute(_SEQUENCES, (list(schemas),)).fetchall()
    if not names:
        return {}
    reads = [
        sql.SQL("SELECT {}, last_value, is_called FROM {}").format(
            sql.Literal(name), sql.Identifier(schema, relation)
        )
        for name, schema, relation in names
    ]
    together = sql.SQL(" UNION ALL ").join(reads)
    return {name: (number, called) for name, number, called in connection.execute(together)}


def _key(row: str, table: Table) -> sql.Composed:
    parts = [sql.SQL("{}::text").format(sql.Identifier(*_path(row, name))) for name in table.key]
    return sql.SQL("ARRAY[{}]::text").format(sql.SQL(", ").join(parts))


def _path(row: str, column: str) -> tuple[str, str]:
    # OLD and NEW are variables, and their names are folded to lower case.
    return row.lower(), column

"""One SQL text for both databases: valid SQLite as written, rewritten once for PostgreSQL.

On PostgreSQL `/*pg … */` becomes live, `:name` becomes a numbered parameter, `:now` the schema's
clock function, `hf_…` is qualified with the schema, `INDEXED BY …` is left out, because there are
statistics, and five words of DDL are exchanged for PostgreSQL's. Text is compared by its bytes
there too, whatever the server's language is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
      (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")*")
    | (?P<line_comment>--[^\n]*)
    | /\*pg\b(?P<postgres>.*?)\*/
    | (?P<comment>/\*.*?\*/)
    | (?P<cast>::)
    | :(?P<parameter>[a-z_][a-z0-9_]*)
    | \b(?P<name>hf_[a-z0-9_]+)
    | (?P<hint>\bINDEXED\ BY\ \w+)
    | \b(?P<type>INTEGER|BLOB|AUTOINCREMENT|WITHOUT\ ROWID|(?<!AS\ )TEXT)\b
    """,
    re.VERBOSE | re.DOTALL,
)
_TYPES = {
    "INTEGER": "BIGINT",
    "BLOB": "BYTEA",
    "AUTOINCREMENT": "GENERATED ALWAYS AS IDENTITY",
    "WITHOUT ROWID": "",
    "TEXT": 'TEXT COLLATE "C"',
}
_CHANGES = re.compile(r"\s*(INSERT|UPDATE|DELETE)\b", re.IGNORECASE)
_READS = re.compile(r"\s*SELECT\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement as one database takes it."""

    text: str
    parameters: tuple[str, ...]
    may_change: bool
    """False for a plain SELECT. Anything unknown, such as WITH, is taken to change rows."""
    counts_changes: bool
    """True where the row count alone tells whether anything changed."""
    columns: list[str] = field(default_factory=list)
    """The names of the columns it returns, kept once they were seen."""

    def values(self, parameters: Mapping[str, object], now_ms: int | None = None) -> list[object]:
        """Return the parameters in the order in which the text numbers them."""
        return [now_ms if name == "now" else parameters[name] for name in self.parameters]


class Dialect:
    """Compiles statements for one database and keeps them."""

    def __init__(self, schema: str | None) -> None:
        self.schema = schema
        self.name = "sqlite" if schema is None else "postgres"
        self.statement: Callable[[str], Statement] = functools.cache(self._compile)
        """Returns the compiled form of a statement, from the cache after the first time."""

    def script(self, sql: str) -> str:
        """Return a parameterless script of several statements in this dialect."""
        return sql if self.schema is None else _Rewriter(self.schema).rewrite(sql)

    def _compile(self, sql: str) -> Statement:
        if self.schema is None:
            text, parameters = sql, _parameters(sql)
        else:
            rewriter = _Rewriter(self.schema)
            text = rewriter.rewrite(sql)
            parameters = tuple(rewriter.parameters)
        return Statement(
            text=text,
            parameters=parameters,
            may_change=_READS.match(text) is None,
            counts_changes=_CHANGES.match(text) is not None,
        )


class _Rewriter:
    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.parameters: list[str] = []

    def rewrite(self, sql: str) -> str:
        return _TOKEN.sub(self._replace, sql).strip()

    def _replace(self, token: re.Match[str]) -> str:
        found = token[0]
        match token.lastgroup:
            case "postgres":
                return self.rewrite(token["postgres"])
            case "line_comment" | "comment" | "hint":
                return " "
            case "parameter" if token["parameter"] == "now":
                return f'"{self.schema}".hf_now()'
            case "parameter":
                return self._number(token["parameter"])
            case "name":
                return f'"{self.schema}".{found}'
            case "type":
                return _TYPES[found]
            case _:
                return found

    def _number(self, name: str) -> str:
        if name not in self.parameters:
            self.parameters.append(name)
        return f"${self.parameters.index(name) + 1}"


def _parameters(sql: str) -> tuple[str, ...]:
    found = (token["parameter"] for token in _TOKEN.finditer(sql) if token["parameter"])
    return tuple(dict.fromkeys(found))


def merged(branches: Sequence[str], order: str = "number") -> str:
    """Return a page of the rows of several statements; each is read along its own index."""
    page = f"ORDER BY {order} LIMIT :limit"
    if len(branches) == 1:
        return f"{branches[0]} {page}"
    parts = (f"SELECT * FROM ({each} {page}) AS part{n}" for n, each in enumerate(branches))  # noqa: S608
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}) AS found {page}"  # noqa: S608

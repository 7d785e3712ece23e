"""One SQL text for both databases: valid SQLite as written, rewritten once for PostgreSQL.

On PostgreSQL the content of `/*pg … */` is uncommented, what stands between `/*sqlite*/` and
`/*end*/` is dropped, `:name` becomes a numbered parameter and
`:now` the schema's clock function, `hf_…` is qualified with the schema, `INDEXED BY …` is dropped
(the planner has statistics), and five DDL keywords are translated. Text has the collation "C", so
it is compared by bytes as on SQLite.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Literal

from ..dataclass import dataclass

_TOKEN = re.compile(
    r"""
      (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")*")
    | (?P<line_comment>--[^\n]*)
    | /\*pg\b(?P<postgres>.*?)\*/
    | /\*sqlite\*/(?P<sqlite>.*?)/\*end\*/
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
# Stands for the schema in a text that the stores of a process share; no SQL text contains it.
_SCHEMA = "\0"
_TEXTS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement compiled for one database."""

    text: str
    parameters: tuple[str, ...]
    """In the order of their numbers."""
    may_change: bool
    """False for a plain SELECT. Anything else, WITH included, is assumed to change rows."""
    counts_changes: bool
    """Whether the row count shows if anything changed."""
    is_uncounted: bool
    """Whether it may change rows without a count of them."""
    values: Callable[[Mapping[str, object]], tuple[object, ...]]
    """Returns the values of the parameters but `:now`, in their order."""
    now_at: int | None
    """Where `:now` belongs among them; never on PostgreSQL, where it is a function."""
    columns: list[str] = field(default_factory=list)
    """The names of the returned columns, cached after the first row."""


class Dialect:
    """Compiles and caches statements for one database."""

    def __init__(self, schema: str | None) -> None:
        self.schema = schema
        self.statement: Callable[[str], Statement] = functools.cache(self._compile)
        """Returns the compiled form of a statement, cached."""

    def _compile(self, sql: str) -> Statement:
        if self.schema is None:
            text, names = sql, _names(sql)
        else:
            text, names = _rewritten(sql)
            text = text.replace(_SCHEMA, f'"{self.schema}"')
        may_change = _READS.match(text) is None
        counts_changes = _CHANGES.match(text) is not None
        return Statement(
            text=text,
            parameters=names,
            may_change=may_change,
            counts_changes=counts_changes,
            is_uncounted=may_change and not counts_changes,
            values=_taker([name for name in names if name != "now"]),
            now_at=names.index("now") if "now" in names else None,
        )


def _taker(names: Sequence[str]) -> Callable[[Mapping[str, object]], tuple[object, ...]]:
    """Return a function that takes values by name out of a mapping."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda parameters: tuple(parameters[name] for name in names)


@functools.lru_cache(_TEXTS_KEPT)
def _names(sql: str) -> tuple[str, ...]:
    """Return the parameters as SQLite numbers them: in the order in which they first appear."""
    return tuple(dict.fromkeys(_named(sql)))


def _named(sql: str) -> Iterator[str]:
    for token in _TOKEN.finditer(sql):
        if token["sqlite"] is not None:
            yield from _named(token["sqlite"])
        if token["parameter"] is not None:
            yield token["parameter"]


@functools.lru_cache(_TEXTS_KEPT)
def _rewritten(sql: str) -> tuple[str, tuple[str, ...]]:
    """Return the text for PostgreSQL, without the schema, and its parameters."""
    rewriter = _Rewriter()
    return rewriter.rewrite(sql), tuple(rewriter.parameters)


class _Rewriter:
    def __init__(self) -> None:
        self.parameters: list[str] = []

    def rewrite(self, sql: str) -> str:
        return _TOKEN.sub(self._replace, sql).strip()

    def _replace(self, token: re.Match[str]) -> str:
        found = token[0]
        match token.lastgroup:
            case "postgres":
                return self.rewrite(token["postgres"])
            case "line_comment" | "comment" | "hint" | "sqlite":
                return " "
            case "parameter" if token["parameter"] == "now":
                return f"{_SCHEMA}.hf_now()"
            case "parameter":
                return self._number(token["parameter"])
            case "name":
                return f"{_SCHEMA}.{found}"
            case "type":
                return _TYPES[found]
            case _:
                return found

    def _number(self, name: str) -> str:
        if name not in self.parameters:
            self.parameters.append(name)
        return f"${self.parameters.index(name) + 1}"


def given(keys: Iterable[int | str]) -> str:
    """Return numbers or ids as one parameter, for `given_keys`."""
    return json.dumps(dict.fromkeys(keys))


def given_keys(parameter: str, kind: Literal["INTEGER", "TEXT"] = "TEXT") -> str:
    """Return a subquery for the keys that `given` packed, with the one column `given_key`.

    PostgreSQL expects a hundred keys of JSON, and may read a whole table for them; of an array it
    expects ten.
    """
    return f"""(
    /*pg SELECT unnest(ARRAY( */
    {_unpacked(parameter, kind)}
    /*pg )) AS given_key */
)"""


def among(parameter: str, kind: Literal["INTEGER", "TEXT"] = "TEXT") -> str:
    """Return the second half of a condition: that a column has one of the keys given so."""
    return one_of(_unpacked(parameter, kind))


def one_of(query: str) -> str:
    """Return the second half of a condition: that a column has one of the few values of a query.

    PostgreSQL looks for each value of an array in the index; a subquery it may join with the whole
    table instead, where few sessions have most of the rows or a LIMIT is expected to end it soon.
    """
    return f"/*sqlite*/ IN /*end*/ /*pg = ANY */ ( /*pg ARRAY( */ {query} /*pg ) */ )"


def _unpacked(parameter: str, kind: str) -> str:
    return f"""SELECT CAST(key AS {kind}) AS given_key
    FROM json_each(CAST(:{parameter} AS TEXT) /*pg ::json */)"""  # noqa: S608


def along(columns: Mapping[str, str], start: str) -> str:
    """Return the condition for the rows with these values behind a start, `number > :after`.

    To be used in `paged` or `merged` with the names of the columns, which begin an index.
    """
    column, comparison, value = start.split()
    names, values = ", ".join(columns), ", ".join(columns.values())
    equal = " AND ".join(f"{name} = {value}" for name, value in columns.items())
    end = {">": "<=", "<": ">="}[comparison]
    stretch = f"({names}, {column}) {comparison} ({values}, {value}) AND ({names}) {end} ({values})"
    return f"/*sqlite*/ {equal} AND {start} /*end*/ /*pg {stretch} */"


def pair(first: str, second: str) -> dict[str, str]:
    """Return what two columns are together in an index, and its value, for `along`.

    PostgreSQL takes indexes that begin with the same column for equally good, and may read all that
    has the first value; no other index begins with both. The second column is to be compared too.
    """
    return {f"({first} || ' ' || {second})": f"(:{first} || ' ' || :{second})"}


def is_also(column: str) -> str:
    """Return the condition that a column has the value of the parameter named like it.

    PostgreSQL uses no index for it, and expects half of the rows to meet it.
    """
    return f"coalesce({column} = :{column}, false)"


def merged(branches: Sequence[str], order: str = "number", leading: Iterable[str] = ()) -> str:
    """Return one query for a page of the rows of several; each can use its own index."""
    return united([paged(each, order, leading) for each in branches], order)


def paged(branch: str, order: str = "number", leading: Iterable[str] = ()) -> str:
    """Return the query for a page of its rows.

    With its `leading` columns, PostgreSQL must read along that index. Of rows with equal values it
    would expect to find some soon in the order of their numbers alone, and may read a whole table.
    """
    sense = order.removeprefix("number")
    first = "".join(f"{each}{sense}, " for each in leading)
    return f"{branch} ORDER BY /*pg {first} */ {order} LIMIT :limit"


def united(pages: Sequence[str], order: str = "number") -> str:
    """Return one query for the page of the rows of several."""
    if len(pages) == 1:
        return pages[0]
    parts = (f"SELECT * FROM ({each}) AS part{n}" for n, each in enumerate(pages))  # noqa: S608
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}) AS found ORDER BY {order} LIMIT :limit"  # noqa: S608

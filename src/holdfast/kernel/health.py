"""Read-only examination of a store: its identity, format and health."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeAlias

from ..dataclass import dataclass
from ..errors import CorruptStore, HoldfastError, InvalidArgument, NotAStore
from ..formatting import plural
from ..records import Finding, MigrationState, StoreInfo, StoreSize
from .append_only import check_doors
from .commit_settlement import COUNT_WRITERS, WRITER_KEPT_MS
from .driver import DialectName, Runner, Settings
from .nouns import Noun
from .opening import existing, open_remote, require_psycopg
from .operation import Call, Op, query, rows, whole_query
from .schema import SchemaOps, formats, newest, no_store
from .sqlite import SqliteReader
from .sqlite.health import file_findings, page_checks
from .url import PostgresTarget, RemoteTarget, SqliteTarget, Target

COUNT_LEASES = """
SELECT count(*) AS held, count(CASE WHEN lease_expires_at <= :now THEN 1 END) AS expired
FROM {leased}
"""
READ_BYTES = """
SELECT coalesce(CAST(sum(pg_table_size(c.oid)) AS INTEGER), 0) AS bytes
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relkind = 'r'
"""
READ_PAGES = """
SELECT p.page_count * s.page_size AS bytes, f.freelist_count * s.page_size AS free_bytes
FROM pragma_page_count AS p, pragma_page_size AS s, pragma_freelist_count AS f
"""
# Roughly what an examination takes where nothing else runs; PostgreSQL's is an estimate.
SECONDS_PER_GB = {"sqlite": 4.0, "postgres": 6.0}
WRITERS_MAX = 10_000
Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the check that begins, how many are done, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much a store holds, and about how long an examination of it takes."""

    bytes: int
    seconds: float


class HealthOps:
    """Runs a check in one snapshot."""

    @query
    def bytes_in(self, schema: str) -> Op[int]:
        """Return how much the tables of a schema hold."""
        return (yield from _bytes_in(schema))

    @whole_query
    def check(self, check: Callable[[], Op[list[Finding]]]) -> Op[list[Finding]]:
        """Run one check."""
        return (yield from check())


def read_size(target: Target) -> Op[StoreSize]:
    """Return how large a store's database is."""
    if isinstance(target, PostgresTarget):
        return StoreSize(bytes=(yield from _bytes_in(target.schema)), free_bytes=None)
    [row] = yield from rows(READ_PAGES)
    return StoreSize(**row)


def _bytes_in(schema: str) -> Op[int]:
    [row] = yield from rows(READ_BYTES, schema=schema)
    return int(row["bytes"])


def check_writers() -> Op[list[Finding]]:
    """Count the connections that have written."""
    [row] = yield from rows(COUNT_WRITERS, age_ms=WRITER_KEPT_MS)
    message = f"{plural(row['writers'], 'writer row')}, {row['abandoned']:,} older than 7 days."
    advice = "Connections are opened too often: keep one store open in each process."
    is_many = row["writers"] - row["abandoned"] > WRITERS_MAX
    return [Finding.of("writers", message, warning=advice if is_many else "")]


def check_leases(nouns: Sequence[Noun]) -> Op[list[Finding]]:
    """Look for expired leases of any noun."""
    found = []
    held = []
    for noun in reversed([noun for noun in nouns if noun.leased]):
        [row] = yield from rows(COUNT_LEASES.format(leased=noun.leased))
        held.append(plural(row["held"], noun.name))
        if row["expired"]:
            what = plural(row["expired"], noun.name)
            message = f"{what} with an expired lease: the {noun.leased_to} died."
            found.append(Finding.of("leases", message, warning=noun.advice))
    return found or [Finding.of("leases", f"None has expired: {', '.join(held)}.")]


def content_checks(driver: Runner, nouns: Sequence[Noun]) -> dict[str, partial[list[Finding]]]:
    """Return the checks of a store's rows, by name."""
    checks = {"writers": check_writers, "history": check_doors}
    for noun in nouns:
        checks.update(noun.checks())
    checks["leases"] = partial(check_leases, nouns)
    ops = HealthOps()
    return {
        name: partial(driver.run, Call(HealthOps.check, ops, (check,)))
        for name, check in checks.items()
    }


def findings_of(
    checks: Mapping[str, Callable[[], list[Finding]]], tell: Tell | None = None
) -> Iterator[Finding]:
    """Yield the findings of checks; an error while reading is a finding too."""
    for place, (name, check) in enumerate(checks.items()):
        if tell is not None:
            tell(name, place, len(checks))
        try:
            yield from check()
        except HoldfastError as error:
            yield Finding(name, "problem", f"{error}.")


def inspect(target: Target, settings: Settings) -> StoreInfo:
    """Return a store's id, format and migrations. Raises NotFound where there is none."""
    _require_database(target)
    with read_only_driver(target, settings) as driver:
        return info_of(driver, target)


def extent(target: Target, settings: Settings) -> Extent:
    """Return how much there is to examine, and about how long that takes."""
    _require_database(target)
    if isinstance(target, SqliteTarget):
        count = existing(target).stat().st_size
    else:
        assert isinstance(target, PostgresTarget)
        with read_only_driver(target, settings) as driver:
            count = driver.run(Call(HealthOps.bytes_in, HealthOps(), (target.schema,)))
    seconds = count / 1e9 * SECONDS_PER_GB[dialect_of(target)]
    return Extent(bytes=count, seconds=seconds)


def check(
    target: Target, settings: Settings, *, full: bool, tell: Tell | None = None
) -> list[Finding]:
    """Run every check of a store. Raises only if there is no store to examine."""
    _require_database(target)
    found = [Finding("store", "ok", place(target))]
    if isinstance(target, SqliteTarget):
        found += file_findings(existing(target))
    try:
        with read_only_driver(target, settings) as driver:
            if isinstance(driver, SqliteReader):
                found += findings_of(page_checks(driver, full=full), tell)
            elif isinstance(target, PostgresTarget):
                from .postgres.health import server_checks

                found += findings_of(server_checks(driver, target.schema))
            info = info_of(driver, target)
            found.append(format_finding(info))
            if info.format == info.newest:
                found += findings_of(content_checks(driver, settings.nouns), tell)
    except NotAStore as error:
        # The other findings are about another program's file.
        return [Finding("database", "problem", f"{error}.")]
    except CorruptStore as error:
        found.append(Finding("database", "problem", f"{error}."))
    return found


def _require_database(target: Target) -> None:
    if isinstance(target, RemoteTarget):
        raise InvalidArgument("a store is examined where its database is, not through a server")


def info_of(driver: Runner, target: Target) -> StoreInfo:
    """Read a store's id, format and migrations."""
    where = place(target)
    ops = SchemaOps(target.schema if isinstance(target, PostgresTarget) else None, where)
    applied = driver.run(Call(SchemaOps.applied, ops))
    if not applied:
        raise no_store(where)
    times = {row["version"]: row["applied_at"] for row in applied}
    names = formats() | {row["version"]: row["name"] for row in applied}
    return StoreInfo(
        where=where,
        dialect=dialect_of(target),
        store_id=driver.run(Call(SchemaOps.store_id, ops)),
        format=max(times),
        newest=newest(),
        migrations=tuple(
            MigrationState(version=version, name=names[version], applied_at=times.get(version))
            for version in sorted(names)
        ),
    )


def format_finding(info: StoreInfo) -> Finding:
    """Compare a store's format with the one this Holdfast writes."""
    return Finding.of(
        "schema format",
        f"The store has format {info.format}, this Holdfast writes format {info.newest}.",
        problem="Install a newer Holdfast." if info.format > info.newest else "",
        warning="Run `holdfast migrate`." if info.format < info.newest else "",
    )


@contextmanager
def read_only_driver(target: Target, settings: Settings) -> Iterator[Runner]:
    """Open a driver that only reads."""
    if isinstance(target, PostgresTarget):
        require_psycopg()
        from .postgres import PostgresDriver

        with closing(PostgresDriver(target, settings)) as driver:
            yield driver
    elif isinstance(target, SqliteTarget):
        with closing(SqliteReader(existing(target), settings, target.vfs)) as reader:
            yield reader
    else:
        with closing(open_remote(target, settings)) as remote:
            yield remote


def dialect_of(target: Target) -> DialectName:
    """Return which database a target names."""
    return "sqlite" if isinstance(target, SqliteTarget) else "postgres"


def place(target: Target) -> str:
    """Return where a store is, without its password."""
    if isinstance(target, PostgresTarget):
        return f"schema {target.schema!r} of {target.shown}"
    return str(target.path) if isinstance(target, SqliteTarget) else target.shown

"""Examining a store from outside: what it is and how it fares, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeAlias

from ..errors import CorruptStore, HoldfastError, NotAStore, NotFound
from ..formatting import plural
from ..records import Finding, MigrationState, StoreInfo
from .append_only import check_doors
from .commit_settlement import COUNT_WRITERS, WRITER_KEPT_MS
from .driver import Runner, Settings
from .nouns import Noun
from .opening import existing, require_psycopg
from .operation import Call, Op, query, rows
from .schema import SchemaOps, formats, newest
from .sqlite import SqliteReader
from .sqlite.health import file_findings, page_checks
from .url import PostgresTarget, SqliteTarget, Target

COUNT_LEASES = """
SELECT count(*) AS held, count(CASE WHEN lease_expires_at <= :now THEN 1 END) AS expired
FROM {leased}
"""
WRITERS_MAX = 10_000
Tell: TypeAlias = Callable[[str, int, int], None]
"""Told the name of the check that begins, how many are done, and how many there are."""


class HealthOps:
    """Reads what a check compares, in one snapshot."""

    @query
    def check(self, check: Callable[[], Op[list[Finding]]]) -> Op[list[Finding]]:
        """Run one check."""
        return (yield from check())


def check_writers() -> Op[list[Finding]]:
    """Count the connections that have written recently."""
    [row] = yield from rows(COUNT_WRITERS, age_ms=WRITER_KEPT_MS)
    message = f"{plural(row['writers'], 'writer row')}, {row['abandoned']:,} older than 7 days."
    advice = "Connections are opened too often: keep one store open in each process."
    is_many = row["writers"] - row["abandoned"] > WRITERS_MAX
    return [Finding.of("writers", message, warning=advice if is_many else "")]


def check_leases(nouns: Sequence[Noun]) -> Op[list[Finding]]:
    """Look for rows of any noun whose holder died."""
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
    """Yield what checks find; a store that cannot be read is a finding too."""
    for place, (name, check) in enumerate(checks.items()):
        if tell is not None:
            tell(name, place, len(checks))
        try:
            yield from check()
        except HoldfastError as error:
            yield Finding(name, "problem", f"{error}.")


def inspect(target: Target, settings: Settings) -> StoreInfo:
    """Return what a store is. Raises NotFound where there is none."""
    with read_only_driver(target, settings) as driver:
        return info_of(driver, target)


def check(
    target: Target, settings: Settings, *, full: bool, tell: Tell | None = None
) -> list[Finding]:
    """Examine a store, telling of each check. Raises only where there is nothing to examine."""
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
        # Whatever else was found is about a file that is none of ours.
        return [Finding("database", "problem", f"{error}.")]
    except CorruptStore as error:
        found.append(Finding("database", "problem", f"{error}."))
    return found


def info_of(driver: Runner, target: Target) -> StoreInfo:
    """Read what a store is."""
    where = place(target)
    ops = SchemaOps(target.schema if isinstance(target, PostgresTarget) else None, where)
    applied = driver.run(Call(SchemaOps.applied, ops))
    if not applied:
        raise NotFound(f"there is no store in {where}; `holdfast migrate` creates it")
    times = {row["version"]: row["applied_at"] for row in applied}
    names = formats() | {row["version"]: row["name"] for row in applied}
    return StoreInfo(
        where=where,
        dialect="sqlite" if isinstance(target, SqliteTarget) else "postgres",
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
    """Lend a driver that only reads."""
    if isinstance(target, PostgresTarget):
        require_psycopg()
        from .postgres import PostgresDriver

        with closing(PostgresDriver(target, settings)) as driver:
            yield driver
    else:
        with closing(SqliteReader(existing(target), settings, target.vfs)) as reader:
            yield reader


def place(target: Target) -> str:
    """Return where a store is, without its password."""
    if isinstance(target, PostgresTarget):
        return f"schema {target.schema!r} of {target.shown}"
    return str(target.path)
